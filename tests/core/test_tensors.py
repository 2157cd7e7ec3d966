from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedbayes.core.messages import decode, dense, encode
from fedbayes.core.tensors import (
    Tensors,
    add_to,
    all_finite,
    named,
    pack,
    parameter_count,
    part,
    sparsity,
    unpack,
)
from fedbayes.errors import MessageError


@dataclass(frozen=True)
class State:
    weights: Tensors
    memory: Tensors
    scale: torch.Tensor
    step: int
    rate: float
    open: bool


def test_pack_and_unpack_are_inverse():
    state = State(
        {"a.b": torch.ones(2), "c/d": torch.zeros(1)}, {}, torch.tensor(3.0), 7, 0.1, True
    )
    back = unpack(State, dense(decode(encode(dict(pack(state))))))
    assert back.step == 7
    assert back.rate == 0.1
    assert back.open is True
    assert back.memory == {}
    assert back.weights.keys() == state.weights.keys()
    assert torch.equal(back.weights["c/d"], state.weights["c/d"])
    assert torch.equal(back.scale, state.scale)


def test_unpack_names_what_is_wrong():
    with pytest.raises(MessageError, match="scale"):
        unpack(State, {"step": torch.tensor(1)})
    flat = pack(State({}, {}, torch.ones(1), 1, 1.0, False))
    with pytest.raises(MessageError, match="other"):
        unpack(State, {**flat, "other": torch.ones(1)})


def test_only_tensors_are_state():
    @dataclass
    class Bad:
        words: list[str]

    with pytest.raises(TypeError, match="words"):
        pack(Bad(["x"]))


@dataclass
class Told:
    text: str


@given(st.text(st.characters(blacklist_categories=["Cs"])))
def test_text_survives(text):
    stored = dense(decode(encode(dict(pack(Told(text))))))
    assert unpack(Told, stored) == Told(text)


@dataclass(frozen=True)
class Inner:
    tensors: Tensors
    one: torch.Tensor


@dataclass(frozen=True)
class Middle:
    inner: Inner
    tensors: Tensors
    note: str


@dataclass(frozen=True)
class Outer:
    first: Middle
    second: Middle
    tensors: Tensors
    count: int


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="#"), min_size=1, max_size=8)
"""Any but with the sign that messages reserve."""
NUMBERS = st.lists(st.floats(width=32, allow_nan=False), max_size=4)
TENSOR = st.builds(torch.tensor, NUMBERS, dtype=st.just(torch.float32))
TENSORS = st.dictionaries(NAMES, TENSOR, max_size=3)
MIDDLE = st.builds(Middle, st.builds(Inner, TENSORS, TENSOR), TENSORS, st.text("aé/ ", max_size=3))


def alike(left, right):
    """The same kind of thing with the same values all the way down."""
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(alike(left[n], right[n]) for n in left)
    if hasattr(left, "__dataclass_fields__"):
        return type(left) is type(right) and alike(vars(left), vars(right))
    return left == right


@given(st.builds(Outer, MIDDLE, MIDDLE, TENSORS, st.integers(-(2**63), 2**63 - 1)))
def test_nested_states_survive_storage_whatever_tensors_are_called(state):
    """Names with slashes and names of fields among them."""
    stored = dense(decode(encode(dict(pack(state)))))
    assert alike(unpack(Outer, stored), state)


def test_nested_names_are_paths():
    inner = Inner({"a/b": torch.ones(1)}, torch.zeros(2))
    state = Middle(inner, {"inner/one": torch.ones(3)}, "x")
    assert list(pack(state)) == ["inner/tensors/a/b", "inner/one", "tensors/inner/one", "note"]


def test_what_is_wrong_with_a_nested_state_is_named():
    flat = pack(Middle(Inner({}, torch.ones(1)), {}, "x"))
    with pytest.raises(MessageError, match="a stored Inner lacks its field 'one'"):
        unpack(Middle, {n: t for n, t in flat.items() if n != "inner/one"})
    with pytest.raises(MessageError, match=r"a stored Inner has unknown fields \['two'\]"):
        unpack(Middle, {**flat, "inner/two": torch.ones(1)})

    with pytest.raises(TypeError, match=r"Inner\.one is a list"):
        pack(Middle(Inner({}, [7]), {}, "x"))


@given(NAMES, st.dictionaries(NAMES, st.integers()), st.dictionaries(NAMES, st.integers()))
def test_part_is_the_inverse_of_named(prefix, tensors, others):
    assert part(named(prefix, tensors), prefix) == tensors
    # Beside others, whose names begin otherwise.
    beside = {n: t for n, t in others.items() if not n.startswith(f"{prefix}/")}
    assert part(beside | named(prefix, tensors), prefix) == tensors


def test_sparsity_counts_zeros():
    tensors = {"a": torch.tensor([0.0, 1.0]), "b": torch.tensor([[0.0, 0.0]])}
    assert sparsity(tensors) == 0.75
    assert parameter_count(tensors) == 4
    assert sparsity({}) == 0.0


@pytest.mark.parametrize("count", [0, 1, 65_535, 65_536, 200_003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool])
def test_what_is_added_in_pieces_has_the_bits_of_one_addition(
    count: int, dtype: torch.dtype
) -> None:
    rng = torch.Generator().manual_seed(count)
    total = torch.randn(count, generator=rng, dtype=torch.float64)
    values = torch.randn(count, generator=rng).to(dtype)
    expected = torch.add(total, values, alpha=37.3)
    add_to(total, values, 37.3)
    assert torch.equal(total, expected)


def test_a_total_that_is_not_contiguous_is_added_to_in_place() -> None:
    whole = torch.zeros(3, 4, dtype=torch.float64)
    add_to(whole.mT, torch.arange(12.0).reshape(4, 3), 2.0)
    assert torch.equal(whole, 2 * torch.arange(12.0).reshape(4, 3).mT.double())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_values_whose_sum_overflows_are_finite_and_hidden_infinities_are_not(
    dtype: torch.dtype,
) -> None:
    values = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    assert all(all_finite(held) for held in (values, -values, values[:0]))
    for bad in (torch.nan, torch.inf, -torch.inf):
        for place in (0, 500, 999):
            spoilt = values.clone()
            spoilt[place] = bad
            assert not all_finite(spoilt)
    values[3], values[700] = torch.inf, -torch.inf
    assert not all_finite(values)
