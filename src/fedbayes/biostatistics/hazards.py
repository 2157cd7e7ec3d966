"""Cox regression: clients send sums over who is at risk at each event time."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import numpy as np

from fedbayes.biostatistics.columns import Coding, ColumnAgreement, Wanted, agree
from fedbayes.biostatistics.design import ColumnMoments, moments
from fedbayes.biostatistics.exchange import Array, Exchange
from fedbayes.biostatistics.generalized import refuse_empty_levels
from fedbayes.biostatistics.newton import NewtonEvaluation, condition, maximize, unpacked
from fedbayes.biostatistics.partial import Counts, partial_likelihood, score_terms
from fedbayes.biostatistics.results import Regression
from fedbayes.biostatistics.risk_sets import tied_times
from fedbayes.biostatistics.times import EventTimes, event_times
from fedbayes.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

Ties = Literal["efron", "breslow"]

_INFINITE = (
    "The next event is always at the largest (or smallest) value (monotone likelihood), so no "
    "finite coefficients maximize the likelihood. Leave one of the columns out, or combine "
    "categories."
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
        raise DataError("there are no features. Use kaplan_meier for a curve without features")
    scales = moments(exchange, coding)
    refuse_empty_levels(agreed, scales, all_too=False, outcome=wanted.event)
    numbers = {"center": scales.mean, "scale": scales.scale}
    cohort: _Cohort | None = None
    if strata_by_client:
        evaluate = _each_alone(exchange, coding, numbers, ties)
    else:
        times = event_times(exchange, coding, shared=False, rows=True)
        if not len(times.times):
            raise DataError(f"'{wanted.event}' happens in no row")
        cohort = _Cohort(exchange, coding, numbers, times, ties)
        evaluate = cohort.evaluate
    within = " of its stratum" if strata_by_client or wanted.strata else ""
    flat = f"is the same for everyone at risk at each event{within}, so it has no effect on hazards"
    least = _FLAT * scales.y_sum
    first, best = maximize(evaluate, np.zeros(p), coding.names, _INFINITE, least, flat)
    covariance: Array = np.asarray(np.linalg.inv(best.information), np.float64)
    if wanted.sample_weight:
        ask, told, asked = "own_scores", {"coding": coding.model_dump(), "ties": ties}, numbers
        if cohort is not None:
            ask, asked = "scores", cohort.score_numbers(best.at)
        shapes = {"meat": (p * (p + 1) // 2,)}
        found = exchange.sum(ask, told, {**asked, "at": best.at}, shapes)
        covariance = np.asarray(covariance @ unpacked(found["meat"], p) @ covariance)
    baseline = None if cohort is None else _baseline(coding, times, cohort.hazards(best.at))
    return _result(exchange, agreed, scales, first, best, covariance, ties, baseline)


def _each_alone(
    exchange: Exchange, coding: Coding, numbers: dict[str, Array], ties: Ties
) -> Callable[[Array], NewtonEvaluation]:
    p = len(coding.names)
    told = {"coding": coding.model_dump(), "ties": ties}
    shapes = {"loglik": (1,), "gradient": (p,), "hessian": (p * (p + 1) // 2,), "events": (1,)}

    def evaluate(at: Array) -> NewtonEvaluation:
        found = exchange.sum("own_likelihood", told, {**numbers, "at": at}, shapes, finite=False)
        hessian = unpacked(found["hessian"], p)
        return NewtonEvaluation(at, float(found["loglik"][0]), found["gradient"], hessian)

    return evaluate


class _Cohort:
    """The rows of all clients, or of all in a stratum, at risk together."""

    def __init__(
        self,
        exchange: Exchange,
        coding: Coding,
        numbers: dict[str, Array],
        times: EventTimes,
        ties: Ties,
    ) -> None:
        self._exchange, self._p = exchange, len(coding.names)
        self._counts = Counts(times.events, times.rows)
        self._tied = tied_times(times.rows, ties)
        self._told = {"coding": coding.model_dump()}
        about = {"times": times.times, "groups": times.groups, "tied": self._tied}
        self._numbers = {**numbers, **about}
        self._last: tuple[Array, dict[str, Array]] | None = None

    def _sums(self, at: Array) -> dict[str, Array]:
        """Sums over risk sets at coefficients; the last ones are asked for once."""
        if self._last is None or not np.array_equal(self._last[0], at):
            q = 1 + self._p + self._p * (self._p + 1) // 2
            shapes = {
                "risk": (len(self._numbers["times"]), q),
                "ties": (len(self._tied), q),
                "events": (1 + self._p,),
            }
            numbers = {**self._numbers, "at": at}
            found = self._exchange.sum("risk_sets", self._told, numbers, shapes, finite=False)
            self._last = at, found
        return self._last[1]

    def evaluate(self, at: Array) -> NewtonEvaluation:
        """The partial likelihood at coefficients."""
        value, gradient, information = partial_likelihood(
            at, self._counts, self._tied, **self._sums(at)
        )
        return NewtonEvaluation(at, value, gradient, information)

    def hazards(self, at: Array) -> Array:
        """D / S at each time, with features at their means (Breslow's estimate) [K]."""
        return np.asarray(self._counts.events / self._sums(at)["risk"][:, 0])

    def score_numbers(self, at: Array) -> dict[str, Array]:
        """What clients need to know for the scores of their rows."""
        found = self._sums(at)
        terms = score_terms(self._p, self._counts, self._tied, found["risk"], found["ties"])
        return {**self._numbers, **terms}


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
    agreed: ColumnAgreement,
    scales: ColumnMoments,
    first: NewtonEvaluation,
    best: NewtonEvaluation,
    covariance: Array,
    ties: Ties,
    baseline: "pd.DataFrame | None",
) -> Regression:
    coding, n, p, share = agreed.coding, scales.total, len(best.at), 1.0
    robust = bool(coding.wanted.sample_weight)
    if robust:  # weights have any unit: as if they were 1 on average
        n, share = float(sum(agreed.rows.values())), sum(agreed.rows.values()) / scales.total
    return Regression(
        model="cox",
        outcome=coding.wanted.event,
        happened=coding.happened,
        names=coding.names,
        references=tuple((t.column, t.levels[0]) for t in coding.terms if t.levels),
        estimates=best.at / scales.scale,
        covariance=covariance / np.outer(scales.scale, scales.scale),
        statistic="z",
        freedom=n - p,
        ratio="hazard_ratio",
        loglik=share * best.loglik,
        null_loglik=share * first.loglik,
        deviance=None,
        null_deviance=None,
        dispersion=1.0,
        total=n,
        events=share * scales.y_sum,
        robust=robust,
        condition=condition(best.information, coding.names),
        rows=agreed.rows,
        dropped=agreed.dropped,
        rounds=exchange.rounds,
        floats=exchange.floats,
        ties=ties,
        baseline=baseline,
    )
