"""Baseline hazards for the model of a run, from its clients' sums over who is at risk."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from torch import Tensor

from fedbayes.contracts import Federation, Sampler
from fedbayes.core.brief import Brief
from fedbayes.core.tensors import PREDICTED
from fedbayes.data import FederatedData
from fedbayes.errors import ConfigError, RunError
from fedbayes.likelihoods.hazards import (
    Array,
    Hazards,
    at_risk,
    breslow,
    check_at_risk,
    check_events,
    event_counts,
)
from fedbayes.storage.calibrations import HAZARDS
from fedbayes.workflows.calibrate.ended_run import EndedRun

_ROUNDING = 1e-9
"""By which a quotient of times may be off, and is a whole number all the same."""


@dataclass(frozen=True)
class Foretold:
    """How many events there were among test rows, and how many were to be expected."""

    observed: int
    expected: float
    """The sum over rows of the cumulative hazard at the time up to which each was observed."""
    rows: int


@dataclass(frozen=True, repr=False)
class Estimated(Brief):
    """What `estimate_hazards` wrote."""

    path: Path
    times: int
    """Distinct times of events."""
    events: int
    rows: int
    last: float
    """The longest time that a row was observed for."""
    all: Foretold
    """On all clients' test rows: by the common hazards, or by each one's own if asked for."""
    clients: dict[str, Foretold]
    """On each client's, by name."""


def estimate_hazards(
    folder: Path | str,
    *,
    per_client: bool = False,
    personal: bool = False,
    rows: Literal["train", "test"] = "train",
    coarsen: float = 0.0,
) -> Estimated:
    """Estimate the baseline hazards of a run with the likelihood `cox`.

    They are written next to the run's model, where `fedbayes predict --times` looks for them.

    Args:
        folder: of a run that has ended, with its data.
        per_client: hazards of each client too, from its rows alone.
        personal: of every client's own model, from its rows alone, instead of the global model.
        rows: the part of each client's rows to use. An overfitted model predicts the events of its
            training rows too well, and others' badly.
        coarsen: times are rounded up to multiples of this; 0 leaves them as they are.

    Raises:
        FedbayesError: the run has not ended, has no such model, or predicts no risks; its data are
            not here; or there are no events.

    Examples:
        >>> import pandas as pd
        >>> import fedbayes
        >>> from fedbayes.workflows.calibrate.hazards import estimate_hazards
        >>> table = pd.DataFrame(
        ...     {"age": [50, 60, 70, 80] * 20, "days": [9, 7, 4, 2] * 20, "died": [1, 0, 1, 1] * 20}
        ... )
        >>> label = ["days", "died"]
        >>> result = fedbayes.run(
        ...     data=table, label=label, likelihood="cox", clients=2, rounds=1, out="stays"
        ... )
        >>> estimate_hazards("stays").path.name
        'calibration.json'
    """
    if not 0 <= coarsen < math.inf:
        raise ConfigError(f"coarsen is {coarsen:g}. Give 0, or a number above 0")
    if rows not in ("train", "test"):
        raise ConfigError(f"rows is {rows!r}. Choose train or test")
    ended = EndedRun.open(folder, personal=personal)
    place, run = ended.folder, ended.run
    if run.likelihood.target.kind != "survival":
        raise ConfigError(
            f"hazards need a survival likelihood, got {run.likelihood.name} in {place.path}"
        )
    ended.note_no_noise("the sums behind hazards")
    sides = {
        client: _Side.of(run, draw, ended.data, client, rows, coarsen)
        for client, draw in ended.models()
    }
    common = _estimate(list(sides.values()), str(place.path))
    own = {c: _estimate([s], str(place.path)) for c, s in sides.items() if s.events}
    names, alone = place.client_names(), per_client or personal
    path = ended.keep(HAZARDS, common, own if alone else {})
    told = {
        names[client]: side.foretold(own[client] if alone else common)
        for client, side in sides.items()
        if len(side.test_y) and (client in own or not alone)
    }
    whole = Foretold(
        sum(one.observed for one in told.values()),
        sum(one.expected for one in told.values()),
        sum(one.rows for one in told.values()),
    )
    return Estimated(path, len(common.times), common.events, common.rows, common.last, whole, told)


@dataclass(frozen=True)
class _Side:
    """What a client has: log-risks, times and events of its rows; and of its test rows."""

    name: str
    risk: Array
    y: Array
    test_risk: Array
    test_y: Array

    @classmethod
    def of(
        cls,
        run: Federation,
        draw: Sampler,
        data: FederatedData,
        client: int,
        rows: str,
        coarsen: float,
    ) -> "_Side":
        parts = []
        for samples in (data.train(client), data.test(client)):
            y = samples.y.double().numpy().copy()
            y[:, 0] = _as_written(samples.y[:, 0].numpy(), coarsen)
            batches = samples.to(run.network.device).batches(PREDICTED)
            found = [run.likelihood.mean(draw(x).double())[:, 0].cpu() for x, _ in batches]
            parts.append((_joined(found), y))
        (risk, y), test = parts
        return cls(data.names[client], *(test if rows == "test" else (risk, y)), *test)

    @property
    def events(self) -> int:
        return int((self.y[:, 1] > 0.5).sum())

    def foretold(self, hazards: Hazards) -> Foretold:
        with np.errstate(over="ignore"):
            expected = hazards.at(self.test_y[:, 0]) * np.exp(self.test_risk)
        observed = int((self.test_y[:, 1] > 0.5).sum())
        return Foretold(observed, float(expected.sum()), len(self.test_y))


def _as_written(times: Array, coarsen: float) -> Array:
    """Times [n] as their table has them, rounded up to multiples of `coarsen` if not 0."""
    distinct, place = np.unique(times, return_inverse=True)
    found = distinct.astype(str).astype(np.float64)  # as few digits as tell them apart
    if coarsen:
        multiples = np.ceil(found / coarsen - _ROUNDING) * coarsen
        found = np.array([float(f"{time:.12g}") for time in multiples])
    return np.asarray(found[place])


def _joined(found: list[Tensor]) -> Array:
    return np.concatenate([np.zeros(0), *(one.numpy() for one in found)])


def _estimate(sides: list[_Side], source: str) -> Hazards:
    """What the server adds up: event times and counts, then sums over who is at risk."""
    told = [event_counts(side.y) for side in sides]
    for side, (own, counts) in zip(sides, told, strict=True):
        check_events(own, counts, len(side.y), side.name)
    times = np.unique(np.concatenate([own for own, _ in told]))
    if not len(times):
        raise RunError(f"the clients of {source} have no row with an event")
    events, sums = np.zeros(len(times)), np.zeros(len(times))
    for side, (own, counts) in zip(sides, told, strict=True):
        events[np.searchsorted(times, own)] += counts
        at_each = at_risk(side.risk, side.y, times)
        check_at_risk(at_each, side.name)
        sums += at_each
    last = max(float(side.y[:, 0].max()) for side in sides if len(side.y))
    return breslow(times, events, sums, last=last, rows=sum(len(side.y) for side in sides))
