"""What methods share that draw weights from mean-field Gaussians: in training, and to predict."""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from fedbayes.contracts.method import Sampler
from fedbayes.contracts.run import Federation
from fedbayes.core.devices import placed
from fedbayes.core.tensors import Samples, Tensors, added
from fedbayes.errors import ModelError
from fedbayes.inference.problem import Noise, Tree
from fedbayes.models import Network


def weight_noise(run: Federation, samples: int) -> Noise:
    """Standard normal noise for each weight, `samples` times in every step.

    Args:
        run: with the network.
        samples: Monte-Carlo samples of a step, the first axis of what is drawn, `weights`
            [samples, entries].
    """
    sizes = [tensor.numel() for tensor in run.network.initial.values()]

    def draw(rng: torch.Generator, batch: Samples) -> Tree:
        drawn = torch.cat([torch.randn(samples, size, generator=rng) for size in sizes], 1)
        return {"weights": placed(drawn, run.network.device)}

    return Noise("weights", draw)


Fit = Callable[[Tensor, Tensor], Tensor]
"""Outputs of a network [n, width] and targets to the mean loss of the samples, a scalar."""


def expected_loss(
    fit: Fit,
    run: Federation,
    drawn: Sequence[Tensors],
    batch: Samples,
    *,
    training: bool,
) -> Tensor:
    """The mean loss of samples, averaged over networks; a scalar.

    Args:
        fit: the loss, such as the negative log-likelihood.
        run: with the network.
        drawn: weights of each network, as `reparametrized` draws them.
        batch: some samples.
        training: whether dropout and the like are as in training.
    """
    outputs = (run.network(weights, batch.x, training=training) for weights in drawn)
    return added([fit(found, batch.y) / len(drawn) for found in outputs])


def draws_of(mean: Tensors, std: Tensors, count: int) -> Iterator[Tensors]:
    """Weights drawn from N(mean, std²), one network after the other, the same on every call."""
    rng = torch.Generator().manual_seed(0)
    for _ in range(count):
        move = _move(std, rng)
        yield {name: m + move[name] for name, m in mean.items()}


def sampler_of(
    mean: Tensors, std: Tensors, network: Network, count: int, *, linearized: bool = False
) -> Sampler:
    """Outputs [count, n, width] under draws from N(mean, std²), the same draws on every call;
    `linearized` as for `around`.
    """
    mean, std = network.prepare(mean), network.prepare(std)
    return around(mean, lambda rng: _move(std, rng), network, count, linearized=linearized)


def sampler_over(networks: Tensors, network: Network) -> Sampler:
    """Outputs [draws, n, width] of networks whose weights are stacked, [draws, ...] by name."""
    count = len(next(iter(networks.values())))
    every = [network.prepare({n: t[k] for n, t in networks.items()}) for k in range(count)]
    return lambda x: torch.stack([network(weights, x) for weights in every])


def around(
    mean: Tensors,
    moves: Callable[[torch.Generator], Tensors],
    network: Network,
    count: int,
    *,
    linearized: bool,
) -> Sampler:
    """Outputs [count, n, width] under draws of weights, the same draws on every call.

    Args:
        mean: of the weights, prepared for the network.
        moves: draws how far weights are from their means.
        network: the network.
        count: draws.
        linearized: whether the network is taken as linear in its weights around their means.
    """
    derived: Network | None = None

    def draw() -> Iterator[Tensors]:
        rng = torch.Generator().manual_seed(0)
        for _ in range(count):
            step = moves(rng)
            yield step if linearized else {name: m + step[name] for name, m in mean.items()}

    def outputs(x: Tensor) -> Tensor:
        nonlocal derived
        entries = count * sum(m.numel() for m in mean.values())
        networks = _kept(draw) if entries <= _KEPT else draw()
        if not linearized:
            return torch.stack([network(weights, x) for weights in networks])
        derived = derived or _derivable(network, mean, x[:1])
        return torch.stack([_linear(derived, mean, step, x) for step in networks])

    return outputs


_KEPT = 1 << 24
"""Entries of draws that are kept for the next call, at most: 64 MiB. A draw takes longer than the
outputs of a small network."""


@lru_cache(maxsize=1)
def _kept(draw: Callable[[], Iterator[Tensors]]) -> list[Tensors]:
    """What was drawn last, of one sampler in a process."""
    return list(draw())


def _move(std: Tensors, rng: torch.Generator) -> Tensors:
    """A draw from N(0, std²)."""
    return {n: s * torch.randn(s.shape, generator=rng).to(s) for n, s in std.items()}


def _derivable(network: Network, mean: Tensors, x: Tensor) -> Network:
    """The network, laid out such that it has forward derivatives."""
    # Some operations have none for images with channels last, such as GroupNorm.
    try:
        _linear(network, mean, mean, x)
    except RuntimeError as error:
        if "view size is not compatible" not in str(error):
            raise
        return network.channels_first
    return network


def _linear(network: Network, mean: Tensors, moves: Tensors, x: Tensor) -> Tensor:
    """The network's outputs at its means plus their derivative along moves of the weights."""
    mean, moves = (network.prepare({name: some[name] for name in mean}) for some in (mean, moves))
    try:
        at_mean, along = torch.func.jvp(lambda w: network(w, x), (mean,), (moves,))[:2]
    except (RuntimeError, NotImplementedError) as error:
        if not isinstance(error, NotImplementedError) and "forward" not in str(error):
            raise
        reason = str(error).splitlines()[0]
        raise ModelError(
            f"the network cannot be linearized ({reason}); set method.predictive = 'sampled'"
        ) from None
    total: Tensor = at_mean + along
    return total
