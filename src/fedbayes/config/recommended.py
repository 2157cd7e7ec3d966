"""Settings that are left at `auto`, chosen before the first round."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedbayes.config.config import Config
from fedbayes.contracts import AnyMethod, Federation, Known
from fedbayes.data import FederatedData
from fedbayes.errors import ConfigError
from fedbayes.inference.settings import LocalTraining

RATES = {"sgd": 0.1, "adam": 0.003, "amsgrad": 0.003, "adamax": 0.006}
"""Learning rates of optimizers that a user set instead of the recommended one."""


def choose(config: Config, run: Federation, data: FederatedData) -> Config:
    """The settings with a value for each `auto`; chosen values are in `settings_chosen`.

    With `method.preset = "published"` that are published values, else what the method recommends
    for this network, likelihood and these clients.

    Args:
        config: the settings.
        run: of the federation, with published values for open settings.
        data: the clients' data, or what the server has of them.
    """
    method, training = config.named_method(), config.training
    if not (training.open or method.open):
        return config
    sizes = data.train_sizes()
    median = int(np.median(sizes))
    # Where clients are looked at when they are asked, those that were stand for all.
    samples = round(float(sizes.mean()) * run.clients)
    if method.reports.pooled:
        samples = median = int(sizes.sum())
    pretrained = config.model.pretrained is not None and not config.model.scratch
    known = Known(run, samples, median, pretrained)
    wanted: Mapping[str, Any] = {
        f"method.{n}": value for n, value in method.about.published.items()
    }
    if method.preset == "recommended":
        wanted = method.recommended(known)
        wanted = _beside(method, training, wanted)
        _require_choosable(method, training, wanted)
    trained = training.with_chosen(_part(wanted, "training"))
    made = method.with_chosen(_part(wanted, "method"))
    chosen = {f"training.{name}": getattr(trained, name) for name in training.open}
    chosen |= {f"method.{name}": getattr(made, name) for name in method.open}
    table = {"name": config.method["name"], **made.model_dump(mode="json", exclude_none=True)}
    told = {key: value for key, value in chosen.items() if value is not None}
    told = {**config.settings_chosen, **told}  # those of a run that this config comes from
    return config.model_copy(update={"training": trained, "method": table, "settings_chosen": told})


def _part(wanted: Mapping[str, Any], table: str) -> dict[str, Any]:
    """Values of one table, by name."""
    return {
        key.removeprefix(f"{table}."): value
        for key, value in wanted.items()
        if key.startswith(f"{table}.")
    }


def _require_choosable(
    method: AnyMethod, training: LocalTraining, wanted: Mapping[str, Any]
) -> None:
    """See that all that a method recommends are settings that may be `auto`."""
    known = [f"training.{name}" for name in training.choosable()]
    known += [f"method.{name}" for name in method.choosable()]
    if unknown := [key for key in wanted if key not in known]:
        raise ConfigError(
            f"{method.name} recommends {', '.join(unknown)}, which a run cannot choose. Mark "
            f"fields with fedbayes.core.fields.Chosen(). Possible: {', '.join(known)}"
        )


def _beside(
    method: AnyMethod, training: LocalTraining, wanted: Mapping[str, Any]
) -> dict[str, Any]:
    """What is recommended in addition to the user's settings of training."""
    found = dict(wanted)
    meant, given = found.get("training.optimizer"), "optimizer" not in training.open
    if "optimizer" in method.about.unused:  # its usual rate has no effect either
        found.pop("training.optimizer", None)
    elif (given or training.momentum) and meant != training.optimizer:
        found["training.optimizer"] = training.optimizer
        found["training.lr"] = RATES.get(training.optimizer, training.lr)
    if training.steps is not None:  # epochs and patience would have no effect
        found.pop("training.epochs", None)
        found.pop("training.patience", None)
    return found
