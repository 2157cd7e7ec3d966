"""Rows to be predicted, read piece by piece: files may be larger than memory."""

import gzip
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any

import numpy as np

from fedbayes.data.cells import as_numbers
from fedbayes.data.sources.files import reading
from fedbayes.data.sources.own import as_pictures, plain_array
from fedbayes.data.sources.rows import decoded, holds_pictures
from fedbayes.data.sources.tables import DELIMITERS, layout, mend_decimal_commas
from fedbayes.data.wording import listed
from fedbayes.errors import ColumnError, DataError, did_you_mean

FORMATS = (".csv", ".csv.gz", ".parquet", ".npz")
"""Suffixes of the files that can be read so."""
_MISSING = (
    *("", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN"),
    *("<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null"),
)
"""What stands for a missing value in a feature, as pandas has it by default."""


@dataclass(frozen=True)
class Piece:
    """Some rows of a file."""

    x: Any
    """What the model reads of them: a DataFrame of its features, or an array [n, ...]."""
    kept: Any
    """All other columns as they are in the file, a DataFrame."""


@dataclass
class Rows:
    """The rows of a file, in pieces."""

    path: Path
    features: tuple[str, ...]
    """Columns that the model reads; none if its samples have no names."""
    size: int = 10_000
    """Rows of a piece."""
    share: float = 0.0
    """How much has been read, of 1."""
    notes: list[str] = field(default_factory=list)
    """What a user should know."""

    def __iter__(self) -> Iterator[Piece]:
        """The pieces, in the order of the file.

        Raises:
            DataError: it is absent, damaged, empty, or of another format, or a feature holds what
                is no number; names the file, the column and the row.
            ColumnError: it has no column of a feature.
        """
        name = self.path.name.lower()
        if not name.endswith(FORMATS):
            raise DataError(
                f"{self.path} cannot be predicted from: give a file that ends in "
                f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
            )
        if not self.path.is_file():
            raise DataError(f"there is no file {self.path} to predict from")
        read = _parquet if name.endswith(".parquet") else _csv
        pieces = _arrays(self) if name.endswith(".npz") else read(self)
        some = False
        with reading(self.path):
            for piece in pieces:
                some = some or bool(len(piece.x))
                if len(piece.x):
                    yield piece
        if not some:
            raise DataError(f"{self.path} has no rows to predict")
        self.share = 1.0


def _csv(rows: Rows) -> Iterator[Piece]:
    import pandas as pd

    path = rows.path
    delimiter, names = layout(path)
    if not any(names):
        raise DataError(f"{path} is empty: its first line must name the columns")
    _refuse_twins(path, names)
    if delimiter != ",":
        rows.notes.append(f"{path} is read with {DELIMITERS[delimiter]} between columns")
    columns = [name or f"Unnamed: {place}" for place, name in enumerate(names)]
    features = _features(rows, columns)
    kept = [name for name in columns if name not in features]
    total = path.stat().st_size
    with (
        _opened(path) as (file, text),
        warnings.catch_warnings(action="error", category=pd.errors.ParserWarning),
    ):
        try:
            for frame in pd.read_csv(
                text,
                sep=delimiter,
                header=0,
                names=columns,
                index_col=False,
                dtype=dict.fromkeys(kept, str),
                keep_default_na=False,
                na_values={name: list(_MISSING) for name in features},
                low_memory=False,
                chunksize=rows.size,
            ):
                chosen = frame[list(features)]
                if delimiter != ",":
                    chosen = chosen.copy()
                    mend_decimal_commas(chosen)
                rows.share = file.tell() / max(total, 1)
                yield Piece(_numbers(chosen, path), frame[kept])
        except pd.errors.ParserWarning:
            raise DataError(
                f"{path} has more values in a row than its first line has names; name every column"
            ) from None


@contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], IO[str]]]:
    """A CSV file, as it lies on the disk and as text."""
    with path.open("rb") as file:
        plain: Any = gzip.GzipFile(fileobj=file) if path.suffix.lower() == ".gz" else file
        with TextIOWrapper(plain, encoding="utf-8-sig", newline="") as text:
            yield file, text


def _parquet(rows: Rows) -> Iterator[Piece]:
    import pandas as pd
    import pyarrow as pa
    from pyarrow import parquet

    path = rows.path
    with parquet.ParquetFile(path) as file:
        columns = [name.strip() for name in file.schema_arrow.names]
        _refuse_twins(path, columns)
        total, done = file.metadata.num_rows, 0
        pictured = _pictured(file.schema_arrow) if not rows.features else ""
        features = (pictured,) if pictured else _features(rows, columns)
        for batch in file.iter_batches(batch_size=rows.size):
            table = pa.Table.from_batches([batch]).rename_columns(columns)
            frame = table.select(list(features)).to_pandas(ignore_metadata=True)
            frame.index = pd.RangeIndex(done, done + len(frame))
            kept = table.drop_columns(list(features)).to_pandas(
                types_mapper=pd.ArrowDtype, ignore_metadata=True
            )
            done += len(frame)
            rows.share = done / max(total, 1)
            if pictured and len(frame) and holds_pictures(frame[pictured]):
                yield Piece(decoded(frame[pictured], str(path)), kept)
            else:
                yield Piece(_numbers(frame, path), kept)


def _pictured(schema: Any) -> str:
    """The only column of pictures as the Hugging Face hub stores them; empty if there is none."""
    import pyarrow as pa

    found = [
        column.name
        for column in schema
        if pa.types.is_struct(column.type) and column.type.get_field_index("bytes") >= 0
    ]
    return found[0] if len(found) == 1 else ""


def _arrays(rows: Rows) -> Iterator[Piece]:
    import pandas as pd

    path = rows.path
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: plain_array(file, name, path) for name in file.files}
    if "x" not in arrays:
        raise DataError(f"{path} has no array 'x' with the samples; there are {listed(arrays)}")
    x = arrays.pop("x")
    if x.ndim < 2 or x.dtype.kind not in "iufb":
        raise DataError(
            f"{path}: x must hold numbers, a sample in each of its first dimension, and have at "
            "least two dimensions"
        )
    x = as_pictures(x)
    if rows.features:
        rows.notes.append(
            f"{path} has no names of features; they are taken to be in the order of the model's: "
            f"{listed(rows.features, 3)}"
        )
    aligned = {name: one for name, one in arrays.items() if one.shape == (len(x),)}
    if left := [name for name in arrays if name not in aligned]:
        rows.notes.append(
            f"{path}: {listed(left)} left out: columns are of one value a sample, [{len(x)}]"
        )
    kept = pd.DataFrame(aligned, index=pd.RangeIndex(len(x)))
    for start in range(0, len(x), rows.size):
        part = slice(start, start + rows.size)
        rows.share = min(start + rows.size, len(x)) / len(x)
        yield Piece(x[part], kept.iloc[part].reset_index(drop=True))


def _features(rows: Rows, columns: Sequence[str]) -> tuple[str, ...]:
    """The columns that the model reads, in its order.

    Raises:
        ColumnError: one is absent.
        DataError: the model has no names of features.
    """
    if not rows.features:
        raise DataError(
            f"{rows.path} is a table, and the features of this model have no names: it was trained "
            "on arrays; give its samples as an array x [n, ...] in a .npz file"
        )
    for name in rows.features:
        if name not in columns:
            like = did_you_mean(name, columns)
            raise ColumnError(f"{rows.path} has no column '{name}'{like}", name, "features", like)
    return rows.features


def _refuse_twins(path: Path, names: Sequence[str]) -> None:
    twice = [name for name, count in Counter(filter(None, names)).items() if count > 1]
    if twice:
        raise DataError(f"{path} has two columns '{twice[0]}'; give each column a name of its own")


def _numbers(frame: Any, path: Path) -> Any:
    """The features as numbers, NaN where one is missing.

    Raises:
        DataError: one holds what is no number, or is infinite.
    """
    way = "the model was trained on numbers there"
    frame = frame.assign(
        **{name: as_numbers(frame[name], name, str(path), way) for name in frame.columns}
    )
    values = frame.to_numpy(np.float32, na_value=np.nan)
    if (odd := np.argwhere(np.isinf(values))).size:
        row, column = odd[0]
        raise DataError(
            f"{path}: column '{frame.columns[column]}' is infinite in row "
            f"{frame.index[row] + 1:,}; leave a value that is not known empty"
        )
    return frame
