"""What the columns of the clients' tables are, and how server and clients agree to code them.

A client says the names of its columns, and of those an analysis uses their kind, how many values
are missing, and the categories of text. The server puts these together: one `Coding` for all.
"""

import math
from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from fedbayes.biostatistics.exchange import Exchange, Packet
from fedbayes.core.categories import (
    alike,
    are_dates,
    name_of,
    normal,
    ordered,
    spelled_apart,
    truth_as_number,
)
from fedbayes.core.plausible import LONGEST_CATEGORY, MOST_ROWS
from fedbayes.errors import (
    ColumnError,
    ConfigError,
    DataError,
    EngineError,
    MessageError,
    did_you_mean,
)

if TYPE_CHECKING:
    import pandas as pd

MOST_LEVELS = 50
"""Categories that a column may have, unless it is named as a category."""
MOST_GROUPS = 100_000
"""Categories that a client may say of one column."""
ROLES = (
    *("outcome", "time", "entry", "event", "weights", "sample_weight", "offset", "exposure"),
    *("strata", "by"),
)
"""Settings of `Wanted` that name one column."""


def _as_name(value: object) -> object:
    """A column's name, which pandas has as a number where a file names no columns."""
    if isinstance(value, tuple):
        raise ConfigError(
            f"a column has the name {value}. Give each column one name, as in table.columns = "
            "table.columns.map('_'.join)"
        )
    return normal(value) if isinstance(value, str | Real) else value


Name = Annotated[str, BeforeValidator(_as_name)]
"""The name of a column or category: text in Unicode's form NFC, or a number."""


class Wanted(BaseModel):
    """Which columns an analysis uses, and as what."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    outcome: Name = ""
    """What is explained."""
    two_valued: bool = False
    """Whether the outcome is an event that happens or does not."""
    counts: bool = False
    """Whether the outcome is a number of events, 0 or more."""
    time: Name = ""
    entry: Name = ""
    """Survival: time from which on a row is observed (left truncation); empty: from 0 on."""
    event: Name = ""
    """Survival: the column that says whether the event happened at `time`, or observation ended."""
    happened: Name = ""
    """Which of two values of the outcome or event means that it happened; empty: 1 or true."""
    features: tuple[Name, ...] = ()
    categories: tuple[Name, ...] = ()
    """Features of numbers that are categories; or of text with many categories."""
    references: tuple[tuple[Name, Name], ...] = ()
    """Reference categories other than the first, by column."""
    weights: Name = ""
    """How many rows each row stands for."""
    sample_weight: Name = ""
    """How much each row counts, in any unit: it is one row all the same."""
    offset: Name = ""
    """What is added to the linear predictor."""
    exposure: Name = ""
    """Whose logarithm is added to the linear predictor."""
    strata: Name = ""
    by: Name = ""
    coarsen: float = 0.0
    """Times are rounded up to multiples of this; 0 leaves them as they are."""
    drop_missing: bool = False
    least: int = 0
    """Fewest rows of a client, and of a category at a client, of which it says anything."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.weights and self.sample_weight:
            raise ConfigError(
                f"weights = {self.weights!r} are numbers of rows and sample_weight = "
                f"{self.sample_weight!r} are sampling weights. Leave one of them out"
            )
        if not 0 <= self.coarsen < math.inf:
            raise ConfigError(f"coarsen is {self.coarsen:g}. Give 0, or a number above 0")
        return self

    @property
    def used(self) -> tuple[str, ...]:
        """All columns, each once."""
        named = [getattr(self, role) for role in ROLES]
        return tuple(dict.fromkeys([*filter(None, named), *self.features]))

    @property
    def binary(self) -> str:
        """The column of the event, if there is one."""
        return self.outcome if self.two_valued else self.event

    @property
    def groupings(self) -> tuple[str, ...]:
        """Columns that divide rows, whatever they hold."""
        return tuple(filter(None, (self.strata, self.by, *self.categories)))


class Term(BaseModel):
    """A feature, coded: one number, or an indicator of each level but the first."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    column: str
    levels: tuple[str, ...] = ()
    flag: bool = False
    """Whether it is a number that is 0 or 1."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the coefficients."""
        return tuple(f"{self.column}={level}" for level in self.levels[1:]) or (self.column,)


class Coding(BaseModel):
    """How every client turns its table into numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    wanted: Wanted
    terms: tuple[Term, ...]
    happened: str = ""
    """Text of the outcome or event that means that it happened; empty where it is 0 or 1."""
    groups: tuple[str, ...] = ()
    """Levels of the column `strata` or `by`."""

    @property
    def weighted(self) -> bool:
        """Whether rows have weights."""
        return bool(self.wanted.weights or self.wanted.sample_weight)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the coefficients, without the intercept."""
        return tuple(name for term in self.terms for name in term.names)


Level = Annotated[str, Field(max_length=LONGEST_CATEGORY)]


class Named(BaseModel):
    """A client's description of its table."""

    columns: list[str]


class CodedColumn(BaseModel):
    """A client's description of one column."""

    kind: Literal["number", "flag", "text", "date", "empty"]
    missing: int = Field(ge=0, le=MOST_ROWS)
    infinite: int = Field(0, ge=0, le=MOST_ROWS)
    levels: Annotated[list[Level], Field(max_length=MOST_GROUPS)] | int = Field(
        default_factory=list
    )
    """Categories; of too many their number."""


class ColumnDescription(BaseModel):
    """A client's description of the columns in use."""

    rows: int = Field(ge=0, le=MOST_ROWS)
    whole: int = Field(ge=0, le=MOST_ROWS)
    """Rows without a missing value."""
    columns: dict[str, CodedColumn]

    @model_validator(mode="after")
    def _of_rows(self) -> "ColumnDescription":
        counts = [n for c in self.columns.values() for n in (c.missing, c.infinite)]
        if max([self.whole, *counts]) > self.rows:
            raise ValueError("its counts exceed its number of rows")
        return self


Told = Mapping[str, ColumnDescription]
"""By client."""


def explained(column: str, happened: str) -> str:
    """The outcome of an analysis, as in `status = dead`; only the column if the value is 1."""
    return column if happened in ("", "1", "True") else f"{column} = {happened}"


def texts(column: "pd.Series[Any]") -> "pd.Series[Any]":
    """Values of a column as names of categories; missing ones as NaN."""
    import pandas as pd

    try:
        index, distinct = pd.factorize(column.astype(object))
    except TypeError:  # lists and the like have no hash
        raise DataError(
            f"column '{column.name}' has cells with several values. Leave it out"
        ) from None
    names = np.array([*map(name_of, distinct), np.nan], object)
    return pd.Series(names[index], index=column.index, dtype=object)


def outcomes(column: "pd.Series[Any]") -> "pd.Series[Any]":
    """Values of a column of events as names: true and false are 1 and 0, as other tables have
    them.
    """
    return texts(column).map(truth_as_number, na_action="ignore")


def kind_of(column: "pd.Series[Any]") -> str:
    """number, flag, text, date, or empty if no row has a value."""
    import pandas as pd

    if column.isna().all():
        return "empty"
    if isinstance(column.dtype, pd.CategoricalDtype):
        return "text"
    found = pd.api.types.infer_dtype(column, skipna=True)
    if found == "boolean":
        return "flag"
    if found in ("integer", "floating", "mixed-integer-float", "decimal"):
        return "number"
    return "date" if found.startswith(("date", "time", "period")) else "text"


def tell_names(frame: "pd.DataFrame") -> Packet:
    """A client's answer: the names of its columns."""
    return Packet({"columns": [str(name) for name in frame.columns]})


def describe(frame: "pd.DataFrame", wanted: Wanted) -> Packet:
    """A client's answer, of its table: a description of the columns of an analysis.

    Raises:
        EngineError: there are too few rows to say anything of them.
    """
    used = frame[list(wanted.used)]
    missing = used.isna()
    rows = used[~missing.any(axis=1)]
    if len(rows) < wanted.least:
        raise EngineError(
            f"it has {len(rows):,} complete rows, and the minimum is {wanted.least:,}"
        )
    told = {}
    for name in wanted.used:
        kind = kind_of(used[name])
        written = kind == "text" and name not in (*wanted.groupings, wanted.binary)
        if written and are_dates(texts(rows[name]).unique()):
            kind = "date"
        entry: dict[str, Any] = {"kind": kind, "missing": int(missing[name].sum())}
        if kind == "number":
            entry["infinite"] = int(np.isinf(rows[name].astype(float)).sum())
        grouping = name in wanted.groupings
        if name == wanted.binary or grouping or kind == "text":
            entry["levels"] = _levels(rows[name], name, wanted, grouping)
        told[name] = entry
    return Packet({"rows": len(used), "whole": len(rows), "columns": told})


def _levels(column: "pd.Series[Any]", name: str, wanted: Wanted, grouping: bool) -> list[str] | int:
    """The categories in a column; of too many their number alone."""
    names = outcomes(column) if name == wanted.binary else texts(column)
    counts = names.value_counts()
    most = 2 if name == wanted.binary else MOST_LEVELS
    if len(counts) > most and not grouping:
        return len(counts)
    if name != wanted.binary and len(counts) and counts.min() < wanted.least:
        raise EngineError(
            f"fewer than {wanted.least:,} of its rows have {name}={counts.idxmin()}. Combine rare "
            "categories, or leave the column out"
        )
    return list(ordered(set(counts.index)))


def agree(
    exchange: Exchange, wanted: Wanted, drop: tuple[str, ...] = (), *, every: bool = True
) -> "ColumnAgreement":
    """Ask the clients what their columns are, and settle how they are coded.

    Args:
        exchange: the way to the clients.
        wanted: which columns, and as what.
        drop: columns that are no features.
        every: whether all columns that are nothing else are features, where none is named. If
            not, there is nothing to explain, and the event may happen in no row.

    Raises:
        ColumnError: a client has no such column.
        DataError: columns differ between clients, values are missing, or the outcome is not of
            its kind; the text names column and client.
    """
    names = {c: named.columns for c, named in exchange.words("names", {}, Named).items()}
    wanted = _with_features(wanted, drop, names, every)
    for column in wanted.used:
        _require(column, wanted, names)
    told = exchange.words("columns", {"wanted": wanted.model_dump()}, ColumnDescription)
    for client, described in told.items():
        if set(described.columns) != set(wanted.used):
            raise MessageError(f"client {client} answered for columns that were not requested")
    _refuse_missing(wanted, told)
    terms = tuple(_term(column, wanted, told) for column in wanted.features)
    group = wanted.strata or wanted.by
    coding = Coding(
        wanted=wanted,
        terms=terms,
        happened=_happened(wanted, told, never=not every) if wanted.binary else "",
        groups=_union(group, told) if group else (),
    )
    for role in ("outcome", "time", "entry", "weights", "sample_weight", "offset", "exposure"):
        column = getattr(wanted, role)
        if column and column != wanted.binary:
            _number(column, role, told)
    all_names = ("intercept", *coding.names)
    if twice := [name for name in all_names if all_names.count(name) > 1]:
        raise DataError(f"two coefficients would have the name '{twice[0]}'. Rename a column")
    rows = {name: t.whole for name, t in told.items()}
    dropped = {name: t.rows - t.whole for name, t in told.items()}
    return ColumnAgreement(coding=coding, rows=rows, dropped=dropped)


class ColumnAgreement(BaseModel):
    """What server and clients have agreed upon, and the rows there are."""

    coding: Coding
    rows: dict[str, int]
    """Rows that count, by client."""
    dropped: dict[str, int]
    """Rows left out because a value is missing, by client."""


def _with_features(
    wanted: Wanted, drop: tuple[str, ...], names: Mapping[str, list[str]], every: bool
) -> Wanted:
    known = tuple(dict.fromkeys(column for columns in names.values() for column in columns))
    for column in drop:
        if column not in known:
            like = did_you_mean(column, known)
            raise ColumnError(f"drop lists '{column}', which is not a column{like}", column, "drop")
    taken = {getattr(wanted, role) for role in ROLES} | set(drop)
    if wanted.features:
        both = [column for column in wanted.features if column in taken]
        if both:
            raise DataError(
                f"features lists '{both[0]}', which is the outcome or has another role. Leave it "
                "out of features"
            )
    elif every:
        everywhere = tuple(column for column in known if column not in taken)
        wanted = wanted.model_copy(update={"features": everywhere})
    for column in (*wanted.categories, *(column for column, _ in wanted.references)):
        if column not in wanted.features:
            like = did_you_mean(column, wanted.features)
            raise DataError(f"'{column}' is listed as a category, but is not a feature{like}")
    return wanted


def _require(column: str, wanted: Wanted, names: Mapping[str, list[str]]) -> None:
    """See that all clients have a column."""
    lacking = next((client for client in names if column not in names[client]), None)
    if lacking is None:
        return
    having = next((client for client in names if column in names[client]), None)
    role = next((role for role in ROLES if getattr(wanted, role) == column), "features")
    like = did_you_mean(column, names[lacking])
    what = f"which {role} lists"
    if role == "features":
        what = "which is one of the features"
        if having is not None:
            what = f"which client {having} has: leave it out (--drop {column}), or add it to all"
    raise ColumnError(
        f"client {lacking} has no column '{column}'{like}, {what}; it has "
        f"{', '.join(names[lacking][:30])}",
        column,
        role,
        like,
    )


def _refuse_missing(wanted: Wanted, told: Told) -> None:
    """See that no value is missing, unless such rows are left out, nor infinite."""
    lacking = []
    for column in wanted.used:
        by_client = {c: t.columns[column].missing for c, t in told.items()}
        if count := sum(by_client.values()):
            where = ", ".join(f"{client}: {n:,}" for client, n in by_client.items() if n)
            lacking.append(f"{count:,} of '{column}' ({where})")
        for client, entry in told.items():
            if infinite := entry.columns[column].infinite:
                raise DataError(
                    f"client {client}: column '{column}' is infinite in {infinite:,} rows. "
                    "Correct them, or leave the column out"
                )
    rows, whole = (sum(getattr(t, key) for t in told.values()) for key in ("rows", "whole"))
    if lacking and not wanted.drop_missing:
        raise DataError(
            f"values are missing: {'; '.join(lacking)}. Leave out the {rows - whole:,} of "
            f"{rows:,} rows with --drop-missing (drop_missing=True), leave out the columns, or "
            "fill the values in first"
        )
    if not whole:
        raise DataError("no row is complete. Leave out the columns that are mostly empty")


def _kinds(column: str, told: Told) -> dict[str, str]:
    """Kind of a column by client, where it has values."""
    kinds = {client: t.columns[column].kind for client, t in told.items()}
    return {client: kind for client, kind in kinds.items() if kind != "empty"}


def _number(column: str, role: str, told: Told) -> None:
    for client, kind in _kinds(column, told).items():
        if kind not in ("number", "flag"):
            raise DataError(
                f"client {client}: column '{column}', which is the {role}, has {kind}, not numbers"
            )


def _term(column: str, wanted: Wanted, told: Told) -> Term:
    kinds = _kinds(column, told)
    if "date" in kinds.values():
        raise DataError(
            f"column '{column}' has dates. Convert them to numbers, such as days since a date, or "
            "leave it out"
        )
    if column in wanted.categories or set(kinds.values()) == {"text"}:
        levels = _union(column, told)
        reference = dict(wanted.references).get(column)
        if reference is not None and reference not in levels:
            like = did_you_mean(reference, levels)
            raise DataError(f"'{column}' has no category {reference!r}{like} for the reference")
        if len(levels) < 2:
            raise DataError(
                f"column '{column}' is {levels[0]!r} in all rows and explains nothing. Leave it out"
            )
        if reference is not None:
            levels = (reference, *(level for level in levels if level != reference))
        return Term(column=column, levels=levels)
    if column in dict(wanted.references):
        raise DataError(f"'{column}' has numbers. List it as a category to choose a reference")
    if "text" in kinds.values():
        text = next(client for client, kind in kinds.items() if kind == "text")
        number = next(client for client, kind in kinds.items() if kind != "text")
        raise DataError(
            f"column '{column}' has text at client {text} and numbers at client {number}. Correct "
            "it, or list it as a category"
        )
    return Term(column=column, flag=set(kinds.values()) == {"flag"})


def _union(column: str, told: Told) -> tuple[str, ...]:
    """The categories of a column at all clients."""
    levels: dict[str, list[str]] = {}
    for client, entry in told.items():
        own = entry.columns[column].levels
        if isinstance(own, int):
            raise DataError(
                f"column '{column}' has {own:,} different texts at client {client}, and a "
                f"category has at most {MOST_LEVELS}. Leave it out (--drop {column}), or list it "
                f"as a category (--category {column})"
            )
        levels[client] = own
    if apart := spelled_apart(levels):
        (one, here), (other, there) = apart
        raise DataError(
            f"column '{column}' has the category {here!r} at client {one}, which at client "
            f"{other} is {there!r}. Write it the same way at all clients, with a letter if "
            "programs read codes as numbers, as in c01"
        )
    truths = next((c for c, own in levels.items() if set(own) & {"True", "False"}), None)
    numbers = next((c for c, own in levels.items() if own and set(own) <= {"0", "1"}), None)
    if truths is not None and numbers is not None:
        raise DataError(
            f"column '{column}' has true and false at client {truths}, and 0 and 1 at client "
            f"{numbers}. Write it the same way at all clients"
        )
    return ordered({level for own in levels.values() for level in own})


def _happens_always_or_never(wanted: Wanted, only: str, *, never: bool) -> str:
    """Which text means that the event happened, where all rows have one; or empty."""
    if wanted.happened:
        asked = wanted.happened if wanted.happened == only else truth_as_number(wanted.happened)
        return asked if never or (wanted.event and asked == only) else ""
    if wanted.event and only == "1":
        return only
    return "1" if never and only == "0" else ""


def _happened(wanted: Wanted, told: Told, *, never: bool) -> str:
    """Which text of the outcome means that the event happened; empty where it is 1."""
    column = wanted.binary
    entries = {client: t.columns[column] for client, t in told.items()}
    many = next((c for c, e in entries.items() if isinstance(e.levels, int)), None)
    if many is not None:
        raise DataError(
            f"client {many}: column '{column}' has {entries[many].levels:,} different values, but "
            "an event needs two values"
        )
    levels = _union(column, told)
    if len(levels) == 1:
        if one := _happens_always_or_never(wanted, levels[0], never=never):
            return one
        way = "Give the value that means an event with --event-value" if never else ""
        raise DataError(
            f"'{column}' is {levels[0]!r} in all {sum(t.whole for t in told.values()):,} rows, so "
            f"there is nothing to explain. {way or 'take another column'}"
        )
    if len(levels) > 2:
        same = alike(levels)
        cases = (
            f": {' and '.join(same[0])} differ only in case. Write them the same way"
            if same
            else ""
        )
        raise DataError(f"'{column}' has the values {', '.join(levels)}; an event has two{cases}")
    if wanted.happened:
        asked = wanted.happened
        asked = asked if asked in levels else truth_as_number(asked)
        if asked not in levels:
            raise DataError(
                f"'{column}' is never {wanted.happened!r}. Its values are {', '.join(levels)}"
            )
        return asked
    if set(levels) <= {"0", "1"}:
        return levels[-1]
    if any(kind in ("number", "flag") for kind in _kinds(column, told).values()):
        raise DataError(
            f"'{column}' has the values {' and '.join(levels)}, not 0 and 1. Give the value that "
            f"means an event (--event-value {levels[-1]})"
        )
    return levels[-1]
