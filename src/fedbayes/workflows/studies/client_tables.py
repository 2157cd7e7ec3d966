"""The clients' tables behind a `[data]` table or files, as pandas has them, for biostatistics."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedbayes.core.brief import Brief
from fedbayes.core.categories import without_blanks
from fedbayes.core.wording import listed
from fedbayes.data import DataSettings, load_dataset, partition
from fedbayes.data.sources.labels import group_indices
from fedbayes.data.sources.sql import WHERE, read_query
from fedbayes.data.sources.tables import (
    UNNAMED,
    client_files,
    has_row_numbers,
    read_table,
)
from fedbayes.errors import ColumnError, ConfigError, DataError, did_you_mean, warn

_DIVIDING = ("partition", "alpha", "clients", "class_counts", "limit", "samples_per_client")
"""Settings of how rows are divided among clients, which tables of one's own say themselves."""
_FEATURES = (
    "numeric",
    "dates",
    "date_format",
    "text",
    "text_width",
    "max_categories",
    "scale",
    "standardize",
)
"""Settings of how columns become inputs of a network."""
_PARTS = ("test", "official_test", "limit_test", "test_counts", "min_samples", "validation")
"""Settings of how rows are divided into parts, all of which count here."""


@dataclass(frozen=True, repr=False)
class ClientTables(Brief):
    """A table for each client, and what the settings say of its columns."""

    tables: dict[str, Any]
    """DataFrames by client."""
    outcome: str = ""
    """The column that is to be predicted, if the settings name one."""
    features: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    """Columns that are categories, whatever they hold."""
    drop_missing: bool = False
    """Whether the settings leave rows with missing values out."""
    group: str = ""
    """The column that named the client of a row, which the tables do not contain."""


def client_tables(
    files: Path | str | Sequence[Path | str] = (),
    settings: DataSettings | None = None,
    seed: int = 0,
    *,
    group: str | None = None,
    categories: Sequence[str] = (),
) -> ClientTables:
    """Read the table of each client.

    Args:
        files: a table of all clients' rows, whose column `settings.group` names the client; or
            several, one for each client, named after it. None: the data of the settings.
        settings: how the files are read, and what their columns are; every row counts, whichever
            part it is of.
        seed: of the partition of a built-in set.
        group: the column that names the client of a row, instead of the settings'.
        categories: more columns that are categories than the settings name, so that codes such as
            01 are read as they are.

    Raises:
        DataError: a file cannot be read, or has no such column.
        ConfigError: a setting has no effect on such data.

    Examples:
        >>> import fedbayes, pandas as pd, pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "patients.csv"
        >>> pd.DataFrame({"site": ["north", "south"], "age": [40, 50]}).to_csv(file, index=False)
        >>> list(fedbayes.client_tables([file], group="site").tables)
        ['north', 'south']
    """
    paths = [Path(file) for file in ([files] if isinstance(files, Path | str) else files)]
    settings = DataSettings(path=paths[0] if paths else None) if settings is None else settings
    if group is not None:
        settings = settings.model_copy(update={"group": group})
    given = settings.model_fields_set
    built_in = not paths and settings.path is None and settings.query is None
    _refuse_idle(settings, divided=not built_in)
    if parts := [f"data.{name}" for name in _PARTS if name in given]:
        warn(f"all rows are used; {listed(parts)} has no effect")
    if built_in:
        return _built_in(settings, seed)
    if not paths and settings.path is not None:
        paths = [settings.path, *settings.more]
    read = settings.model_copy(update={"categorical": (*settings.categorical, *categories)})
    found = client_files(paths, settings.group)
    where = str(next(iter(found.values()), WHERE))
    if not found:
        tables = _by_group(read_query(settings), settings.group, WHERE)
    elif len(found) == 1:
        tables = _by_group(_read(next(iter(found.values())), read), settings.group, where)
    else:
        tables = {name: _read(file, read) for name, file in found.items()}
    tables = _others(tables, settings)
    first = next(iter(tables.values()))
    drop = list(settings.drop)
    for setting, column in (("drop", c) for c in settings.drop):
        _require(first, column, setting, where)
    if settings.split is not None:
        _require(first, settings.split, "split", where)
        drop.append(settings.split)
    if UNNAMED in first.columns and all(has_row_numbers(table) for table in tables.values()):
        drop.append(UNNAMED)
    known = "label" in given or settings.label[0] in first.columns
    return ClientTables(
        tables,
        settings.label[0] if known and len(settings.label) == 1 else "",
        settings.features,
        tuple(dict.fromkeys(drop)),
        settings.categorical,
        settings.missing == "drop",
        settings.group or "" if len(found) < 2 else "",
    )


def _refuse_idle(settings: DataSettings, *, divided: bool) -> None:
    """See that no setting is of networks, nor divides rows that are divided already."""
    given = settings.model_fields_set
    if settings.missing in ("impute", "indicate"):
        raise ConfigError(
            f"data.missing = {settings.missing!r} has no effect on regressions, which would treat "
            "imputed values as observed. Impute them first, or leave such rows out with "
            "--drop-missing"
        )
    if idle := [n for n in _FEATURES if n in given] + ["label_noise"] * (settings.label_noise > 0):
        raise ConfigError(
            f"data.{idle[0]} has no effect on regressions, which use numbers unchanged and text "
            "as categories. Leave it out"
        )
    natural = settings.partition in ("natural", "default")
    idle = [n for n in _DIVIDING if n in given and not (n == "partition" and natural)]
    if divided and idle:
        raise ConfigError(
            f"data.{idle[0]} has no effect: the clients are the files, or the values of the "
            "column --group (data.group). Leave it out"
        )


def _read(path: Path, settings: DataSettings) -> Any:
    notes: list[str] = []
    table = read_table(path, settings, notes)
    for note in notes:
        warn(note)
    return table


def _by_group(table: Any, group: str | None, path: str) -> dict[str, Any]:
    if group is None:
        warn(
            f"all rows of {path} belong to one client. Give the column of the clients with "
            "--group, or one file per client"
        )
        return {"all": table}
    _require(table, group, "group", path)
    whose = without_blanks(table[group])
    absent = int(whose.isna().sum())
    if absent:
        raise DataError(
            f"{path}: {absent:,} of {len(table):,} rows have no '{group}', so they belong to no "
            "client. Give each row one"
        )
    notes: list[str] = []
    index, names = group_indices(whose.to_numpy(), path, notes)  # named as for a run
    for note in notes:
        warn(note)
    parts = table.drop(columns=group).groupby(index, sort=True)
    return {names[int(k)]: part.reset_index(drop=True) for k, part in parts}


def _others(tables: dict[str, Any], settings: DataSettings) -> dict[str, Any]:
    """The tables of all clients but those that the settings leave out."""
    if unknown := [name for name in settings.exclude if name not in tables]:
        raise DataError(
            f"data.exclude lists unknown clients: {listed(unknown)}. The clients are "
            f"{listed(tables)}"
        )
    kept = {name: table for name, table in tables.items() if name not in settings.exclude}
    if not kept:
        raise DataError("data.exclude lists every client. Keep at least one")
    return kept


def _require(table: Any, column: str, setting: str, path: str) -> None:
    if column not in table.columns:
        like = did_you_mean(column, table.columns)
        raise ColumnError(
            f"{path} has no column '{column}'{like} of {setting}. It has "
            f"{listed(table.columns, 100)}",
            column,
            setting,
            like,
        )


def _built_in(settings: DataSettings, seed: int) -> ClientTables:
    """The rows of a set that the package knows, divided as the settings say."""
    import pandas as pd

    dataset = load_dataset(settings)
    if len(dataset.shape) != 1:
        raise DataError(f"{dataset.name} is not a table, and a regression needs columns of a table")
    names = dataset.features or tuple(f"x{number}" for number in range(dataset.shape[0]))
    whole = pd.DataFrame(np.asarray(dataset.x, np.float64), columns=list(names))
    target = dataset.target
    if target.kind == "class":
        whole[outcome := "class"] = np.array(target.names, object)[dataset.y]
    else:
        whole[list(target.names)] = np.asarray(dataset.y, np.float64)
        outcome = target.names[0]
    divided = partition(dataset, settings, seed)
    tables = {}
    for client, name in enumerate(divided.names):
        rows = np.sort(np.concatenate([divided.train_rows(client), divided.test_rows(client)]))
        tables[name] = whole.iloc[rows].reset_index(drop=True)
    drops = settings.drops_incomplete
    return ClientTables(tables, outcome, settings.features, settings.drop, (), drops)
