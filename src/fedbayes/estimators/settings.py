"""The config of an estimator: constructor parameters as settings of a run."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from fedbayes.config.config import Config
from fedbayes.config.former import COHORT
from fedbayes.errors import ConfigError

OWN = {
    "seed": "random_state",
    "rounds": "rounds",
    "cohort": "cohort",
    "clients_per_round": "clients_per_round",
    "client_fraction": "client_fraction",
    "method": "method",
    "model": "model",
    "training": "training",
    "task": "likelihood",
    "data": "clients of fit, n_clients and partition",
}
"""Settings that have a constructor parameter of their own, and which."""
NEEDS_FOLDER = (
    "engine",
    "round_timeout",
    "workers",
    "ray",
    "threads",
    "bits",
    "evaluate_every",
    "evaluate_local_every",
    "evaluate_at",
    "checkpoint_every",
    "keep_checkpoints",
    "stop_after",
    "stop_min_improvement",
    "secure",
    "attack",
    "clock",
    "asynchronous",
)
"""Settings that have no meaning without a run folder, test samples or other processes."""


def config_of(parameters: Mapping[str, Any], *, seed: int, given: bool) -> Config:
    """The settings of an estimator's parameters.

    Args:
        parameters: of the constructor, by name.
        seed: of all randomness.
        given: whether the clients are given, so that nothing is divided.

    Raises:
        ConfigError: a parameter is of the wrong type or not allowed; the text names it.
    """
    settings = nested(parameters["settings"])
    data = {"partition": "natural"} if given else _partition(parameters)
    for key in settings:
        if key in OWN:
            raise ConfigError(f"settings has {key!r}. Set it with {OWN[key]} instead")
        if key in NEEDS_FOLDER:
            raise ConfigError(
                f"settings has {key!r}, which has no effect in memory. Use fedbayes.run"
            )
    return Config.create(
        seed=seed,
        rounds=parameters["rounds"],
        **{name: parameters[name] for name in COHORT if parameters[name] is not None},
        method=table(parameters, "method", "name"),
        model=table(parameters, "model", "name"),
        task=table(parameters, "likelihood", "likelihood"),
        training=table(parameters, "training"),
        data=data,
        **settings,
    )


def table(parameters: Mapping[str, Any], name: str, key: str = "") -> dict[str, Any]:
    """A parameter as a table of settings, from a mapping, nothing, or the value of one key.

    Raises:
        ConfigError: it is something else.
    """
    value = parameters[name]
    if value is None:
        return {}
    if key and (isinstance(value, str | BaseModel) or callable(value)):
        return {key: value}
    if isinstance(value, Mapping):
        return dict(value)
    raise ConfigError(f"{name} is {value!r}; give {'a name, or ' if key else ''}a dict of settings")


def nested(settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """Settings with keys such as `aggregation.rule` as tables in tables.

    Raises:
        ConfigError: they are no mapping, or a key says two things.
    """
    if settings is None:
        return {}
    if not isinstance(settings, Mapping):
        raise ConfigError(f"settings is {settings!r}. Give a dict of settings")
    tables: dict[str, Any] = {}
    for key, value in settings.items():
        *path, last = str(key).split(".")
        place = tables
        for part in path:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise ConfigError(f"settings has {key!r}, but {part} is not a table")
        if last in place:
            raise ConfigError(f"settings has {key!r} twice")
        place[last] = dict(value) if isinstance(value, Mapping) else value
    return tables


def _partition(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The `[data]` table of an artificial partition."""
    partition = table(parameters, "partition", "partition")
    allowed = ("partition", "alpha", "balance", "shards_per_client", "class_counts")
    for key in partition:
        if key not in allowed:
            raise ConfigError(f"partition has {key!r}; it takes {', '.join(allowed)}")
    if partition.get("partition") in ("natural", "default"):
        raise ConfigError(
            f"partition is {partition['partition']!r}, but fit got no clients. Give fit an array "
            "of clients, or choose iid or dirichlet"
        )
    return {"clients": parameters["n_clients"], **partition}
