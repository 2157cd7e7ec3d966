from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedbayes.errors import MessageError
from fedbayes.messages import decode, dense, encode
from fedbayes.tensors import Tensors, pack, parameter_count, sparsity, unpack


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


def test_sparsity_counts_zeros():
    tensors = {"a": torch.tensor([0.0, 1.0]), "b": torch.tensor([[0.0, 0.0]])}
    assert sparsity(tensors) == 0.75
    assert parameter_count(tensors) == 4
    assert sparsity({}) == 0.0
