"""Commands that are killed at random moments, and then called again: `fuse`, `attack`, `conformal`,
and `glm` over the nodes of Flower's simulation.

The second call must end as one that was never disturbed, whatever the first one left.
"""

import os
import random
import shutil
import signal
import tempfile
import time
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

import fedbayes
from fedbayes.core.files import digest
from tests.helpers.command_line import command
from tests.hostile import folders
from tests.hostile.kills import forked


def fuse(folder):
    """Two models into one."""
    models = [folder / name / "model.safetensors" for name in ("run", "other")]
    return command("fuse", *models, "-m", "average", "-o", folder / "f.pt")


def conformal(folder):
    """Thresholds beside the model of a run."""
    return command("conformal", folder / "run")


def glm(folder):
    """A regression over nodes."""
    files = [folder / f"{k}.csv" for k in range(2)]
    over = ("--engine", "flower-simulation")
    return command("stats", "glm", *files, "--outcome", "y", *over, "-o", folder / "g.csv")


def under_attack(folder):
    """A run with and without an attacker."""
    options = ("--methods", "fedavg", "--kinds", "sign-flip", "--rules", "mean", "-o")
    few = ("--set", "rounds=1", "--set", "data.clients=3", "--set", "data.limit=200")
    return command("attack", *options, folder / "grid", *few)


KINDS = (conformal, fuse, glm, under_attack)


@cache
def started():
    """A folder with what the commands read."""
    place = Path(tempfile.mkdtemp(prefix="fedbayes-hostile-"))
    for seed, name in enumerate(("run", "other")):
        fedbayes.run(folders.config(seed=seed), place / name, progress=False)
    rng = np.random.default_rng(0)
    for k in range(2):
        x = rng.normal(size=50)
        frame = pd.DataFrame({"x": x, "y": 2 * x + rng.normal(size=50)})
        frame.to_csv(place / f"{k}.csv", index=False)
    return place


def left(folder):
    """What a command leaves, but for times and paths."""
    kept = (".safetensors", ".csv", ".pt")
    found = [path for path in sorted(folder.rglob("*")) if path.name.endswith(kept)]
    return {
        str(path.relative_to(folder)): digest(path.read_bytes())
        for path in found
        if path.is_file() and not path.name.startswith(".") and "checkpoints" not in path.parts
    }


@cache
def undisturbed(kind):
    """What a command leaves that is not killed, and how long it takes."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "place"
        shutil.copytree(started(), place)
        began = time.perf_counter()
        child = forked(lambda: _require(kind(place)))
        _, status = os.waitpid(child, 0)
        assert status == 0, kind.__name__
        return time.perf_counter() - began, left(place)


def _require(status):
    assert status == 0


def attack(count, seed):
    """Kill so many commands.

    Returns:
        How many were killed and ended well the second time, and what failed.
    """
    failures = []
    for number in range(seed, seed + count):
        kind, rng = KINDS[number % len(KINDS)], random.Random(number)
        took, expected = undisturbed(kind)
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / "place"
            shutil.copytree(started(), place)
            child = forked(lambda k=kind, p=place: _require(k(p)))
            time.sleep(rng.uniform(0, took))
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            if os.waitstatus_to_exitcode(status) > 0:
                failures.append(f"{kind.__name__} {number}: it ended with {status}")
                continue
            if not set(left(place).items()) <= set(expected.items()) | set(left(started()).items()):
                failures.append(f"{kind.__name__} {number}: half a file is left")
                continue
            again = forked(lambda k=kind, p=place: _require(k(p)))
            _, status = os.waitpid(again, 0)
            if status and kind is not fuse:
                failures.append(f"{kind.__name__} {number}: the second call ended with {status}")
            elif left(place) != expected:
                failures.append(f"{kind.__name__} {number}: it ended otherwise")
    return count, count - len(failures), failures
