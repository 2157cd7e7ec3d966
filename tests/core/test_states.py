"""States as named tensors: types, order, what older versions lack; and where tensors lie."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from fedbayes.core.metrics import calibrate
from fedbayes.core.tensors import Samples, Tensors, pack, to, unpack
from fedbayes.errors import MessageError
from fedbayes.models.variational import Perturbation, WeightDraws, through


@dataclass(frozen=True)
class State:
    weights: Tensors
    text: str
    scale: torch.Tensor
    step: int
    rate: float
    open: bool
    added: int = 4
    noted: str = "none"


FULL = State({"b": torch.ones(1), "a": torch.zeros(2)}, "é", torch.ones(3), 2**40, 0.1, True, 5)


def test_packed_states_have_exact_types_and_names_in_order():
    flat = pack(FULL)
    assert list(flat)[:2] == ["weights/a", "weights/b"]
    assert flat["step"].dtype == torch.int64
    assert flat["rate"].dtype == torch.float64
    assert flat["open"].dtype == torch.bool
    assert flat["text"].tolist() == list("é".encode())
    assert flat["scale"] is FULL.scale
    back = unpack(State, flat)
    assert (back.text, back.step, back.rate, back.open) == ("é", 2**40, 0.1, True)
    assert [type(v) for v in (back.step, back.rate, back.open)] == [int, float, bool]
    assert isinstance(back.scale, torch.Tensor)
    assert back.added == 5


def test_what_an_older_version_did_not_store_has_its_default():
    flat = {n: t for n, t in pack(FULL).items() if n not in ("added", "noted")}
    back = unpack(State, flat)
    assert (back.added, back.noted) == (4, "none")
    without = {n: t for n, t in flat.items() if not n.startswith("weights/")}
    assert unpack(State, without).weights == {}
    for name in ("text", "scale", "step"):
        with pytest.raises(MessageError, match=f"State lacks its field '{name}'"):
            unpack(State, {n: t for n, t in flat.items() if n != name})
    with pytest.raises(MessageError, match="lacks its field 'step'"):
        unpack(State, {**flat, "step/x": torch.ones(1)})
    with pytest.raises(MessageError, match=r"State has unknown fields \['other', 'p'\]"):
        unpack(State, {**flat, "p": torch.ones(1), "other/x": torch.ones(1)})


def test_only_dataclasses_of_tensors_and_plain_things_are_states():
    with pytest.raises(TypeError, match="not dict"):
        pack({"a": torch.ones(1)})

    @dataclass
    class Odd:
        thing: object

    for thing in (None, [1], 1j, np.float64(0.5)):
        with pytest.raises(TypeError, match=r"Odd\.thing is a"):
            pack(Odd(thing))


def test_tensors_move_as_a_whole():
    moved = to({"a": torch.ones(2)}, "meta")
    assert moved["a"].device.type == "meta"
    samples = Samples(torch.ones(2, 3), torch.zeros(2)).to("meta")
    assert samples.x.device.type == samples.y.device.type == "meta"
    noise = Perturbation(2, "flipout", WeightDraws(torch.Generator().manual_seed(0)))
    assert noise.signs(4, 3, torch.ones(1, dtype=torch.float64)).dtype == torch.float64
    assert noise.signs(4, 3, torch.ones(1, device="meta")).device.type == "meta"
    assert noise.normal(4, like=torch.ones(1, device="meta")).device.type == "meta"


@pytest.mark.parametrize("bins", [None, 4])
def test_bins_of_confidence_by_hand(bins):
    """Edges belong to the bin below them, but for 0; an empty bin is 0."""
    rng = np.random.default_rng(0)
    confidence = np.append(rng.uniform(0.2, 1, 40), [0.25, 0.5, 1.0, 1.0]).round(3)
    right = rng.random(44) < confidence
    found = calibrate(
        torch.tensor(confidence), torch.tensor(right), **({} if bins is None else {"bins": bins})
    )
    bins = bins or 15
    gaps = 0.0
    for place in range(bins):
        inside = [
            i for i, c in enumerate(confidence) if max(int(np.ceil(c * bins)) - 1, 0) == place
        ]
        assert found.count[place] == len(inside)
        mean, share = (confidence[inside].mean(), right[inside].mean()) if inside else (0.0, 0.0)
        assert float(found.confidence[place]) == pytest.approx(mean)
        assert float(found.accuracy[place]) == pytest.approx(share)
        gaps += len(inside) * abs(mean - share) / 44
    assert len(found.count) == bins
    assert found.error == pytest.approx(gaps)


def test_dropout_between_variational_layers_is_of_its_own_rate_and_in_training_alone():
    torch.manual_seed(0)
    x = torch.ones(20_000)
    dropped = through([nn.Dropout(0.2)], x, True)
    assert (dropped == 0).float().mean() == pytest.approx(0.2, abs=0.02)
    assert set(dropped.unique().tolist()) == {0.0, 1.25}
    assert through([nn.Dropout(0.2)], x, False) is x
