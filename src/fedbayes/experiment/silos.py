"""What silos hand over: models in files, and how many samples of each class they saw."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedbayes.errors import DataError, ModelError
from fedbayes.models import DenseLayer, dense_layers, read_weights


def read_models(paths: Sequence[Path]) -> dict[str, list[DenseLayer]]:
    """Fully connected networks from files, each read once, by path.

    Raises:
        ModelError: a file is no such network, or is named twice.
    """
    models = {}
    for path in paths:
        if str(path) in models:
            raise ModelError(f"{path} is named twice; a model counts once")
        models[str(path)] = dense_layers(read_weights(path), str(path))
    return models


def read_counts(path: Path, models: Sequence[Path]) -> npt.NDArray[np.int64]:
    """Training samples of each model and class [S, K], from JSON.

    The file is a list with a list of counts for each model in order, or an object that maps file
    names (with or without folder and suffix) to such lists.

    Raises:
        DataError: the file is absent, no JSON, or does not fit the models.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the counts {path}: {error}") from None
    if isinstance(content, dict):
        content = [_row(content, model, path) for model in models]
    form = "a list of counts for each model, all of one length, such as [[50, 3], [0, 41]]"
    if not isinstance(content, list) or not all(
        isinstance(row, list) and all(type(n) is int for n in row) for row in content
    ):
        raise DataError(f"{path} must hold {form}")
    if len(content) != len(models) or len({len(row) for row in content}) != 1:
        raise DataError(f"{path} must hold {form}; there are {len(models)} models")
    counts = np.array(content, dtype=np.int64)
    if (counts < 0).any() or not counts.sum(1).all():
        raise DataError(f"{path}: counts are at least 0, and every model saw some sample")
    return counts


def _row(content: dict[str, object], model: Path, path: Path) -> object:
    for key in (str(model), model.name, model.stem):
        if key in content:
            return content[key]
    raise DataError(f"{path} has no counts of {model}; there are {', '.join(content) or 'none'}")
