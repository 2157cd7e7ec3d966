"""What the server does with reports before a method that averages sees them.

Clipping bounds what one client can move, robust rules put something else in place of the mean,
and noise makes the global models differentially private. A method sees none of it: it asks for
the mean of the reports and gets what the rule says.
"""

import hashlib
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fedbayes.contracts import AnyMethod, Report, Sum
from fedbayes.errors import ConfigError
from fedbayes.federation.settings import Aggregation
from fedbayes.messages import Message, dense
from fedbayes.methods import METHODS
from fedbayes.models import Network
from fedbayes.tensors import Tensors

__all__ = [
    "Aggregation",
    "Clipped",
    "NoiseRng",
    "Private",
    "Robust",
    "clipped",
    "epsilon",
    "noise_rng",
    "require_accounting",
]

NoiseRng = Callable[[bytes], np.random.Generator]
"""The generator of the noise on what has this digest."""


def clipped(report: Tensors, centre: Tensors, clip: float) -> Tensors:
    """The report, drawn to the centre until its distance from it is at most `clip`.

    The distance is the L2 norm over all tensors of real numbers; counters are left alone.
    """
    changes = {name: t.double() - centre[name].double() for name, t in _real(report).items()}
    norm = math.sqrt(sum(float(change.square().sum()) for change in changes.values()))
    if norm <= clip:
        return report
    shrunk = {
        name: (centre[name].double() + change * (clip / norm)).to(report[name].dtype)
        for name, change in changes.items()
    }
    return {**report, **shrunk}


def _real(tensors: Tensors) -> Tensors:
    return {name: t for name, t in tensors.items() if t.is_floating_point()}


class Clipped(Sum):
    """A sum of reports of bounded change."""

    def __init__(self, centre: Tensors, clip: float) -> None:
        super().__init__()
        self._centre, self._clip = centre, clip

    def add(self, client: int, report: Report) -> None:
        """Fold one report in."""
        bounded = clipped(dense(report.tensors), self._centre, self._clip)
        super().add(client, Report(dict(bounded), report.weight))


class Private(Sum):
    """Changes of bounded norm, summed with equal weights, and Gaussian noise on the sum.

    The mean is w + (Σ_s clip(φ_s − w) + N(0, (z·C)²)) / B. It is divided by the size of the
    cohort B, not by the number of reports, which would tell who reported. What is no real
    number stays as it was.
    """

    def __init__(
        self, centre: Tensors, clip: float, noise: float, cohort: int, rng: NoiseRng
    ) -> None:
        super().__init__()
        self._centre, self._clip, self._noise = centre, clip, noise
        self._cohort, self._rng = cohort, rng

    def add(self, client: int, report: Report) -> None:
        """Fold one report in; its weight does not count."""
        bounded = clipped(dense(report.tensors), self._centre, self._clip)
        changes: Message = {
            name: t.double() - self._centre[name].double() for name, t in _real(bounded).items()
        }
        super().add(client, Report(changes, 1.0))

    def mean(self) -> Tensors:
        """The noisy mean; the noise is seeded by what it goes on."""
        result = dict(self._centre)
        digest = hashlib.sha256()
        for name in sorted(self.tensors):
            digest.update(self.tensors[name].numpy().tobytes())
        rng = self._rng(digest.digest())
        for name in sorted(_real(self._centre)):
            before = self._centre[name]
            noise = torch.from_numpy(rng.standard_normal(tuple(before.shape)))
            total = self.tensors[name] + noise * (self._noise * self._clip)
            result[name] = (before.double() + total / self._cohort).to(before.dtype)
        return result


class Robust(Sum):
    """Keeps all the reports, and has a robust middle of them in place of the mean.

    The weights of the reports do not count, since a hostile client chooses its own.
    """

    def __init__(self, rule: str, hostile: int, centre: Tensors, clip: float | None) -> None:
        super().__init__()
        self._rule, self._hostile, self._centre, self._clip = rule, hostile, centre, clip
        self._reports: list[Tensors] = []

    def add(self, client: int, report: Report) -> None:
        """Keep one report, its change bounded if there is a bound."""
        tensors = dense(report.tensors)
        if self._clip is not None:
            tensors = clipped(tensors, self._centre, self._clip)
        self._reports.append(tensors)
        self.clients += 1

    def mean(self) -> Tensors:
        """The middle, in the types that the reports came in."""
        reports = self._nearest() if self._rule == "krum" else self._reports
        result = {}
        for name, first in reports[0].items():
            stack = torch.stack([report[name].double() for report in reports])
            result[name] = self._middle(stack).to(first.dtype)
        return result

    def _middle(self, stack: Tensor) -> Tensor:
        """The middle of numbers [n, ...], entry by entry."""
        if self._rule == "krum":
            return stack.mean(0)
        ordered = stack.sort(0).values
        count, cut = len(stack), self._hostile
        if self._rule == "median":
            cut = (count - 1) // 2
        return ordered[cut : count - cut].mean(0)

    def _nearest(self) -> list[Tensors]:
        """Multi-Krum (Blanchard et al. 2017): the n − f reports nearest to their neighbours.

        A report's score is the sum of its squared distances to the n − f − 2 nearest others.
        """
        flat = torch.stack(
            [torch.cat([t.double().flatten() for t in _real(r).values()]) for r in self._reports]
        )
        count = len(flat)
        distances = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist").square()
        nearest = distances.sort(1).values[:, 1 : count - self._hostile - 1]
        chosen = nearest.sum(1).argsort(stable=True)[: count - self._hostile]
        return [self._reports[place] for place in sorted(chosen.tolist())]


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
    if not method.averages or method.centralized:
        able = ", ".join(name for name, kind in METHODS.items() if kind.averages)
        raise ConfigError(
            f"[aggregation] is for methods that average weights ({able}); {method.name} does not"
        )
    least = {"trimmed-mean": 2 * settings.hostile + 1, "krum": 2 * settings.hostile + 3}
    if min_reports < least.get(settings.rule, 1):
        raise ConfigError(
            f"aggregation.rule = {settings.rule!r} with hostile = {settings.hostile} needs "
            f"min_reports of at least {least[settings.rule]}; it is {min_reports}"
        )


def reduction(settings: Aggregation, broadcast: Message, cohort: int, noise: NoiseRng) -> Sum:
    """What folds the reports of one round.

    Args:
        settings: the `[aggregation]` table.
        broadcast: what the server sent to all.
        cohort: number of clients that it was sent to.
        noise: where noise comes from.
    """
    centre = dense(broadcast)
    if settings.noise:
        return Private(centre, float(settings.clip or 0), settings.noise, cohort, noise)
    if settings.rule == "mean":
        return Clipped(centre, float(settings.clip or 0))
    return Robust(settings.rule, settings.hostile, centre, settings.clip)
