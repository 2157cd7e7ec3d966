"""The data of one client, from a file or folder that only its node can read."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from fedbayes.data import Dataset, FederatedData, load_dataset, partition
from fedbayes.data.wording import describe
from fedbayes.errors import DataError
from fedbayes.flower.project import Schema
from fedbayes.runs.config import Config
from fedbayes.tensors import Samples


class OwnData(FederatedData):
    """The samples of the one client that lives here, whatever its number in the federation."""

    def train(self, client: int) -> Samples:
        """Its training samples."""
        return super().train(0)

    def test(self, client: int) -> Samples:
        """Its test samples."""
        return super().test(0)


def own_data(config: Config, path: Path, schema: Schema) -> OwnData:
    """Read a client's own samples and put them in the federation's terms.

    Args:
        config: the federation's settings; those of `[data]` say how files are read and split.
        path: a file or folder in one of the formats of `fedbayes data`.
        schema: what samples look like in this federation.

    Raises:
        DataError: the samples look otherwise.
    """
    read = {"name": "own", "path": path.expanduser().absolute(), "clients": 1}
    classes = schema.target.names if schema.target.classes else ()
    one_part = {"partition": "iid", "limit": None, "classes": classes}
    # By name, in the federation's order; a column that says whose rows they are is not needed.
    columns = {"features": schema.features, "drop": (), "group": None}
    settings = config.data.model_copy(
        update={**read, **one_part, **(columns if schema.features else {})}
    )
    dataset = load_dataset(settings, (schema.target.kind,))
    dataset = fit(dataset, schema, path)
    statistics = (np.array(schema.mean, np.float32), np.array(schema.std, np.float32))
    divided = partition(dataset, settings, config.seed)
    return OwnData(dataset, divided, config.seed, statistics, target=schema.target)


def fit(dataset: Dataset, schema: Schema, path: Path) -> Dataset:
    """The data set, if it is of the federation's kind.

    Raises:
        DataError: a sample's shape or features, or its target, is not the federation's.
    """
    if dataset.shape != schema.shape or dataset.features != schema.features:
        raise DataError(
            f"{path}: samples are {dataset.features or dataset.shape}, but the federation's are "
            f"{schema.features or schema.shape}"
        )
    if dataset.scale != schema.scale:
        raise DataError(f"{path}: samples go up to {dataset.scale}, not {schema.scale}")
    own, wanted = dataset.target, schema.target
    if own.kind != wanted.kind or (own.kind != "class" and own.names != wanted.names):
        raise DataError(
            f"{path}: the target is {describe(own)}, but the federation's is {describe(wanted)}"
        )
    if own.kind != "class":
        return dataset
    if not set(own.names) <= set(wanted.names):
        raise DataError(f"{path}: classes are not all among {', '.join(wanted.names)}")
    place = np.array([wanted.names.index(name) for name in own.names], np.int64)
    return replace(dataset, y=place[dataset.y], target=wanted)
