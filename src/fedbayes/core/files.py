"""Files that may be damaged, or a stranger's, read with care; and written whole."""

import hashlib
import json
import os
import re
import stat
import struct
import tomllib
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from errno import EDQUOT, EFBIG, EINVAL, ENOSPC
from pathlib import Path
from typing import Any, BinaryIO

from fedbayes.errors import RunError

NPZ_ERRORS = (
    *(OSError, ValueError, TypeError, LookupError, AttributeError, EOFError, ArithmeticError),
    *(MemoryError, RuntimeError, SyntaxError, zipfile.BadZipFile, zlib.error, struct.error),
)
"""What NumPy's reader of NPZ files raises on invalid ones."""


Pieces = Sequence[bytes | memoryview]
"""Parts of a file in their order. Large tensors are written without a joined copy."""


def digest(data: bytes | Pieces) -> str:
    """The SHA-256 digest, in hexadecimal."""
    found = hashlib.sha256()
    for piece in _pieces(data):
        found.update(piece)
    return found.hexdigest()


def _pieces(data: bytes | Pieces) -> Pieces:
    return [data] if isinstance(data, bytes) else data


def read_bytes(path: Path) -> bytes:
    """The content of a file. Of a pipe or a device, at which reading may never end, an error.

    Raises:
        OSError: it cannot be read, or is no file.
    """
    kind = path.stat().st_mode
    # What a shell puts in a file's place, as in <(zcat config.gz), is open already.
    given = path.is_relative_to("/dev/fd") or path.is_relative_to("/proc/self/fd")
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind) or given):
        raise OSError(EINVAL, "it is a pipe or a device, not a file", str(path))
    return path.read_bytes()


def read_text(path: Path) -> str:
    """The content of a text file in UTF-8; as `read_bytes`.

    Raises:
        OSError: it cannot be read, or is no file.
        ValueError: it is no text.
    """
    data = read_bytes(path)
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None


def open_npz(source: Path | BinaryIO) -> Any:
    """The arrays of an NPZ file, of which none is unpickled; to be used in a `with` statement.

    Raises:
        OSError: it cannot be read.
        ValueError: it is none, or a small file that unpacks to so much that it fills the memory.
    """
    import numpy as np

    if isinstance(source, Path):
        _check_unpacked(source)
    try:
        found = np.load(source, allow_pickle=False)
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
        raise ValueError("it is not a .npz file of numpy.savez") from None
    if isinstance(found, np.ndarray):
        raise ValueError("it is a single array without a name. Write it with numpy.savez")
    return found


MOST_TIMES = 1000
"""Bytes that an NPZ file may unpack to, as a multiple of its own: pictures are mostly zeros."""
AT_LEAST = 1 << 28
"""Bytes that any may unpack to in addition."""


def _check_unpacked(path: Path) -> None:
    """See that an NPZ file may be read whole."""
    try:
        with zipfile.ZipFile(path) as parts:
            size = sum(part.file_size for part in parts.infolist())
    except (zipfile.BadZipFile, NotImplementedError):
        return  # NumPy says what it is
    most = MOST_TIMES * path.stat().st_size + AT_LEAST
    if size > most:
        raise ValueError(
            f"it unpacks to {size:,} bytes, and the limit for its size is {most:,}. If the file "
            "is correct, write it with numpy.savez, which does not compress"
        )


_OF_PYTHON = re.compile(r'"(?:[^"\\]|\\.)*"|-?Infinity|NaN')
"""Text in JSON, and what Python writes of numbers and others cannot read."""
_NUMBERS = {"NaN": "null", "Infinity": "1e999", "-Infinity": "-1e999"}


def json_text(content: Any, *, indent: int | None = None) -> str:
    """JSON that every reader takes: null where a number is NaN, and where one is infinite 1e999,
    which readers take for infinity or the largest number that they have.

    Args:
        content: tables, lists, texts and numbers.
        indent: of a text over several lines; None: one line.
    """
    text = json.dumps(content, indent=indent)
    if "NaN" not in text and "Infinity" not in text:
        return text
    return _OF_PYTHON.sub(lambda found: _NUMBERS.get(found[0], found[0]), text)


def parse_json(text: str | bytes) -> Any:
    """The value of JSON text. Raises a ValueError if it is invalid, or nested too deeply."""
    return _parsed(json.loads, text)


def parse_toml(text: str) -> dict[str, Any]:
    """The table of TOML text. Raises a ValueError if it is invalid, or nested too deeply."""
    table: dict[str, Any] = _parsed(tomllib.loads, text)
    return table


def _parsed(parse: Callable[[Any], Any], text: str | bytes) -> Any:
    try:
        return parse(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None
    except ValueError as error:
        if "int_max_str_digits" in str(error):
            raise ValueError("it has a number of thousands of digits") from None
        raise


def require_files(paths: Iterable[Path | None], *, folders: bool = False) -> None:
    """See that files, or `folders`, are there before slow imports, or raise a RunError."""
    for path in paths:
        if path is None or (path.exists() and (folders or not path.is_dir())):
            continue
        if not path.is_dir():
            raise RunError(f"file {'or folder ' if folders else ''}not found: {path}")
        models = sorted(path.glob("*.safetensors"))
        which = ", ".join(map(str, models[:3])) or "none ends in .safetensors"
        raise RunError(f"{path} is a folder. Give a model file in it ({which})")


SEEDS_FILE = "seeds.toml"
"""In a folder of several runs, what they share; see `fedbayes.workflows.experiments.seed_runs`."""
SUMS_FILE = "SHA256SUMS"
"""The file with the digests of the files of a run, next to these."""


def writable(
    path: Path, what: str, formats: Sequence[str] = (), inputs: Iterable[Path | None] = ()
) -> None:
    """Make sure early that a file can be written, so that no work is lost.

    Args:
        path: the file.
        what: is to be written, for messages.
        formats: suffixes of the formats that there are; any by default.
        inputs: files that are read, which it must not take the place of.

    Raises:
        RunError: its suffix is of no format that there is, its folder is absent or closed, or the
            path is a folder, one of the inputs or a file of a run.
    """
    if path.is_dir():
        raise RunError(f"{what} {path} is a folder. Give a file name")
    if formats and not path.name.lower().endswith(tuple(formats)):
        raise RunError(
            f"{what} {path}: unknown format. Use a file name that ends in "
            f"{', '.join(formats[:-1])}{' or ' if formats[1:] else ''}{formats[-1]}"
        )
    if not path.parent.is_dir():
        raise RunError(f"{what} {path}: folder not found: {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise RunError(f"{what} {path}: cannot write into {path.parent}")
    if path.resolve() in {given.resolve() for given in inputs if given is not None}:
        raise RunError(f"{what} {path} would replace one of the inputs. Give another file name")
    sums = path.parent / SUMS_FILE
    if sums.is_file() and f"  {path.name}\n".encode() in read_bytes(sums) + b"\n":
        raise RunError(f"{what} {path} would replace a file of the run. Give another file name")


def writable_folder(path: Path, what: str) -> None:
    """Make sure early that files can be written into a folder, or that it can be made; `what` names
    it in messages.

    Raises:
        RunError: it is a file or in one, or it is closed.
    """
    there = next(place for place in (path, *path.absolute().parents) if os.path.lexists(place))
    if not os.path.isdir(there):  # noqa: PTH112 (Path.is_dir raises where it may not look)
        raise RunError(
            f"{what} {path}: {there} is "
            f"{'a link to what is no folder' if there.is_symlink() else 'no folder'}. Give "
            "another name"
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise RunError(f"{what} {path}: cannot write into {there}")


def flush(path: Path) -> None:
    """Have the system write a file, or the entries of a folder, to the disk itself."""
    number = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(number)
    finally:
        os.close(number)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the name of a file into an error of the system's that has none."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


FULL = {ENOSPC, EDQUOT, EFBIG}
"""Errors of the system where no more can be written: the disk, the quota or the file is full."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL


def write_beside(
    path: Path,
    data: bytes | Pieces,
    *,
    private: bool = False,
    durable: bool = False,
    keep: bool = False,
) -> None:
    """Write a file so that it is there whole or not at all, whenever the process is killed.

    In a folder that is closed to others, so is the file.

    Args:
        path: the file.
        data: what it is to hold.
        private: close it to others in any folder.
        durable: have it on the disk itself before it is there.
        keep: let a file stay that another process has put there meanwhile.
    """
    with written_whole(path, private=private, keep=keep) as file:
        for piece in _pieces(data):
            file.write(piece)
        if durable:
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def written_whole(path: Path, *, private: bool = False, keep: bool = False) -> Iterator[BinaryIO]:
    """A file to be written piece by piece, as `write_beside` does: it takes the place of what is
    at the path when the block ends, and where the block raises, nothing is left of it.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    mode = 0 if private else 0o666 & stat.S_IMODE(path.parent.stat().st_mode)
    try:
        try:
            number = os.open(beside, _NEW, mode | 0o600)
        except FileExistsError:  # left by a process of this number that was killed, or laid there
            beside.unlink()
            number = os.open(beside, _NEW, mode | 0o600)
        with os.fdopen(number, "wb") as file, naming(path):
            yield file
        if keep and _linked(beside, path):
            beside.unlink()
        else:
            beside.replace(path)
    except BaseException as error:
        beside.unlink(missing_ok=True)
        # The system does not say which file is full, and names the one beside where it may not be.
        if isinstance(error, OSError) and (
            error.errno in FULL or error.filename in (beside, str(beside))
        ):
            error.filename = str(path)
        raise


def _linked(beside: Path, path: Path) -> bool:
    """Give a file a second name that no file has yet; False where the file system has no links."""
    try:
        os.link(beside, path)
    except FileExistsError:
        return True
    except OSError:
        return False
    return True
