"""Whether a client's table fits what a federation or a model has its columns encoded by."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from fedbayes.config.config import Config
from fedbayes.data import Preprocessing
from fedbayes.data.tables.cells import code
from fedbayes.data.tables.check import TableCheck, check_table
from fedbayes.data.tables.columns import reading
from fedbayes.data.tables.encoding import unknown
from fedbayes.errors import DataError, told_as
from fedbayes.workflows.serve.evaluation_set import card_of
from fedbayes.workflows.serve.model_files import ModelFiles

_PLACES = ("preprocessing.json", "schema.json")
"""Files of a run folder and of a Flower project that say how columns are encoded."""


def check_like(config: Config, like: Path) -> TableCheck:
    """What would be done with a table by the columns of a federation or a model.

    Args:
        config: whose `[data]` names the table.
        like: a run folder, a Flower project or its `schema.json`, or a model file.

    Raises:
        FedbayesError: one of the two cannot be read.
    """
    seen = stored_columns(like)
    if not seen.table:
        raise DataError(f"{like} has samples without column names, so there is nothing to compare")
    changes = {**reading(seen.table), "classes": seen.classes}
    if "label" not in config.data.model_fields_set:
        names = seen.target.names if not seen.classes else (seen.label or "label",)
        changes["label"] = names
    settings = config.data.model_copy(update=changes)
    check = check_table(settings, (seen.target.kind,))
    if "label" not in config.data.model_fields_set:  # rows to predict have none
        there = check.frame.columns
        check = replace(check, columns=tuple(one for one in check.columns if one.name in there))
    if check.refused:
        return check
    new = unknown(code(check.frame, seen.table, check.file), seen.columns)
    told: dict[str, list[str]] = defaultdict(list)  # empty cells, and unknown categories
    for odd in new:
        told[odd.column.name].append(odd.told())
    columns = tuple(
        replace(look, hint="; ".join(told[look.name]), width=_width(look.name, seen))
        for look in check.columns
    )
    return replace(check, columns=columns)


def _width(name: str, seen: Preprocessing) -> int:
    return next((len(column.features) for column in seen.table if column.name == name), 0)


def stored_columns(place: Path) -> Preprocessing:
    """What a network sees, as a run folder, a Flower project or a model file says.

    Raises:
        DataError: it does not say so.
    """
    if place.is_dir():
        place = next((place / name for name in _PLACES if (place / name).is_file()), place)
    if place.is_dir() or not place.is_file():
        raise DataError(
            f"{place} is not a run folder, Flower project or model file: it has no "
            f"{' or '.join(_PLACES)}"
        )
    if place.suffix.lower() == ".json":
        return Preprocessing.load(place.read_bytes())
    with told_as(DataError, f"cannot read {place}", OSError):
        card = card_of(place, ModelFiles())
    if card is None:
        raise DataError(f"{place} has no card with the inputs of its network")
    return card.preprocessing
