"""Synchronous against asynchronous rounds by a simulated clock: the table and the picture of
`docs/asynchronous.md`.

    python benchmarks/asynchronous.py [OUT.png] [--spread 1] [--by-samples]

On digits, 100 clients whose seconds are log-normal, 20 at work at any time: FedAvg that waits for
all 20, and with buffers of 10, 5 and 2, until as many reports were taken. Three seeds; the picture
shows synchronous rounds and a buffer of 5 under the first.
"""

import argparse
import shutil
import statistics
import tempfile
from pathlib import Path

import fedbayes
from fedbayes.reports import plot

CLIENTS, AT_WORK, REPORTS, WANTED = 100, 20, 1200, 0.9


def settings(buffer, seed, options):
    """Those of a run; 0: synchronous rounds."""
    asynchronous = {"buffer": buffer, "staleness": options.staleness} if buffer else {}
    clock = {"speeds": "log-normal", "spread": options.spread, "by_samples": options.by_samples}
    return {
        "seed": seed,
        "rounds": REPORTS // (buffer or AT_WORK),
        "cohort": AT_WORK,
        "data": {"name": "digits", "clients": CLIENTS},
        "clock": clock,
        "asynchronous": asynchronous,
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
    options = parser.parse_args()
    folder, first = Path(tempfile.mkdtemp()), []
    try:
        print(
            f"| rounds | seconds to {WANTED:.0%} | seconds in all | accuracy, % | mean staleness |"
        )
        print("|---|---|---|---|---|")
        for buffer in (0, 10, 5, 2):
            name = f"buffer of {buffer}" if buffer else "synchronous"
            lines, ends = [], []
            for seed in range(options.seeds):
                path = folder / (name if not seed else f"{name} {seed}")
                result = fedbayes.run(folder=path, **settings(buffer, seed, options))
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
