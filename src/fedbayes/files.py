"""Files that may be damaged, or a stranger's: read with care, sealed with their own digest.

A *seal* is the SHA-256 digest of a file of tensors in its own header, taken with zeros in the
place of the digest: whichever byte of the file is changed, the seal no longer fits.
"""

import hashlib
import json
import os
import re
import stat
import struct
import tomllib
import zipfile
import zlib
from collections.abc import Mapping
from errno import EINVAL
from pathlib import Path
from typing import Any

from torch import Tensor

from fedbayes.errors import MessageError
from fedbayes.messages import Masked, encode

NPZ_ERRORS = (
    *(OSError, ValueError, TypeError, LookupError, AttributeError, EOFError, ArithmeticError),
    *(MemoryError, RuntimeError, SyntaxError, zipfile.BadZipFile, zlib.error, struct.error),
)
"""What NumPy's reader of NPZ files raises on invalid ones."""
SEAL = "fedbayes-sha256"
"""The seal's name in the metadata of a safetensors file."""
_BLANK = "0" * 64
_SEALED = re.compile(rb'"' + SEAL.encode() + rb'":"([0-9a-f]{64})"')


def digest(data: bytes) -> str:
    """The SHA-256 digest, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def read_bytes(path: Path) -> bytes:
    """The content of a file. Of a pipe or a device, at which reading may never end, an error.

    Raises:
        OSError: it cannot be read, or is no file.
    """
    kind = path.stat().st_mode
    # What a shell puts in a file's place, as in <(zcat config.gz), is open already.
    given = path.is_relative_to("/dev/fd") or path.is_relative_to("/proc/self/fd")
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind) or given):
        raise OSError(EINVAL, "it is a pipe or a device, and no file", str(path))
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
        raise ValueError("it is no text in UTF-8") from None


def parse_json(text: str | bytes) -> Any:
    """What JSON says.

    Raises:
        ValueError: it is invalid, or nested so deeply that no file of ours is.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("it is no text in UTF-8") from None
    except ValueError as error:
        if "int_max_str_digits" in str(error):
            raise ValueError("it has a number of thousands of digits") from None
        raise


def parse_toml(text: str) -> dict[str, Any]:
    """What TOML says.

    Raises:
        ValueError: it is invalid, or nested so deeply that no file of ours is.
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        if "int_max_str_digits" in str(error):
            raise ValueError("it has a number of thousands of digits") from None
        raise


def sealed(tensors: Mapping[str, Tensor | Masked], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file of these tensors with a seal.

    Args:
        tensors: by name, at least one.
        metadata: text for its header.
    """
    plain = encode(tensors, plain=True)
    end = 8 + int.from_bytes(plain[:8], "little")
    # The library's own writer has text in a random order, and equal runs have equal files.
    text = json.dumps({**metadata, SEAL: _BLANK}, separators=(",", ":"), ensure_ascii=False)
    header = b'{"__metadata__":' + text.encode() + b"," + plain[9:end].rstrip()
    header += b" " * (-len(header) % 8)
    data = len(header).to_bytes(8, "little") + header + plain[end:]
    found = _seal_of(data)
    assert found is not None
    start, end = found.span(1)
    return data[:start] + digest(data).encode() + data[end:]


def has_seal(data: bytes) -> bool:
    """Whether a file has a seal; those of older versions have none."""
    return _seal_of(data) is not None


def check_seal(data: bytes) -> None:
    """See that a file is what it was when it was sealed; nothing is said of one without a seal.

    Raises:
        MessageError: it is not.
    """
    found = _seal_of(data)
    if found is None:
        return
    start, end = found.span(1)
    content = hashlib.sha256(data[:start])
    content.update(_BLANK.encode())
    content.update(memoryview(data)[end:])
    if content.hexdigest() != found[1].decode():
        raise MessageError("its content is not what its digest says")


def _seal_of(data: bytes) -> re.Match[bytes] | None:
    """The place of the seal in the header of a safetensors file."""
    end = 8 + int.from_bytes(data[:8], "little")
    return _SEALED.search(data, 8, min(end, len(data)))


def flush(path: Path) -> None:
    """Have the system write a file, or the entries of a folder, to the disk itself."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
