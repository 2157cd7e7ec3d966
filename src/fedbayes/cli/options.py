"""Options that several commands have, what is known of them, and what becomes of them."""

import json
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import click
import typer
from typer.core import TyperOption

from fedbayes.cli.commands import Command
from fedbayes.core.lazy import offers
from fedbayes.errors import ConfigError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from fedbayes.config.settings import SettingRow


_OFFERED = {"method.name": "methods", "data.name": "data", "model.name": "models"}
"""Settings whose values installed packages offer too, and the groups of their entry points."""


def completes(key: str) -> Callable[[str], list[str]]:
    """Completion of the value of an option that sets this key."""

    def complete(incomplete: str) -> list[str]:
        from fedbayes.config.config import settings

        choices = [word for row in settings(None) if row.key == key for word in row.choices]
        if key in _OFFERED:
            choices += [offer.name for offer in offers(_OFFERED[key], choices)]
        return [word for word in choices if word.startswith(incomplete)]

    return complete


def complete_key(incomplete: str) -> list[str]:
    """Completion of a key."""
    from fedbayes.config.config import settings

    return [row.key for row in settings(None) if row.key.startswith(incomplete)]


def complete_setting(incomplete: str) -> list[str]:
    """Completion of a key, and after its `=` of the value."""
    key, equals, value = incomplete.partition("=")
    if equals:
        return [f"{key}={word}" for word in completes(key)(value)]
    return [f"{word}=" for word in complete_key(key)]


Method = Annotated[
    str | None,
    typer.Option("--method", "-m", help="Method.", autocompletion=completes("method.name")),
]
DataSet = Annotated[
    str | None,
    typer.Option("--dataset", "-d", help="Data set.", autocompletion=completes("data.name")),
]
Model = Annotated[str | None, typer.Option(help="Network.", autocompletion=completes("model.name"))]
DataPartition = Annotated[
    str | None,
    typer.Option(help="Partition of the data.", autocompletion=completes("data.partition")),
]
Clients = Annotated[int | None, typer.Option(help="Number of clients.")]
ClientsPerRound = Annotated[int | None, typer.Option(help="Number of clients per round.")]
ClientFraction = Annotated[float | None, typer.Option(help="Share of the clients per round.")]
Cohort = Annotated[
    str | None,
    typer.Option(help="Former name of --clients-per-round (10) and --client-fraction (0.1)."),
]
Rounds = Annotated[int | None, typer.Option(help="Number of rounds.")]
Alpha = Annotated[float | None, typer.Option(help="Dirichlet concentration.")]
LearningRate = Annotated[float | None, typer.Option("--lr", help="Clients' learning rate.")]
Epochs = Annotated[int | None, typer.Option(help="Passes over a client's data per round.")]
BatchSize = Annotated[int | None, typer.Option(help="Number of samples in a training step.")]
Optimizer = Annotated[
    str | None,
    typer.Option(help="Clients' optimizer.", autocompletion=completes("training.optimizer")),
]
Device = Annotated[
    str | None, typer.Option(help="Device of the networks.", autocompletion=completes("devices"))
]
Workers = Annotated[int | None, typer.Option(help="Number of worker processes (engine workers).")]
Seed = Annotated[int | None, typer.Option(help="Seed of all randomness.")]
Seeds = Annotated[int, typer.Option(min=1, help="Number of runs of each, with consecutive seeds.")]
Jobs = Annotated[
    int,
    typer.Option("--jobs", "-j", min=1, help="Number of parallel runs, each in its own process."),
]
Metrics = Annotated[
    str,
    typer.Option(
        help="Metrics in addition to the likelihood's own, between commas, such as "
        "auroc,sensitivity@0.3. auto: those that suit the likelihood. Empty: none.",
        autocompletion=completes("metrics"),
    ),
]
Engine = Annotated[
    str | None,
    typer.Option(help="Where clients are executed.", autocompletion=completes("engine")),
]
Json = Annotated[bool, typer.Option("--json", help="Print only the summary, as JSON.")]
Setting = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        help="Any setting, such as training.lr=0.05. `fedbayes settings` lists all settings.",
        metavar="KEY=VALUE",
        autocompletion=complete_setting,
    ),
]
Mean = Annotated[
    str | None,
    typer.Option(
        help="Mean that training subtracted from the inputs, for files without it, as in "
        "0.49,0.48,0.45. Images are in the range 0 to 1. Default: 0.",
        metavar="X,X,X",
    ),
]
Std = Annotated[
    str | None,
    typer.Option(help="Standard deviation that training divided by. Default: 1.", metavar="X,X,X"),
]
Track = Annotated[
    list[str] | None, typer.Option("--track", help="Also log rounds to tensorboard or mlflow.")
]
RunFolder = Annotated[Path, typer.Argument(help="Run folder.", exists=True, file_okay=False)]
MoreRounds = Annotated[
    int | None,
    typer.Option("--rounds", min=1, help="New total number of rounds. Default: unchanged."),
]
ConfigFile = Annotated[Path | None, typer.Argument(help="TOML file with settings.", exists=True)]
DataDir = Annotated[Path | None, typer.Option(help="Folder with data sets (FEDBAYES_DATA).")]


@dataclass(frozen=True)
class MethodOption:
    """The option of a command that trains one method."""

    method: Method = None


@dataclass(frozen=True)
class FederationOptions:
    """Options that set settings of any federation."""

    dataset: DataSet = None
    model: Model = None
    clients: Clients = None
    rounds: Rounds = None
    seed: Seed = None
    data_dir: DataDir = None


@dataclass(frozen=True)
class ExperimentOptions(FederationOptions):
    """Options that set settings of experiments."""

    clients_per_round: ClientsPerRound = None
    client_fraction: ClientFraction = None
    epochs: Epochs = None
    batch_size: BatchSize = None
    optimizer: Optimizer = None
    partition: DataPartition = None
    alpha: Alpha = None
    engine: Engine = None
    workers: Workers = None
    device: Device = None


@dataclass(frozen=True)
class RunOptions(ExperimentOptions, MethodOption):
    """Options that set settings of runs."""

    cohort: Cohort = None
    lr: LearningRate = None


_KEYS = {
    "method": "method.name",
    "dataset": "data.name",
    "model": "model.name",
    "clients": "data.clients",
    "clients_per_round": "clients_per_round",
    "client_fraction": "client_fraction",
    "rounds": "rounds",
    "lr": "training.lr",
    "epochs": "training.epochs",
    "batch_size": "training.batch_size",
    "optimizer": "training.optimizer",
    "device": "devices",
    "partition": "data.partition",
    "alpha": "data.alpha",
    "engine": "engine",
    "workers": "workers",
    "seed": "seed",
}
"""Settings that options set, by the names of the options; the help is the settings' own."""
_OTHER_KEYS = {
    "cohort": "cohort",
    "data_dir": "data.dir",
    "file": "data.path",
    "malicious": "attack.clients",
    "more": "data.more",
}
"""Likewise, where the option says all that there is to say."""


_OLDER = {"device": "devices"}
"""Names of settings that a config takes too."""


class SettingsCommand(Command):
    """A command whose options set settings: the help has their choices and defaults."""

    def settings(self) -> dict[str, "SettingRow"]:
        """The settings by the names of the options that set them."""
        from fedbayes.config.config import settings

        known = {row.key: row for row in settings(None)}
        return {name: known[key] for name, key in _KEYS.items() if key in known}

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The options; those without help get it from the settings."""
        known = self.settings()
        options: list[click.Parameter] = []
        for option in super().get_params(ctx):
            row = known.get(option.name or "")
            if row and isinstance(option, TyperOption):
                option = copy(option)
                about = (option.help or "").rstrip(".")
                if not about:
                    about = row.description[:1].upper() + row.description[1:]
                elif row.choices:
                    about += f": {', '.join(row.choices)}"
                default = "" if row.default is None else f" Default: {_shown(row.default)}."
                option.help = f"{about}.{default}"
            options.append(option)
        return options


def _shown(default: object) -> str:
    """A default as a command line has it."""
    return ",".join(map(str, default)) if isinstance(default, list) else str(default)


class FusionCommand(Command):
    """A command that also has the settings of all fusion methods as options.

    Those that were given are in the context's `meta` under `GIVEN`.
    """

    GIVEN = "fedbayes.fusion"

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The command's own options and those that settings give, each with its default in the
        help, and grouped by the methods that have them.
        """
        from fedbayes.workflows.fuse.methods import ADAPTERS, FUSIONS

        own = super().get_params(ctx)
        taken = {option.name for option in own}
        fields: dict[str, list[FieldInfo]] = {}
        panels: dict[str, str] = {}
        for settings in dict.fromkeys(k.settings for k in (*FUSIONS.values(), *ADAPTERS.values())):
            known = {} if settings is None else settings.model_fields
            if any(field.default_factory for field in known.values()):  # tables
                continue
            names = ", ".join(name for name, kind in FUSIONS.items() if kind.settings is settings)
            for name in sorted(known.keys() - taken):
                fields.setdefault(name, []).append(known[name])
                panels.setdefault(name, f"Settings of {names or 'LoRA adapters'}")
        of_settings = [_of_setting(name, fields[name], panels[name]) for name in fields]
        return [*own[:-1], *of_settings, own[-1]]  # whose last one is the help

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Print the help, with the methods and then the examples at its end."""
        from fedbayes.workflows.fuse.methods import ADAPTERS, FUSIONS

        lines = ["Methods (default: function if files or --shape describe inputs, else gpi-fnm):"]
        lines += [f"  {name}: {kind.summary}" for name, kind in FUSIONS.items()]
        lines.append("Methods of LoRA adapters (default: function):")
        lines += [f"  {name}: {kind.summary}" for name, kind in ADAPTERS.items()]
        examples, self.epilog = self.epilog, "\n\n".join([*lines, self.epilog or ""])
        super().format_help(ctx, formatter)
        self.epilog = examples


def _of_setting(name: str, fields: "list[FieldInfo]", panel: str) -> TyperOption:
    """The option of a setting, which several methods may have, each in words of its own."""

    def keep(context: click.Context, option: click.Parameter, value: Any) -> None:
        if value is not None:
            context.meta.setdefault(FusionCommand.GIVEN, {})[name] = value

    from pydantic import BeforeValidator

    words = []
    for field in fields:
        about = field.description or ""
        default = "" if field.default is None else f" Default: {field.default}."
        words.append(f"{about[:1].upper()}{about[1:]}.{default}")
    annotation = fields[0].annotation
    kinds = (set(get_args(annotation)) or {annotation}) - {type(None)}
    types = {float: click.FLOAT, int: click.INT}
    kind = types.get(next(iter(kinds)), click.STRING) if len(kinds) == 1 else click.STRING
    if any(isinstance(mark, BeforeValidator) for mark in fields[0].metadata):
        kind = click.STRING  # it takes words too
    return TyperOption(
        param_decls=[f"--{name.replace('_', '-')}"],
        type=click.BOOL if kinds == {bool} else kind,
        is_flag=kinds == {bool},
        default=None,
        help=" ".join(dict.fromkeys(words)),
        show_default=False,
        expose_value=False,
        callback=keep,
        rich_help_panel=panel,
    )


def named(text: str) -> list[str]:
    """The names between commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def numbers(option: str, text: str | None) -> tuple[float, ...]:
    """Numbers from the command line, separated by commas; empty without text.

    Raises:
        ConfigError: they are none.
    """
    try:
        return tuple(float(part) for part in text.split(",")) if text is not None else ()
    except ValueError:
        raise ConfigError(f"{option} {text}: give it as 0.5, or as 0.49,0.48,0.45") from None


def shares(option: str, text: str) -> dict[str, float]:
    """Shares by name from the command line, as in `a=0.2,b=0.8`.

    Raises:
        ConfigError: they are none.
    """
    found = {}
    for part in text.split(","):
        name, equals, share = part.rpartition("=")
        try:
            found[name.strip()] = float(share)
        except ValueError:
            equals = ""
        if not equals or not name.strip():
            raise ConfigError(f"{option} {text}: give it as a=0.2,b=0.8")
    return found


def overrides(settings: list[str] | None, **options: str | float | Path | None) -> list[str]:
    """The given options as `key=value`, and those of `--set`.

    Args:
        settings: of `--set`.
        options: those that set settings, by their names.

    Raises:
        ConfigError: an option and `--set` set one setting.
    """
    keys = {**_KEYS, **_OTHER_KEYS}
    given = {name: value for name, value in options.items() if value is not None}
    for setting in settings or ():
        key = setting.partition("=")[0].strip()
        for name in given:
            if keys[name] in (key, _OLDER.get(key)):
                raise ConfigError(
                    f"--{name.replace('_', '-')} and --set {setting} both set {keys[name]}; give "
                    "one of them"
                )
    return [
        *(
            f"{keys[name]}={json.dumps(str(value)) if isinstance(value, Path) else value}"
            for name, value in given.items()
        ),
        *(settings or []),
    ]
