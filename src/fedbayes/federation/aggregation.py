"""What the server does with reports before a method whose reports add sees them.

Clipping bounds what one client can move, and robust rules put something else in place of the mean.
A method sees none of it: it asks for the sum of the reports and gets what the rule says.
"""

import math
from typing import Any

import torch
from torch import Tensor

from fedbayes.contracts import AnyMethod, Changes, Report, Run, Sum, Total
from fedbayes.contracts.changes import types_of
from fedbayes.errors import ConfigError
from fedbayes.federation.fold import Fold, OfChanges, Untouched, Way
from fedbayes.federation.settings import Aggregation
from fedbayes.methods import METHODS

__all__ = [
    "Aggregation",
    "Clipped",
    "Robust",
    "clipped",
    "fold",
]


def clipped(changes: Changes, clip: float) -> Changes:
    """Changes, each part of which is shortened until its norm is at most `clip`.

    The norm is L2 over all of a part's tensors; what a report says nothing of counts as no change.
    Integers count what no client can be moved by, and are left alone.
    """
    bounded = {}
    for part, tensors in changes.items():
        squares = [t.nan_to_num(nan=0.0).square().sum() for t in tensors.values()]
        norm = math.sqrt(sum(float(square) for square in squares))
        short = part == "counters" or norm <= clip
        bounded[part] = tensors if short else {n: t * (clip / norm) for n, t in tensors.items()}
    return bounded


class Clipped(OfChanges):
    """A sum of reports of bounded change."""

    def __init__(self, way: Way, clip: float) -> None:
        super().__init__(way)
        self._clip = clip

    def add(self, client: int, report: Report) -> None:
        """Fold one report in."""
        self._add(clipped(self._way.changes(report), self._clip), report, report.weight)


class Robust(OfChanges):
    """Keeps all the changes, and has a robust middle of them in place of their mean.

    The weights of the reports do not count, since a hostile client chooses its own. An entry of
    which only some reports say something has the middle of those.
    """

    def __init__(self, way: Way, rule: str, hostile: int, clip: float | None) -> None:
        super().__init__(way)
        self._rule, self._hostile, self._clip = rule, hostile, clip
        self._found: list[Changes] = []
        self._dtypes: dict[str, torch.dtype] = {}

    @property
    def clients(self) -> int:
        """Number of reports."""
        return len(self._found)

    def add(self, client: int, report: Report) -> None:
        """Keep one report, its change bounded if there is a bound."""
        changes = self._way.changes(report)
        self._dtypes |= types_of(report)
        self._found.append(changes if self._clip is None else clipped(changes, self._clip))

    def reduced(self) -> Sum:
        """The sum of as many reports as came, all of which are the middle."""
        chosen = self._nearest() if self._rule == "krum" else self._found
        total = Total(weight=float(self.clients), clients=self.clients, dtypes=self._dtypes)
        for part, tensors in chosen[0].items():
            total.changes[part], total.heard[part] = {}, {}
            for name in tensors:
                stack = torch.stack([changes[part][name] for changes in chosen])
                share = (~stack.isnan()).double().mean(0)
                if bool((share < 1).any()):
                    total.heard[part][name] = share * self.clients
                total.changes[part][name] = self._middle(stack) * share * self.clients
        return self._way.resummed(total)

    def _middle(self, stack: Tensor) -> Tensor:
        """The middle of numbers [n, ...] entry by entry, NaN left out; 0 where all are NaN."""
        if self._rule == "krum":
            return stack.nanmean(0).nan_to_num(nan=0.0)
        ordered = stack.sort(0).values  # NaN come last
        count = (~ordered.isnan()).sum(0)
        most = (count - 1).clamp_min(0) // 2
        cut = most if self._rule == "median" else most.clamp_max(self._hostile)
        rank = torch.arange(len(stack)).reshape(-1, *[1] * (stack.ndim - 1))
        kept = (rank >= cut) & (rank < count - cut)
        return torch.where(kept, ordered, 0.0).sum(0) / kept.sum(0).clamp_min(1)

    def _nearest(self) -> list[Changes]:
        """Multi-Krum (Blanchard et al. 2017): the n − f reports nearest to their neighbours.

        A report's score is the sum of its squared distances to the n − f − 2 nearest others.
        Integers, and what a report says nothing of, are no distance.
        """
        flat = torch.stack([_flat(changes) for changes in self._found])
        count = len(flat)
        distances = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist").square()
        nearest = distances.sort(1).values[:, 1 : count - self._hostile - 1]
        chosen = nearest.sum(1).argsort(stable=True)[: count - self._hostile]
        return [self._found[place] for place in sorted(chosen.tolist())]


def _flat(changes: Changes) -> Tensor:
    parts = (tensors for part, tensors in changes.items() if part != "counters")
    return torch.cat([t.flatten() for part in parts for t in part.values()]).nan_to_num(nan=0.0)


def check(
    settings: Aggregation,
    method: AnyMethod,
    *,
    min_reports: int,
) -> None:
    """See that the settings go together, and with the rest.

    Raises:
        ConfigError: they do not; the text says what would.
    """
    if settings.plain:
        return
    if not _adds(method):
        able = ", ".join(name for name, kind in METHODS.items() if _adds(kind))
        raise ConfigError(
            f"[aggregation] is for methods whose reports add ({able}); {method.name} does not"
        )
    least = {"trimmed-mean": 2 * settings.hostile + 1, "krum": 2 * settings.hostile + 3}
    if min_reports < least.get(settings.rule, 1):
        raise ConfigError(
            f"aggregation.rule = {settings.rule!r} with hostile = {settings.hostile} needs "
            f"min_reports of at least {least[settings.rule]}; it is {min_reports}"
        )


def _adds(method: AnyMethod | type[AnyMethod]) -> bool:
    return method.reduction is Sum and not method.centralized


def fold(settings: Aggregation, method: AnyMethod, server: Any, run: Run) -> Fold:
    """What folds the reports of one round.

    Args:
        settings: the `[aggregation]` table.
        method: of the run.
        server: its state before the round.
        run: the run.
    """
    if settings.plain:
        return Untouched(method.reduction)
    way = Way.of(method, server, run)
    if settings.rule == "mean":
        return Clipped(way, float(settings.clip or 0))
    return Robust(way, settings.rule, settings.hostile, settings.clip)
