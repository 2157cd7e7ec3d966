"""What messages are made of, by hand: text in headers, shapes and masks that are none."""

import json
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from fedbayes.core.messages import Masked, decode, encode, metadata
from fedbayes.errors import MessageError

TEXT = {"method": "fedavg", "note": "ä"}


def test_text_is_read_from_the_header_of_a_plain_file_alone():
    weights = {"w": torch.arange(6.0)}
    plain = encode(weights, plain=True, metadata=TEXT)
    assert metadata(plain) == TEXT
    assert metadata(plain[:60]) == {}
    assert torch.equal(decode(plain)["w"], weights["w"])
    assert metadata(encode(weights, plain=True)) == {}
    assert metadata(encode(weights, metadata=TEXT)) == {}
    assert metadata(b"") == {}


@pytest.mark.parametrize("header", ["[1]", "3", '{"a": 1}', '{"__metadata__": [2]}', "{", "null"])
def test_headers_without_text_give_none(header):
    assert metadata(struct.pack("<Q", len(header)) + header.encode()) == {}


@given(st.dictionaries(st.text(max_size=5), st.text(max_size=5)), st.binary(max_size=40))
@settings(max_examples=50, deadline=None)
def test_text_is_that_of_the_header_whatever_follows(text, rest):
    header = json.dumps({"__metadata__": text}).encode()
    assert metadata(struct.pack("<Q", len(header)) + header + rest) == text
    assert metadata(rest) == {}


def test_a_header_that_is_too_long_is_not_read(monkeypatch):
    monkeypatch.setattr("fedbayes.core.messages.LONGEST_HEADER", 20)
    for text, wanted in (({"a": ""}, {}), ({}, {})):
        header = json.dumps({"__metadata__": text}).encode()
        assert (len(header) > 20) == bool(text)
        assert metadata(struct.pack("<Q", len(header)) + header) == wanted
    header = b'{"__metadata__":{"a":""}}'
    monkeypatch.setattr("fedbayes.core.messages.LONGEST_HEADER", len(header))
    assert metadata(struct.pack("<Q", len(header)) + header) == {"a": ""}


GOOD = {
    "w": torch.ones(6),
    "w#shape": torch.tensor([4, 3], dtype=torch.int32),
    "w#mask:0": torch.tensor([0b10100000], dtype=torch.uint8),
}


def test_a_sparse_tensor_by_hand():
    found = decode(save(GOOD))["w"]
    assert found.dense().tolist() == [[1.0] * 3, [0.0] * 3, [1.0] * 3, [0.0] * 3]


@pytest.mark.parametrize(
    "parts",
    [
        {"w": torch.ones(6, 1)},
        {"w": torch.ones(5)},
        {"w#shape": torch.tensor([[4, 3]], dtype=torch.int32)},
        {"w#shape": torch.tensor([4, 3])},
        {"w#shape": torch.tensor([4, -3], dtype=torch.int32)},
        {"w#shape": torch.tensor(4, dtype=torch.int32)},
        {"w#mask:0": torch.tensor([0b10100000], dtype=torch.int16)},
        {"w#mask:0": torch.tensor([[0b10100000]], dtype=torch.uint8)},
        {"w#mask:0": torch.tensor([0b10100000, 0], dtype=torch.uint8)},
        {"w#other": torch.ones(1)},
    ],
)
def test_parts_that_are_no_parts_are_refused(parts):
    with pytest.raises(MessageError, match="not a message"):
        decode(save({**GOOD, **parts}))


def test_tensors_without_entries_can_be_sparse():
    for shape in ((0, 3), (3, 0)):
        item = Masked.keep(torch.ones(shape), {(0,): torch.ones(shape[0], dtype=torch.bool)})
        back = decode(encode({"w": item}))["w"]
        assert back.dense().shape == shape


def test_a_sparse_tensor_moves_as_a_whole():
    mask = torch.tensor([[True, False], [True, True]])
    item = Masked.keep(torch.ones(2, 2), {(0, 1): mask}).to("meta")
    assert item.values.device.type == "meta"
    assert item.mask().device.type == "meta"
    assert item.masks[(0, 1)].device.type == "meta"
