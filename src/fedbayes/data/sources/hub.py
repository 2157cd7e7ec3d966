"""Tables through Hugging Face `datasets`: from local Parquet files, or from the hub."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedbayes.data.sources.files import PARTS, reading
from fedbayes.errors import DataError

_MAGIC = b"PAR1"
"""What a Parquet file begins and ends with."""


def open_parquet(files: dict[str, list[Path]]) -> dict[str, Any]:
    """The train and test tables in local Parquet files, read as a stream.

    Raises:
        DataError: A file is no Parquet file; the message names it.
    """
    import datasets

    for file in (file for part in files.values() for file in part):
        with reading(file), file.open("rb") as stream:
            head = stream.read(4)
            stream.seek(-4, 2)
            if not head == stream.read(4) == _MAGIC:
                raise ValueError("it is no complete Parquet file")
    tables: dict[str, Any] = {}
    for part, part_files in files.items():
        paths = {part: [str(file) for file in part_files]}
        with reading(", ".join(paths[part])):
            tables |= datasets.load_dataset("parquet", data_files=paths, streaming=True)
    return tables


@contextmanager
def quiet() -> Iterator[None]:
    """Keep `datasets` from writing to the terminal what it also raises."""
    log = logging.getLogger("datasets")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def open_hub(name: str, hub: str) -> dict[str, Any]:
    """The train and test tables of a data set of the hub, downloaded where need be.

    Raises:
        DataError: The hub cannot be reached or has no such set.
    """
    import datasets

    try:
        opened = datasets.load_dataset(hub)
    except Exception as error:
        # Which class is raised depends on the HTTP library that the hub's client uses.
        raise DataError(
            f"{name}: cannot get {hub} from the Hugging Face hub: "
            f"{str(error).strip() or type(error).__name__}. There are no local files of it "
            f"either: download https://huggingface.co/datasets/{hub} into a folder '{name}' and "
            "name its parent with dir or FEDBAYES_DATA"
        ) from error
    return {part: opened[part] for part in PARTS if part in opened}
