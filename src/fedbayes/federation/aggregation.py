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

from fedbayes.contracts import AnyMethod, Gathered, Method, Report, Run, Sum
from fedbayes.contracts.changes import clipped
from fedbayes.errors import ConfigError
from fedbayes.federation.fold import Fold, OfChanges, Untouched, Way
from fedbayes.federation.robust import Guarded, Robust
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


class Clipped(OfChanges):
    """A sum of reports whose weight times change is bounded.

    So a client cannot move the sum by more, however heavy it says that it is. The intake makes the
    weights multiples of the cohort's median, and bounds them.
    """

    def __init__(self, way: Way, clip: float) -> None:
        super().__init__(way)
        self._clip = clip

    def add(self, client: int, report: Report) -> None:
        """Fold one report in."""
        bound = self._clip / report.weight
        self._add(clipped(self._way.changes(report), bound), report, report.weight)


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
            f"aggregation.rule and aggregation.clip are for methods whose reports add ({able}), "
            f"and not for {method.name}{_instead(method)}"
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


def _instead(method: AnyMethod) -> str:
    """What a method has in place of robust rules, in words."""
    if method.absent == "unchanged":
        return f": {method.name} takes the clients' median, or the mean of their signs, as it is"
    if type(method).compared is not Method.compared:
        return "; aggregation.outliers = 'leave-out' leaves out networks unlike the others"
    return ""


def _adds(method: AnyMethod | type[AnyMethod]) -> bool:
    if method.reduction is Gathered:
        return method.takes_middle
    return not method.centralized


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
    if method.reduction is Gathered:
        return Guarded(way, settings.rule, settings.hostile, settings.clip)
    if settings.noise:
        return Private(way, float(settings.clip or 0), settings.noise, cohort, noise)
    if settings.rule == "mean":
        return Clipped(way, float(settings.clip or 0))
    return Robust(way, settings.rule, settings.hostile, settings.clip)
