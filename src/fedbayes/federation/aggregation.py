"""What the server does with reports before a method whose reports add sees them.

Clipping bounds what one client can move, robust rules put something else in place of the mean,
and noise makes the global models differentially private. A method sees none of it: it asks for
the sum of the reports and gets what the rule says.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbayes.contracts import AnyMethod, Changes, Report, Run, Sum, Total
from fedbayes.contracts.changes import types_of
from fedbayes.errors import ConfigError
from fedbayes.federation.fold import Fold, OfChanges, Untouched, Way
from fedbayes.federation.settings import Aggregation
from fedbayes.methods import METHODS
from fedbayes.models import Network

__all__ = [
    "Aggregation",
    "Clipped",
    "NoiseRng",
    "Private",
    "Robust",
    "clipped",
    "epsilon",
    "fold",
    "noise_rng",
    "require_accounting",
]

NoiseRng = Callable[[bytes], np.random.Generator]
"""The generator of the noise on what has this digest."""


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


class Private(OfChanges):
    """Changes of bounded norm, summed with equal weights, and Gaussian noise on the sum.

    The mean is w + (Σ_s clip(φ_s − w) + N(0, P (z·C)²)) / B for P parts: what a client moves has a
    norm of √P C at most. It is divided by the size of the cohort B, not by the number of reports,
    which would tell who reported. What is no real number stays as it was.
    """

    def __init__(self, way: Way, clip: float, noise: float, cohort: int, rng: NoiseRng) -> None:
        super().__init__(way)
        self._clip, self._noise = clip, noise
        self._cohort, self._rng = cohort, rng

    def add(self, client: int, report: Report) -> None:
        """Fold one report in; its weight does not count."""
        changes = clipped(self._way.changes(report), self._clip)
        if "counters" in changes:
            changes["counters"] = {n: 0 * t for n, t in changes["counters"].items()}
        self._add(changes, report, 1.0)

    def reduced(self) -> Sum:
        """The noisy sum, as of so many reports as the cohort has; the noise is seeded by what it
        goes on.
        """
        digest = hashlib.sha256()
        sums = {n: t for part in self._total.changes.values() for n, t in part.items()}
        for name in sorted(sums):
            digest.update(sums[name].numpy().tobytes())
        rng = self._rng(digest.digest())
        parts = [part for part in self._total.changes if part != "counters"]
        std = self._noise * self._clip * math.sqrt(len(parts))
        noisy = dict(self._total.changes)
        for part in sorted(parts):
            noisy[part] = {
                n: t + std * torch.from_numpy(rng.standard_normal(tuple(t.shape)))
                for n, t in sorted(noisy[part].items())
            }
        return self._way.resummed(
            replace(self._total, changes=noisy, weight=float(self._cohort), clients=self._cohort)
        )


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


def noise_rng(key: bytes, number: int, digest: bytes) -> np.random.Generator:
    """The noise of one round from the server's secret key.

    The seed of a run is known to its clients, who could take noise off that came from it. And a
    round that is run again after a kill, on other reports, must not have the noise it had: the
    two sums would tell their difference. So what the noise goes on is part of its seed.

    Args:
        key: the secret.
        number: the round.
        digest: of what the noise goes on.
    """
    seed = hashlib.sha256(key + number.to_bytes(8, "little") + digest).digest()
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(int.from_bytes(seed))))


def epsilon(noise: float, delta: float, times: int) -> float:
    """ε of a client's data after it was sampled so many times.

    Neighbours are federations that differ in all the data of one client. Who is sampled when
    follows from the seed, which clients know, so sampling amplifies nothing here.

    Args:
        noise: the multiplier z.
        delta: δ.
        times: rounds that the client was sampled for.

    Raises:
        ConfigError: dp-accounting is not installed.
    """
    require_accounting()
    if not times:
        return 0.0
    from dp_accounting import get_epsilon_gaussian

    # Another client's data move the sum by 2·clip; T rounds are one of deviation z/√T.
    return float(get_epsilon_gaussian(noise / (2 * math.sqrt(times)), delta))


def require_accounting() -> None:
    """See that dp-accounting is installed.

    Raises:
        ConfigError: it is not.
    """
    try:
        import dp_accounting  # noqa: F401
    except ImportError:
        raise ConfigError(
            "aggregation.noise needs dp-accounting: pip install 'fedbayes[privacy]'"
        ) from None


def check(
    settings: Aggregation,
    method: AnyMethod,
    network: Network,
    *,
    min_reports: int,
    checkpoint_every: int,
) -> None:
    """See that the settings go together, and with the rest.

    Raises:
        ConfigError: they do not; the text says what would.
    """
    if settings.noise and (settings.clip is None or settings.rule != "mean"):
        raise ConfigError("aggregation.noise needs aggregation.clip and rule = 'mean'")
    if settings.noise and checkpoint_every > 1:
        raise ConfigError(
            "aggregation.noise needs checkpoint_every = 1: rounds that were run again after "
            "a kill would tell more than ε says"
        )
    running = [n for n in sorted(network.buffers) if network.initial[n].is_floating_point()]
    if settings.noise and running:
        raise ConfigError(
            f"aggregation.noise would go on running statistics too ({running[0]!r}), and might "
            "make a variance negative; use GroupNorm or LayerNorm in place of BatchNorm"
        )
    if settings.plain:
        return
    if not _adds(method):
        able = ", ".join(name for name, kind in METHODS.items() if _adds(kind))
        raise ConfigError(
            f"[aggregation] is for methods whose reports add ({able}); {method.name} does not"
        )
    if settings.noise and not method.summable:
        able = ", ".join(name for name, kind in METHODS.items() if _adds(kind) and kind.summable)
        raise ConfigError(f"aggregation.noise is for {able}; {method.name} sends sparse reports")
    least = {"trimmed-mean": 2 * settings.hostile + 1, "krum": 2 * settings.hostile + 3}
    if min_reports < least.get(settings.rule, 1):
        raise ConfigError(
            f"aggregation.rule = {settings.rule!r} with hostile = {settings.hostile} needs "
            f"min_reports of at least {least[settings.rule]}; it is {min_reports}"
        )


def _adds(method: AnyMethod | type[AnyMethod]) -> bool:
    return method.reduction is Sum and not method.centralized


def fold(
    settings: Aggregation, method: AnyMethod, server: Any, run: Run, cohort: int, noise: NoiseRng
) -> Fold:
    """What folds the reports of one round.

    Args:
        settings: the `[aggregation]` table.
        method: of the run.
        server: its state before the round.
        run: the run.
        cohort: number of clients that take part.
        noise: where noise comes from.
    """
    if settings.plain:
        return Untouched(method.reduction)
    way = Way.of(method, server, run)
    if settings.noise:
        return Private(way, float(settings.clip or 0), settings.noise, cohort, noise)
    if settings.rule == "mean":
        return Clipped(way, float(settings.clip or 0))
    return Robust(way, settings.rule, settings.hostile, settings.clip)
