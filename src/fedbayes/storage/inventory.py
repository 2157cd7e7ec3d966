"""What a checkpoint knows of the other files of its run, so that damage is found and told."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fedbayes.config.former import renewed
from fedbayes.core.files import digest, parse_toml
from fedbayes.errors import MessageError

INVENTORY = "fedbayes-inventory"
"""The name of the inventory in the metadata of a checkpoint."""
FREE = (
    "rounds",
    "engine",
    "workers",
    "threads",
    "device",
    "devices",
    "deterministic",
    "data_cache",
    "round_timeout",
    "evaluate_every",
    "evaluate_local_every",
    "evaluate_at",
    "checkpoint_every",
    "keep_checkpoints",
    "stop_after",
    "stop_min_improvement",
    "stop_refused",
    "data.dir",
    "data.path",
    "data.more",
    "data.cache",
    "data.database",
    "data.summaries",
    "model.weights",
    "ray",
    "clock.file",
    "clock.spells",
)
"""Settings, and whole tables, that may change while a run is interrupted: how long it goes on,
where and how it is computed, and where files are whose content is looked at by itself."""


def is_free(key: str, free: Collection[str] = FREE) -> bool:
    """Whether a setting may change while a run is interrupted, by itself or with all its table."""
    return key in free or key.partition(".")[0] in free


@dataclass(frozen=True)
class Inventory:
    """The files of a run when a checkpoint was written."""

    config: str
    """The text of `config.toml`."""
    files: dict[str, str] = field(default_factory=dict)
    """SHA-256 digests of the files that stay as they are, by name."""
    lines: int = 0
    """Bytes of `metrics.jsonl` up to this checkpoint."""
    lines_digest: str = ""
    """Their digest."""
    headline: str = ""
    """Name of the metric that the run is for, such as `local_rmse`; for reports, which look up
    nothing that a config names."""
    higher_is_better: bool = True
    """Whether a higher value of it is a better one."""

    best: int = 0
    """Round of the best checkpoint, which is kept in addition to this one; 0 if none is."""

    def dump(self) -> str:
        """As JSON."""
        return _FORM.dump_json(self).decode()

    @classmethod
    def load(cls, text: str) -> "Inventory":
        """The inverse of `dump`. Raises a MessageError if it is invalid."""
        try:
            return _FORM.validate_json(text)
        except ValidationError:
            raise MessageError("its inventory of the run's files is invalid") from None

    def changes(self, config: str) -> dict[str, str]:
        """The settings that differ in another text of the config: how, by key.

        Nothing that a config names is looked up.

        Raises:
            ValueError: the text is no TOML.
        """
        before = dict(dotted(renewed(parse_toml(self.config))))
        now = dict(dotted(renewed(parse_toml(config))))
        return {
            key: f"{key} was {_said(before, key)}, and is now {_said(now, key)}"
            for key in sorted(before.keys() | now.keys())
            # As they are written: 1 and 1.0 may be two things.
            if repr(before.get(key)) != repr(now.get(key))
        }

    def holds(self, name: str, data: bytes) -> bool:
        """Whether this may be the content of a file of this name."""
        return digest(data) == self.files.get(name, digest(data))


_FORM = TypeAdapter(Inventory)


def dotted(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by their dotted names; a table without any is one itself."""
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _said(settings: Mapping[str, Any], key: str) -> str:
    return repr(settings[key]) if key in settings else "not set"
