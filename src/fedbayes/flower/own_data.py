"""The data of one client, from a file or folder that only its node can read."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from fedbayes.config.config import Config
from fedbayes.core.tensors import Samples
from fedbayes.core.wording import listed
from fedbayes.data import Dataset, FederatedData, Preprocessing, load_dataset, partition
from fedbayes.data.differences import CLASSES, differences
from fedbayes.data.tables.columns import reading
from fedbayes.errors import ColumnError, DataError


class OwnData(FederatedData):
    """The samples of the one client that lives here, whatever its number in the federation."""

    def train(self, client: int) -> Samples:
        """Training samples of the client that lives here."""
        return super().train(0)

    def test(self, client: int) -> Samples:
        """Test samples of the client that lives here."""
        return super().test(0)


def own_data(
    config: Config,
    path: Path | None,
    wanted: Preprocessing,
    *,
    query: str | None = None,
    database: str | None = None,
    sheet: str | None = None,
    client: int = 0,
) -> OwnData:
    """Read a client's own samples and put them in the federation's terms.

    Args:
        config: the federation's settings; those of `[data]` say how files are read and split.
        path: a file or folder in one of the formats of `fedbayes data`; None with a query.
        wanted: what the network sees of a sample in this federation.
        query: SQL that gives the samples, instead of the path.
        database: its database, as `data.database` has it.
        sheet: the sheet of an Excel file, instead of the one that the federation's settings name.
        client: its number, so that label noise differs between clients.

    Raises:
        DataError: the samples look otherwise.
    """
    file = None if path is None else path.expanduser().absolute()
    read = {"name": "own", "path": file, "query": query, "database": database, "clients": 1}
    if sheet is not None or file is None or file.suffix.lower() != ".xlsx":
        read["sheet"] = sheet
    one_part = {"partition": "iid", "limit": None, "classes": wanted.classes}
    # By name, in the federation's order; a column that says whose rows they are is not needed.
    columns = {**reading(wanted.table), "group": None} if wanted.table else {}
    settings = config.data.model_copy(update={**read, **one_part, **columns})
    where = str(path or "the query")
    if file is not None and not file.exists():
        raise DataError(f"file or folder not found: {file}. Correct data in the node config")
    try:
        dataset = load_dataset(settings, (wanted.target.kind,))
    except ColumnError as error:
        raise DataError(
            f"{where} has no column '{error.column}', which the federation needs{error.like}. Add "
            "or rename it; cells of features may be empty"
        ) from None
    dataset = fit(dataset, wanted, where)
    divided = partition(dataset, settings, config.seed)
    return OwnData(
        dataset,
        divided,
        config.seed,
        wanted.statistics,
        target=wanted.target,
        columns=wanted.columns,
        label_noise=config.data.label_noise,
        label_noise_kind=config.data.label_noise_kind,
        owner=client,
    )


def fit(dataset: Dataset, wanted: Preprocessing, where: str) -> Dataset:
    """The data set, if it is of the federation's kind. Classes may be some of the federation's.

    Raises:
        DataError: a sample's shape or features, or its target, is not the federation's.
    """
    for what, theirs, own in differences(wanted, dataset):
        if what != CLASSES:
            raise DataError(f"{where} has {what} {own}; the federation has {theirs}")
    if not wanted.classes:
        return dataset
    if not set(dataset.classes) <= set(wanted.classes):
        raise DataError(f"{where}: some classes are not in {listed(wanted.classes)}")
    place = np.array([wanted.classes.index(name) for name in dataset.classes], np.int64)
    return replace(dataset, y=place[dataset.y], target=wanted.target)
