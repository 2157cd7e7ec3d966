"""Generalized linear models: clients send log-likelihood, gradient and Hessian of their rows."""

from collections.abc import Callable

import numpy as np

from fedbayes.biostatistics.columns import ColumnAgreement, Wanted, agree
from fedbayes.biostatistics.design import ColumnMoments, Design, moments
from fedbayes.biostatistics.exchange import Array, Exchange, Packet
from fedbayes.biostatistics.families import FAMILIES
from fedbayes.biostatistics.newton import NewtonEvaluation, condition, maximize, packed, unpacked
from fedbayes.biostatistics.results import Regression
from fedbayes.errors import DataError

_INFINITE = {
    "gaussian": "",
    "binomial": "These columns separate the outcomes: fitted probabilities reach 0 or 1 "
    "(separation), so no finite coefficients maximize the likelihood. Leave one of them out, "
    "or combine categories.",
    "poisson": "Some values of these columns have only counts of 0, so no finite coefficients "
    "maximize the likelihood. Leave one of them out, or combine categories.",
}


def tell_fit(data: Design, family: str, numbers: dict[str, Array]) -> Packet:
    """A client's answer: sums over its rows at some coefficients of scaled columns.

    Args:
        data: its rows.
        family: name of the family.
        numbers: coefficients `at` [p + 1], the intercept first; `center` and `scale` of the
            columns [p]; `outcome`, center and scale of the outcome.
    """
    kind, at = FAMILIES[family], numbers["at"]
    x, y, offset = _coded(data, family, numbers)
    with np.errstate(over="ignore", invalid="ignore"):
        eta = x @ at + offset
        mu, w = kind.mean(eta), data.weights
        hessian = x.T @ (x * (w * kind.variance(mu))[:, None])
        return Packet(
            numbers={
                "loglik": np.array([w @ kind.loglik(y, eta), w @ kind.deviance(y, eta)]),
                "gradient": x.T @ (w * (y - mu)),
                "hessian": packed(hessian),
            }
        )


def tell_fit_scores(data: Design, family: str, numbers: dict[str, Array]) -> Packet:
    """A client's answer for standard errors that hold whatever weights are: Σ w² u uᵀ over its
    rows, of their scores u = (y − μ) x [(p + 1) (p + 2) / 2]; arguments as for `tell_fit`.
    """
    x, y, offset = _coded(data, family, numbers)
    away = data.weights * (y - FAMILIES[family].mean(x @ numbers["at"] + offset))
    scores = x * away[:, None]
    return Packet(numbers={"meat": packed(scores.T @ scores)})


def _coded(data: Design, family: str, numbers: dict[str, Array]) -> tuple[Array, Array, Array]:
    """Features with an intercept [n, p + 1], outcome and offset [n], as they are fitted."""
    scaled = data.scaled(numbers["center"], numbers["scale"])
    x = np.concatenate([np.ones((len(data.y), 1)), scaled], axis=1)
    y, offset = data.y, data.offset
    if family == "gaussian":
        y, offset = (y - offset - numbers["outcome"][0]) / numbers["outcome"][1], 0.0 * offset
    return x, y, offset


def fit_glm(
    exchange: Exchange, wanted: Wanted, family: str, drop: tuple[str, ...] = ()
) -> Regression:
    """Fit a generalized linear model with an intercept.

    Args:
        exchange: the way to the clients.
        wanted: outcome and features.
        family: gaussian, binomial or poisson, with the canonical link.
        drop: columns that are no features.

    Raises:
        DataError: the columns do not allow of a fit; the text names them.
    """
    agreed = agree(exchange, wanted, drop)
    scales = moments(exchange, agreed.coding)
    if family != "binomial" and scales.y_scale == 0:
        raise DataError(
            f"the outcome '{wanted.outcome}' is {scales.y_mean:g} in all rows, so there is nothing "
            "to explain. Choose another column"
        )
    if family != "gaussian":
        refuse_empty_levels(agreed, scales, all_too=family == "binomial", outcome=wanted.outcome)
    p = len(agreed.coding.names) + 1
    if scales.total <= p:
        raise DataError(
            f"{p} coefficients cannot be fitted to {scales.total:g} rows. Use fewer features"
        )
    outcome = (scales.y_mean, scales.y_scale) if family == "gaussian" else (0.0, 1.0)
    numbers = {"center": scales.mean, "scale": scales.scale, "outcome": np.array(outcome)}
    told = {"coding": agreed.coding.model_dump(), "family": family}
    shapes = {"loglik": (2,), "gradient": (p,), "hessian": (p * (p + 1) // 2,)}

    def evaluate(at: Array) -> NewtonEvaluation:
        found = exchange.sum("glm", told, {**numbers, "at": at}, shapes, finite=False)
        loglik, deviance = found["loglik"]
        hessian = unpacked(found["hessian"], p)
        return NewtonEvaluation(at, float(loglik), found["gradient"], hessian, float(deviance))

    offset = bool(wanted.offset or wanted.exposure)
    null = _intercept_alone(evaluate, scales, family, p, offset=offset)
    names = ("intercept", *agreed.coding.names)
    quadratic = family == "gaussian"
    first, best = maximize(
        evaluate, null, names, _INFINITE[family], rows=scales.total, quadratic=quadratic
    )
    covariance: Array = np.asarray(np.linalg.inv(best.information), np.float64)
    if wanted.sample_weight:
        told_meat = {"meat": (p * (p + 1) // 2,)}
        found = exchange.sum("glm_scores", told, {**numbers, "at": best.at}, told_meat)
        covariance = np.asarray(covariance @ unpacked(found["meat"], p) @ covariance)
    return _result(exchange, agreed, scales, family, first, best, covariance)


def refuse_empty_levels(
    agreed: ColumnAgreement, scales: ColumnMoments, *, all_too: bool, outcome: str
) -> None:
    """See that coefficients of categories are finite, or raise a DataError."""
    # The outcome must occur in some row of each, and be absent in one with `all_too`.
    start = 0
    for term in agreed.coding.terms:
        part = slice(start, start + len(term.names))
        start = part.stop
        if not term.levels and not term.flag:
            continue
        rows, events = scales.total * scales.mean[part], scales.xy[part]
        rows = np.concatenate([[scales.total - rows.sum()], rows])
        events = np.concatenate([[scales.y_sum - events.sum()], events])
        for level, count, happened in zip(
            term.levels or ("False", "True"), rows, events, strict=True
        ):
            never, always = abs(happened) < 1e-9, all_too and abs(count - happened) < 1e-6
            if count > 0.5 and (never or always):
                raise DataError(
                    f"'{outcome}' {'never' if never else 'always'} happens in the {count:,.0f} "
                    f"rows with {term.column}={level} (separation), so its coefficient is "
                    f"infinite. Combine the category with another one, or leave '{term.column}' "
                    "out"
                )


def _intercept_alone(
    evaluate: Callable[[Array], NewtonEvaluation],
    scales: ColumnMoments,
    family: str,
    p: int,
    *,
    offset: bool,
) -> Array:
    """Coefficients of the model of an intercept alone, and perhaps an offset [p]."""
    kind = FAMILIES[family]
    start = np.zeros(p)
    if family == "gaussian":
        start[0] = -scales.offset / scales.total / scales.y_scale
        return start
    if family == "poisson":
        start[0] = kind.link(scales.y_sum / scales.exposure)
        return start
    start[0] = kind.link(scales.y_mean)
    if not offset:
        return start

    def restricted(at: Array) -> NewtonEvaluation:
        found = evaluate(np.concatenate([at, start[1:]]))
        return NewtonEvaluation(at, found.loglik, found.gradient[:1], found.information[:1, :1])

    best = maximize(restricted, start[:1], ("intercept",), _INFINITE[family], rows=scales.total)[1]
    start[0] = best.at[0]
    return start


def _result(
    exchange: Exchange,
    agreed: ColumnAgreement,
    scales: ColumnMoments,
    family: str,
    first: NewtonEvaluation,
    best: NewtonEvaluation,
    covariance: Array,
) -> Regression:
    """The fit in the columns' own units."""
    p, n = len(best.at), scales.total
    robust = bool(agreed.coding.wanted.sample_weight)
    share = 1.0
    if robust:  # weights have any unit: as if they were 1 on average
        n, share = float(sum(agreed.rows.values())), sum(agreed.rows.values()) / scales.total
    transform, at = scales.transform, best.at
    loglik, null = share * best.loglik, share * first.loglik
    deviance, null_deviance, dispersion = share * best.deviance, share * first.deviance, 1.0
    if family == "gaussian":
        at = at * scales.y_scale
        at[0] += scales.y_mean
        deviance, null_deviance = (d * scales.y_scale**2 for d in (deviance, null_deviance))
        dispersion = deviance / (n - p)
        loglik, null = (-n / 2 * (np.log(2 * np.pi * d / n) + 1) for d in (deviance, null_deviance))
        covariance = covariance * (scales.y_scale**2 if robust else dispersion)
    return Regression(
        model=family,
        outcome=agreed.coding.wanted.outcome,
        happened=agreed.coding.happened,
        names=("intercept", *agreed.coding.names),
        references=tuple((t.column, t.levels[0]) for t in agreed.coding.terms if t.levels),
        estimates=transform @ at,
        covariance=transform @ covariance @ transform.T,
        statistic="t" if family == "gaussian" else "z",
        freedom=n - p,
        ratio=FAMILIES[family].ratio,
        loglik=float(loglik),
        null_loglik=float(null),
        deviance=float(deviance),
        null_deviance=float(null_deviance),
        dispersion=float(dispersion),
        total=n,
        events=share * scales.y_sum if family == "binomial" else None,
        robust=robust,
        condition=condition(best.information, ("intercept", *agreed.coding.names)),
        rows=agreed.rows,
        dropped=agreed.dropped,
        rounds=exchange.rounds,
        floats=exchange.floats,
    )
