"""Tables through Hugging Face `datasets`: from local Parquet files, or from the hub."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from fedbayes.core.pretrained import silenced, unreachable
from fedbayes.data.sources.files import PARTS, reading
from fedbayes.errors import DataError

_MAGIC = b"PAR1"
"""What a Parquet file begins and ends with."""
_PATIENCE = 3.0
"""Seconds that the hub has to answer at all."""


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
                raise ValueError("it is not a complete Parquet file")
    tables: dict[str, Any] = {}
    for part, part_files in files.items():
        paths = {part: [str(file) for file in part_files]}
        with reading(", ".join(paths[part])):
            tables |= datasets.load_dataset("parquet", data_files=paths, streaming=True)
    return tables


def quiet() -> AbstractContextManager[None]:
    """Keep `datasets` and the hub's client from writing to the terminal what they also raise."""
    return silenced("datasets", "huggingface_hub")


def open_hub(name: str, hub: str) -> dict[str, Any]:
    """The train and test tables of a data set of the hub, downloaded where need be.

    Where the hub does not answer, what was downloaded before is taken.

    Raises:
        DataError: The hub cannot be reached or has no such set.
    """
    import datasets

    silent = "HF_HUB_OFFLINE is set" if datasets.config.HF_HUB_OFFLINE else unreachable(_PATIENCE)
    try:
        with quiet(), _offline() if silent else nullcontext():
            opened = datasets.load_dataset(hub)
    except Exception as error:
        # Which class is raised depends on the HTTP library that the hub's client uses.
        reason = f"{str(error).strip() or type(error).__name__}."
        if silent and isinstance(error, ConnectionError | FileNotFoundError):
            reason = f"{silent}, and {hub} was not downloaded before."
        raise DataError(
            f"{name}: cannot get {hub} from the Hugging Face hub: {reason} There are no local "
            f"files of it either. Download https://huggingface.co/datasets/{hub} into a folder "
            f"'{name}', and set data.dir or FEDBAYES_DATA to the parent folder"
        ) from error
    return {part: opened[part] for part in PARTS if part in opened}


@contextmanager
def _offline() -> Iterator[None]:
    """Have `datasets` look into its own cache alone, as HF_HUB_OFFLINE does."""
    import datasets
    from huggingface_hub import constants

    places: tuple[Any, ...] = (constants, datasets.config)
    before = [place.HF_HUB_OFFLINE for place in places]
    for place in places:
        place.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.HF_HUB_OFFLINE = value
