"""Predictions of the rows of a file, written to another: both may be larger than memory."""

import gzip
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from torch import Tensor

from fedbayes.core.brief import Brief
from fedbayes.core.files import writable, written_whole
from fedbayes.data.sources.picture_streams import PictureRows, are_pictures
from fedbayes.data.sources.query_streams import QueryRows
from fedbayes.data.sources.streams import Piece, Pieces, Rows
from fedbayes.data.sources.tables import UNNAMED
from fedbayes.data.tables.encoding import Unknown
from fedbayes.errors import CellError, ColumnError, DataError, RunError
from fedbayes.likelihoods.answers import Answers
from fedbayes.runs.trained import TrainedModel
from fedbayes.workflows.serve.evaluation_set import absent_feature
from fedbayes.workflows.serve.trained_models import load

_MANY = 20
"""Rows that are hardly all of one class."""
OUTPUTS = (".csv", ".csv.gz", ".parquet")
"""Suffixes of files of predictions."""


@dataclass(frozen=True, repr=False)
class Predicted(Brief):
    """What `predict_file` wrote."""

    path: Path
    rows: int
    columns: tuple[str, ...]
    """Those that were added."""
    level: float | None
    """Probability that a number is in its interval; None where there are no intervals."""
    missing: int
    """Rows in which the value of some feature is missing: the model takes its training mean."""
    broken: int
    """Rows of which the model predicts nothing finite."""
    notes: tuple[str, ...]
    """What a user should know of how the file was read."""


def predict_file(
    model: TrainedModel | Path | str,
    inputs: Path | str,
    out: Path | str,
    *,
    query: str | None = None,
    sheet: str | None = None,
    level: float | None = None,
    keep_inputs: bool = False,
    overwrite: bool = False,
    safe_csv: bool = False,
    rows: int = 10_000,
    watch: Callable[[float], None] = lambda share: None,
) -> Predicted:
    """Predict each row of a file or query, or each image of a folder, in order.

    Columns that the model does not know (ids, and the label if it is there) are written as they
    are, before the predictions; see `fedbayes.likelihoods.answers` for these.

    Args:
        model: as `fedbayes.load` gives it, or the run folder or file that it takes.
        inputs: a `.csv`, `.csv.gz`, `.parquet` or `.xlsx` with the columns that the model reads,
            or a `.npz` with an array `x` [n, ...], of which other arrays [n] are kept. Or a
            picture, or a folder of pictures at any depth: the path below it is kept as `file`, and
            the folder above each as `class` where all such are classes of the model. With a query,
            the URL of a database as SQLAlchemy has it, without a password.
        out: a `.csv`, `.csv.gz` or `.parquet`, there whole at the end or not at all.
        query: a SQL query; its rows are predicted in the order of the database, and the columns
            that are kept become text.
        sheet: of an `.xlsx` with several.
        level: as for `TrainedModel.predict_frame`.
        keep_inputs: write the features too.
        overwrite: whether `out` may be there already.
        safe_csv: put an apostrophe before text that spreadsheets would take for a formula.
        rows: that are read at a time; predictions do not depend on it.
        watch: called with the share that is done, from 0 to 1, if that is known.

    Raises:
        FedbayesError: a file cannot be read or written, or does not fit the model.

    Examples:
        >>> import fedbayes, numpy as np, pathlib, tempfile
        >>> from sklearn.datasets import load_digits
        >>> run, folder = fedbayes.run(data="digits", rounds=1), pathlib.Path(tempfile.mkdtemp())
        >>> np.savez(folder / "new.npz", x=load_digits().images[:3, None])
        >>> fedbayes.predict_file(run.folder, folder / "new.npz", folder / "out.csv").rows
        3
    """
    out = Path(out)
    writable(out, "the predictions", OUTPUTS, [] if query else [Path(inputs)])
    if out.exists() and not overwrite:
        raise RunError(f"{out} already exists. Give another file, or add --overwrite")
    if rows < 1:
        raise RunError(f"{rows} rows cannot be read at a time. Give 1 or more")
    if safe_csv and not out.name.lower().endswith((".csv", ".csv.gz")):
        raise RunError(f"--safe-csv has no effect: {out} is not a CSV file. Leave it out")
    if not isinstance(model, TrainedModel):
        model = load(model)
    read = _read(model, inputs, query, sheet, rows)
    if keep_inputs and not model.table:
        raise RunError(
            f"the inputs of {model.source} have no columns to keep. Leave out --keep-inputs"
        )
    level, done = model.level(level), _Counted()
    try:
        kinds = _kinds(model, inputs, query) if keep_inputs else {}
        with _writing(out, kinds, safe_csv) as write:
            for piece in read:
                raw, unknown = _encode(model, piece, read.where)
                known = model.preprocessing
                if not piece.start and len(known.shape) == 1 and known.tokens is None:
                    done.units = known.other_units(raw[0])
                found = model.columns(raw, level, piece.start)
                done.odd += [replace(one, first=one.first + piece.start) for one in unknown]
                kept = piece.kept
                if keep_inputs and hasattr(piece.x, "columns"):
                    kept = kept.join(piece.x.reset_index(drop=True))
                model.refuse_taken(kept.columns, found, read.where)
                write(kept, found)
                done.add(piece, found)
                if read.share is not None:
                    watch(read.share)
    except ColumnError as error:
        raise absent_feature(read.where, model.source, error) from None
    notes = (*dict.fromkeys(read.notes), *done.notes(read.where))
    return Predicted(out, done.rows, done.added, level, done.missing, done.broken, notes)


@dataclass
class _Counted:
    """What was predicted so far."""

    rows: int = 0
    missing: int = 0
    """Rows with an empty cell."""
    broken: int = 0
    """Rows of which nothing finite is predicted."""
    added: tuple[str, ...] = ()
    """Columns."""
    classes: set[str] = field(default_factory=set)
    odd: list[Unknown] = field(default_factory=list)
    units: str = ""
    """The message of `Preprocessing.other_units`."""

    def add(self, piece: Piece, found: Answers) -> None:
        """Count the predictions of a piece."""
        self.added = tuple(found)
        self.rows += len(piece.x)
        self.missing += _rows_with_gaps(piece.x)
        self.broken += _not_finite(found)
        self.classes |= set(found.get("predicted", ())) - {""}

    def notes(self, where: str) -> list[str]:
        """What a user should know of them."""
        told = [one.told(where) for one in _summed(self.odd)]
        if self.units:
            told.append(f"{where}: {self.units}")
        if self.missing:
            told.append(
                f"{where}: {self.missing:,} of {self.rows:,} rows have an empty cell that the "
                "model reads; for numbers the mean of the training rows is used, 0 without "
                "standardization"
            )
        if len(self.classes) == 1 and self.rows >= _MANY:
            told.append(
                f"all {self.rows:,} rows are predicted {next(iter(self.classes))!r}. If the other "
                "classes are rare, use the probabilities, or choose a --threshold"
            )
        if self.broken:
            told.append(f"{where}: the predictions of {self.broken:,} rows are not finite")
        return told


def _read(
    model: TrainedModel, inputs: Path | str, query: str | None, sheet: str | None, size: int
) -> Pieces:
    """What reads the inputs."""
    if sheet is not None and (query is not None or are_pictures(Path(inputs))):
        raise RunError(f"{inputs} has no sheets, so --sheet has no effect. Leave it out")
    if query is not None or "://" in str(inputs):
        if query is None:
            raise RunError("a database needs a query. Give one with --query")
        if "://" not in str(inputs):
            raise RunError(
                f"a query needs a database, and {inputs} is not its URL. Write it as "
                "sqlite:////path/to/file.db or postgresql+psycopg://user@host/name"
            )
        return QueryRows(str(inputs), query, model.table, size)
    path, known = Path(inputs), model.preprocessing
    if are_pictures(path):
        shape, scale = known.shape, known.scale
        return PictureRows(path, model.framing, shape, scale, known.classes, size)
    return Rows(path, model.table, size, sheet, settings=model.reading, decimal=known.decimal)


def _encode(model: TrainedModel, piece: Piece, where: str) -> tuple[list[Tensor], list[Unknown]]:
    """What the networks take of a piece of a file."""
    try:
        return model.encode(piece.x, where)
    except CellError as error:
        here, there = (f"in row {row + 1:,}" for row in (error.row, error.row + piece.start))
        raise CellError(
            str(error).replace(here, there), error.column, error.row + piece.start
        ) from None
    except DataError as error:
        text = str(error)
        raise DataError(text if where in text else f"{where}: {text}") from None


def _summed(odd: Sequence[Unknown]) -> list[Unknown]:
    """What is unknown in all pieces together, by column."""
    found: dict[tuple[str, bool], Unknown] = {}
    for one in odd:
        key = one.column.name, one.empty
        before = found.get(key)
        found[key] = one if before is None else replace(before, rows=before.rows + one.rows)
    return list(found.values())


def _kinds(model: TrainedModel, inputs: Path | str, query: str | None) -> dict[str, str]:
    """What columns are that the model reads, by name, where no file says of which type."""
    if query is None and str(inputs).lower().endswith((".parquet", ".xlsx")):
        return {}
    return {column.name: column.kind for column in model.table}


def _rows_with_gaps(x: Any) -> int:
    if hasattr(x, "columns"):
        return int(x.isna().any(axis=1).sum())
    return int(np.isnan(x.reshape(len(x), -1)).any(axis=1).sum()) if x.dtype.kind == "f" else 0


def _not_finite(found: dict[str, Any]) -> int:
    first = next(iter(found.values()))
    return int((~np.isfinite(first)).sum())


Write = Callable[[Any, Answers], None]
"""Takes up what is kept of the next rows, a DataFrame, and their predictions."""
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
"""Beginnings of what a spreadsheet computes."""
_DIGITS = "{:.10g}".format
"""Of predictions in double precision, which come from outputs in single precision."""


@contextmanager
def _writing(path: Path, kinds: Mapping[str, str], safe: bool) -> Iterator[Write]:
    """Rows to be written to a file that is there whole at the end, or not at all."""
    name = path.name.lower()
    with written_whole(path) as file:
        if name.endswith(".parquet"):
            with _parquet(file, kinds) as write:
                yield write
        elif name.endswith(".gz"):
            # Without the time, the same predictions are the same file.
            packed = gzip.GzipFile(fileobj=file, mode="wb", filename="", mtime=0)
            with packed, _csv(packed, safe) as write:
                yield write
        else:
            with _csv(file, safe) as write:
                yield write


@contextmanager
def _csv(file: Any, safe: bool) -> Iterator[Write]:
    text = TextIOWrapper(file, encoding="utf-8", newline="")
    first = True

    def write(kept: Any, found: Answers) -> None:
        nonlocal first
        frame = kept.assign(**found)
        for name, column in found.items():
            if name == "set":
                frame[name] = frame[name].map(_spelled)
            elif column.dtype == np.float64:
                frame[name] = frame[name].map(_DIGITS, na_action="ignore")
        names = ["" if name == UNNAMED else name for name in frame.columns]
        if safe:
            names = [_harmless(name) for name in names]
            for name in frame.columns[[kind.kind not in "biufM" for kind in frame.dtypes]]:
                frame[name] = frame[name].map(_harmless, na_action="ignore")
        frame.to_csv(text, index=False, header=names if first else False, lineterminator="\n")
        first = False

    yield write
    text.flush()
    text.detach()


def _harmless(cell: Any) -> Any:
    """A cell that no spreadsheet takes for a formula, which may read files or open addresses."""
    if not isinstance(cell, str) or not cell.lstrip(" ").startswith(_FORMULA):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell  # a number with a sign


@cache
def _spelled(names: tuple[str, ...]) -> str:
    """A set as text, as in `yes|no`."""
    if odd := [name for name in names if "|" in name]:
        raise DataError(
            f"the class {odd[0]!r} has a | in its name, which separates classes of a set in a CSV "
            "file. Write a .parquet file instead"
        )
    return "|".join(names)


@contextmanager
def _parquet(file: BinaryIO, kinds: Mapping[str, str]) -> Iterator[Write]:
    import pyarrow as pa
    from pyarrow import parquet

    writer = None

    def write(kept: Any, found: Answers) -> None:
        nonlocal writer
        frame = kept.assign(**found)
        if writer is None:
            first = pa.Table.from_pandas(frame, preserve_index=False)
            schema = pa.schema([_lasting(first, name, kinds) for name in first.column_names])
        else:
            schema = writer.schema
        table = pa.Table.from_pandas(frame, schema=schema, preserve_index=False)
        table = table.replace_schema_metadata(None)
        if writer is None:
            writer = parquet.ParquetWriter(file, table.schema)
        writer.write_table(table)

    try:
        yield write
    finally:
        if writer is not None:
            writer.close()


def _lasting(table: Any, name: str, kinds: Mapping[str, str]) -> Any:
    """A column of the first piece, of a type that it has in later ones too."""
    import pyarrow as pa

    kind, now = kinds.get(name), table.schema.field(name).type
    if kind == "number" and (pa.types.is_integer(now) or pa.types.is_null(now)):
        return pa.field(name, pa.float64())
    if kind == "boolean" and table[name].null_count == len(table):
        return pa.field(name, pa.bool_())
    if pa.types.is_null(now):
        return pa.field(name, pa.string())
    if pa.types.is_list(now) and pa.types.is_null(now.value_type):
        return pa.field(name, pa.list_(pa.string()))
    return pa.field(name, now)
