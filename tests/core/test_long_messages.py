"""Messages and tensors beyond 2**31 bytes: in memory that nobody touches, so it takes none."""

import math
import mmap

import pytest
import torch

from fedbayes.core import messages
from fedbayes.core.coding import places_bytes, read_places, write_places
from fedbayes.core.messages import LONGEST_AXIS, Masked, encode, payload, pieces
from fedbayes.core.tensor_files import parts
from fedbayes.errors import MessageError
from fedbayes.federation.stages.checks import longest_report

LONG = 2**31 + 2**20
"""Entries of a tensor; its float32 bytes are beyond 2**33."""


def untouched(*shape, dtype=torch.float32):
    return torch.empty(1, dtype=dtype).expand(*shape)


@pytest.fixture
def huge():
    """A tensor of its own memory of over two gigabytes, none of which is ever touched."""
    with mmap.mmap(-1, LONG) as memory:
        yield torch.frombuffer(memory, dtype=torch.uint8)


@pytest.mark.parametrize("plain", [False, True])
def test_a_message_beyond_two_gigabytes_says_its_true_lengths(huge, plain):
    message = {"a": torch.ones(3), "w": huge, "z": torch.ones(2, dtype=torch.uint8)}
    start, *rest = pieces(message, plain=plain)
    lengths = [memoryview(piece).nbytes for piece in rest]
    assert sorted(lengths) == [2, 12, LONG]
    with mmap.mmap(-1, len(start) + sum(lengths)) as data:
        data[: len(start)] = bytes(start)
        header, body = messages._split(data, 10_000)
        found = parts(header, body, 100)
        ends = {name: (part.data.nbytes, part.shape) for name, part in found.items()}
        assert ends == {"a": (12, (3,)), "w": (LONG, (LONG,)), "z": (2, (2,))}
        # Bytes behind the long tensor are found where they were written.
        data[-2:] = b"\1\2"
        last = found["z"].data.tobytes()
        found.clear()
        body.release()
    assert last == b"\1\2"
    assert payload(message) == LONG + 14


def test_a_body_that_is_cut_after_two_gigabytes_is_rejected(huge):
    start, _ = pieces({"w": huge})
    with mmap.mmap(-1, len(start) + LONG - 2**31) as data:  # what 32 bits would make of it
        data[: len(start)] = bytes(start)
        header, body = messages._split(data, 10_000)
        with pytest.raises(MessageError, match="longer than its bytes"):
            parts(header, body, 100)
        body.release()


def test_the_limit_of_a_report_has_no_overflow():
    shape = (70_000, 70_000)
    expected = {"w": untouched(*shape)}
    values = 4 * math.prod(shape)
    assert values < longest_report(expected) < 1.05 * values


def test_an_axis_of_a_sparse_tensor_that_int32_cannot_say_is_an_error():
    none = torch.empty(0)
    encode({"w": Masked(none, (LONGEST_AXIS, 2), {(1,): torch.zeros(2, dtype=torch.bool)})})
    too_long = Masked(none, (2, LONGEST_AXIS + 1), {(0,): torch.zeros(2, dtype=torch.bool)})
    with pytest.raises(MessageError, match=r"'w' has an axis of 2,147,483,648 entries; .*dense"):
        encode({"w": too_long})


def test_places_among_billions_of_entries_come_back():
    entries = 2**34
    places = torch.tensor([0, 7, 2**31 - 1, 2**31, 2**32 + 5, entries - 1])
    data = write_places(places, entries)
    assert len(data) == places_bytes(len(places), entries)
    assert torch.equal(read_places(data, len(places), entries), places)
