"""The settings of a fusion in function space, as options and `function.KEY=VALUE` give them."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from fedbayes.config.settings import rows
from fedbayes.errors import ConfigError
from fedbayes.fusion.settings import (
    AdapterFunctionSettings,
    DistillationSettings,
    FunctionSettings,
)
from fedbayes.workflows.fuse.job import checked

TABLE = "function."
TRAINING = "function.distillation."
OF_ADAPTERS = {"batch_size": 32, "lr": 3e-3, "held_out": 128, "checks": 3}
SHORT = {"steps": 200, "draws": 2048}
"""Defaults of training adapters end to end, whose networks are large; the latter without a time
limit. Chosen on tweets and reviews that no client has (`benchmarks/adapter_fusion.py --validation`,
seeds 12 and 13)."""
(POSTERIORS,) = (row.choices for row in rows(FunctionSettings) if row.key == "posterior")


def function_settings(
    given: Mapping[str, Any], minutes: float | None = None, posterior: str | None = None
) -> FunctionSettings:
    """How networks become one in function space.

    Args:
        given: settings by name, those of a table in a table.
        minutes: of training end to end, as many steps as there is time for; 0: none.
        posterior: its kind.

    Raises:
        ConfigError: there is no such setting, it is out of range, or it has no effect.
    """
    table = dict(given)
    training = _training(table, minutes)
    if posterior is not None:
        if posterior not in POSTERIORS:
            raise ConfigError(f"--posterior {posterior}: choose {', '.join(POSTERIORS)}")
        table["posterior"] = posterior
    known = [*rows(FunctionSettings, TABLE), *rows(DistillationSettings, TRAINING)]
    known = [row for row in known if row.key != TRAINING[:-1]]
    distillation = (
        None if minutes == 0 else checked(DistillationSettings, training, TRAINING, known)
    )
    return checked(FunctionSettings, table, TABLE, known).model_copy(
        update={"distillation": distillation}
    )


def adapter_settings(
    kind: type[BaseModel], given: Mapping[str, Any], minutes: float | None = None
) -> BaseModel:
    """How adapters become one.

    Args:
        kind: of the settings of a method.
        given: settings by name, those of a table in a table.
        minutes: of training end to end; 0: none.

    Raises:
        ConfigError: there is no such setting, it is out of range, or it has no effect.
    """
    table = dict(given)
    if kind is not AdapterFunctionSettings:
        return checked(kind, table)
    training = _training(table, minutes)
    known = [*rows(kind, TABLE), *rows(DistillationSettings, TRAINING)]
    known = [row for row in known if row.key != TRAINING[:-1]]
    found = checked(AdapterFunctionSettings, table, TABLE, known)
    if minutes == 0:
        return found
    most = {"steps": 10**9} if "minutes" in training else SHORT
    training = {**OF_ADAPTERS, **most, **training}
    distillation = checked(DistillationSettings, training, TRAINING, known)
    return found.model_copy(update={"distillation": distillation})


def _training(table: dict[str, Any], minutes: float | None) -> dict[str, Any]:
    """The settings of training end to end that were given, taken out."""
    way = "such as function.distillation.lr; without training end to end: --minutes 0"
    training = _table(table, "distillation", way)
    if minutes == 0 and training:
        raise ConfigError(
            f"{TRAINING}{next(iter(training))} has no effect with --minutes 0: there is no training"
        )
    if minutes:
        for name in ("steps", "minutes"):
            if name in training:
                raise ConfigError(f"{TRAINING}{name} and --minutes exclude each other")
        training |= {"steps": 10**9, "minutes": minutes}
    return training


def _table(given: dict[str, Any], name: str, way: str) -> dict[str, Any]:
    """A table of settings, taken out."""
    found = given.pop(name, {})
    if not isinstance(found, dict):
        raise ConfigError(f"{name} = {found!r}: it is a table. Set its keys, {way}")
    return dict(found)
