"""The user's own tables: CSV, Parquet and Excel files as frames."""

from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedbayes.core.categories import as_if_read, codes, identifiers, name_of, normal
from fedbayes.core.wording import Files, listed
from fedbayes.data.source_settings import CLIENT, TABLES, TEXTS, SourceSettings
from fedbayes.data.sources.conventions import (
    ConventionEvidence,
    Numbers,
    called,
    decide,
    header_names,
    layout,
    may_be_grouped,
)
from fedbayes.data.sources.files import named_cells, reading, refuse_idle
from fedbayes.data.sources.unpacking import check_unpacked
from fedbayes.data.tables.cells import cell, is_numeric, no_number
from fedbayes.errors import CellError, ConfigError, DataError, did_you_mean

UNNAMED = "Unnamed: 0"
"""What pandas calls a first column without a name."""


def is_table(file: Path) -> bool:
    """Whether a file is a table, by its name."""
    return file.name.lower().endswith(TABLES)


def client_files(paths: Sequence[Path], group: str | None) -> dict[str, Path]:
    """Files that are a client each, by the names of the clients: theirs without the suffix.

    Args:
        paths: Tables, or folders of tables.
        group: The column with the client of each row, if the settings name one.

    Raises:
        DataError: There is no such file or folder, it holds no table, or two have one name.
        ConfigError: There are several files, and a group.
    """
    files = [file for path in paths for file in _expanded(path)]
    if group is not None and len(files) > 1:
        raise ConfigError(
            f"each of the {len(files)} files is a client, so group = '{group}' has no effect. "
            "Leave it out, or put all rows into one file"
        )
    found: dict[str, Path] = {}
    for file in files:
        suffix = max((one for one in TABLES if file.name.lower().endswith(one)), key=len)
        if (name := file.name[: -len(suffix)]) in found:
            raise DataError(
                f"{found[name]} and {file} both have the name '{name}'. The name of a file is its "
                "client, so rename one"
            )
        found[name] = file
    return found


def _expanded(path: Path) -> list[Path]:
    """The tables behind a path: a file, or all those in a folder."""
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if is_table(file))
        if not found:
            raise DataError(
                f"{path} contains no table. Put files that end in {', '.join(TABLES)} there"
            )
        return found
    if not path.exists():
        raise DataError(f"file or folder not found: {path}. Correct the path")
    if not is_table(path):
        raise DataError(
            f"{path} is not a table with column names. Give a file that ends in "
            f"{', '.join(TABLES)}, or a folder of them"
        )
    return [path]


def read_tables(
    files: dict[str, list[Path]], settings: SourceSettings, notes: list[str]
) -> tuple[Any, int, Files]:
    """The rows of all files as one frame, how many of them are of the training part, and the name
    of the whole. What separates decimals is in `attrs` of the frame, where all files agree.

    Raises:
        DataError: A file is damaged or empty, or lacks a column that the first one has, or has
            other things in it.
    """
    import pandas as pd

    first = files["train"][0]
    frames: list[Any] = []
    trained = 0
    for part, paths in files.items():
        for file in paths:
            frame = read_table(file, settings, notes)
            columns = frames[0].columns if frames else frame.columns
            absent = [column for column in columns if column not in frame.columns]
            if absent:
                raise DataError(f"{file} has no column '{absent[0]}', which {first} has")
            extra = [column for column in frame.columns if column not in columns]
            if extra:
                notes.append(
                    f"{file}: {listed(extra)} left out, because {first} has no such column"
                )
            if frames:
                _compare(frame, frames[0], settings, file, first)
            frames.append(frame[columns])
            trained += len(frame) if part == "train" else 0
    together = pd.concat(frames, ignore_index=True)
    if settings.more:
        clients = client_files(files["train"], None)
        together[CLIENT] = np.repeat([*clients], [len(frame) for frame in frames])
    decimals = {frame.attrs.get("decimal", "") for frame in frames} - {""}
    together.attrs["decimal"] = decimals.pop() if len(decimals) == 1 else ""
    names = [str(file) for paths in files.values() for file in paths]
    return together, trained, Files.of(dict(zip(names, map(len, frames), strict=True)))


def _compare(frame: Any, other: Any, settings: SourceSettings, file: Path, first: Path) -> None:
    """See that columns of a file hold what those of the first one do."""
    chosen = {*settings.categorical, *settings.text, *settings.drop}
    chosen |= {settings.group or "", settings.split or ""}
    for name in other.columns:
        here, there = family(frame[name]), family(other[name])
        if str(name) in chosen or not here or not there or here == there:
            continue
        way = f"It has {there} in {first}. " + (
            "Correct it, or save both as .parquet, where 01 is not read as 1"
            if str(name) in settings.label
            else "Correct it, or list it in data.categorical or data.drop"
        )
        if there == "numbers" and here == "text":
            raise no_number(frame[name], str(name), str(file), way)
        row = int(np.asarray(frame[name].notna()).argmax())
        what = f"{file}: column '{name}' has {here} ({cell(frame[name], row)} in row {row + 1:,})"
        raise CellError(f"{what}. {way}", str(name), row)


def family(column: Any) -> str:
    """What sort of thing the cells of a column are: numbers, dates or text; empty if none are."""
    import pandas as pd

    kind = pd.api.types.infer_dtype(column, skipna=True)
    if kind == "empty" or column.isna().all():
        return ""
    if is_numeric(column):
        return "numbers"
    return "dates" if column.dtype.kind == "M" or kind.startswith("date") else "text"


def read_table(file: Path, settings: SourceSettings, notes: list[str]) -> Any:
    """A table as a frame, with the names of columns stripped of blanks.

    Args:
        file: A CSV, Parquet or Excel file.
        settings: The sheet to take, and which columns are text, whatever they look like.
        notes: Takes up what a user should know.

    Raises:
        DataError: It is damaged or empty.
    """
    import pandas as pd

    name, texts = file.name.lower(), _texts(settings)
    if not name.endswith(".xlsx"):
        refuse_idle(settings, ("sheet",), f"{file} has no sheets")
    with reading(file):
        check_unpacked(file)
        if name.endswith(".parquet"):
            frame = pd.read_parquet(file)
        elif name.endswith(".xlsx"):
            frame = _read_excel(file, settings, texts, notes)
        else:
            frame = _read_csv(file, settings, texts, notes)
        frame.columns = pd.Index([normal(column).strip() for column in frame.columns])
        if not name.endswith(".parquet"):
            _refuse_units(frame, {*settings.categorical, *settings.drop}, file)
        if not name.endswith(".parquet"):  # which has types, so that 01 is text, and 1 a number
            for column in frame.columns.intersection([*settings.categorical]):
                frame[column] = codes(frame[column])
            named = frame.columns.isin([*settings.label, settings.group])
            for column in frame.columns[named]:
                frame[column] = identifiers(frame[column])
    if frame.empty:
        raise DataError(f"{file} has no rows")
    refuse_twice(list(frame.columns), file)
    idle = () if name.endswith(TEXTS) else ("decimal", "thousands", "encoding")
    idle = (*idle, "header_rows") if name.endswith(".parquet") else idle
    refuse_idle(settings, idle, f"{file} is not a text file")
    return without(frame, settings.na_values)


def _refuse_units(frame: Any, free: Collection[str], file: Path) -> None:
    """See that the first row is no second row of the header, with units for example."""
    import pandas as pd

    for name in frame.columns.difference([*free]):
        column = frame[name]
        if len(frame) < 3 or column.dtype.kind in "iufbM" or not isinstance(column.iloc[0], str):
            continue
        try:
            numbers = pd.to_numeric(column, errors="coerce").notna()
        except TypeError:  # lists and the like
            continue
        others = column.iloc[1:].notna()
        if not numbers.iloc[0] and others.sum() > 1 and numbers.iloc[1:][others].all():
            raise DataError(
                f"{file}: column '{name}' is '{column.iloc[0]}' in row 1 and a number in all "
                "others. If that row belongs to the header, set data.header_rows to 2; if it "
                "means a missing value, list it in data.na_values"
            )


def without(frame: Any, na_values: Collection[str]) -> Any:
    """A table in which cells with these values, texts or numbers, are empty."""
    import pandas as pd

    if not na_values:
        return frame
    texts = {as_if_read(name_of(value)) for value in na_values}
    numbers = pd.to_numeric(pd.Series([*texts], dtype=object), errors="coerce").dropna().tolist()

    def emptied(column: Any) -> Any:
        if column.dtype.kind in "iuf":
            absent = column.isin(numbers)
        elif column.dtype.kind in "bM":
            return column
        else:
            values = column.dropna().astype(object).unique()
            absent = column.isin([value for value in values if as_if_read(name_of(value)) in texts])
        return column.mask(absent).infer_objects() if absent.any() else column

    attrs, frame = frame.attrs, frame.apply(emptied)
    frame.attrs = attrs
    return frame


def _texts(settings: SourceSettings) -> frozenset[str]:
    """Columns that are read as text, since 01 is no text once it is read as a number."""
    single = filter(None, (settings.group, settings.tokens))
    several = (*settings.label, *settings.categorical, *settings.text, *settings.dates)
    return frozenset((*several, *single))


def _read_excel(
    file: Path, settings: SourceSettings, texts: Collection[str], notes: list[str]
) -> Any:
    """A sheet of an Excel file; cells of columns of these names as they are."""
    import pandas as pd

    sheet, count = settings.sheet, settings.header_rows
    with pd.ExcelFile(file, engine="openpyxl") as book:
        sheets = [str(name) for name in book.sheet_names]
        if sheet is None and len(sheets) > 1:
            raise DataError(f"{file} has the sheets {listed(sheets)}. Choose one with sheet")
        if sheet is not None and sheet not in sheets:
            raise DataError(
                f"{file} has no sheet '{sheet}'{did_you_mean(sheet, sheets)}. It has "
                f"{listed(sheets)}"
            )
        chosen = sheet or sheets[0]
        head = pd.read_excel(book, sheet_name=chosen, header=None, nrows=count)
        names: list[str] | None = None
        header = head.iloc[0].dropna().tolist() if len(head) else []
        if count > 1:
            rows = head.fillna("").astype(str).map(str.strip).to_numpy().tolist()
            header = names = list(header_names(file, rows))
            notes.append(called(file, names, count))
        refuse_twice([normal(name).strip() for name in header], file)
        as_is = dict.fromkeys((n for n in header if normal(n).strip() in texts), object)
        first = count - 1
        return pd.read_excel(book, sheet_name=chosen, header=first, names=names, dtype=as_is)


def refuse_twice(names: list[str], file: Path) -> None:
    """See that no two columns have one name, or raise a DataError."""
    twice = [name for name, count in Counter(filter(None, names)).items() if count > 1]
    if twice:
        raise DataError(f"{file} has two columns '{twice[0]}'. Give each column its own name")


def _read_csv(
    file: Path, settings: SourceSettings, texts: Collection[str], notes: list[str]
) -> Any:
    """A CSV file, some columns as text; `attrs` of the frame has the decimal separator."""
    import pandas as pd

    found = layout(file, settings)
    if not any(found.names):
        raise DataError(f"{file} is empty. Its first line must have the column names")
    refuse_twice(list(found.names), file)
    # All at once, since a column read in pieces may come as numbers here, as text there.
    read: Any = partial(
        pd.read_csv,
        file,
        sep=found.delimiter,
        names=found.columns,
        header=found.header - 1,
        index_col=False,
        low_memory=False,
        encoding=found.encoding,
        na_values=list(settings.na_values),
    )
    with named_cells(file):
        frame = read(dtype={name: str for name in found.columns if name in texts})
    said = list(found.notes)
    decimal, told = _settle(frame, read, settings, texts, found.delimiter, file)
    if said and told and told[0].startswith(COMMAS):
        said[-1] += f", and {told.pop(0)}"
    notes += [*said, *(f"{file} is read {one}" for one in told)]
    frame.attrs["decimal"] = decimal
    return frame


COMMAS = "with decimal commas in "


def _settle(
    frame: Any,
    read: Any,
    settings: SourceSettings,
    texts: Collection[str],
    delimiter: str,
    file: Path,
) -> tuple[str, list[str]]:
    """Read numbers as the file writes them, in place; the decimal separator, and notes."""
    import pandas as pd

    numbers = Numbers.of(settings)
    codes, both = {*settings.categorical}, {*settings.categorical, *settings.label}
    columns = [name for name in frame.columns if name in both or name not in texts]
    floats = [n for n in columns if frame[n].dtype.kind == "f" and may_be_grouped(frame[n])]
    raw = read(usecols=floats, dtype=str) if floats else frame
    evidence = {}
    for name in columns:
        column = raw[name] if name in floats else frame[name]
        if column.dtype.kind == "f":
            example = str(column[column != np.rint(column)].iloc[0])
            evidence[name] = ConventionEvidence({".": True, ",": False}, example, points=True)
        elif pd.api.types.infer_dtype(column, skipna=True) == "string":
            evidence[name] = numbers.look(column.dropna().unique())
    left = {*settings.drop} | ({*columns} - {*settings.features, *settings.label}
                               if settings.features else set())  # fmt: skip
    decision = decide(evidence, numbers, delimiter, str(file), free=codes | left)
    commas, grouped = [], {}
    for name, one in evidence.items():
        decimal = decision.of(name)
        read_already = frame[name].dtype.kind == "f" and (decimal == "." or name not in floats)
        if read_already or not one.fits[decimal]:
            continue
        column = raw[name] if name in floats else frame[name]
        column, example = numbers.read(column, decimal, grouped=name not in codes)
        if example:
            grouped[name] = example
        frame[name] = column if name in both else pd.to_numeric(column)
        if decimal == "," and one.example:
            commas.append(name)
    told = [f"{COMMAS}{listed(commas)}"] if commas else []
    points = [name for name, one in evidence.items() if one.certain == "."]
    if commas and points:
        told[0] += f" and decimal points in {listed(points)}"
    if grouped:
        name, text = next(iter(grouped.items()))
        value = numbers.read(pd.Series([text]), decision.of(name))[0].iloc[0]
        told.append(f"with thousands separators in {listed(grouped)} ({text!r} is {value})")
    return decision.file, told


def has_row_numbers(frame: Any) -> bool:
    """Whether the first column has no name and a different whole number in every row."""
    column = frame[frame.columns[0]]
    return frame.columns[0] == UNNAMED and column.dtype.kind in "iu" and bool(column.is_unique)
