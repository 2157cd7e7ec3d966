"""Uncertainty of a fused network: a Laplace approximation of its last layer on synthetic inputs.

The server has no data, but inputs x of a prior, and the number N of samples that the clients
trained on. The last layer W [K, d], its bias as a column, reads the features h(x) and gets the
Gaussian around its weights of precision

    p + N E_x[Λ(x) ⊗ h hᵀ],    Λ(x) = E_{y ~ p(y | f)}[∇ log p(y | f) ∇ log p(y | f)ᵀ],

whole (`full`), or with E[Λ] ⊗ E[h hᵀ] instead of the mean of products (`kron`; Ritter et al.
2018). Its outputs are Gaussian then. Probabilities of classes follow pair by pair from MacKay's
probit approximation (1992): every difference of two logits is divided by √(1 + π/8 · its variance),

    p_k ∝ 1 / Σ_j exp(−(f_k − f_j) / √(1 + π/8 · var(f_k − f_j))),

which of two classes is his own (Lu, Ie and Sha 2020 have this form for more). This layer replaces
the last one, so a calibrated network is a network, and can be exported. The prior
precision p and a temperature are those whose predictions diverge the least from a teacher's on
held-out draws.
"""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import exp, log, pi
from typing import Literal, NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

from fedbayes.core.brief import Brief
from fedbayes.errors import ModelError
from fedbayes.fusion.curvature import scores
from fedbayes.fusion.frozen import Function
from fedbayes.likelihoods import Likelihood
from fedbayes.models.hooks import watched

LARGEST = 2000
"""Weights of a last layer up to which its precision is whole by default."""
PRECISIONS = tuple(float(p) for p in np.logspace(-4, 8, 37))
"""Prior precisions that are tried."""
PIECE = 2**22
"""Entries of covariances of outputs that are held at once."""
_TEMPERATURES = (0.05, 20.0)
"""Bounds of the temperature."""

Draw = Callable[[int], Tensor]
"""The batch of inputs [n, ...] with a number; the same number, the same batch."""


@dataclass(frozen=True, repr=False)
class LastLayer(Brief):
    """A Gaussian around the last layer of a network, of precision Q (λ + p) Qᵀ.

    With factors Q = V ⊗ U, where V are eigenvectors of E[Λ] and U of E[h hᵀ]. As named tensors
    (`fedbayes.core.tensors.pack`) it can be stored together with the weights.
    """

    layer: str
    """Name of the layer in the network."""
    width: int
    """K, its outputs."""
    biased: bool
    values: Tensor
    """λ, float64: [K · d], or [K, d] with factors."""
    left: Tensor
    """V [K, K], in columns; of no entries where the precision is whole."""
    right: Tensor
    """U [d, d], in columns; Q [K · d, K · d] where the precision is whole."""
    precision: float = 1.0
    """p, of the prior."""
    temperature: float = 1.0
    """What logits are divided by."""

    def along(self, h: Tensor) -> Tensor:
        """What covariances need of features [n, d], for any prior: [n, K, K · d], or [n, d]."""
        if self.left.numel():
            return (h @ self.right.to(h)).square()
        basis = self.right.to(h).reshape(self.width, -1, len(self.right))
        return torch.einsum("nd,kdp->nkp", h, basis)

    def covariance(self, along: Tensor) -> Tensor:
        """Of the outputs, [n, K, K]."""
        inverse = (1 / (self.values + self.precision)).to(along)
        if self.left.numel():
            left = self.left.to(along)
            return (left * (along @ inverse.T)[:, None]) @ left.T
        return (along * inverse) @ along.transpose(1, 2)

    def layer_of(self, linear: nn.Linear) -> "CalibratedLinear":
        """Return the layer that gives calibrated logits instead of this one."""
        inverse = 1 / (self.values + self.precision)
        if self.left.numel():
            return CalibratedLinear(
                linear, self.temperature, turned=self.right, spread=inverse.T, back=self.left
            )
        columns = len(self.right) // self.width
        blocks = ((self.right * inverse) @ self.right.T).reshape(
            self.width, columns, self.width, columns
        )
        return CalibratedLinear(linear, self.temperature, blocks=blocks)


class CalibratedLinear(nn.Module):
    """A last layer with calibrated logits: their softmax is the predictive probability.

    Args:
        linear: the layer.
        temperature: what logits are divided by.
        blocks: covariance of the weights [K, d, K, d]; or
        turned: eigenvectors of the features' moments [d, d] in columns,
        spread: variance along each of them and each eigenvector of the outputs [d, K], and
        back: these eigenvectors [K, K] in columns.
    """

    temperature: Tensor
    blocks: Tensor | None
    turned: Tensor | None
    spread: Tensor | None
    back: Tensor | None

    def __init__(
        self,
        linear: nn.Linear,
        temperature: float,
        *,
        blocks: Tensor | None = None,
        turned: Tensor | None = None,
        spread: Tensor | None = None,
        back: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.linear = linear
        self.register_buffer("temperature", torch.tensor(temperature).to(linear.weight))
        parts = {"blocks": blocks, "turned": turned, "spread": spread, "back": back}
        for name, value in parts.items():
            self.register_buffer(name, None if value is None else value.to(linear.weight))

    def covariance(self, h: Tensor) -> Tensor:
        """Of the outputs given features [n, d without bias], [n, K, K]."""
        if self.linear.bias is not None:
            h = torch.cat([h, torch.ones_like(h[:, :1])], dim=1)
        if self.blocks is not None:
            return torch.einsum("nd,kdle,ne->nkl", h, self.blocks, h)
        assert self.turned is not None
        assert self.spread is not None
        assert self.back is not None
        along = (h @ self.turned).square() @ self.spread
        return (self.back * along[:, None]) @ self.back.T

    def forward(self, h: Tensor) -> Tensor:
        """Features [n, d without bias] to logits [n, K]."""
        return expected(self.linear(h), self.covariance(h)) / self.temperature


def expected(f: Tensor, covariance: Tensor) -> Tensor:
    """Logits of the mean probabilities of classes, about, of Gaussian logits.

    Args:
        f: their means [n, K].
        covariance: [n, K, K].
    """
    own = covariance.diagonal(dim1=1, dim2=2)
    variance = (own[:, :, None] + own[:, None] - 2 * covariance).clamp_min(0)
    apart = (f[:, :, None] - f[:, None]) / (1 + pi / 8 * variance).sqrt()
    return -torch.logsumexp(-apart, dim=2)


def last_layer(
    module: nn.Module,
    likelihood: Likelihood,
    draw: Draw,
    batches: int,
    samples: int,
    *,
    kind: Literal["full", "kron"] | None = None,
) -> LastLayer:
    """The Laplace approximation of a network's last layer on synthetic inputs.

    Args:
        module: the network; its outputs are those of its last linear layer.
        likelihood: what they mean.
        draw: inputs.
        batches: how many to take, from 0.
        samples: N, how many the clients trained on, all together.
        kind: whole, or with factors; by default whole for at most `LARGEST` weights. Memory is
            that of the precision: 8 (K d)² bytes, or 8 (K² + d²).

    Raises:
        ModelError: the network does not end with a linear layer, or there is nothing to go on.
    """
    if batches < 1 or samples < 1:
        raise ModelError(
            f"a Laplace approximation needs synthetic inputs and training samples, got {batches} "
            f"batches and {samples} samples. Pass at least 1 of each"
        )
    name, linear = find_last(module, draw(0))
    width, columns = linear.weight.shape
    biased = linear.bias is not None
    columns += biased
    kind = kind or ("full" if width * columns <= LARGEST else "kron")
    size = width * columns if kind == "full" else columns
    right = torch.zeros(size, size, dtype=torch.float64)
    left = torch.zeros(width, width, dtype=torch.float64)
    count = 0
    rng = torch.Generator().manual_seed(0)
    for number in range(batches):
        h, f = features(module, linear, draw(number))
        h = h.double()
        h = torch.cat([h, h.new_ones(len(h), 1)], dim=1) if biased else h
        count += len(h)
        if kind == "kron":
            right += h.T @ h
        for v in scores(likelihood, f, None, rng):
            v = v.double()
            if kind == "kron":
                left += v.T @ v
            else:
                rows = (v[:, :, None] * h[:, None]).flatten(1)
                right += rows.T @ rows
    if kind == "full":
        values, vectors = torch.linalg.eigh(right * (samples / count))
        return LastLayer(name, width, biased, values.clamp_min(0), left[:0], vectors)
    (b, v), (a, u) = torch.linalg.eigh(left / count), torch.linalg.eigh(right / count)
    values = samples * torch.outer(b.clamp_min(0), a.clamp_min(0))
    return LastLayer(name, width, biased, values, v, u)


def fitted(
    found: LastLayer, module: nn.Module, teacher: Function, draw: Draw, batches: int
) -> tuple[LastLayer, float]:
    """The prior precision and temperature whose predictions are the nearest to a teacher's.

    Args:
        found: the Gaussian.
        module: the network.
        teacher: logits or log-probabilities of classes [n, K].
        draw: held-out inputs.
        batches: how many to take, from 0; where the precision is whole, 8 K² d bytes are held for
            each input.

    Returns:
        The Gaussian with these, and the mean KL divergence from the teacher, in nats.
    """
    linear = module.get_submodule(found.layer)
    assert isinstance(linear, nn.Linear)
    seen, said, wanted = [], [], []
    for number in range(batches):
        x = draw(number)
        with torch.no_grad():
            h, f = features(module, linear, x)
            wanted.append(teacher(x).double().log_softmax(-1))
        h = torch.cat([h, h.new_ones(len(h), 1)], dim=1) if found.biased else h
        seen.append(found.along(h.double()))
        said.append(f.double())
    target, along, outputs = torch.cat(wanted), torch.cat(seen), torch.cat(said)

    rows = max(1, PIECE // found.width**2)

    def logits(precision: float) -> Tensor:
        tried = replace(found, precision=precision)
        pieces = zip(torch.split(outputs, rows), torch.split(along, rows), strict=True)
        return torch.cat([expected(f, tried.covariance(a)) for f, a in pieces])

    best = nearest(target, ((p, logits(p)) for p in PRECISIONS))
    return replace(found, precision=best.precision, temperature=best.temperature), best.divergence


class Nearest(NamedTuple):
    """The predictions that are the nearest to a teacher's."""

    divergence: float
    """Mean KL divergence from the teacher, in nats."""
    precision: float
    """Of the prior."""
    temperature: float
    """What their logits are divided by."""


def nearest(target: Tensor, tried: Iterable[tuple[float, Tensor]]) -> Nearest:
    """Try prior precisions, each with the temperature that is the best for it.

    Args:
        target: log-probabilities of a teacher's [n, K].
        tried: prior precisions, and logits [n, K] with each.
    """

    def divergence(logits: Tensor) -> float:
        return float((target.exp() * (target - logits.log_softmax(-1))).sum(-1).mean())

    found = []
    for precision, logits in tried:
        result = minimize_scalar(
            lambda t, f=logits: divergence(f / exp(t)),
            bounds=tuple(log(t) for t in _TEMPERATURES),
            method="bounded",
        )
        found.append(Nearest(float(result.fun), precision, exp(float(result.x))))
    return min(found, key=lambda one: one.divergence)


def calibrated(module: nn.Module, found: LastLayer) -> nn.Module:
    """A copy of a network whose last layer gives calibrated logits."""
    whole = copy.deepcopy(module).eval()
    path, _, key = found.layer.rpartition(".")
    linear = whole.get_submodule(found.layer)
    assert isinstance(linear, nn.Linear)
    layer = found.layer_of(linear)
    if not found.layer:
        return layer
    setattr(whole.get_submodule(path), key, layer)
    return whole


def find_last(module: nn.Module, x: Tensor) -> tuple[str, nn.Linear]:
    """The linear layer whose outputs are the network's, and its name. A ModelError if none is."""
    made: dict[str, Tensor] = {}
    linear = {name: one for name, one in module.named_modules() if isinstance(one, nn.Linear)}
    with watched(linear, lambda name, _, __, out: made.update({name: out})), torch.no_grad():
        f = module.eval()(x)
    for name, out in reversed(made.items()):
        if out.shape == f.shape and torch.equal(out, f):
            return name, linear[name]
    raise ModelError(
        f"a {type(module).__name__} does not end with a linear layer, which the Laplace "
        "approximation needs"
    )


def features(module: nn.Module, linear: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    """What a last layer reads [n, d], and the outputs of the network [n, K]."""
    seen: list[Tensor] = []
    hook = linear.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with hook, torch.no_grad():
        f = module.eval()(x)
    return seen[-1], f
