"""Changes since a common start, trimmed or dropped before they are added: TIES and DARE."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedbayes.core import seeds
from fedbayes.core.tensors import Tensors
from fedbayes.errors import ModelError
from fedbayes.fusion.combining import MergedWeights, Merging, combine
from fedbayes.fusion.settings import TaskVectorSettings


def ties(merging: Merging, settings: TaskVectorSettings) -> MergedWeights:
    """Trim, elect signs and merge (Yadav et al. 2023, Algorithm 1).

    With w_s = w_0 + τ_s, of each τ_s the entries of largest magnitude are kept, a share `density`
    of all. An entry's sign is that of Σ_s α_s τ_s, and the change is the weighted mean over the
    networks whose entry is not 0 and has this sign, times `scale`. The paper has equal α.

    Args:
        merging: the networks, and their shares α of all samples.
        settings: the start, and how much is kept.

    Raises:
        ModelError: there is no start, or it is of another graph.
    """
    start, changes = _changes(merging)
    mean, agree = elected(changes, merging.alpha, settings.density)
    return _moved(merging, start, settings.scale * mean, {"share_of_changes_that_agree": agree})


def dare(merging: Merging, settings: TaskVectorSettings) -> MergedWeights:
    """Drop changes at random and rescale the others (Yu et al. 2024, section 3.2).

    Each entry of τ_s = w_s − w_0 is kept with probability `density` and divided by it, so that its
    mean is as before; the change is `scale` times Σ_s α_s τ_s.

    Args:
        merging: the networks, and their shares α of all samples.
        settings: the start, how much is kept, and the seed.

    Raises:
        ModelError: there is no start, or it is of another graph.
    """
    start, changes = _changes(merging)
    rng = seeds.torch_rng(settings.drop_seed, "dropped changes")
    total = dropped(changes, merging.alpha, settings.density, rng)
    return _moved(merging, start, settings.scale * total, {})


def elected(
    changes: Sequence[Tensor], alpha: Sequence[float], density: float
) -> tuple[Tensor, float]:
    """The mean of trimmed changes of the sign that most have, and how many agree with it.

    Args:
        changes: of the networks, float64 [n] each.
        alpha: their shares.
        density: share of the entries that is kept.
    """
    shares = torch.tensor(alpha, dtype=torch.float64)[:, None]
    stacked = torch.stack([_trimmed(change, density) for change in changes])
    sign = (shares * stacked).sum(0).sign()
    counted = shares * ((stacked.sign() == sign) & (sign != 0))
    mean = (counted * stacked).sum(0) / counted.sum(0).clamp_min(torch.finfo(torch.float64).tiny)
    return mean, float((counted > 0).sum() / (stacked != 0).sum().clamp_min(1))


def dropped(
    changes: Sequence[Tensor], alpha: Sequence[float], density: float, rng: torch.Generator
) -> Tensor:
    """The sum, by shares, of changes of which a share `density` is kept and divided by it."""
    total = torch.zeros_like(changes[0])
    for share, change in zip(alpha, changes, strict=True):
        kept = torch.rand(change.shape, generator=rng, dtype=torch.float64) < density
        total += share / density * change * kept
    return total


def _changes(merging: Merging) -> tuple[Tensors, list[Tensor]]:
    """The start, and each network's change since then as a vector, float64."""
    if merging.start is None:
        raise ModelError(
            "changes need the network from which all clients started. Give its file with --base"
        )
    combine([*merging.states, merging.start], [0.0] * (len(merging.states) + 1))  # one graph
    found = merging.states[0].items()
    # Counters of batch normalization and running statistics are averaged.
    names = [n for n, t in found if t.is_floating_point() and "running_" not in n]
    start = {name: merging.start[name] for name in names}
    before = _flat(start, names)
    return start, [_flat(state, names) - before for state in merging.states]


def _flat(state: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    return torch.cat([state[name].double().flatten() for name in names])


def _trimmed(change: Tensor, density: float) -> Tensor:
    """The entries of largest magnitude; of several at the limit all."""
    count = max(1, int(density * change.numel()))
    least = change.abs().topk(count).values[-1]
    return torch.where(change.abs() >= least, change, 0.0)


def _moved(
    merging: Merging, start: Tensors, change: Tensor, told: dict[str, float]
) -> MergedWeights:
    """The start with a change, and the mean of what is no weight."""
    weights, place = combine(merging.states, merging.alpha), 0
    for name, before in start.items():
        part = change[place : place + before.numel()].reshape(before.shape)
        weights[name] = (before.double() + part).to(merging.states[0][name].dtype)
        place += before.numel()
    return MergedWeights(weights, told)
