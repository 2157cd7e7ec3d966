"""Kaplan-Meier curves by summed counts, and log-rank tests between groups."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import stats

from fedbayes.biostatistics.columns import Coding, Wanted, agree, explained
from fedbayes.biostatistics.exchange import Array, Exchange
from fedbayes.biostatistics.times import EventTimes, event_times
from fedbayes.core.brief import Brief

if TYPE_CHECKING:
    import pandas as pd

_ROUNDING = 1e-12
"""By which a product of shares may be off."""


@dataclass(frozen=True, repr=False)
class Curve(Brief):
    """The survival curve of one group, at the K times at which its events happen.

    Examples:
        >>> import pandas as pd
        >>> from fedbayes import kaplan_meier
        >>> from fedbayes.biostatistics import Curve
        >>> sites = {
        ...     "north": pd.DataFrame({"days": [5, 8, 12], "died": [1, 0, 1], "age": [60, 50, 70]}),
        ...     "south": pd.DataFrame({"days": [4, 9, 30], "died": [1, 1, 1], "age": [72, 66, 51]}),
        ... }
        >>> (curve,) = kaplan_meier(sites, "days", "died").curves.values()
        >>> curve.times.tolist()
        [4.0, 5.0, 9.0, 12.0, 30.0]
    """

    times: Array
    at_risk: Array
    """Rows at risk just before each time [K]."""
    events: Array
    variance: Array | None = None
    """Variance of log S just after each time [K], where it is not Greenwood's."""

    @property
    def survival(self) -> Array:
        """Kaplan and Meier's (1958) estimate Π (1 − d / n) just after each time [K]."""
        return np.asarray(np.cumprod(1 - self.events / self.at_risk))

    @property
    def std_errors(self) -> Array:
        """Greenwood's (1926) S √Σ d / (n (n − d)) [K]; 0 where the curve has come to 0."""
        left = self.survival > 0
        return np.where(left, self.survival * np.sqrt(np.where(left, self._sum, 0.0)), 0.0)

    @property
    def _sum(self) -> Array:
        """The variance of log S [K]: Greenwood's Σ d / (n (n − d)), unless there is another."""
        if self.variance is not None:
            return self.variance
        left = self.at_risk - self.events
        terms = np.divide(
            self.events, self.at_risk * left, out=np.full(len(left), np.inf), where=left > 0
        )
        return np.asarray(np.cumsum(terms))

    def intervals(self, level: float = 0.95) -> Array:
        """Confidence intervals [K, 2], by Greenwood's variance on the scale of log(−log S), which
        keeps them within 0 and 1 (Kalbfleisch and Prentice 2002); (0, 0) where the curve has come
        to 0.
        """
        z = float(stats.norm.ppf((1 + level) / 2))
        with np.errstate(divide="ignore", invalid="ignore"):
            log = np.log(self.survival)
            half = z * np.sqrt(self._sum) / log
            bounds = np.stack([np.exp(log * np.exp(-half)), np.exp(log * np.exp(half))], axis=1)
        bounds[self.survival <= 0] = 0.0
        return np.asarray(bounds)

    def median(self, level: float = 0.95) -> tuple[float, float, float]:
        """The first time at which survival is at most a half, and where its interval's ends are;
        infinity where they are not reached.
        """
        low, high = self.intervals(level).T

        def first(values: Array) -> float:
            reached = np.flatnonzero(values <= 0.5 + _ROUNDING)
            return float(self.times[reached[0]]) if len(reached) else float("inf")

        return first(self.survival), first(low), first(high)


@dataclass(frozen=True, repr=False)
class LogRank(Brief):
    """A test whether G groups survive alike."""

    chi2: float
    degrees: int
    p: float
    observed: Mapping[str, float]
    """Events by group."""
    expected: Mapping[str, float]
    """Events by group if all survived alike."""


@dataclass(frozen=True, repr=False)
class Survival(Brief):
    """Kaplan-Meier curves of all clients' rows together.

    Examples:
        >>> import pandas as pd
        >>> from fedbayes import kaplan_meier
        >>> from fedbayes.biostatistics import Survival
        >>> sites = {
        ...     "north": pd.DataFrame({"days": [5, 8, 12], "died": [1, 0, 1], "age": [60, 50, 70]}),
        ...     "south": pd.DataFrame({"days": [4, 9, 30], "died": [1, 1, 1], "age": [72, 66, 51]}),
        ... }
        >>> kaplan_meier(sites, "days", "died").test is None
        True
    """

    event: str
    """The column that says whether the event happened."""
    happened: str
    """Its value that means that it did."""
    by: str
    """The column of the groups; empty without."""
    curves: Mapping[str, Curve]
    """By group; of all rows, under `all`, without groups."""
    test: LogRank | None
    """Between the groups, if there are several."""
    rows: Mapping[str, int]
    """Rows by client."""
    dropped: Mapping[str, int]
    rounds: int
    floats: int
    """Numbers that the client which sent most has sent."""

    def frame(self, level: float = 0.95) -> "pd.DataFrame":
        """A DataFrame with a row for each group and event time; a group without events has one at
        time 0, without a number at risk.

        Args:
            level: of the confidence intervals.

        Returns:
            Columns group, time, at_risk, events, survival, std_error, low and high.
        """
        import pandas as pd

        frames = []
        for name, curve in self.curves.items():
            low, high = curve.intervals(level).T
            columns = {
                "group": name,
                "time": curve.times,
                "at_risk": _whole(curve.at_risk),
                "events": _whole(curve.events),
                "survival": curve.survival,
                "std_error": curve.std_errors,
                "low": low,
                "high": high,
            }
            if not len(curve.times):
                start = (name, 0.0, pd.NA, 0, 1.0, 0.0, 1.0, 1.0)
                columns = {key: [one] for key, one in zip(columns, start, strict=True)}
                columns["at_risk"] = pd.array(columns["at_risk"], "Int64")
            frames.append(pd.DataFrame(columns))
        return pd.concat(frames, ignore_index=True)

    def heading(self) -> str:
        """A heading of one line for the curves."""
        return (
            f"time to {explained(self.event, self.happened)}: {sum(self.rows.values()):,} rows of "
            f"{len(self.rows)} clients"
        )

    def to_dict(self, level: float = 0.95) -> dict[str, Any]:
        """All of it as JSON has it; infinite medians, which were not reached, as null."""
        found: dict[str, Any] = {
            "event": self.event,
            "happened": self.happened,
            "by": self.by or None,
            "confidence_level": level,
            "curves": {},
            "rows": dict(self.rows),
            "dropped": dict(self.dropped),
            "rounds": self.rounds,
            "floats_sent": self.floats,
        }
        frame = self.frame(level)
        for name, curve in self.curves.items():
            median = [None if np.isinf(time) else time for time in curve.median(level)]
            mine = frame[(frame["group"] == name) & (frame["events"] > 0)].drop(columns="group")
            found["curves"][name] = {
                **{str(key): column.tolist() for key, column in mine.items()},
                "median": median[0],
                "median_interval": median[1:],
            }
        if self.test is not None:
            test = self.test
            found["logrank"] = {
                "chi2": test.chi2,
                "degrees": test.degrees,
                "p": test.p,
                "observed": dict(test.observed),
                "expected": dict(test.expected),
            }
        return found

    def summary(self) -> str:
        """In a few lines, how many survive how long."""
        lines = [self.heading()]
        for name, curve in self.curves.items():
            median, low, high = curve.median()
            lines.append(
                f"{name}: {curve.events.sum():,.0f} events, median {median:g} ({low:g} to {high:g})"
            )
        if self.test is not None:
            test = self.test
            lines.append(
                f"log-rank test: chi2 {test.chi2:.4f}, {test.degrees} degrees of freedom, "
                f"p {test.p:.4g}"
            )
        return "\n".join(lines)


def fit_curves(exchange: Exchange, wanted: Wanted) -> Survival:
    """Kaplan-Meier curves, and with groups (`wanted.by`) a log-rank test.

    Clients send their distinct event times, and how many of their rows are at risk and have an
    event at each time of the union. So the counts are those of the pooled rows. With
    `wanted.sample_weight` they are sums of weights, standard errors are those of the infinitesimal
    jackknife, and there is no test.

    Raises:
        DataError: the columns do not allow of it.
    """
    agreed = agree(exchange, wanted, every=False)
    groups = agreed.coding.groups or ("all",)
    found = event_times(exchange, agreed.coding, shared=True)
    robust = bool(wanted.sample_weight)
    variance = _variance(exchange, agreed.coding, found) if robust else found.events
    times = found.times.reshape(len(groups), -1)[0]
    at_risk, events, variance = (
        a.reshape(len(groups), -1) for a in (found.at_risk, found.events, variance)
    )
    curves = {}
    for group, name in enumerate(groups):
        there = events[group] > 0
        curve = Curve(times[there], at_risk[group][there], events[group][there])
        curves[name] = replace(curve, variance=variance[group][there]) if robust else curve
    return Survival(
        event=wanted.event,
        happened=agreed.coding.happened,
        by=wanted.by,
        curves=curves,
        test=_logrank(groups, at_risk, events) if len(groups) > 1 and not robust else None,
        rows=agreed.rows,
        dropped=agreed.dropped,
        rounds=exchange.rounds,
        floats=exchange.floats,
    )


def _whole(counts: Array) -> Any:
    """Counts as whole numbers, unless weights make them others."""
    return counts.astype(np.int64) if np.array_equal(counts, np.rint(counts)) else counts


def _variance(exchange: Exchange, coding: Coding, found: EventTimes) -> Array:
    """The variance of log S at each event time, whatever weights are [K]."""
    if not len(found.times):
        return found.events
    numbers = {name: getattr(found, name) for name in ("times", "groups", "at_risk", "events")}
    shapes = {"variance": (len(found.times),)}
    told = {"coding": coding.model_dump()}
    return exchange.sum("influence", told, numbers, shapes)["variance"]


def _logrank(groups: tuple[str, ...], at_risk: Array, events: Array) -> LogRank:
    """Mantel's (1966) test; counts are [G, K].

    The events of a group at a time are hypergeometric given all that happen there, d of n: their
    mean is d n_g / n, their covariance d (n − d) / (n − 1) (δ_gh n_g / n − n_g n_h / n²).
    """
    n, d = at_risk.sum(axis=0), events.sum(axis=0)
    share = at_risk / n
    expected = (share * d).sum(axis=1)
    factor = np.where(n > 1, d * (n - d) / np.maximum(n - 1, 1), 0.0)
    covariance = np.diag((share * factor).sum(axis=1)) - (share * factor) @ share.T
    away = events.sum(axis=1) - expected
    degrees = len(groups) - 1
    chi2 = float(away[:-1] @ np.linalg.pinv(covariance[:-1, :-1]) @ away[:-1])
    return LogRank(
        chi2=chi2,
        degrees=degrees,
        p=float(stats.chi2.sf(chi2, degrees)),
        observed=dict(zip(groups, events.sum(axis=1).tolist(), strict=True)),
        expected=dict(zip(groups, expected.tolist(), strict=True)),
    )
