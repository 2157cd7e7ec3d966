"""Regressions, survival curves and meta-analyses of clients' tables, for Python."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from fedbayes.biostatistics.client import LocalClients, TableClient
from fedbayes.biostatistics.columns import Wanted, agree
from fedbayes.biostatistics.curves import Survival, fit_curves
from fedbayes.biostatistics.exchange import Carrier, Exchange, Packet
from fedbayes.biostatistics.families import FAMILIES, FamilyName
from fedbayes.biostatistics.generalized import fit_glm
from fedbayes.biostatistics.hazards import Ties, fit_cox
from fedbayes.biostatistics.meta import MetaAnalysis, Pooled, pool
from fedbayes.biostatistics.newton import of_condition
from fedbayes.biostatistics.results import Regression
from fedbayes.core.categories import normal
from fedbayes.errors import ConfigError, DataError, MessageError, not_among, warn

Clients = Mapping[str, Any] | Carrier
"""A DataFrame for each client by its name, or whatever carries questions to clients."""
CLIENT = "client"
"""What `strata` is where every client is a stratum of its own."""


def glm(
    clients: Clients,
    outcome: str,
    features: Sequence[str] = (),
    *,
    family: FamilyName = "gaussian",
    happened: str = "",
    categories: Sequence[str] = (),
    references: Mapping[str, str] | None = None,
    drop: Sequence[str] = (),
    weights: str = "",
    sample_weight: str = "",
    offset: str = "",
    exposure: str = "",
    drop_missing: bool = False,
    min_count: int = 0,
) -> Regression:
    """Fit a regression across clients; the coefficients equal those of the pooled rows.

    Args:
        clients: a DataFrame of each client by its name, or a carrier.
        outcome: the column that is explained.
        features: the columns that explain it; all others without.
        family: gaussian (linear), binomial (logistic) or poisson, with the canonical link.
        happened: binomial: which of the outcome's two values is the event; default 1, true, or
            the last one in order.
        categories: columns of numbers that are categories, or of text with more than 50.
        references: category by column that the others are compared with; default the first.
        drop: columns that are no features.
        weights: a column: how many rows each row stands for.
        sample_weight: a column: how much each row counts, in any unit, as after sampling with known
            probabilities. Standard errors are then of the sandwich estimator (HC0).
        offset: a column that is added to the linear predictor.
        exposure: a column whose logarithm is added to it.
        drop_missing: whether to leave out rows with a missing value; otherwise they raise an error.
        min_count: fewest rows of a client, and of a category at a client, of which it tells sums.

    Raises:
        FedbayesError: the data do not allow of the fit; the text names client and column.

    Examples:
        >>> import fedbayes, pandas as pd
        >>> columns = ["age", "days", "died"]
        >>> north = pd.DataFrame([[31, 9, 0], [45, 4, 1], [52, 7, 0], [60, 2, 1]], columns=columns)
        >>> south = pd.DataFrame([[38, 8, 1], [49, 6, 0], [58, 5, 1], [66, 3, 1]], columns=columns)
        >>> fit = fedbayes.glm({"north": north, "south": south}, outcome="days", features=["age"])
        >>> list(fit.names)
        ['intercept', 'age']
    """
    if family not in FAMILIES:
        raise ConfigError(not_among("family", family, FAMILIES))
    if happened and family != "binomial":
        raise ConfigError(f"happened has no effect on family = {family!r}. Leave it out")
    wanted = Wanted(
        outcome=outcome,
        two_valued=family == "binomial",
        counts=family == "poisson",
        happened=happened,
        features=tuple(features),
        categories=tuple(categories),
        references=tuple((references or {}).items()),
        weights=weights,
        sample_weight=sample_weight,
        offset=offset,
        exposure=exposure,
        drop_missing=drop_missing,
        least=min_count,
    )
    found = fit_glm(Exchange(carrier(clients, min_count)), wanted, family, tuple(map(normal, drop)))
    return _with_condition(found)


def cox(
    clients: Clients,
    time: str,
    event: str,
    features: Sequence[str] = (),
    *,
    ties: Ties = "efron",
    strata: str = "",
    happened: str = "",
    categories: Sequence[str] = (),
    references: Mapping[str, str] | None = None,
    drop: Sequence[str] = (),
    entry: str = "",
    weights: str = "",
    sample_weight: str = "",
    coarsen: float = 0.0,
    drop_missing: bool = False,
    min_count: int = 0,
) -> Regression:
    """Fit a Cox regression across clients; the coefficients equal those of the pooled rows.

    Args:
        clients: a DataFrame of each client by its name, or a carrier.
        time: the column with the time of the event, or until which there was none.
        event: the column that says whether it happened (1, true).
        features: the columns that explain it; all others without.
        ties: efron or breslow.
        strata: a column each of whose values has a baseline hazard of its own; or `client`: each
            client has, and no event times travel.
        happened: which of the event's two values means that it happened.
        categories: as for `glm`.
        references: as for `glm`.
        drop: columns that are no features.
        entry: a column with the time from which on a row is observed (left truncation): at an
            event time it is at risk if it entered before.
        weights: a column: how many rows each row stands for. Tied events after Efron share their
            mean weight, as in R's survival and in lifelines.
        sample_weight: a column: how much each row counts, in any unit. Standard errors are then of
            the sandwich estimator (Lin and Wei 1989).
        coarsen: times are rounded up to multiples of this, and entry times down.
        drop_missing: as for `glm`.
        min_count: as for `glm`.

    Raises:
        FedbayesError: the data do not allow of the fit; the text names client and column.

    Examples:
        >>> import fedbayes, pandas as pd
        >>> columns = ["age", "days", "died"]
        >>> north = pd.DataFrame([[31, 9, 0], [45, 4, 1], [52, 7, 0], [60, 2, 1]], columns=columns)
        >>> south = pd.DataFrame([[38, 8, 1], [49, 6, 0], [58, 5, 1], [66, 3, 1]], columns=columns)
        >>> fit = fedbayes.cox({"north": north, "south": south}, time="days", event="died")
        >>> list(fit.names)
        ['age']
    """
    if ties not in ("efron", "breslow"):
        raise ConfigError(not_among("ties", ties, ("efron", "breslow")))
    way = carrier(clients, min_count)
    wanted = Wanted(
        time=time,
        event=event,
        happened=happened,
        coarsen=coarsen,
        drop_missing=drop_missing,
        least=min_count,
        entry=entry,
        weights=weights,
        sample_weight=sample_weight,
        strata="" if strata == CLIENT else strata,
        features=tuple(features),
        categories=tuple(categories),
        references=tuple((references or {}).items()),
    )
    found = fit_cox(
        Exchange(way), wanted, ties, tuple(map(normal, drop)), strata_by_client=strata == CLIENT
    )
    return _with_condition(found)


def kaplan_meier(
    clients: Clients,
    time: str,
    event: str,
    *,
    by: str = "",
    happened: str = "",
    entry: str = "",
    weights: str = "",
    sample_weight: str = "",
    coarsen: float = 0.0,
    drop_missing: bool = False,
    min_count: int = 0,
) -> Survival:
    """Estimate survival curves, equal to those of the pooled rows, and a log-rank test.

    Args:
        clients: a DataFrame of each client by its name, or a carrier.
        time: the column with the time of the event, or until which there was none.
        event: the column that says whether it happened (1, true).
        by: a column of groups.
        happened: which of the event's two values means that it happened; it may be in no row.
        entry: as for `cox`.
        weights: a column: how many rows each row stands for.
        sample_weight: a column: how much each row counts, in any unit. Standard errors are then of
            the infinitesimal jackknife, and there is no log-rank test.
        coarsen: as for `cox`.
        drop_missing: as for `glm`.
        min_count: as for `glm`.

    Raises:
        FedbayesError: the data do not allow of it; the text names client and column.

    Examples:
        >>> import fedbayes, pandas as pd
        >>> columns = ["age", "days", "died"]
        >>> north = pd.DataFrame([[31, 9, 0], [45, 4, 1], [52, 7, 0], [60, 2, 1]], columns=columns)
        >>> south = pd.DataFrame([[38, 8, 1], [49, 6, 0], [58, 5, 1], [66, 3, 1]], columns=columns)
        >>> clients = {"north": north, "south": south}
        >>> found = fedbayes.kaplan_meier(clients, time="days", event="died")
        >>> list(found.curves)
        ['all']
    """
    wanted = Wanted(
        time=time,
        event=event,
        happened=happened,
        coarsen=coarsen,
        drop_missing=drop_missing,
        least=min_count,
        by=by,
        entry=entry,
        weights=weights,
        sample_weight=sample_weight,
    )
    return fit_curves(Exchange(carrier(clients, min_count)), wanted)


def meta_analysis(
    clients: Clients,
    outcome: str = "",
    features: Sequence[str] = (),
    *,
    family: Literal["gaussian", "binomial", "poisson", "cox"] = "gaussian",
    time: str = "",
    event: str = "",
    ties: Ties = "efron",
    happened: str = "",
    categories: Sequence[str] = (),
    references: Mapping[str, str] | None = None,
    drop: Sequence[str] = (),
    entry: str = "",
    weights: str = "",
    sample_weight: str = "",
    offset: str = "",
    exposure: str = "",
    coarsen: float = 0.0,
    drop_missing: bool = False,
    min_count: int = 0,
) -> MetaAnalysis:
    """Fit a regression at each client and combine the fits, with fixed and random effects.

    Clients send coefficients and standard errors alone. A client that has no fit of its own is left
    out, and named with the reason; so is a coefficient where it lacks the category.

    Args:
        clients: a DataFrame of each client by its name, or a carrier.
        outcome: as for `glm`.
        features: as for `glm`.
        family: as for `glm`, or cox.
        time: cox: as for `cox`.
        event: cox: as for `cox`.
        ties: cox: efron or breslow.
        happened: as for `glm`.
        categories: as for `glm`.
        references: as for `glm`.
        drop: as for `glm`.
        entry: cox: as for `cox`.
        weights: as for `glm`.
        sample_weight: as for `glm`.
        offset: as for `glm`.
        exposure: as for `glm`.
        coarsen: as for `cox`.
        drop_missing: as for `glm`.
        min_count: as for `glm`.

    Raises:
        FedbayesError: fewer than two clients have a fit, or a column is not there.

    Examples:
        >>> import fedbayes, pandas as pd
        >>> columns = ["age", "days", "died"]
        >>> north = pd.DataFrame([[31, 9, 0], [45, 4, 1], [52, 7, 0], [60, 2, 1]], columns=columns)
        >>> south = pd.DataFrame([[38, 8, 1], [49, 6, 0], [58, 5, 1], [66, 3, 1]], columns=columns)
        >>> found = fedbayes.meta_analysis({"north": north, "south": south}, outcome="days",
        ...                                features=["age"])
        >>> sorted(set(found.frame()["effects"]))
        ['fixed', 'random']
    """
    wanted = Wanted(
        outcome=outcome,
        two_valued=family == "binomial",
        counts=family == "poisson",
        time=time,
        event=event,
        happened=happened,
        features=tuple(features),
        categories=tuple(categories),
        references=tuple((references or {}).items()),
        entry=entry,
        weights=weights,
        sample_weight=sample_weight,
        offset=offset,
        exposure=exposure,
        coarsen=coarsen,
        drop_missing=drop_missing,
        least=min_count,
    )
    exchange = Exchange(carrier(clients, min_count))
    coding = agree(exchange, wanted, tuple(map(normal, drop))).coding
    grouped = [term for term in coding.terms if term.levels]
    same = coding.wanted.model_copy(
        update={
            "happened": coding.happened,
            "categories": tuple(term.column for term in grouped),
            "references": tuple((term.column, term.levels[0]) for term in grouped),
        }
    )
    answers = exchange.each("fit", {"wanted": same.model_dump(), "family": family, "ties": ties})
    own = {name: _own_fit(name, answer) for name, answer in answers.items()}
    fits = {name: fit for name, fit in own.items() if not fit.none}
    left_out = {name: fit.none for name, fit in own.items() if fit.none}
    if len(fits) < 2:
        why = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        if len(answers) < 2:
            why = "There is only one client. Fit its rows without --per-client (glm or cox)"
        raise DataError(f"fewer than two clients have their own fit. {why}")
    intercept = () if family == "cox" else ("intercept",)
    coefficients = {}
    for term in (*intercept, *coding.names):
        having = {name: fit.terms[term] for name, fit in fits.items() if term in fit.terms}
        if len(having) > 1:
            estimates, errors = zip(*having.values(), strict=True)
            coefficients[term] = pool(list(having), estimates, errors)
    ratio = "hazard_ratio" if family == "cox" else FAMILIES[family].ratio
    rows = {name: fit.rows for name, fit in fits.items()}
    explained = wanted.outcome or wanted.event
    return MetaAnalysis(family, ratio, coefficients, left_out, rows, explained, coding.happened)


class _OwnFit(BaseModel):
    """What a client says of a fit of its own rows."""

    none: str = ""
    """Why there is none."""
    names: list[str] = Field(default_factory=list)
    rows: int = Field(0, ge=0)
    terms: dict[str, tuple[float, float]] = Field(default_factory=dict)
    """Estimate and standard error of each coefficient."""


def _own_fit(name: str, answer: Packet) -> _OwnFit:
    try:
        own = _OwnFit.model_validate({**answer.told, "terms": {}})
        pairs = zip(
            answer.numbers.get("estimates", ()), answer.numbers.get("std_errors", ()), strict=True
        )
        values = [(float(estimate), float(error)) for estimate, error in pairs]
        terms = dict(zip(own.names, values, strict=True))
    except (ValidationError, ValueError, TypeError):
        raise MessageError(f"the answer of client {name} is incomplete: fit") from None
    return own.model_copy(update={"terms": terms})


def carrier(clients: Clients, least: int = 0) -> Carrier:
    """The way to clients: their DataFrames in this process, or what is a way already.

    Raises:
        DataError: it is neither.
    """
    if isinstance(clients, Mapping):
        names = [normal(name) for name in clients]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise DataError(f"two clients have the name '{twice}'. Give each its own name")
        tables = zip(names, clients.values(), strict=True)
        return LocalClients({name: TableClient(table, least) for name, table in tables})
    if not hasattr(clients, "ask"):
        raise DataError(
            f"clients is of type {type(clients).__name__}. Give a DataFrame for each client by "
            "its name, as in dict(list(table.groupby('site'))), or client_tables(files).tables"
        )
    return clients


def _with_condition(found: Regression) -> Regression:
    """The fit; a warning says which columns nearly depend on one another."""
    if said := of_condition(*found.condition):
        warn(said)
    return found


__all__ = [
    "MetaAnalysis",
    "Pooled",
    "Regression",
    "Survival",
    "cox",
    "glm",
    "kaplan_meier",
    "meta_analysis",
    "pool",
]
