"""The clock of a simulation: how long each client takes for its work and messages in a round."""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedbayes.core import seeds
from fedbayes.errors import ConfigError
from fedbayes.federation.clock.availability import Always, Availability, Times, listed, shares
from fedbayes.federation.clock.rates import FROM_FILE
from fedbayes.federation.clock.settings import ClockSettings
from fedbayes.federation.clock.tables import read_rates, read_seconds, read_spells


class Lengths(NamedTuple):
    """Of a client's messages in a round, in encoded bytes."""

    down: int = 0
    """Of what it is sent."""
    up: int = 0
    """Of its report."""


class Clock:
    """Who takes how long, and when who is there.

    The time of a task depends on the seed, the client, the round in which it starts and the lengths
    of its messages alone. So it is the same in synchronous and in asynchronous rounds.

    Args:
        settings: the `[clock]` table.
        names: of the clients.
        sizes: training samples of each, [S].
        seed: of the run.

    Raises:
        ConfigError: a file cannot be read, or lacks a client.
    """

    def __init__(
        self, settings: ClockSettings, names: Sequence[str], sizes: NDArray[Any], seed: int
    ) -> None:
        self.clients = len(names)
        self._seed, self._jitter = seed, settings.jitter
        digest = hashlib.sha256()
        self._seconds = _seconds(settings, names, seed)
        if settings.by_samples:
            self._seconds = self._seconds * (sizes / sizes.mean())
        digest.update(self._seconds.tobytes())
        self._down = _rates(settings, "download", names, seed)
        self._up = _rates(settings, "upload", names, seed)
        for which, rates in (("download", self._down), ("upload", self._up)):
            if rates is not None:
                digest.update(which.encode() + rates.tobytes())
        self.availability: Availability = Always()
        if settings.availability == "share":
            room = settings.period * (1.0 - settings.wave)
            phases = room * seeds.numpy_rng(seed, "availability").random(self.clients)
            self.availability = shares(settings.period, settings.available, phases)
        elif settings.availability == "file":
            if settings.spells is None:
                raise ConfigError("clock.availability = 'file' needs clock.spells, a file of them")
            spells = read_spells(settings.spells, names, settings.period)
            for client in range(self.clients):
                digest.update(spells[client].tobytes())
            self.availability = listed(settings.period, spells)
        self.digest = digest.hexdigest()
        """Of clients' seconds, rates and spells as they came from files and sizes."""

    def work(self, client: int, number: int) -> float:
        """Seconds of work of a client that starts in round `number`."""
        seconds = float(self._seconds[client])
        if self._jitter:
            rng = seeds.numpy_rng(self._seed, "jitter", round=number, client=client)
            seconds *= float(np.exp(self._jitter * rng.standard_normal()))
        return seconds

    def seconds(self, client: int, number: int, lengths: Lengths) -> float:
        """Seconds of a client that starts in round `number`, from when it is sent something until
        its report has come.
        """
        seconds = self.work(client, number)
        for length, rates in zip(lengths, (self._down, self._up), strict=True):
            if rates is not None:
                seconds += length / float(rates[client])
        return seconds

    def ends(self, client: int, number: int, start: float, lengths: Lengths) -> float:
        """When a client's report has come that starts at a moment in round `number`."""
        return self.availability.ends(client, start, self.seconds(client, number, lengths))

    def first(self, time: float, clients: Sequence[int]) -> float:
        """The first moment from `time` on at which one of some clients is there."""
        return min(self.availability.comes(client, time) for client in clients)


def _seconds(settings: ClockSettings, names: Sequence[str], seed: int) -> Times:
    """Seconds of each client, float64 [S]."""
    if settings.speeds == "file":
        if settings.file is None:
            raise ConfigError("clock.speeds = 'file' needs clock.file, a table of seconds")
        return read_seconds(settings.file, names)
    if settings.speeds == "equal":
        return np.full(len(names), settings.seconds)
    drawn = seeds.numpy_rng(seed, "speeds").standard_normal(len(names))
    return settings.seconds * np.exp(settings.spread * drawn)


def _rates(settings: ClockSettings, column: str, names: Sequence[str], seed: int) -> Times | None:
    """Bytes a second of each client, float64 [S]; None where messages take no time."""
    median = getattr(settings, column)
    if median is None:
        return None
    if median == FROM_FILE:
        if settings.file is None:
            raise ConfigError(f"clock.{column} = 'file' needs clock.file, a table of rates")
        return read_rates(settings.file, names, column)
    drawn = seeds.numpy_rng(seed, "rates").standard_normal(len(names))
    return float(median) * np.exp(settings.rate_spread * drawn)
