"""A regression, survival curves or a meta-analysis, from settings and files to a result."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fedbayes.biostatistics import (
    Carrier,
    LocalClients,
    MetaAnalysis,
    Packet,
    Regression,
    Survival,
    TableClient,
    cox,
    glm,
    kaplan_meier,
    meta_analysis,
)
from fedbayes.config.config import Config
from fedbayes.core.files import writable, write_beside
from fedbayes.errors import ConfigError, warn
from fedbayes.workflows.studies.client_tables import ClientTables, client_tables

TABLES = (".csv", ".json")
"""Formats of a result as a file."""
Asked = Callable[[int, str], object]
"""Called with the number of a round, and the question of the round."""


_FITS: dict[str, Callable[..., Regression | Survival]] = {
    "glm": glm,
    "cox": cox,
    "km": kaplan_meier,
}


@dataclass(frozen=True)
class StudySite:
    """Where the clients are."""

    files: Sequence[Path] = ()
    """Their tables, or a config with a `[data]` table."""
    settings: Sequence[str] = ()
    """Settings as `key=value`."""
    group: str | None = None
    """The column that names the client of a row."""
    engine: Literal["sequential", "flower-simulation"] = "sequential"
    superlink: str | None = None
    """HOST:PORT; the clients are nodes there."""
    clients: int | None = None
    """How many there are at the SuperLink."""
    certificates: Path | None = None
    insecure: bool = False
    secret: Path | None = None
    timeout: float = 600.0
    """Seconds that a round over a network may take."""
    secure: bool = False
    """Whether the server sees sums over clients alone, by secure aggregation."""


@dataclass(frozen=True)
class Study:
    """What is fitted to the tables of clients, wherever they are; `fedbayes stats`."""

    place: StudySite
    columns: Mapping[str, Any]
    """Arguments of `glm`, `cox`, `kaplan_meier` or `meta_analysis`, but for the clients."""
    kind: Literal["glm", "cox", "km"]
    by_client: bool = False
    """Whether to report each client's own fit, and a meta-analysis of them."""
    level: float = 0.95
    out: Path | None = None
    """File to write the result to."""
    figure: Path | None = None
    """File to draw it into."""
    asked: Asked = field(default=lambda number, what: None)

    def run(self) -> Regression | Survival | MetaAnalysis:
        """Read, fit, draw and write.

        Raises:
            FedbayesError: what is wrong with an option, a file or a column.
        """
        if not 0 < self.level < 1:
            raise ConfigError(
                f"--level is {self.level:g}. Give a number between 0 and 1, such as 0.95"
            )
        if self.out is not None:
            writable(self.out, "the result", TABLES, self.place.files)
        if self.figure is not None:
            from fedbayes.data.plot import PICTURES

            writable(self.figure, "the figure", PICTURES)
        with self._clients() as (clients, tables):
            found = self._fit(_Told(clients, self.asked), tables)
        if isinstance(found, MetaAnalysis):
            for name, reason in found.left_out.items():
                _note(f"client {name} has no own fit and is left out: {reason}")
        else:
            _tell_dropped(found.dropped)
        if self.figure is not None:
            from fedbayes.reports.biostatistics import plot_forest, plot_survival

            if isinstance(found, Survival):
                plot_survival(found, self.figure, self.level)
            else:
                plot_forest(found, self.figure, self.level)
        if self.out is not None:
            write_beside(self.out, self._written(found).encode())
        return found

    def _fit(
        self, clients: Carrier, tables: ClientTables | None
    ) -> Regression | Survival | MetaAnalysis:
        columns = dict(self.columns)
        if tables is not None and tables.group:
            _refuse_group(columns, tables)
        if tables is not None and tables.drop_missing:
            columns["drop_missing"] = True
        if tables is not None and self.kind != "km":
            columns["features"] = columns["features"] or tables.features
            columns["drop"] = tuple(dict.fromkeys([*columns["drop"], *tables.drop]))
            others = {*columns["drop"], *(v for v in columns.values() if isinstance(v, str))}
            named = [c for c in tables.categories if c not in others | {tables.outcome}]
            if columns["features"]:
                named = [c for c in named if c in columns["features"]]
            columns["categories"] = tuple(dict.fromkeys([*columns["categories"], *named]))
        if self.kind == "glm":
            columns["outcome"] = columns["outcome"] or (tables.outcome if tables else "")
            if not columns["outcome"]:
                raise ConfigError("the outcome is missing. Give its column with --outcome")
        if self.by_client:
            return meta_analysis(clients, **columns)
        return _FITS[self.kind](clients, **columns)

    @contextmanager
    def _clients(self) -> Iterator[tuple[Carrier, ClientTables | None]]:
        """The way to the clients, and their tables where they are here."""
        place, least = self.place, int(self.columns["min_count"])
        if place.secure and self.by_client:
            raise ConfigError(
                "--per-client shows each client's own fit, which --secure hides. Leave one of "
                "them out"
            )
        if place.secure and place.superlink is None and place.engine == "sequential":
            raise ConfigError(
                "--secure has no effect if all tables are in one process. Add --superlink, or "
                "try it with --engine flower-simulation"
            )
        if place.superlink is not None:
            if place.files or place.group:
                raise ConfigError(
                    "with --superlink the nodes have the tables. Leave the files and --group out"
                )
            if place.clients is None:
                raise ConfigError(
                    "the number of clients at the SuperLink is missing. Give it with --clients"
                )
            from fedbayes.flower import superlink_at

            link = superlink_at(place.superlink, place.certificates, place.insecure, place.secret)
            from fedbayes.flower.sums import linked_nodes

            nodes = linked_nodes(link, place.clients, place.timeout, secure=place.secure)
            try:
                yield nodes, None
            finally:
                nodes.close()
            return
        if place.clients is not None:
            raise ConfigError(
                "--clients works only with --superlink. Without it, clients are the files, or "
                "the values of --group"
            )
        tables = self._tables()
        if place.engine == "sequential":
            clients = {name: TableClient(table, least) for name, table in tables.tables.items()}
            yield LocalClients(clients), tables
            return
        from fedbayes.flower import require_flower

        require_flower()
        from fedbayes.flower.sums import simulated_nodes

        nodes = simulated_nodes(tables.tables, least, place.timeout, secure=place.secure)
        try:
            yield nodes, tables
        finally:
            nodes.close()

    def _tables(self) -> ClientTables:
        given = list(self.place.settings)
        if self.place.group is not None:
            given.append(f"data.group={json.dumps(self.place.group)}")
        settled = Config.load_any(self.place.files, given)
        if "data" not in settled.model_fields_set:
            raise ConfigError(
                "the clients' tables are missing. Give one file with --group, a file for each "
                "client, or a config with a [data] table"
            )
        if self.out is not None:
            writable(self.out, "the result", TABLES, [settled.data.path, *settled.data.more])
        dividing = (self.columns.get(role) or "" for role in ("strata", "by"))
        categories = (*self.columns.get("categories", ()), *filter(None, dividing))
        return client_tables((), settled.data, settled.seed, categories=categories)

    def _written(self, found: Regression | Survival | MetaAnalysis) -> str:
        """The result as the content of a file."""
        assert self.out is not None
        if self.out.suffix.lower() == ".json":
            return json.dumps(found.to_dict(self.level), indent=2) + "\n"
        return str(found.frame(self.level).to_csv(index=isinstance(found, Regression)))


class _Told:
    """A carrier that reports its questions."""

    def __init__(self, carrier: Carrier, asked: Asked) -> None:
        self._carrier, self._asked, self._round = carrier, asked, 0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the clients."""
        return self._carrier.names

    def ask(self, question: Packet, most: int) -> dict[str, Packet]:
        """The answers of all clients."""
        self._round += 1
        self._asked(self._round, str(question.told["ask"]).replace("_", " "))
        return self._carrier.ask(question, most)


_ONE = (
    *("outcome", "weights", "sample_weight", "offset", "exposure", "time", "entry", "event"),
    *("by", "strata"),
)
"""Arguments that name a column."""
_SEVERAL = ("features", "categories")
"""And those that name several."""


def _refuse_group(columns: Mapping[str, Any], tables: ClientTables) -> None:
    """See that no column is the one that names a row's client: clients' tables have none."""
    group = tables.group
    for name in (*_ONE, *_SEVERAL):
        value = columns.get(name) or ()
        own = name == "strata" and value == "client"  # of each client
        if own or group not in ((value,) if name in _ONE else value):
            continue
        otherwise = ". For a baseline per client, use --strata client"
        raise ConfigError(
            f"{name} is '{group}', the column of clients (--group), which clients' tables do not "
            "contain. Add a second column with the same values, and give "
            f"that{otherwise if name == 'strata' else ''}"
        )


def _tell_dropped(dropped: Mapping[str, int]) -> None:
    some = {name: count for name, count in dropped.items() if count}
    if some:
        where = ", ".join(f"{name}: {count:,}" for name, count in some.items())
        _note(f"{sum(some.values()):,} rows are left out, because values are missing ({where})")


def _note(text: str) -> None:
    warn(text)
