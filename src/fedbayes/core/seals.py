"""Files that are sealed with their own digest.

A *seal* is the SHA-256 digest of a file of tensors in its own header, taken with zeros in the
place of the digest: whichever byte of the file is changed, the seal no longer fits. That of a table
in JSON is the digest of what it holds besides the seal.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fedbayes.core.files import Pieces, digest, json_text, parse_json
from fedbayes.core.messages import Masked, pieces
from fedbayes.errors import MessageError

SEAL = "fedbayes-sha256"
"""The seal's name in the metadata of a safetensors file."""
_BLANK = "0" * 64
_SEALED = re.compile(rb'"' + SEAL.encode() + rb'":"([0-9a-f]{64})"')


def sealed(tensors: Mapping[str, Tensor | Masked], metadata: Mapping[str, str]) -> Pieces:
    """A safetensors file of these tensors, one at least, and this text in its header, with a seal;
    in pieces.
    """
    # The library's own writer has text in a random order, and equal runs have equal files.
    start, *rest = pieces(tensors, plain=True, metadata={**metadata, SEAL: _BLANK})
    header = bytes(start)
    found = _seal_of(header)
    assert found is not None
    begin, end = found.span(1)
    return [header[:begin] + digest([header, *rest]).encode() + header[end:], *rest]


def has_seal(data: bytes) -> bool:
    """Whether a file has a seal; those of older versions have none."""
    return _seal_of(data) is not None


def check_seal(data: bytes, *, required: bool = False) -> None:
    """Check that a file is unchanged since it was sealed; one without a seal passes, if it may.

    Raises:
        MessageError: the file is empty or has changed, or lacks a seal that is required.
    """
    if not data:
        raise MessageError("it is empty")
    found = _seal_of(data)
    if found is None:
        if required:
            raise MessageError("it lacks its digest")
        return
    start, end = found.span(1)
    content = hashlib.sha256(data[:start])
    content.update(_BLANK.encode())
    content.update(memoryview(data)[end:])
    if content.hexdigest() != found[1].decode():
        raise MessageError("its content does not match its digest")


def _seal_of(data: bytes) -> re.Match[bytes] | None:
    """The place of the seal in the header of a safetensors file."""
    end = 8 + int.from_bytes(data[:8], "little")
    return _SEALED.search(data, 8, min(end, len(data)))


def sealed_table(content: Mapping[str, Any]) -> bytes:
    """A table in JSON with a seal."""
    seal = digest(json_text(content).encode())
    return (json_text({**content, SEAL: seal}, indent=2) + "\n").encode()


def unsealed_table(data: bytes) -> dict[str, Any]:
    """What a table holds besides its seal.

    Raises:
        ValueError: it is no table in JSON, or not what it was when it was sealed.
    """
    content = parse_json(data)
    seal = content.pop(SEAL, None) if isinstance(content, dict) else None
    if seal is None or seal != digest(json_text(content).encode()):
        raise ValueError("its content does not match what was written")
    return dict(content)
