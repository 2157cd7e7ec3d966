"""The config of a run: TOML to checked settings, with errors that name the key."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from fedbayes.config.former import COHORT, of_cohort, refuse_several, renewed
from fedbayes.config.given import assign, read, refuse_unknown, renamed, tables, whole
from fedbayes.config.settings import SettingRow, explain, find, rows, toml, unknown
from fedbayes.core.brief import Settings
from fedbayes.core.fields import AUTO as AUTO_SETTING
from fedbayes.core.fields import OneOf, Only, Place, Several
from fedbayes.core.lazy import own_class, placed
from fedbayes.core.pretrained import TIMM
from fedbayes.data import DataSettings
from fedbayes.data.source_settings import is_data
from fedbayes.errors import ConfigError
from fedbayes.federation.attacks.settings import AttackSettings
from fedbayes.federation.clock.settings import Asynchronous, ClockSettings
from fedbayes.federation.engine_table import ENGINES, takers
from fedbayes.federation.privacy.settings import Privacy
from fedbayes.federation.ray_settings import RaySettings
from fedbayes.federation.settings import Aggregation, Compression, Secure
from fedbayes.inference.settings import LocalTraining
from fedbayes.likelihoods import LIKELIHOODS, complete_likelihood, find_likelihood
from fedbayes.likelihoods.measures import AUTO, MEASURES, check_names
from fedbayes.likelihoods.measures import HOW as METRIC
from fedbayes.methods import METHODS
from fedbayes.models import ModelSettings, Precision
from fedbayes.models.settings import OTHERS

if TYPE_CHECKING:
    from fedbayes.contracts import AnyMethod


SAMPLING = "function(round, clients, size, rng)"
"""How a user's own sampling of clients is called."""


LARGEST = 1e30
"""Of a setting: far more is beyond what 32 bits hold, in which networks compute."""


DATA_CACHE = 1024
"""MiB of clients' samples that stay on a GPU between rounds, unless set."""


def is_reference(engine: object, data: object) -> bool:
    """Whether a server with its own data has only a reference table, by the names of the engine and
    of the data.
    """
    known = isinstance(engine, str) and engine in ENGINES
    return known and ENGINES[str(engine)].states == "remote" and data == "own"


class Config(Settings):
    """All settings of a run. Each has a default; the defaults train on digits.

    Examples:
        >>> from fedbayes import Config
        >>> config = Config.create(method="fedprox", rounds=5, training={"lr": 0.05})
        >>> config.method["name"], config.training.lr
        ('fedprox', 0.05)
    """

    seed: int = Field(0, ge=0, description="seed of all randomness")
    rounds: int = Field(20, ge=1, description="number of rounds")
    clients_per_round: int | None = Field(
        None,
        ge=1,
        description="number of clients per round, such as 10. Unset: client_fraction decides",
    )
    client_fraction: float | None = Field(
        None,
        gt=0,
        le=1,
        description="share of the clients per round, such as 0.1. Unset: clients_per_round "
        "decides, else all clients take part",
    )
    sampling: Literal["uniform", "cyclic", "poisson"] | Place = Field(
        "uniform",
        description="how the clients of a round are sampled. uniform: at random. cyclic: in a "
        "fixed "
        "order. poisson: each client independently, so that clients_per_round is the expected "
        f"number. Or your own as package.module:function, called as {SAMPLING}, which returns the "
        "numbers of at most size clients",
    )
    min_reports: int = Field(1, ge=1, description="number of valid updates that a round needs")
    stages: Several[str] = Field(
        (),
        description="your own stages of a round, in order, as package.module:Class. Each class "
        "derives from fedbayes.federation.stages.stage.Stage",
    )
    engine: Annotated[str, OneOf(ENGINES)] = Field(
        "auto",
        description="; ".join(f"{name}: {kind.summary}" for name, kind in ENGINES.items()),
    )
    round_timeout: Annotated[float, Only("engine", *takers("round_timeout"))] = Field(
        600.0,
        gt=0,
        allow_inf_nan=False,
        description="longest time in seconds that a round waits for updates",
    )
    workers: Annotated[int | None, Only("engine", *takers("workers"))] = Field(
        None,
        ge=1,
        description="number of worker processes (engine workers). Unset: one per core, or more if "
        "there are more devices",
    )
    threads: int = Field(
        1,
        ge=1,
        description="threads per process; results can depend on it, unless bits = 'portable'",
    )
    bits: Literal["machine", "portable"] = Field(
        "machine",
        description="portable: the same bits on every x86 CPU with AVX2, with any number of "
        "threads and every exact engine, in at most about twice the time; CPU and float32 only. "
        "machine: the fastest kernels, whose last digits depend on CPU and threads",
    )
    devices: Several[str] = Field(
        ("cpu",),
        min_length=1,
        description="cpu, cuda, cuda:1, or auto for all GPUs. With several devices, worker "
        "processes take one each in turn; other processes use the first",
        examples=["cpu", "cuda", "auto"],
    )
    deterministic: bool = Field(
        True, description="whether results on a GPU are identical bit for bit; false may be faster"
    )
    data_cache: int | None = Field(
        None,
        ge=0,
        description="MiB of clients' samples that each process caches on its device between "
        "rounds; the least recently used are dropped first. Unset: 1024 on a GPU, 0 on the CPU",
    )
    precision: Precision | Literal["auto"] = Field(
        "auto",
        description="float32, or bf16 by autocast. auto: float32; with deterministic = false, bf16 "
        "if a training step is clearly faster on this machine (measured once)",
    )
    evaluate_every: int = Field(
        1,
        ge=0,
        description="rounds between evaluations of the global model. 0: evaluate only after the "
        "last "
        "round",
    )
    evaluate_local_every: int = Field(
        1,
        ge=0,
        description="rounds between evaluations of clients' own models, each on the client's test "
        "samples. 0: evaluate only after the last round. A client that is in no evaluated round "
        "has no metrics",
    )
    evaluate_at: Annotated[
        Literal["auto", "server", "clients"], Only("engine", *takers("evaluate_at"))
    ] = Field(
        "auto",
        description="where the global model is evaluated over a network. server: on the server's "
        "test samples. clients: at each client, which returns sums and metrics. auto: at the "
        "clients if the server has only a reference table and may see clients' metrics",
    )
    metrics: Several[str] = Field(
        (AUTO,),
        description="metrics in addition to the likelihood's own, for all test rows and for each "
        f"client: {', '.join(k for k, m in MEASURES.items() if m.value)}. With a threshold for "
        "classes: sensitivity@0.3. Or your own as package.module:function, called as "
        f"{METRIC}. auto: those that suit the likelihood, for the global model after the last "
        "round",
        examples=[AUTO, *MEASURES],
    )
    calibration: Literal["temperature", "none"] = Field(
        "temperature",
        description="calibration of classes and labels at the end of the run. temperature: each "
        "client holds out a tenth of its training samples, at most 200; sums over these samples "
        "give the temperature of the global model, or under local that of the client's own. none: "
        "clients train on all samples",
    )
    checkpoint_every: int = Field(1, ge=1, description="number of rounds between checkpoints")
    keep_checkpoints: Literal["last", "best", "all"] = Field(
        "last",
        description="number of checkpoints to keep. best: keep the best round's too, and save its "
        "model",
    )
    stop_after: int | None = Field(
        None,
        ge=1,
        description="early stopping: evaluations in a row without a better primary metric",
    )
    stop_min_improvement: Annotated[float, Only("stop_after")] = Field(
        0.0, ge=0, description="smallest improvement of the primary metric that counts (stop_after)"
    )

    stop_refused: int = Field(
        5,
        ge=0,
        description="rounds in a row without an accepted update after which the run stops with an "
        "error. 0: never",
    )

    settings_chosen: dict[str, Any] = Field(
        default_factory=dict,
        description="in the config of a run: the values chosen for settings at auto, by key",
    )
    data: DataSettings = DataSettings()
    task: dict[str, Any] = Field(
        default_factory=lambda: {"likelihood": "auto"},
        description="the likelihood of the target, and its settings",
    )
    model: ModelSettings = ModelSettings()
    training: LocalTraining = LocalTraining()
    aggregation: Aggregation = Aggregation()
    privacy: Privacy = Privacy()
    secure: Secure = Secure()
    compression: Compression = Compression()
    attack: AttackSettings = AttackSettings()
    ray: Annotated[RaySettings, Only("engine", *takers("ray"))] = RaySettings()
    clock: ClockSettings = ClockSettings()
    asynchronous: Asynchronous = Asynchronous()
    method: dict[str, Any] = Field(
        default_factory=lambda: {"name": "fedavg"},
        description="name of the method and its parameters",
    )

    @model_validator(mode="before")
    @classmethod
    def _processor(cls, values: Any) -> Any:
        """Texts and pictures of the user's own are read as the pretrained network was trained."""
        if not isinstance(values, dict):
            return values
        data, model = values.get("data"), values.get("model")
        if not isinstance(data, dict) or not isinstance(model, dict):
            return values
        name, found = model.get("name"), model.get("pretrained")
        own = data.get("path") is not None or ":" in str(data.get("name", ""))
        if str(name) not in OTHERS or not isinstance(found, str) or not own or "processor" in data:
            return values
        processor = f"{TIMM}{found}" if name == "timm" else found
        return {**values, "data": {**data, "processor": processor}}

    @model_validator(mode="before")
    @classmethod
    def _given(cls, values: Any) -> Any:
        """Words and Python objects as tables, first of all, and older names by today's."""
        if not isinstance(values, dict):
            return values
        if "device" in values:
            if "devices" in values:
                raise ConfigError("device is the former name of devices. Give only devices")
            values = {"devices" if k == "device" else k: v for k, v in values.items()}
        return of_cohort(tables(values))

    @model_validator(mode="after")
    def _check_bits(self) -> Self:
        for holds, what, setting, good in (
            (self.devices == ("cpu",), "the CPU", "devices", "cpu"),
            (self.precision != "bf16", "float32", "precision", "float32"),
            (ENGINES[self.engine].exact, "rounding as in 'sequential'", "engine", "sequential"),
        ):
            if self.bits == "portable" and not holds:
                value = getattr(self, setting)
                shown = ", ".join(value) if isinstance(value, tuple) else repr(value)
                raise ConfigError(
                    f"bits = 'portable' needs {what}, and {setting} is {shown}. Set {setting} = "
                    f"{good!r}"
                )
        return self

    @field_validator("clients_per_round", mode="before")
    @classmethod
    def _whole(cls, clients: Any) -> Any:
        """NumPy's integers are numbers of clients too."""
        return int(clients) if isinstance(clients, Integral) else clients

    @field_validator("metrics")
    @classmethod
    def _check_metrics(cls, metrics: tuple[str, ...]) -> tuple[str, ...]:
        check_names(metrics)
        return metrics

    @field_validator("stages")
    @classmethod
    def _check_stages(cls, stages: tuple[str, ...]) -> tuple[str, ...]:
        """By their places; what they are is seen when a run is built."""
        return tuple(placed("stage", place, ()) for place in stages)

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        """The names alone: what they stand for imports PyTorch."""
        method, likelihood = self.method.get("name", "fedavg"), self.task.get("likelihood", "auto")
        self.method["name"] = placed("method", method, METHODS)
        self.task["likelihood"] = placed("likelihood", likelihood, ("auto", *LIKELIHOODS))
        return self

    @model_validator(mode="after")
    def _complete_tables(self) -> Self:
        """Last, since parameters are checked by what they are for, which imports PyTorch."""
        for table, completed in (
            (self.task, complete_task(self.task)),
            (self.method, complete_method(self.method)),
        ):
            table.clear()
            table.update(completed)
        for key, value in _numbers(self.model_dump(mode="json")):
            if abs(value) > LARGEST:
                raise ValueError(f"{key} is {value:g}; the largest number is {LARGEST:g}")
        return self

    @classmethod
    def create(cls, **settings: Any) -> Self:
        """Checked settings from keyword arguments; tables are dicts.

        Raises:
            ConfigError: a key is unknown or a value is not allowed; the text names the key.
        """
        try:
            return cls.model_validate(settings)
        except ValidationError as error:
            raise ConfigError(explain(cls, error, _known(error, settings))) from None

    @classmethod
    def published(cls, **settings: Any) -> Self:
        """As `create`, with the settings of the method's paper where none is given, and without
        calibration.

        Raises:
            ConfigError: as for `create`.
        """
        method = {"preset": "published", **settings.get("method", {"name": "fedavg"})}
        return cls.create(**{"calibration": "none", **settings, "method": method})

    @classmethod
    def load(cls, file: Path | None = None, overrides: Iterable[str] = ()) -> Self:
        """Settings from a TOML file, changed by `key=value` overrides such as `training.lr=0.1`.

        Raises:
            ConfigError: the file is unreadable, or as for `create`.
        """
        return cls._changed(read(file) if file is not None else {}, overrides)

    @classmethod
    def load_any(cls, files: Sequence[Path], overrides: Iterable[str] = ()) -> Self:
        """As `load`, from a TOML file, or from tables that are the data: of several, each is one
        client's.

        Raises:
            ConfigError: as for `load`.
        """
        if len(files) < 2 and not any(map(is_data, files)):
            return cls.load(next(iter(files), None), overrides)
        path, *more = (str(file) for file in files)
        of_data = [f"data.path={json.dumps(path)}"]
        of_data += [f"data.more={json.dumps(more)}"] if more else []
        return cls.load(None, [*of_data, *overrides])

    @classmethod
    def given(cls, config: "Config | Path | str | None", settings: Mapping[str, Any]) -> "Config":
        """The settings of a call from Python: a config, a TOML file, or keys of one.

        Raises:
            ConfigError: it is none of them, or there are keys besides it; or as for `create`.
        """
        if config is None:
            return cls.create(**whole(settings))
        if settings:
            raise ConfigError(
                f"{', '.join(settings)} cannot be combined with a config. Give only keys, or "
                "change a file with Config.load(file, ['rounds=5', 'training.lr=0.05'])"
            )
        if isinstance(config, str | Path):
            return cls.load(Path(config))
        if not isinstance(config, Config):
            raise ConfigError(
                f"config is of type {type(config).__name__}; give a Config, a TOML file, or keys "
                "as in rounds=5, training={'lr': 0.05}"
            )
        return config

    @classmethod
    def stored(
        cls,
        file: Path,
        overrides: Iterable[str] = (),
        *,
        objects: Mapping[str, str] | None = None,
    ) -> Self:
        """As `load`, of the settings that a run left, which may be an older version's.

        Args:
            file: the config.
            overrides: as for `load`.
            objects: what Python objects that it names are called in this process; None: the same.
        """
        settings = renewed(read(file))
        if objects is not None:
            refuse_unknown(settings, objects, file)
            settings = renamed(settings, objects)
        return cls._changed(settings, overrides)

    @classmethod
    def _changed(cls, settings: dict[str, Any], overrides: Iterable[str]) -> Self:
        settings, changes = tables(settings), list(overrides)
        keys = [change.partition("=")[0].strip() for change in changes]
        refuse_several([key for key in COHORT if key in keys])
        for change in changes:
            assign(settings, change)
        return cls.create(**settings)

    def dump(self) -> str:
        """All settings as TOML, every key of them; those that are unset as comments."""
        values = self.model_dump(mode="json")
        known = settings(self.method["name"], self.task["likelihood"])
        for table in ("task", "method"):
            unset = {row.key.removeprefix(f"{table}."): None for row in find(known, table)}
            values[table] = unset | values[table]
        return toml(known, values)

    def named_method(self) -> "AnyMethod":
        """The named method with its parameters."""
        return find_method(self.method["name"]).model_validate(_parameters(self.method))

    def build_method(self) -> "AnyMethod":
        """The method that runs with its parameters, which may be a variant of the named one."""
        method = self.named_method()
        if self.model.batch_norm != "local":
            return method.variant()
        from fedbayes.federation.stages.personal_layers import with_personal_layers

        return with_personal_layers(method)

    def reopened(self) -> Self:
        """The settings with `auto` restored for those that were chosen and not changed since."""
        values = self.model_dump()
        for key, value in self.settings_chosen.items():
            table, _, name = key.partition(".")
            if table in values and values[table].get(name) == value:
                values[table][name] = AUTO_SETTING
        return type(self).create(**{**values, "settings_chosen": {}})

    def closed(self) -> Self:
        """The settings with class defaults for open ones, or published values with the preset
        `published`.
        """
        method = self.named_method()
        method = method.with_chosen(method.about.published if method.preset == "published" else {})
        table = {"name": self.method["name"], **_stored(method)}
        return self.model_copy(update={"training": self.training.with_chosen({}), "method": table})

    def chosen_as(self, before: "Config") -> Self:
        """The settings, with the values that a run chose for open ones."""
        values, chosen = self.reopened().model_dump(), {}
        for key, value in before.settings_chosen.items():
            table, _, name = key.partition(".")
            if values[table].get(name) == AUTO_SETTING:
                values[table][name] = chosen[key] = value
        return type(self).create(**{**values, "settings_chosen": chosen})

    @property
    def target_kinds(self) -> tuple[str, ...]:
        """Kinds of target that the likelihood takes; none if it is left to the data."""
        name = self.task["likelihood"]
        return () if name == "auto" else find_likelihood(name).kinds

    @property
    def reference(self) -> bool:
        """Whether the server's rows are a reference table, and clients have their own elsewhere."""
        return is_reference(self.engine, self.data.name)

    @property
    def at_clients(self) -> bool:
        """Whether clients try the global model, each on its own test samples."""
        if self.evaluate_at != "auto":
            return self.evaluate_at == "clients"
        unseen = self.secure.enabled or (self.privacy.noise and self.privacy.metrics == "off")
        return self.reference and not unseen and self.asynchronous.buffer is None

    @property
    def device(self) -> str:
        """The device of this process: the first."""
        return self.devices[0]

    def on(self, device: str) -> Self:
        """The same settings, of a process that computes on this device."""
        return self.model_copy(update={"devices": (device,)})

    def as_found(self, before: "Config") -> Self:
        """The same settings, with the values that a run found for open ones.

        Args:
            before: the stored settings of the run.
        """
        found = {"precision": before.precision} if self.precision == "auto" else {}
        return self.model_copy(update=found)

    def data_cache_bytes(self, kind: str) -> int:
        """Bytes of clients' samples that stay on a device of this kind between rounds."""
        usual = 0 if kind == "cpu" else DATA_CACHE
        return (usual if self.data_cache is None else self.data_cache) << 20

    @property
    def cohort(self) -> int | float:
        """Clients in a round: a number of them, or a fraction of all."""
        fraction = 1.0 if self.client_fraction is None else self.client_fraction
        return fraction if self.clients_per_round is None else self.clients_per_round

    def cohort_size(self, clients: int) -> int:
        """Number of clients of a round, at least one.

        Raises:
            ConfigError: more than there are.
        """
        cohort = self.cohort
        if isinstance(cohort, float):
            return max(1, round(cohort * clients))
        if cohort > clients:
            raise ConfigError(
                f"clients_per_round is {cohort}, but there are {clients} clients. Choose "
                f"{clients} or fewer"
            )
        return cohort


def settings(method: str | None = "fedavg", likelihood: str = "auto") -> list[SettingRow]:
    """Every setting of a config.

    Args:
        method: whose parameters; None leaves out what only methods know, and is quick.
        likelihood: whose settings; auto has none.

    Raises:
        ConfigError: there is no such method or likelihood.
    """
    tables = [row for row in rows(Config) if row.key not in ("task", "method")]
    about = (
        "likelihood of the target given the network's outputs. auto: categorical for classes, "
        "multilabel for labels, gaussian for real numbers. Or your own as package.module:Class"
    )
    task = [SettingRow("task.likelihood", "text", "auto", about, ("auto", *LIKELIHOODS))]
    if likelihood != "auto":
        task += rows(find_likelihood(likelihood), "task.")
    about = f"{', '.join(METHODS)}, or package.module:Class"
    name = SettingRow("method.name", "text", "fedavg", about, tuple(METHODS))
    parameters: Iterable[SettingRow] = ()
    if method is not None and method in METHODS:
        from fedbayes.config.listing import built_in

        parameters = built_in()[method].parameters
    elif method:
        parameters = rows(find_method(method), "method.")
    return [*tables, *task, name, *parameters]


def find_method(name: str) -> "type[AnyMethod]":
    """The method class of this name, or of `package.module:Class`.

    Raises:
        ConfigError: there is none.
    """
    place = placed("method", name, METHODS)
    if place in METHODS:
        return METHODS[place]
    from fedbayes.contracts import Method

    kind: type[AnyMethod] = own_class(place, Method, "method")
    for attribute, example in (("name", f"{kind.__name__.lower()}"), ("server_state", "Weights")):
        value = getattr(kind, attribute, None)
        if not isinstance(value, str if attribute == "name" else type):
            shown = repr(example) if attribute == "name" else example
            raise ConfigError(
                f"the method {kind.__name__} has no {attribute}. Write {attribute} = {shown} into "
                "the class, without a type"
            )
    return kind


def complete_method(table: Mapping[str, Any]) -> dict[str, Any]:
    """The `[method]` table with every parameter, defaults filled in.

    Raises:
        ConfigError: there is no such method or parameter, or a value is not allowed.
    """
    name, parameters = table["name"], _parameters(table)
    kind = find_method(name)
    try:
        method = kind.model_validate(parameters)
    except ValidationError as error:
        known = [*rows(kind, "method."), *settings(None)]
        text = explain(kind, error, known, "method.")
        for key in parameters.keys() - kind.model_fields.keys():
            key = f"method.{key}"
            text = text.replace(unknown(key, known), no_setting(key, known, name))
        raise ConfigError(text) from None
    return {"name": name, **_stored(method)}


def _parameters(table: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters in a `[method]` table."""
    return {key: value for key, value in table.items() if key != "name"}


def _stored(method: "AnyMethod") -> dict[str, Any]:
    """Parameters as they are stored: TOML has no null; one that may be none is none by default."""
    return method.model_dump(mode="json", exclude_none=True)


def complete_task(table: Mapping[str, Any]) -> dict[str, Any]:
    """The `[task]` table with every setting of its likelihood, defaults filled in.

    Raises:
        ConfigError: there is no such likelihood or setting, or a value is not allowed.
    """
    name, own = table["likelihood"], {k: v for k, v in table.items() if k != "likelihood"}
    for key in ("name", "target"):  # of the likelihood itself
        if key in own:
            raise ConfigError(unknown(f"task.{key}", settings(None)))
    if name == "auto":
        for key in own:
            raise ConfigError(no_setting(f"task.{key}", settings(None), "", name))
        return {"likelihood": name}
    completed = complete_likelihood(name, **own)
    # TOML has no null; a setting that may be none is none by default.
    return {"likelihood": name, **{k: v for k, v in completed.items() if v is not None}}


def no_setting(key: str, known: Sequence[SettingRow], method: str, likelihood: str = "auto") -> str:
    """The error for an unknown setting; it lists methods or likelihoods that have it."""
    table, _, parameter = key.partition(".")
    if table == "task":
        owners = [n for n, kind in LIKELIHOODS.items() if parameter in kind.model_fields]
        if not owners or parameter == "target":
            return unknown(key, known)
        return (
            f"{key} is a setting of {', '.join(owners)}, not of {likelihood}. Choose the "
            f"likelihood with task.likelihood={owners[0]}, or leave the setting out"
        )
    if table != "method":
        return unknown(key, known)
    owners = [name for name, kind in METHODS.items() if parameter in kind.model_fields]
    if not owners:
        return unknown(key, known)
    return (
        f"{key} is a parameter of {', '.join(owners)}, not of {method}. Choose the method with "
        f"--method {owners[0]} or method.name, or leave the parameter out"
    )


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """All fractions among settings, by key, but for the arguments of a user's own network."""
    if isinstance(value, dict):
        for name, item in value.items():
            own = key == "model" and name == "arguments"
            yield from () if own else _numbers(item, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item, key)
    elif isinstance(value, float):
        yield key, value


def _known(error: ValidationError, given: Mapping[str, Any]) -> list[SettingRow]:
    """The settings that there are; the method's parameters only if a key is like no other."""
    wrong = [e["loc"] for e in error.errors() if e["type"] == "extra_forbidden"]
    known = settings(None)
    keys = [".".join(map(str, place)) for place in wrong]
    if all("did you mean" in unknown(key, known) for key in keys):
        return known
    method = given.get("method")
    name = method.get("name", "fedavg") if isinstance(method, dict) else "fedavg"
    return settings(name)
