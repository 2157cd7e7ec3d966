"""Calibration of a fused network by a posterior of its weights, compared with a temperature."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fedbayes.errors import ModelError
from fedbayes.fusion.draws import CHUNK, Draws
from fedbayes.fusion.kronecker import AllLayers, Linearized, all_layers, check_layers, fitted_layers
from fedbayes.fusion.laplace import LARGEST, LastLayer, calibrated, find_last, fitted, last_layer
from fedbayes.fusion.settings import PosteriorOf
from fedbayes.fusion.teacher import Teacher
from fedbayes.fusion.temperature import TemperatureScaled, temperature
from fedbayes.likelihoods.categorical import Categorical

FITTED = 4
"""Batches of held-out draws that precision and temperatures are found on."""
FIRST = 4
"""Held-out batches before them, which networks are compared on."""
MOST_CLASSES = 200
"""Classes of a posterior: predictions need covariances of all pairs."""
MEMORY = 512 * 2**20
"""Bytes that fitting a whole covariance may hold; larger ones are taken with factors."""
NOTHING = 1e-4
"""Nats that make no difference."""
NAMES: dict[PosteriorOf, str] = {
    "last-layer": "a posterior of the last layer",
    "kronecker": "a posterior of all layers",
}
"""What to call them."""


@dataclass(frozen=True)
class FusedCalibration:
    """A fused network with a posterior of its weights, and with a temperature alone."""

    module: nn.Module
    """The network with calibrated logits, in evaluation mode."""
    gaussian: LastLayer | AllLayers
    """The posterior."""
    samples: int
    """Of the clients, all together."""
    cooled: TemperatureScaled
    """The network with a temperature alone, found on the same draws."""
    divergence: float
    """KL(teacher ‖ network) in nats, of the network with the posterior, on draws of neither."""
    divergence_cooled: float
    """Likewise, with a temperature alone."""

    @property
    def idle(self) -> bool:
        """Whether the posterior brings the network no nearer to the teacher than a temperature."""
        return self.divergence > self.divergence_cooled - NOTHING


def calibrate(
    module: nn.Module,
    teacher: Teacher,
    draws: Draws,
    batches: int,
    samples: int,
    measure: Callable[[nn.Module], float],
    of: PosteriorOf = "last-layer",
) -> FusedCalibration:
    """Fit a Laplace approximation that is as confident as the teacher.

    It is that of `fusion.laplace` or `fusion.kronecker`.

    Args:
        module: the fused network, with a logit for each class.
        teacher: the ensemble prediction of the clients.
        draws: inputs; those of numbers from 0 are taken as seen in training, and prior precision
            and temperature are found on held-out ones.
        batches: how many of the former.
        samples: that the clients trained on.
        measure: the divergence of a network from the teacher, on other draws.
        of: which weights it is of.

    Raises:
        ModelError: the network has no such posterior.
    """
    example = draws.batch(0, CHUNK)
    with torch.no_grad():
        kind = teacher.likelihood(teacher(example[:2]).shape[-1])
    assert isinstance(kind, Categorical)
    held_out = [draws.batch(-1 - FIRST - number, CHUNK) for number in range(FITTED)]

    def draw(number: int) -> Tensor:
        return draws.batch(number, CHUNK)

    found: LastLayer | AllLayers
    if of == "last-layer":
        last = last_layer(module, kind, draw, batches, samples, kind=_kind(module, example))
        found, _ = fitted(last, module, teacher, held_out.__getitem__, FITTED)
        whole = calibrated(module, found).eval()
    else:
        layers = all_layers(module, kind, draw, batches, samples)
        found, _ = fitted_layers(layers, module, teacher, held_out.__getitem__, FITTED)
        whole = Linearized(module, found, example).eval()
    with torch.no_grad():
        own, said = (torch.cat([f(x) for x in held_out]) for f in (module.eval(), teacher))
    cooled = TemperatureScaled(module, temperature(own, said, kind)).eval()
    return FusedCalibration(whole, found, samples, cooled, measure(whole), measure(cooled))


def _kind(module: nn.Module, x: Tensor) -> Literal["full", "kron"]:
    """Whole where that is small, and small to fit."""
    _, linear = find_last(module, x)
    width, columns = linear.weight.shape
    weights = width * (columns + (linear.bias is not None))
    held = 8 * width * weights * FITTED * CHUNK
    return "full" if weights <= LARGEST and held <= MEMORY else "kron"


def check_calibration(
    like: nn.Module,
    teacher: Teacher,
    samples: Sequence[float] | None,
    x: Tensor,
    of: PosteriorOf = "last-layer",
) -> None:
    """See early that a network can have a posterior `of` these weights, or raise a ModelError."""
    with torch.no_grad():
        kind = teacher.likelihood(teacher(x).shape[-1])
    if not isinstance(kind, Categorical):
        raise ModelError(
            f"{NAMES[of]} needs a logit per class (categorical), but these outputs have the "
            f"likelihood {kind.name}. Leave it out"
        )
    if kind.outputs > MOST_CLASSES:
        raise ModelError(
            f"{NAMES[of]} works with up to {MOST_CLASSES} classes, and there are {kind.outputs}. "
            "Leave it out"
        )
    if samples is None:
        raise ModelError(
            "a posterior depends on the clients' numbers of training samples. Give them with "
            "--counts, as [[40, 2], [3, 60]], or leave it out"
        )
    if any(isinstance(layer, GraphModule) for layer in like.modules()):
        raise ModelError(
            f"{NAMES[of]} needs a network with known layers, but programs are graphs of "
            "operations. Give the network of the fused model with --model or --like"
        )
    if of == "last-layer":
        find_last(like, x)
    else:
        check_layers(like, kind, x)
