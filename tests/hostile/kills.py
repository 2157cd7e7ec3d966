"""Runs killed at random moments, gone on with, and compared with one that was left alone.

    python -m tests.hostile.kills 100 0

A process is forked for each run, so that nothing but the run itself takes time, and is killed with
SIGKILL, again and again until one of them ends. What it leaves must be what an undisturbed run
leaves, to the bit.
"""

import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import fedbayes
from fedbayes import Config
from tests.hostile.folders import resumed as contents
from tests.hostile.folders import same, timeless

METHODS = ("fedavg", "scaffold", "local")


def config(method, keep):
    return Config.create(
        rounds=6,
        cohort=2,
        keep_checkpoints=keep,
        checkpoint_every=1 if keep == "best" else 2,
        method={"name": method},
        data={"clients": 4, "partition": "iid", "limit": 200},
        model={"hidden": [4]},
    )


def forked(work):
    """Do it in a process of its own."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        work()
        status = 0
    finally:
        os._exit(status)


def go_on(settings, folder):
    """The run of this folder, from its start or from where it was killed."""
    if (folder / "config.toml").exists():
        fedbayes.resume(folder, progress=False)
    else:
        fedbayes.run(settings, folder, progress=False)


def left(folder):
    """What a run leaves, but for the time that it took."""
    (folder / "clients").mkdir(exist_ok=True)
    model = folder / "model.safetensors"
    return timeless(folder), model.exists() and contents(folder)


def attack(kills, seed=0, place=None):
    """Kill runs so often; how many kills were tried, how many survived, and what went wrong.

    Args:
        kills: how many.
        seed: of the moments.
        place: an empty folder to work in; a temporary one by default.
    """
    if place is None:
        with tempfile.TemporaryDirectory() as temporary:
            return attack(kills, seed, Path(temporary))
    rng, failures, done, number = random.Random(seed), [], 0, 0
    whole = {}
    while done < kills:
        method, keep = rng.choice(METHODS), rng.choice(("last", "best", "all"))
        settings = config(method, keep)
        if (method, keep) not in whole:
            # The first time loads what is loaded once.
            shutil.rmtree(place / "whole", ignore_errors=True)
            go_on(settings, place / "whole")
            shutil.rmtree(place / "whole")
            began = time.perf_counter()
            go_on(settings, place / "whole")
            whole[method, keep] = time.perf_counter() - began, left(place / "whole")
        took, expected = whole[method, keep]
        folder, here = place / str(number), 0
        number += 1
        while done < kills:
            child = forked(lambda f=folder, s=settings: go_on(s, f))
            time.sleep(rng.uniform(0, took))
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            done, here = done + 1, here + 1
            if os.waitstatus_to_exitcode(status) > 0:
                failures.append(f"{method}, {keep}, kill {here}: a process ended with {status}")
                break
            if (folder / "summary.json").exists():
                break
        try:
            go_on(settings, folder)
            if not same(expected, left(folder)):
                failures.append(f"{method}, {keep}, {here} kills: it ended otherwise")
            if halves := [p for p in folder.rglob(".*") if p.name != ".lock"]:
                failures.append(f"{method}, {keep}, {here} kills: {halves} are left")
        except Exception:
            failures.append(f"{method}, {keep}, {here} kills: {traceback.format_exc()}")
        shutil.rmtree(folder, ignore_errors=True)
    return done, done - len(failures), failures


def main(kills, seed):
    tried, survived, failures = attack(int(kills), int(seed))
    for failure in failures:
        print(failure)
    print(f"{survived} of {tried} kills survived")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["50"]), *(["0"] if len(sys.argv) < 3 else []))
