import json
import struct
import tracemalloc
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbayes.errors import MessageError
from fedbayes.messages import Masked, decode, encode

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool]
names = st.text(
    st.characters(blacklist_characters="#", blacklist_categories=["Cs"]), min_size=1
).filter(lambda name: name != "__metadata__")
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@st.composite
def masked(draw):
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple))
    axes = list(range(len(shape)))
    masks = {}
    while axes:
        take = draw(st.integers(0, len(axes)))
        group, axes = tuple(axes[:take]), axes[max(take, 1) :]
        if group:
            sizes = [shape[a] for a in group]
            bits = draw(st.lists(st.booleans(), min_size=prod(sizes), max_size=prod(sizes)))
            masks[group] = torch.tensor(bits).reshape(sizes)
    return Masked.keep(torch.randn(shape), masks)


@given(st.dictionaries(names, st.tuples(shapes, st.sampled_from(DTYPES)), max_size=5))
def test_dense_round_trip(pattern):
    message = {name: torch.ones(shape).to(dtype) for name, (shape, dtype) in pattern.items()}
    back = decode(encode(message))
    assert back.keys() == message.keys()
    for name, tensor in message.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)


@given(masked())
def test_sparse_round_trip(item):
    back = decode(encode({"w": item, "other": torch.ones(2)}))
    assert torch.equal(back["w"].dense(), item.dense())
    assert torch.equal(back["w"].mask(), item.mask())


@given(masked())
def test_mask_removes_what_a_plain_loop_removes(item):
    kept = item.dense()
    for index in np.ndindex(*item.shape):
        keep = all(bool(mask[tuple(index[a] for a in axes)]) for axes, mask in item.masks.items())
        assert bool(item.mask()[index]) == keep
        assert keep or kept[index] == 0


def test_an_empty_message_costs_nothing():
    assert encode({}) == b""
    assert decode(b"") == {}


def test_a_filter_mask_costs_a_bit_a_filter():
    weight = torch.randn(50, 20, 5, 5)
    mask = torch.zeros(50, dtype=torch.bool)
    mask[::3] = True
    sparse = encode({"w": Masked.keep(weight, {(0,): mask})})
    values = int(mask.sum()) * 20 * 25 * 4
    assert len(sparse) - values <= 50 / 8 + 256  # names, shapes and offsets take the rest
    assert len(encode({"w": weight})) >= 50 * 20 * 25 * 4


def test_shared_memory_is_encoded_twice():
    weight = torch.arange(6.0)
    back = decode(encode({"a": weight, "b": weight, "c": weight[2:4]}))
    assert torch.equal(back["c"], weight[2:4])
    assert torch.equal(back["a"], back["b"])


def test_encoding_is_the_same_in_any_order():
    a, b = torch.ones(2), torch.zeros(3)
    assert encode({"a": a, "b": b}) == encode({"b": b, "a": a})


def test_decoding_gives_one_order_and_aligned_memory():
    """Rounding follows from the order of sums and, in matrix products, from the alignment."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        names = [f"layer{n}.weight" for n in rng.permutation(8)]
        sizes = rng.integers(1, 50, 8)
        message = {n: torch.ones(int(s)) for n, s in zip(names, sizes, strict=True)}
        message["mask"] = Masked.keep(torch.ones(4), {(0,): torch.ones(4, dtype=torch.bool)})
        back = decode(encode(message))
        assert list(back)[:8] == sorted(names)
        assert all(t.data_ptr() % 64 == 0 for t in back.values() if isinstance(t, torch.Tensor))


def test_reserved_names_are_refused():
    for name in ("a#b", "__metadata__"):
        with pytest.raises(MessageError, match="reserved"):
            encode({name: torch.ones(1)})


@given(st.binary(max_size=300))
@settings(max_examples=300)
def test_hostile_bytes_give_one_error(data):
    try:
        decode(data)
    except MessageError:
        return


@given(masked(), st.data())
@settings(max_examples=300)
def test_damaged_messages_give_one_error(item, data):
    whole = bytearray(encode({"w": item, "v": torch.ones(3)}))
    for _ in range(data.draw(st.integers(1, 8))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole)))
    for bad in (bytes(whole), bytes(whole[:cut])):
        try:
            dense_size = decode(bad)
        except MessageError:
            continue
        assert isinstance(dense_size, dict)


def _hand_made(entries, body):
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + body


def test_a_huge_claim_allocates_nothing():
    shape = np.array([2**30, 2**30], dtype=np.int32).tobytes()
    entries = {
        "w": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]},
        "w#shape": {"dtype": "I32", "shape": [2], "data_offsets": [0, 8]},
    }
    tracemalloc.start()
    with pytest.raises(MessageError):
        decode(_hand_made(entries, shape))
    entries["w"] = {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}
    with pytest.raises(MessageError):
        decode(_hand_made(entries, shape))
    with pytest.raises(MessageError):
        decode(struct.pack("<Q", 2**62) + b"{}")
    assert tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()


@pytest.mark.parametrize(
    "masks",
    [{(0,): 4, (0, 1): 12}, {(2,): 1}, {(1, 0): 12}, {(0,): 99}],
    ids=["overlap", "no such axis", "not ascending", "too long"],
)
def test_masks_that_do_not_fit(masks):
    flat = {"w": torch.zeros(0), "w#shape": torch.tensor([4, 3], dtype=torch.int32)}
    for axes, count in masks.items():
        key = "w#mask:" + ",".join(map(str, axes))
        flat[key] = torch.zeros(-(-count // 8), dtype=torch.uint8)
    from safetensors.torch import save

    with pytest.raises(MessageError):
        decode(save(flat))
