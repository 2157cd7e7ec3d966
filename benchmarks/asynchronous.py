"""Synchronous against asynchronous rounds by a simulated clock: the table and the picture of
`docs/benchmarks/features.md`.

    python benchmarks/asynchronous.py [OUT.png] [--spread 1] [--by-samples]
    python benchmarks/asynchronous.py --upload '20 kbit/s'

On digits, 100 clients whose seconds are log-normal, 20 at work at any time: FedAvg that waits for
all 20, and with buffers of 10, 5 and 2, until as many reports were taken. Three seeds; the picture
shows synchronous rounds and a buffer of 5 under the first. With --upload clients send over a link
of that rate, and rows are synchronous rounds and a buffer of 5, compressed and not.
"""

import argparse
import shutil
import statistics
import tempfile
from pathlib import Path

import fedbayes
from fedbayes.reports import plot

CLIENTS, AT_WORK, REPORTS, WANTED = 100, 20, 1200, 0.9

COMPRESSED = {"none": {}, "int8": {"up": "int8"}, "top-k, 5 %": {"up": "top-k", "share": 0.05}}


def settings(buffer, compression, seed, options):
    """Those of a run; 0: synchronous rounds."""
    asynchronous = {"buffer": buffer, "staleness": options.staleness} if buffer else {}
    clock = {"speeds": "log-normal", "spread": options.spread, "by_samples": options.by_samples}
    if options.upload:
        clock["upload"] = options.upload
    return {
        "seed": seed,
        "rounds": REPORTS // (buffer or AT_WORK),
        "cohort": AT_WORK,
        "data": {"name": "digits", "clients": CLIENTS},
        "clock": clock,
        "asynchronous": asynchronous,
        "compression": COMPRESSED[compression],
    }


def reached(lines):
    """Seconds of the clock until the global model is as accurate as wanted; None if it never is."""
    return next((x["clock_seconds"] for x in lines if x["global_accuracy"] >= WANTED), None)


def shown(values):
    """Mean and range of some numbers, those that are None apart."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return f"{len(known)} of {len(values)} runs"
    return f"{statistics.mean(known):.1f} ({min(known):.1f} to {max(known):.1f})"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--spread", type=float, default=1.0)
    parser.add_argument("--by-samples", action="store_true")
    parser.add_argument("--staleness", default="polynomial")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--upload")
    options = parser.parse_args()
    folder, first = Path(tempfile.mkdtemp()), []
    rows = [(buffer, "none") for buffer in (0, 10, 5, 2)]
    if options.upload:
        rows = [(buffer, compression) for buffer in (0, 5) for compression in COMPRESSED]
    try:
        print(
            f"| rounds | seconds to {WANTED:.0%} | seconds in all | accuracy, % | mean staleness |"
        )
        print("|---|---|---|---|---|")
        for buffer, compression in rows:
            name = f"buffer of {buffer}" if buffer else "synchronous"
            name += f", {compression}" if options.upload else ""
            lines, ends = [], []
            for seed in range(options.seeds):
                path = folder / (name if not seed else f"{name} {seed}")
                result = fedbayes.run(folder=path, **settings(buffer, compression, seed, options))
                lines.append(result.metrics)
                ends.append(result.summary)
                if not seed and buffer in (0, 5):
                    first.append(path)
            stale = [end.get("asynchronous", {}).get("staleness_mean", 0.0) for end in ends]
            print(
                f"| {name} | {shown([reached(each) for each in lines])} | "
                f"{shown([end['clock_seconds'] for end in ends])} | "
                f"{shown([100 * end['global_accuracy'] for end in ends])} | "
                f"{statistics.mean(stale):.1f} |",
                flush=True,
            )
        if options.out:
            plot(first, "clock", options.out)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
