"""Cox regression: clients send sums over who is at risk at each event time."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import numpy as np

from fedbayes.biostatistics.columns import Agreement, Coding, Wanted, agree
from fedbayes.biostatistics.design import Moments, moments
from fedbayes.biostatistics.exchange import Array, Exchange
from fedbayes.biostatistics.generalized import refuse_empty_levels
from fedbayes.biostatistics.newton import Evaluation, maximize, unpacked
from fedbayes.biostatistics.partial import partial_likelihood
from fedbayes.biostatistics.results import Regression
from fedbayes.biostatistics.risk_sets import tied_times
from fedbayes.biostatistics.times import EventTimes, event_times
from fedbayes.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

Ties = Literal["efron", "breslow"]

_INFINITE = (
    "Whoever has the largest (or smallest) value is always the next to whom it happens (monotone "
    "likelihood), so that no finite coefficient is the most likely one; leave one of the columns "
    "out, or join categories."
)
_FLAT = 1e-11
"""Variance of a column among those at risk, of 1 among all, that is none but for rounding."""


def fit_cox(
    exchange: Exchange,
    wanted: Wanted,
    ties: Ties = "efron",
    drop: tuple[str, ...] = (),
    *,
    strata_by_client: bool = False,
) -> Regression:
    """Fit a proportional-hazards model.

    Args:
        exchange: the way to the clients.
        wanted: time, event and features; with `strata` a baseline hazard for each of its values.
        ties: how events at the same time count.
        drop: columns that are no features.
        strata_by_client: whether every client has a baseline hazard of its own. Then no event times
            travel, only each client's log-likelihood, gradient and Hessian.

    Raises:
        DataError: the columns do not allow of a fit; the text names them.
    """
    agreed = agree(exchange, wanted, drop)
    coding, p = agreed.coding, len(agreed.coding.names)
    if not p:
        raise DataError("there are no features; for a curve without them use kaplan_meier")
    scales = moments(exchange, coding)
    refuse_empty_levels(agreed, scales, all_too=False, outcome=wanted.event)
    numbers = {"center": scales.mean, "scale": scales.scale}
    times = None
    if strata_by_client:
        evaluate = _each_alone(exchange, coding, numbers, ties)
    else:
        times = event_times(exchange, coding, shared=False)
        evaluate, hazards = _together(exchange, coding, numbers, times, ties)
    within = " of its stratum" if strata_by_client or wanted.strata else ""
    flat = f"is the same in all who are at risk at an event{within}, so hazards tell nothing of it"
    least = _FLAT * scales.y_sum
    first, best = maximize(evaluate, np.zeros(p), coding.names, _INFINITE, least, flat)
    baseline = None if times is None else _baseline(coding, times, hazards(best.at))
    return _result(exchange, agreed, scales, first, best, ties, baseline)


def _each_alone(
    exchange: Exchange, coding: Coding, numbers: dict[str, Array], ties: Ties
) -> Callable[[Array], Evaluation]:
    p = len(coding.names)
    told = {"coding": coding.model_dump(), "ties": ties}
    shapes = {"loglik": (1,), "gradient": (p,), "hessian": (p * (p + 1) // 2,), "events": (1,)}

    def evaluate(at: Array) -> Evaluation:
        found = exchange.sum("own_likelihood", told, {**numbers, "at": at}, shapes, finite=False)
        hessian = unpacked(found["hessian"], p)
        return Evaluation(at, float(found["loglik"][0]), found["gradient"], hessian)

    return evaluate


def _together(
    exchange: Exchange, coding: Coding, numbers: dict[str, Array], times: EventTimes, ties: Ties
) -> tuple[Callable[[Array], Evaluation], Callable[[Array], Array]]:
    """What asks for the partial likelihood at coefficients, and for the hazard at each time."""
    p = len(coding.names)
    q = 1 + p + p * (p + 1) // 2
    tied = tied_times(times.events, ties)
    told = {"coding": coding.model_dump()}
    numbers = {**numbers, "times": times.times, "groups": times.groups, "tied": tied}
    shapes = {"risk": (len(times.times), q), "ties": (len(tied), q), "events": (1 + p,)}
    last: dict[str, Array] = {}

    def evaluate(at: Array) -> Evaluation:
        found = exchange.sum("risk_sets", told, {**numbers, "at": at}, shapes, finite=False)
        last.update(at=at, risk=found["risk"][:, 0])
        value, gradient, information = partial_likelihood(
            at, times.events, tied, found["risk"], found["ties"], found["events"]
        )
        return Evaluation(at, value, gradient, information)

    def hazards(at: Array) -> Array:
        """D / S at each time, with features at their means (Breslow's estimate) [K]."""
        if not np.array_equal(last["at"], at):
            evaluate(at)
        return np.asarray(times.events / last["risk"])

    return evaluate, hazards


def _baseline(coding: Coding, times: EventTimes, hazards: Array) -> "pd.DataFrame":
    import pandas as pd

    frame = pd.DataFrame({"time": times.times, "hazard": hazards})
    group = times.groups.astype(np.int64)
    frame["cumulative_hazard"] = frame.groupby(group)["hazard"].cumsum()
    frame["survival"] = np.exp(-frame["cumulative_hazard"])
    if coding.groups:
        frame.insert(0, coding.wanted.strata, np.array(coding.groups, object)[group])
    return frame.drop(columns="hazard")


def _result(
    exchange: Exchange,
    agreed: Agreement,
    scales: Moments,
    first: Evaluation,
    best: Evaluation,
    ties: Ties,
    baseline: "pd.DataFrame | None",
) -> Regression:
    coding, n, p = agreed.coding, scales.total, len(best.at)
    covariance = np.linalg.inv(best.information) / np.outer(scales.scale, scales.scale)
    return Regression(
        model="cox",
        outcome=coding.wanted.event,
        happened=coding.happened,
        names=coding.names,
        references=tuple((t.column, t.levels[0]) for t in coding.terms if t.levels),
        estimates=best.at / scales.scale,
        covariance=covariance,
        statistic="z",
        freedom=n - p,
        ratio="hazard_ratio",
        loglik=best.loglik,
        null_loglik=first.loglik,
        deviance=None,
        null_deviance=None,
        dispersion=1.0,
        total=n,
        events=scales.y_sum,
        rows=agreed.rows,
        dropped=agreed.dropped,
        rounds=exchange.rounds,
        floats=exchange.floats,
        ties=ties,
        baseline=baseline,
    )
