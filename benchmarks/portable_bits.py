"""One digest of a run everywhere (`bits = "portable"`): CPUs, threads, engines, kills and cost.

    python benchmarks/portable_bits.py                  # minutes
    python benchmarks/portable_bits.py --kills 1000     # also kills a run so many times

Each row runs the same federation with every value of ATEN_CPU_CAPABILITY, with 1, 2 and 4 threads
and on every exact engine, each in its own process, and compares the digests of the final models.
The exit status is 1 if a digest differs. `machine` counts the digests of the same runs without the
setting, and the last column is the median time of a run relative to them, one thread each.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fedbayes.core import portable

CASES = {
    "fedavg, MLP": [],
    "fedavg, LeNet-5": ["model.name=lenet5"],
    "pvi, MLP": ["method.name=pvi"],
    "fedlap, MLP": ["method.name=fedlap"],
    "fedfuse, MLP": ["method.name=fedfuse", "rounds=1"],
    "gpi-fnm, MLP": ["method.name=gpi-fnm", "rounds=1"],
    "hierarchical, logistic": ["method.name=hierarchical", "model.hidden=[]"],
}
LEVELS = ("default", "avx2", "avx512")
ENGINES = ("workers", "ray", "flower-simulation")


def digest(folder: Path) -> str:
    """Of the model that a run ends with."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def run(folder: Path, settings: list[str], level: str = "avx512", threads: int = 1) -> float:
    """Run a federation in a process of its own; the seconds of its rounds."""
    sets = [part for each in settings for part in ("--set", each)]
    subprocess.run(
        [sys.executable, "-m", "fedbayes", "run", *sets, "--out", str(folder)],
        env={name: value for name, value in os.environ.items() if name not in portable.VARIABLES}
        | {"ATEN_CPU_CAPABILITY": level, "OMP_NUM_THREADS": str(threads)},
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return sum(json.loads(line)["seconds"] for line in lines)


def compare(place: Path, case: list[str]) -> tuple[set[str], set[str], float]:
    """Digests with the setting and without, and the median ratio of times."""
    base = ["engine=sequential", "rounds=2", "data.clients=4", *case]
    found: dict[str, set[str]] = {"portable": set(), "machine": set()}
    ratios = []
    for level in LEVELS:
        for threads in (1, 2, 4):
            seconds = {}
            for bits in found:
                folder = place / f"{bits}-{level}-{threads}"
                settings = [*base, f"bits={bits}", f"threads={threads}"]
                seconds[bits] = run(folder, settings, level, threads)
                found[bits].add(digest(folder))
            if level == "avx512" and threads == 1:
                ratios.append(seconds["portable"] / seconds["machine"])
    for engine in ENGINES:
        folder = place / engine
        run(folder, [*base, "bits=portable", f"engine={engine}"])
        found["portable"].add(digest(folder))
    for k in range(2):
        both = [
            run(place / f"again-{k}-{bits}", [*base, f"bits={bits}"])
            for bits in ("portable", "machine")
        ]
        ratios.append(both[0] / both[1])
    return found["portable"], found["machine"], statistics.median(ratios)


def killed(place: Path, kills: int) -> tuple[int, bool]:
    """Kill a run at random moments and resume it; the kills, and whether the digest is that of one
    that nobody killed.

    Each life is a fork of this process, which has imported everything, so a kill costs no start-up.
    """
    import fedbayes

    settings = {"rounds": max(4, kills // 4), "bits": "portable", "evaluate_every": 0}
    settings |= {"engine": "sequential"}
    settings |= {"data": {"clients": 4}, "evaluate_local_every": 0, "method": {"name": "pvi"}}
    fedbayes.run(out=place / "whole", **settings)
    rng, done, folder = random.Random(0), 0, place / "killed"
    while done < kills:
        child = os.fork()
        if not child:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            if (folder / "config.toml").exists():
                fedbayes.resume(folder)
            else:
                fedbayes.run(out=folder, **settings)
            os._exit(0)
        time.sleep(rng.uniform(0.02, 0.4))
        os.kill(child, signal.SIGKILL)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
            break  # it was quicker
        done += 1
    if not (folder / "summary.json").exists():
        fedbayes.resume(folder)
    return done, digest(folder) == digest(place / "whole")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--kills", type=int, default=0)
    given = parser.parse_args()
    bad = False
    with tempfile.TemporaryDirectory() as name:
        print("| run | digests, portable | digests, machine | time |\n|---|--:|--:|--:|")
        for k, case in enumerate(given.only):
            one, other, ratio = compare(Path(name) / str(k), CASES[case])
            bad |= len(one) != 1
            print(f"| {case} | {len(one)} | {len(other)} | {ratio:.2f} |", flush=True)
        if given.kills:
            done, same = killed(Path(name), given.kills)
            bad |= not same
            print(f"\n{done} kills: {'the same digest' if same else 'ANOTHER DIGEST'}")
    sys.exit(bad)


if __name__ == "__main__":
    if not portable.started() and "--kills" in sys.argv:
        portable.restart()
    main()
