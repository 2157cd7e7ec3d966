"""Files of strangers: models, pictures and tables that claim or unpack to gigabytes, settings and
checkpoints with something else in them.

What is read, or one plain error, comes in `SECONDS` of a processor, and takes less than `MEMORY`.
"""

import gzip
import io
import json
import resource
import struct
import tempfile
import time
import warnings
import zipfile
import zlib
from functools import cache
from pathlib import Path

import numpy as np

import fedbayes
from fedbayes import Config
from fedbayes.data import load_dataset
from fedbayes.data.settings import DataSettings
from fedbayes.errors import FedbayesError
from fedbayes.storage.folder import RunFolder
from fedbayes.workflows.serve.model_files import read_models
from tests.hostile import folders

SECONDS = 20.0
MEMORY = 400_000_000
"""Bytes by which the most that the process has ever held may grow."""


def safetensors(rng, folder):
    """A header that claims much, or too much."""
    entries = {
        f"{k}.weight": {
            "dtype": str(rng.choice(["F32", "F64", "BF16", "I64", "X"])),
            "shape": [int(10 ** rng.integers(0, 12)) for _ in range(rng.integers(0, 4))],
            "data_offsets": [int(x) for x in sorted(rng.integers(0, 2**40, 2))],
        }
        for k in range(rng.integers(1, 2000))
    }
    head = json.dumps(entries).encode()
    path = folder / "m.safetensors"
    length = len(head) if rng.random() < 0.7 else int(rng.integers(0, 2**60))
    path.write_bytes(struct.pack("<Q", length) + head + bytes(int(rng.integers(0, 100))))
    read_models([path])


def torch_file(rng, folder):
    """A ZIP file whose parts unpack to a hundred times 10 MB, or a pickle of nested lists."""
    path = folder / "m.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as parts:
        nested = b"\x80\x02" + b"]" * 5 + b"a" * 4 + b"."
        parts.writestr("m/data.pkl", nested if rng.random() < 0.5 else bytes(10_000_000))
        for k in range(rng.integers(0, 5)):
            parts.writestr(f"m/data/{k}", bytes(20_000_000))
    read_models([path])


def picture(width, height, lines):
    """A PNG that says how large it is, with other lines than that."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(lines))
    parts = (chunk(b"IHDR", head), chunk(b"IDAT", body), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def pictures(rng, folder):
    """A folder of pictures, of which one claims up to 100,000 times 100,000 points."""
    for name in ("cat", "dog"):
        (folder / "p" / name).mkdir(parents=True, exist_ok=True)
        for k in range(3):
            (folder / "p" / name / f"{k}.png").write_bytes(picture(8, 8, 8 * 25))
    width, height = (int(10 ** rng.uniform(4.2, 5)) for _ in range(2))
    lines = int(10 ** rng.uniform(0, 7))
    (folder / "p" / "cat" / "bomb.png").write_bytes(picture(width, height, lines))
    load_dataset(DataSettings(path=folder / "p"))


def table(rng, folder):
    """A CSV that unpacks to 200 MB, of short lines or of one."""
    path, line = folder / "t.csv.gz", b"1,yes\n" if rng.random() < 0.5 else b"1"
    packed = zlib.compressobj(9, zlib.DEFLATED, 31)
    with path.open("wb") as file:
        file.write(packed.compress(b"a,label\n"))
        for _ in range(200):
            file.write(packed.compress(line * (1_000_000 // len(line))))
        file.write(packed.flush())
    load_dataset(DataSettings(path=path))


def arrays(rng, folder):
    """An NPZ file whose array claims another size than it has, or is gigabytes of zeros."""
    path, data = folder / "a.npz", io.BytesIO()
    np.save(data, np.zeros((10, 4), np.float32))
    shape = str(tuple(int(10 ** rng.integers(1, 9)) for _ in range(2))).encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as parts:
        parts.writestr("x.npy", data.getvalue().replace(b"(10, 4)", shape))
        parts.writestr("y.npy", gzip.compress(b"x") + bytes(int(rng.integers(0, 10**7))))
    load_dataset(DataSettings(path=path))


VALUES = (
    "1e999",
    "-1",
    "9" * 400,
    '"\\u0000"',
    "[]",
    "{}",
    "nan",
    '"a:b"',
    "[" * 500,
    "true",
    '""',
)


def settings(rng, folder):
    """A config in which something else stands, or that goes on for a long time."""
    lines = Config().dump().splitlines()
    for _ in range(rng.integers(1, 4)):
        place = rng.integers(len(lines))
        key, equals, _ = lines[place].partition("=")
        if equals:
            lines[place] = f"{key}= {VALUES[rng.integers(len(VALUES))]}"
        else:
            lines[place] = "a" * int(rng.integers(1, 10**6))
    (folder / "c.toml").write_text("\n".join(lines))
    Config.load(folder / "c.toml", [])


@cache
def run_of():
    """The files of a run, as bytes."""
    with tempfile.TemporaryDirectory() as folder:
        fedbayes.run(folders.config(), Path(folder) / "run", progress=False)
        found = RunFolder(Path(folder) / "run")
        name = sorted(found.checkpoints.path.iterdir())[-1].name
        return name, (found.checkpoints.path / name).read_bytes()


def checkpoint(rng, folder):
    """A checkpoint with other bytes, other lengths, or a header that claims much."""
    name, whole = run_of()
    data = bytearray(whole)
    for _ in range(rng.integers(1, 4)):
        kind = rng.integers(4)
        place = int(rng.integers(len(data)))
        if kind == 0:
            data[place] ^= 1 << rng.integers(8)
        elif kind == 1:
            del data[place:]
        elif kind == 2:
            data[:8] = struct.pack("<Q", int(rng.integers(0, 2**62)))
        else:
            data[place:place] = rng.bytes(int(rng.integers(1, 1000)))
        data = data or bytearray(b"0")
    place = folder / "run" / "checkpoints"
    place.mkdir(parents=True, exist_ok=True)
    for old in place.iterdir():
        old.unlink()
    (place / name).write_bytes(data)
    RunFolder(folder / "run").progress()


KINDS = (safetensors, torch_file, pictures, table, arrays, settings, checkpoint)


def attack(count, seed):
    """Read so many files.

    Returns:
        How many were read and survived, what failed, and the worst of time and memory.
    """
    failures, slowest, largest = [], 0.0, 0.0
    run_of()
    for number in range(seed, seed + count):
        kind, rng = KINDS[number % len(KINDS)], np.random.default_rng(number)
        before, begun = _most(), time.process_time()
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                kind(rng, Path(folder))
            except FedbayesError as error:
                if len(str(error)) > 2000 or "Traceback" in str(error):
                    failures.append(f"{kind.__name__} {number}: {error!s:.300}")
            except Exception as error:  # whatever it is, it is a failure
                failures.append(f"{kind.__name__} {number}: {error!r:.300}")
        taken, grown = time.process_time() - begun, _most() - before
        if taken > SECONDS or grown > MEMORY:
            failures.append(f"{kind.__name__} {number}: {taken:.1f} s, {grown / 1e6:,.0f} MB")
        slowest, largest = max(slowest, taken), max(largest, grown)
    lost = len({failure.partition(":")[0] for failure in failures})
    return count, count - lost, failures, {"s": slowest, "MB": largest / 1e6}


def _most():
    """The most memory that this process has ever held, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
