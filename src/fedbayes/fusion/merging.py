"""Units of several clients that become one unit of the fused network.

Chosen units leave something of the others unexplained. Where units say nearly the same, what they
have in common can explain more: with a_j the activations of unit j times its importance, groups
l(j) around the chosen units and their common parts v_l are to

    minimize Σ_j ‖a_j − g_j v_l(j)‖²   over l, v and loadings g_j ≥ 0,

by turns. Then v_l = Σ g_j a_j / Σ g_j² over its group is a sum of units, so is what a layer below
is to say for it, and its weights are such a sum of theirs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Members:
    """Units that are merged into chosen ones; tensors [members]."""

    slot: Tensor
    """Place of the chosen unit in its group, int64."""
    donor: Tensor
    """Which donor the member comes from, int64."""
    unit: Tensor
    """And which of its units it is, int64."""
    share: Tensor
    """What it counts for."""


ROUNDS = 10
"""Of groups and common parts by turns."""


@dataclass(frozen=True)
class Merged:
    """Which units are merged, and the result."""

    slot: Tensor
    """Of each unit, the chosen one that it goes with, int64 [N]; -1: none."""
    share: Tensor
    """What its activations count for in that one's unit, in the chosen unit's scale, [N]."""
    left: float
    """Share of all units' weighted squares that the merged units leave unexplained."""
    left_by_choice: float
    """And that the chosen units do."""

    @property
    def better(self) -> bool:
        """Whether merging explains more than choosing, beyond rounding."""
        return self.left < self.left_by_choice - 1e-6


def merge(factor: Tensor, importance: Tensor, chosen: Tensor, cells: Tensor) -> Merged:
    """Merge units of a group around those that were chosen.

    Args:
        factor: activations times importance, a row for each unit, [N, samples].
        importance: of the units, [N].
        chosen: numbers of the chosen units, int64 [L].
        cells: of the units, [N]; only units of one cell are merged.
    """
    common = factor[chosen]
    for _ in range(ROUNDS):
        slot, loading = _nearest(factor, common, chosen, cells)
        common = _sums(slot, loading, factor, len(chosen))
    slot, loading = _nearest(factor, common, chosen, cells)
    weight = loading * importance
    squares = torch.zeros(len(chosen)).index_add(0, slot.clamp(min=0), loading.square())
    scale = loading[chosen] / importance[chosen] / squares
    alone = ~scale.isfinite() | (scale <= 0)
    share = weight * torch.where(alone, 0, scale)[slot.clamp(min=0)]
    share[slot < 0] = 0
    share[chosen[alone]] = 1
    slot = torch.where(share > 0, slot, -1)
    after = _sums(slot, loading, factor, len(chosen))
    after[alone] = factor[chosen[alone]]
    return Merged(slot, share, _left(factor, after), _left(factor, factor[chosen]))


def _nearest(
    factor: Tensor, common: Tensor, chosen: Tensor, cells: Tensor
) -> tuple[Tensor, Tensor]:
    """The common part that explains most of each unit, and its loading; chosen ones keep theirs."""
    direction = common / common.norm(dim=1, keepdim=True).clamp(min=1e-30)
    loadings = (factor @ direction.T).clamp(min=0)
    loadings *= cells[:, None] == cells[chosen]
    own = torch.arange(len(chosen))
    loading, slot = loadings.max(1)
    loading[chosen] = loadings[chosen, own]
    slot = torch.where(loading > 0, slot, -1)
    slot[chosen] = own
    return slot, loading


def _sums(slot: Tensor, loading: Tensor, factor: Tensor, count: int) -> Tensor:
    """Σ g_j a_j over each group, [L, samples]."""
    sums = factor.new_zeros(count, factor.shape[1])
    inside = slot >= 0
    return sums.index_add(0, slot[inside], loading[inside, None] * factor[inside])


def _left(factor: Tensor, rows: Tensor) -> float:
    """Share of the squares of all rows of a factor outside the span of some, between 0 and 1."""
    rows = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-30)
    basis, values, _ = torch.linalg.svd(rows.T.double(), full_matrices=False)
    basis = basis[:, values > 1e-7 * values.max()].to(factor)
    total = factor.square().sum()
    explained = (factor @ basis).square().sum()
    return float(((total - explained) / total.clamp(min=1e-30)).clamp(min=0))
