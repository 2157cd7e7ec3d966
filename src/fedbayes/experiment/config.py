"""The config of a run: TOML to checked settings, with errors that name the key."""

import tomllib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Self

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from fedbayes.contracts import AnyMethod, Method
from fedbayes.data import DataSettings
from fedbayes.errors import ConfigError
from fedbayes.federation.aggregation import Aggregation
from fedbayes.federation.secure import Secure
from fedbayes.federation.worker import resolve
from fedbayes.inference.local import LocalTraining
from fedbayes.methods import METHODS
from fedbayes.models import ModelSettings, Precision


class Config(BaseModel):
    """All settings of a run. Every one has a default; the defaults learn digits."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    seed: int = Field(0, ge=0, description="seed of all randomness")
    rounds: int = Field(20, ge=1, description="rounds of the run")
    cohort: int | float = Field(
        1.0, description="clients in a round: a number of them (10), or a fraction (0.1)"
    )
    sampling: Literal["uniform", "cyclic"] = Field(
        "uniform", description="who is in a round: drawn anew, or all in a fixed cycle"
    )
    min_reports: int = Field(1, ge=1, description="good reports that an update needs")
    engine: Literal["sequential", "workers", "flower-simulation", "flower"] = Field(
        "sequential", description="who runs clients; flower: nodes of `fedbayes federate`"
    )
    round_timeout: float = Field(
        600.0, gt=0, allow_inf_nan=False, description="seconds that a round waits (flower engines)"
    )
    workers: int = Field(2, ge=1, description="processes of engine workers")
    threads: int = Field(1, ge=1, description="threads of every process; part of the arithmetic")
    device: str = Field("cpu", description="cpu, cuda, cuda:1, or auto")
    precision: Precision = Field("float32", description="float32, or bf16 by autocast")
    evaluate_every: int = Field(
        1, ge=0, description="rounds between evaluations of the global model; 0: the last alone"
    )
    checkpoint_every: int = Field(1, ge=1, description="rounds between checkpoints")
    keep_checkpoints: Literal["last", "best", "all"] = Field(
        "last", description="checkpoints to keep; best: the best round's too, whose model is saved"
    )
    stop_after: int | None = Field(
        None,
        ge=1,
        description="evaluations in a row without a better headline accuracy that end the run",
    )
    stop_min_improvement: float = Field(
        0.0, ge=0, description="rise of the headline accuracy that counts as better (stop_after)"
    )

    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    training: LocalTraining = LocalTraining()
    aggregation: Aggregation = Aggregation()
    secure: Secure = Secure()
    method: dict[str, Any] = Field(
        default_factory=lambda: complete_method({"name": "fedavg"}),
        description="name of the method and its parameters",
    )

    @field_validator("cohort")
    @classmethod
    def _check_cohort(cls, cohort: float) -> int | float:
        if isinstance(cohort, int) and cohort < 1:
            raise ValueError("a number of clients is at least 1")
        if isinstance(cohort, float) and not 0 < cohort <= 1:
            raise ValueError("a fraction of the clients is above 0 and at most 1.0")
        return cohort

    @model_validator(mode="after")
    def _check_stop(self) -> Self:
        if self.stop_min_improvement and self.stop_after is None:
            raise ValueError("stop_min_improvement is for stop_after; give stop_after too")
        return self

    @field_validator("method")
    @classmethod
    def _complete_method(cls, method: dict[str, Any]) -> dict[str, Any]:
        return complete_method(method)

    @classmethod
    def create(cls, **settings: Any) -> Self:
        """Checked settings from keyword arguments; tables are dicts.

        Raises:
            ConfigError: a key is unknown or a value is not allowed; the text names the key.
        """
        try:
            return cls.model_validate(settings)
        except ValidationError as error:
            raise ConfigError("\n".join(_explain(cls, e) for e in error.errors())) from None

    @classmethod
    def load(cls, file: Path | None = None, overrides: Iterable[str] = ()) -> Self:
        """Settings from a TOML file, changed by `key=value` overrides such as `training.lr=0.1`.

        Raises:
            ConfigError: the file is unreadable, or as for `create`.
        """
        settings = _read(file) if file is not None else {}
        for override in overrides:
            _override(settings, override)
        return cls.create(**settings)

    def dump(self) -> str:
        """All settings as TOML."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))

    def build_method(self) -> AnyMethod:
        """The method with its parameters."""
        parameters = {key: value for key, value in self.method.items() if key != "name"}
        return find_method(self.method["name"]).model_validate(parameters)

    def cohort_size(self, clients: int) -> int:
        """How many of so many clients take part in a round, at least one.

        Raises:
            ConfigError: more than there are.
        """
        if isinstance(self.cohort, float):
            return max(1, round(self.cohort * clients))
        if self.cohort > clients:
            raise ConfigError(f"cohort is {self.cohort}, but there are {clients} clients")
        return self.cohort


def find_method(name: str) -> type[AnyMethod]:
    """The method class of this name, or of `package.module:Class`.

    Raises:
        ConfigError: there is none.
    """
    if name in METHODS:
        return METHODS[name]
    if ":" not in name:
        raise ConfigError(
            f"no method is called {name!r}{_suggest(name, METHODS)}; there are "
            f"{', '.join(METHODS)}, or your own as package.module:Class"
        )
    try:
        found = resolve(name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"cannot find the method {name!r}: {error}") from None
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise ConfigError(f"{name!r} is no class derived from fedbayes.contracts.Method")
    return found


def complete_method(table: Mapping[str, Any]) -> dict[str, Any]:
    """The `[method]` table with every parameter, defaults filled in."""
    table = {"name": "fedavg", **table}
    name = table.pop("name")
    if not isinstance(name, str):
        raise ConfigError(f"method.name is {name!r}; it must be a string")
    kind = find_method(name)
    try:
        method = kind.model_validate(table)
    except ValidationError as error:
        lines = [_explain(kind, e, prefix="method.") for e in error.errors()]
        raise ConfigError("\n".join(lines)) from None
    # TOML has no null; a parameter that may be none is none by default.
    return {"name": name, **method.model_dump(mode="json", exclude_none=True)}


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"there is no config file {file}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the config {file}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from None


def _override(settings: dict[str, Any], override: str) -> None:
    """Apply one `a.b=value`; the value is TOML, or else taken as a string."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"{override!r} is no setting; write key=value, as in training.lr=0.05")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *path, last = key.strip().split(".")
    table = settings
    for part in path:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{key} cannot be set: {part} is not a table")
    if path == ["method"] and last == "name" and table.get("name", value) != value:
        table.clear()  # the parameters were another method's
    table[last] = value


def _suggest(word: str, known: Iterable[str]) -> str:
    close = get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _explain(kind: type[BaseModel], error: ErrorDetails, prefix: str = "") -> str:
    """One line that names the key, what is wrong, and what is allowed."""
    path = [str(part) for part in error["loc"]]
    if len(path) > 1 and path[0] in kind.model_fields and error["type"] != "extra_forbidden":
        annotation = kind.model_fields[path[0]].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            path = path[:1]  # what follows names a member of a union
    key = prefix + ".".join(path)
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return str(cause)
    if error["type"] == "extra_forbidden":
        for part in path[:-1]:
            annotation = kind.model_fields[part].annotation if part in kind.model_fields else None
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                kind = annotation
        known = list(kind.model_fields)
        return (
            f"{key} is no setting{_suggest(path[-1], known)}; "
            f"here there are {', '.join(known) or 'none'}"
        )
    message = error["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if not path or isinstance(error["input"], dict):
        return f"{key.rstrip('.') or 'config'}: {message}"
    return f"{key} is {error['input']!r}; {message}"
