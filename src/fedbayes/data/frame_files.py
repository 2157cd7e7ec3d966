"""DataFrames in memory as files, which is what a config names and another process can read."""

import io
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedbayes.core.files import digest
from fedbayes.core.wording import listed
from fedbayes.errors import DataError, told_as

FILE = "dataframe.parquet"


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Where files of DataFrames are until this process ends."""
    return tempfile.TemporaryDirectory(prefix="fedbayes-frames-")


def frame_file(frame: Any) -> Path:
    """A Parquet file with the columns of a DataFrame, or of what has `to_pandas()`; the same file
    for the same content.

    Names of columns become text. The index is left out, but for levels that have a name that no
    column has: a group may be one.

    Raises:
        DataError: two columns have one name, or a column cannot be stored; names it.
    """
    import pandas as pd

    frame = frame if isinstance(frame, pd.DataFrame) else frame.to_pandas()
    levels = [name for name in frame.index.names if name is not None and name not in frame.columns]
    frame = frame.reset_index(level=levels) if levels else frame
    frame = frame.set_axis([str(name) for name in frame.columns], axis=1)
    twice = frame.columns[frame.columns.duplicated()]
    if len(twice):
        raise DataError(f"the DataFrame has {listed(twice)} twice; rename a column")
    if not len(frame):
        raise DataError("the DataFrame has no rows")
    written = io.BytesIO()
    kinds = TypeError, ValueError, ArithmeticError  # pyarrow's errors are of these
    after = ". Give each column values of one type"
    with told_as(DataError, "the DataFrame cannot be stored", *kinds, after=after):
        frame.to_parquet(written, index=False)
    content = written.getvalue()
    place = Path(_folder().name) / digest(content)[:16]
    if not (file := place / FILE).exists():
        place.mkdir(exist_ok=True)
        file.write_bytes(content)
    return file


def without_rows(path: Path, rows: npt.NDArray[np.bool_]) -> Path | None:
    """A copy of the file of a DataFrame that lacks some rows.

    Args:
        path: the file.
        rows: whether each row is left out [n].

    Returns:
        The copy; None where the file does not have as many rows.
    """
    import pandas as pd

    frame = pd.read_parquet(path)
    return frame_file(frame[~rows]) if len(frame) == len(rows) else None
