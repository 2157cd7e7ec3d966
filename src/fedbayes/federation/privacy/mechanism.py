"""One round made private: changes of bounded norm, summed, and noise on the sum."""

import math
import secrets
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from fedbayes.contracts import (
    AnyMethod,
    ChangeCoordinates,
    Changes,
    Federation,
    Report,
    RoundContext,
    Sum,
    Total,
)
from fedbayes.contracts.changes import shortened, types_of
from fedbayes.core.messages import Message
from fedbayes.errors import ConfigError
from fedbayes.federation.client_runtime import ClientFailure, ClientResult
from fedbayes.federation.privacy import matrix
from fedbayes.federation.privacy.accounting import Spent
from fedbayes.federation.privacy.noise import Secret
from fedbayes.federation.privacy.settings import Privacy
from fedbayes.federation.privacy.spending import NONCE, Spending


@dataclass(frozen=True)
class Mechanism:
    """What makes one round of a run private."""

    settings: Privacy
    clip: float
    """Bound of the norm of each part's change where no other is set, or has been found."""
    secret: Secret
    record: Spending
    """What the rounds before it have spent."""
    number: int
    """The round, from 1."""
    size: int
    """Clients of a round; where they are drawn by coins, how many to expect."""
    rate: float = 0.0
    """Probability of a client where a coin was drawn for each; 0: it is known who takes part."""
    members: tuple[int, ...] = ()
    """Who does, where that is known."""

    def begin(self, way: ChangeCoordinates, pattern: Message) -> "Private":
        """What folds the reports of the round.

        Args:
            way: of the method and the server's state.
            pattern: of a proper report; its values do not count.
        """
        return Private(self, way, pattern)

    def kept(self, outcome: ClientResult | ClientFailure) -> ClientResult | ClientFailure:
        """What of an outcome may be seen: figures only where they are asked for."""
        if self.settings.metrics == "on" or isinstance(outcome, ClientFailure):
            return outcome
        return replace(outcome, info={}, scores={})

    def bounds(self, parts: list[str]) -> dict[str, float]:
        """The bound of each part in this round."""
        if self.settings.quantile is not None and self.record.bounds.keys() == set(parts):
            return {part: float(self.record.bounds[part]) for part in parts}
        return {part: self.settings.clips.get(part, self.clip) for part in parts}


class Private:
    """Changes of bounded norm, summed with equal weights, and Gaussian noise on the sum.

    The mean is w + (Σ_s clip(φ_s − w) + N(0, P (z·C)²)) / B for P parts: each part is bounded by a
    C of its own, so what a client moves has a norm of √P at most, in units of the bounds. It is
    divided by the size B that a cohort is to have. A client that sends nothing adds zero, and so
    does a rejected report. The set of parts and entries does not depend on reports. Tensors that
    are no real numbers stay unchanged.
    """

    def __init__(self, mechanism: Mechanism, way: ChangeCoordinates, pattern: Message) -> None:
        self._mechanism, self._way = mechanism, way
        report = Report(dict(pattern))
        self._dtypes = types_of(report)
        self._sums: Changes = {
            part: {name: torch.zeros_like(t) for name, t in sorted(tensors.items())}
            for part, tensors in way.changes(report).items()
        }
        self._parts = sorted(part for part in self._sums if part != "counters")
        self._bounds = mechanism.bounds(self._parts)
        self._within = dict.fromkeys(self._parts, 0.0)
        self.clients = 0
        """Number of reports."""
        self.record = mechanism.record
        """What was spent, this round included once the noise is on."""

    def add(self, client: int, report: Report) -> None:
        """Fold one report in; its weight does not count."""
        changes = self._way.changes(report)
        for part in self._parts:
            found = {n: t.nan_to_num(nan=0.0) for n, t in changes[part].items()}
            entering = shortened(found, self._bounds[part])
            self._within[part] += 0.5 if entering is found else -0.5
            for name, change in entering.items():
                self._sums[part][name].add_(change)
        self.clients += 1

    def reduced(self) -> Sum:
        """The noisy sum, as of so many reports as a cohort is to have."""
        mechanism, size = self._mechanism, self._mechanism.size
        nonce = bytes(NONCE) if mechanism.settings.repeatable else secrets.token_bytes(NONCE)
        spent = self._spent()
        noise, start = self._noise(nonce, spent), 0
        noisy: Changes = dict(self._sums)
        for part in self._parts:
            std = spent.noise * self._bounds[part] * math.sqrt(len(self._parts))
            noisy[part] = {}
            for name, total in self._sums[part].items():
                drawn = torch.from_numpy(noise[start : start + total.numel()]).reshape(total.shape)
                noisy[part][name] = total + std * drawn
                start += total.numel()
        self.record = mechanism.record.after(
            mechanism.number,
            spent,
            clips=self._bounds,
            bounds=self._following(nonce),
            entries=start,
            nonce=nonce,
            fingerprint=mechanism.secret.fingerprint,
        )
        return self._way.resummed(
            Total(noisy, {part: {} for part in noisy}, dict(self._dtypes), float(size), size)
        )

    @property
    def _entries(self) -> int:
        return sum(t.numel() for part in self._parts for t in self._sums[part].values())

    def _spent(self) -> Spent:
        """What the round spends."""
        mechanism, settings = self._mechanism, self._mechanism.settings
        correlated, record = settings.mechanism == "matrix", mechanism.record
        noise, count_noise = multipliers(settings, len(self._parts), mechanism.size)
        begins = correlated and not (
            record.rounds == mechanism.number - 1
            and record.sequence()
            and record.fingerprint == mechanism.secret.fingerprint.hex()
            and record.kinds[-1, 2:].tolist() == [settings.bands or 0, self._entries]
        )
        return Spent(
            noise,
            count_noise,
            mechanism.rate,
            mechanism.members,
            correlated=correlated,
            begins=begins,
            bands=(settings.bands or 0) if correlated else 0,
        )

    def _noise(self, nonce: bytes, spent: Spent) -> NDArray[np.float64]:
        """Noise of deviation 1 on all entries, perhaps correlated with that of rounds before."""
        mechanism, number = self._mechanism, self._mechanism.number
        fresh = mechanism.secret.stream("noise", number, nonce).gaussian(self._entries)
        if not spent.correlated or spent.begins:
            return fresh
        first = mechanism.record.sequence()
        weights = matrix.weights(number - first + 1, spent.bands)
        noise: NDArray[np.float64] = weights[-1] * fresh
        for before, weight in zip(range(first, number), weights, strict=False):
            drawn_with = bytes(mechanism.record.nonces[before - 1].tolist())
            stream = mechanism.secret.stream("noise", before, drawn_with)
            noise += weight * stream.gaussian(self._entries)
        return noise

    def _following(self, nonce: bytes) -> dict[str, float]:
        """The bounds of the next round, after a step to a quantile (Andrew et al. 2021)."""
        mechanism, settings = self._mechanism, self._mechanism.settings
        if settings.quantile is None:
            return {}
        stream = mechanism.secret.stream("counts", mechanism.number, nonce)
        drawn = stream.gaussian(len(self._parts)) * count_deviation(settings, mechanism.size)
        following = {}
        for part, noise in zip(self._parts, drawn.tolist(), strict=True):
            share = 0.5 + (self._within[part] + noise) / mechanism.size
            step = settings.quantile_rate * (min(max(share, 0.0), 1.0) - settings.quantile)
            following[part] = self._bounds[part] * math.exp(-step)
        return following


def count_deviation(settings: Privacy, size: int) -> float:
    """Deviation σ_b of the noise on counts."""
    return settings.count_noise or size / 20


def multipliers(settings: Privacy, parts: int, size: int) -> tuple[float, float]:
    """Multipliers of the noise on the sums of all parts, and on their counts.

    A count moves by ½ where a client is added or removed, and twice that where one is replaced, as
    the sums do in their units. Together they are as z alone where noise is independent: sums get
    the more (Andrew et al. 2021, Theorem 1). Correlated noise is z, and counts cost extra.

    Raises:
        ConfigError: counts alone cost more than z.
    """
    if settings.quantile is None:
        return settings.noise, math.inf
    counts = 2 * count_deviation(settings, size) / math.sqrt(parts)
    if settings.mechanism == "matrix":
        return settings.noise, counts
    rest = settings.noise**-2 - counts**-2
    if rest <= 0:
        least = settings.noise * math.sqrt(parts) / 2
        raise ConfigError(
            f"privacy.noise = {settings.noise:g} is too small for the counts: their noise "
            f"(privacy.count_noise, by default a twentieth of the cohort) must be above {least:g}"
        )
    return rest**-0.5, counts


def parts_of(method: AnyMethod, run: Federation) -> list[str]:
    """The parts of a method's reports that noise goes on."""
    server = method.init(run)
    pattern = method.expected(method.message(server, RoundContext(run, 1)), run)
    changes = ChangeCoordinates.of(method, server, run).changes(Report(dict(pattern)))
    return sorted(part for part in changes if part != "counters")
