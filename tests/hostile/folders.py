"""Run folders damaged on purpose: what is told, and what is believed.

    python -m tests.hostile.folders 1000 0

Each case copies a run that has ended, or one that was killed, damages one of its files, and goes on
with it, reports, exports or evaluates it. It survives if what comes out is what comes out of the
whole folder, or if the damaged file is named, in an error or a note.
"""

import math
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch

import fedbayes
from fedbayes import Config, Simulation
from fedbayes.core.messages import decode, dense
from fedbayes.errors import FedbayesError, FedbayesWarning
from fedbayes.reports import gather
from fedbayes.storage.folder import RunFolder
from fedbayes.workflows.serve.evaluation_set import find_tests
from fedbayes.workflows.serve.export import export
from fedbayes.workflows.serve.model_evaluation import compare, open_model

SECONDS = 60
"""What a case may take; a pipe would be waited for without end."""


def config(seed=0, **changes):
    return Config.published(
        **{
            "seed": seed,
            "rounds": 4,
            "cohort": 2,
            "method": {"name": "scaffold"},
            "data": {"clients": 4, "partition": "iid", "limit": 200},
            "model": {"hidden": [4]},
        }
        | changes
    )


def make_runs(place):
    """A run that has ended, one that was killed in its third round, and another one."""
    fedbayes.run(config(), place / "ended", progress=False)
    fedbayes.run(config(seed=1), place / "other", progress=False)
    with Simulation(config(), place / "killed") as simulation:
        steps = iter(simulation)
        next(steps)
        next(steps)
    with (place / "killed" / "metrics.jsonl").open("a") as file:
        file.write('{"round": 3, "cut')
    (place / "killed" / "clients" / "0000000-0000003.safetensors").write_bytes(b"too early")
    return {name: place / name for name in ("ended", "killed")}


def empty(path, rng, other):
    path.write_bytes(b"")


def truncate(path, rng, other):
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(max(1, len(data)))])


def flip(path, rng, other):
    data = bytearray(path.read_bytes())
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(bytes(data))


def swap(path, rng, other):
    """The same file of another run, or else another file of its folder."""
    if other.is_file() and rng.random() < 0.6:
        shutil.copy(other, path)
        return
    beside = sorted(p for p in path.parent.iterdir() if p.is_file() and p != path)
    if beside:
        shutil.copy(rng.choice(beside), path)


def remove(path, rng, other):
    path.unlink()


def garbage(path, rng, other):
    path.write_bytes(rng.randbytes(rng.randrange(1, 5000)))


def no_text(path, rng, other):
    path.write_bytes(b"\xff\xfe" + path.read_bytes())


def nested(path, rng, other):
    path.write_bytes(rng.choice([b"[" * 50_000 + b"]" * 50_000, b'{"a":' * 50_000]) + b"\n")


def append(path, rng, other):
    path.write_bytes(path.read_bytes() + rng.choice([b"\n", b"{}\n", b"\0" * 40, b"x = 1\n"]))


def pipe(path, rng, other):
    path.unlink()
    os.mkfifo(path)


DAMAGES = (empty, truncate, flip, flip, flip, swap, remove, garbage, no_text, nested, append, pipe)


def timeless(folder):
    return [
        {key: value for key, value in line.items() if key != "seconds"}
        for line in RunFolder(folder).metrics()
    ]


def resumed(folder):
    fedbayes.resume(folder, progress=False)
    checkpoints = {
        path.name: {n: t for n, t in dense(decode(path.read_bytes())).items() if n != "seconds"}
        for path in (folder / "checkpoints").iterdir()
    }
    files = {path.name: path.read_bytes() for path in (folder / "clients").iterdir()}
    return timeless(folder), checkpoints, files, (folder / "model.safetensors").read_bytes()


def reported(folder):
    (record,) = gather([folder])
    skipped = ("folder", "label", "started", "changed", "notes")
    told = {f.name: getattr(record, f.name) for f in fields(record) if f.name not in skipped}
    return told, record.notes


def exported(folder):
    out = folder.parent / "exported.safetensors"
    out.unlink(missing_ok=True)
    export(folder, out)
    return out.read_bytes()


def evaluated(folder):
    model = folder / "model.safetensors"
    tests = find_tests(model, folder, [])
    return [(s.metrics, s.parameters) for s in compare({"m": open_model(model, tests)}, tests)]


COMMANDS = (resumed, reported, exported, evaluated)


def same(one, two):
    """Whether two results are equal to the last bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(two, torch.Tensor) and one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, two, equal_nan=one.dtype.kind == "f")
    if isinstance(one, dict):
        return (
            isinstance(two, dict)
            and one.keys() == two.keys()
            and all(same(value, two[name]) for name, value in one.items())
        )
    if isinstance(one, list | tuple):
        return isinstance(two, list | tuple) and len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, float) and isinstance(two, float) and math.isnan(one):
        return math.isnan(two)
    if hasattr(one, "__dataclass_fields__"):
        return type(one) is type(two) and same(vars(one), vars(two))
    return one == two


def outcome(command, folder):
    """What comes of a command: its result, what is said on the way, or the error's text."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            result, error = command(folder), ""
        except FedbayesError as refused:
            result, error = None, str(refused)
    words = " ".join(str(w.message) for w in said if issubclass(w.category, FedbayesWarning))
    notes = ()
    if command is reported and result is not None:
        result, notes = result
    return result, f"{error} {words} {' '.join(notes)}"


def attack(cases, seed=0, place=None, damages=DAMAGES):
    """Damage run folders so often; how many cases were tried, how many survived, and the others.

    Args:
        cases: how many.
        seed: of what is drawn.
        place: an empty folder to work in; a temporary one by default.
        damages: the ways of damaging that are drawn from.
    """
    if place is None:
        with tempfile.TemporaryDirectory() as temporary:
            return attack(cases, seed, Path(temporary), damages)
    rng, failures = random.Random(seed), []
    runs = make_runs(place)
    whole = {}
    for name, run in runs.items():
        for command in COMMANDS:
            # In the very place of the damaged ones, since results may name it.
            folder = copied(run, place)
            whole[name, command] = outcome(command, folder)
    for _ in range(cases):
        name, command = rng.choice(list(runs)), rng.choice(COMMANDS)
        folder = copied(runs[name], place)
        path = rng.choice(sorted(p for p in folder.rglob("*") if p.is_file()))
        damage, state = rng.choice(damages), rng.getstate()
        inside = path.relative_to(folder)
        damage(path, rng, place / "other" / inside)
        what = f"{damage.__name__} of {name}/{inside}, {command.__name__} (state {hash(state)})"
        previous = signal.signal(signal.SIGALRM, _too_long)
        signal.alarm(SECONDS)
        try:
            result, words = outcome(command, folder)
        except Exception:
            failures.append(f"{what}: {traceback.format_exc()}")
            continue
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, previous)
        expected, usual = whole[name, command]
        told = any(part in words for part in (inside.name, *inside.parts[:-1]))
        told = told and words != usual
        if not told and not (same(expected, result) and (result is not None or words == usual)):
            failures.append(f"{what}: another result, and not a word on the file: {words!r}")
    return cases, cases - len(failures), failures


def copied(run, place):
    folder = place / "damaged"
    if folder.exists():
        shutil.rmtree(folder)
    shutil.copytree(run, folder)
    return folder


def _too_long(number, frame):
    raise AssertionError("it takes too long")


def main(cases, seed):
    tried, survived, failures = attack(int(cases), int(seed))
    for failure in failures:
        print(failure)
    print(f"{survived} of {tried} damaged folders survived")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["100"]), *(["0"] if len(sys.argv) < 3 else []))
