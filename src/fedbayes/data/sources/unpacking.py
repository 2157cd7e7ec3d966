"""How much a packed file may unpack to: a small one of a stranger's must not fill the memory."""

import gzip
import io
import zipfile
from pathlib import Path
from typing import IO, Any

from fedbayes.core.wording import listed
from fedbayes.errors import DataError

MOST_TIMES = 100
"""Bytes that a file may unpack to, as a multiple of its own."""
AT_LEAST = 1 << 26
"""Bytes that any file may unpack to in addition."""
_PIECE = 1 << 20
_CELL = 8
"""Bytes of a number."""


def most_bytes(file: Path) -> int:
    """Bytes that a file may unpack to."""
    return MOST_TIMES * file.stat().st_size + AT_LEAST


def _refused(file: Path, way_out: str) -> DataError:
    return DataError(
        f"{file} has {file.stat().st_size:,} bytes but unpacks to more than {most_bytes(file):,}, "
        f"which could fill the memory. If the file is correct, {way_out}"
    )


class BoundedGzip(gzip.GzipFile):
    """A gzip file, opened, of which no more is read than it may unpack to."""

    def __init__(self, path: Path, opened: IO[bytes]) -> None:
        super().__init__(fileobj=opened)
        self._path, self._left = path, most_bytes(path)

    def read(self, size: int | None = -1) -> bytes:
        """As of any file. Raises a DataError if it unpacks to more."""
        asked = self._left + 1 if size is None or size < 0 else min(size, self._left + 1)
        return self._counted(super().read(asked))

    def read1(self, size: int = -1) -> bytes:
        """As of any file; see `read`."""
        return self._counted(super().read1(_PIECE if size < 0 else size))

    def _counted(self, data: bytes) -> bytes:
        self._left -= len(data)
        if self._left < 0:
            raise _refused(self._path, "unpack it first (gunzip)")
        return data


def check_unpacked(file: Path) -> None:
    """See that a table may be read whole: by what it unpacks to, which is not kept.

    Args:
        file: a `.csv.gz`, `.parquet` or `.xlsx`; of another nothing is looked at.

    Raises:
        DataError: it unpacks to too much.
        OSError: it cannot be read, or its library raises whatever else it does.
    """
    name = file.name.lower()
    if name.endswith(".gz"):
        with file.open("rb") as opened:
            packed = BoundedGzip(file, opened)
            while packed.read1(_PIECE):
                pass
    elif name.endswith(".xlsx"):
        with zipfile.ZipFile(file) as parts:
            if sum(part.file_size for part in parts.infolist()) > most_bytes(file):
                raise _refused(file, "save it as CSV")
    elif name.endswith(".parquet"):
        _check_parquet(file)


_PARQUET = "save it as CSV, or without dictionaries (use_dictionary=False, compression=None)"


def _check_parquet(file: Path) -> None:
    from pyarrow import parquet

    with parquet.ParquetFile(file) as opened:
        about = opened.metadata
        groups = [about.row_group(index) for index in range(about.num_row_groups)]
        rows = sum(group.num_rows for group in groups)
        cells = _CELL * max(rows, about.num_rows) * about.num_columns
        if max(cells, sum(group.total_byte_size for group in groups)) > most_bytes(file):
            raise _refused(file, _PARQUET)
    check_texts(file)


def check_texts(file: Path) -> None:
    """See that texts of a Parquet file do not fill the memory, or raise a DataError."""
    # It may have one of them once, for a million rows.
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow import parquet

    most, total = most_bytes(file), 0
    with parquet.ParquetFile(file) as plain:
        texts = [
            field.name
            for field in plain.schema_arrow
            if pa.types.is_string(field.type)
            or pa.types.is_large_string(field.type)
            or pa.types.is_binary(field.type)
        ]
        about = plain.metadata
        worst = sum(
            group.column(place).total_uncompressed_size * group.num_rows
            for index in range(about.num_row_groups)
            for place in range(about.num_columns)
            if (group := about.row_group(index)).column(place).path_in_schema in texts
        )
    if worst <= most:
        return
    with parquet.ParquetFile(file, read_dictionary=texts) as opened:
        for index in range(opened.metadata.num_row_groups):
            for column in opened.read_row_group(index, columns=texts).columns:
                for chunk in column.chunks:
                    total += _bytes_of(chunk, pa, pc)
                    if total > most:
                        raise _refused(file, f"{_PARQUET}: {listed(texts, 3)} have long texts")


def _bytes_of(chunk: Any, pa: Any, pc: Any) -> int:
    """Bytes of the texts in a part of a column, once for each row."""
    if not pa.types.is_dictionary(chunk.type):
        return int(chunk.nbytes)
    lengths = pc.binary_length(chunk.dictionary).take(chunk.indices)
    return int(pc.sum(lengths).as_py() or 0)


def as_text(path: Path, opened: IO[bytes], encoding: str) -> io.TextIOWrapper:
    """A CSV file as text, of which no more is read than it may unpack to."""
    plain: Any = BoundedGzip(path, opened) if path.suffix.lower() == ".gz" else opened
    return io.TextIOWrapper(plain, encoding=encoding, newline="")
