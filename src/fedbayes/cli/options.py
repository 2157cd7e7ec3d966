"""Options that several commands have, what is known of them, and what becomes of them."""

import json
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
import typer
from typer.core import TyperCommand, TyperOption

from fedbayes.errors import ConfigError

if TYPE_CHECKING:
    from fedbayes.config.settings import SettingRow


def completes(key: str) -> Callable[[str], list[str]]:
    """Completion of the value of an option that sets this key."""

    def complete(incomplete: str) -> list[str]:
        from fedbayes.config.config import settings

        choices = [word for row in settings(None) if row.key == key for word in row.choices]
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
    typer.Option(help="How data are divided.", autocompletion=completes("data.partition")),
]
Clients = Annotated[int | None, typer.Option(help="Number of clients.")]
ClientsPerRound = Annotated[int | None, typer.Option(help="Number of clients in a round.")]
ClientFraction = Annotated[float | None, typer.Option(help="Share of the clients in a round.")]
Cohort = Annotated[
    str | None,
    typer.Option(help="Older name: 10 is --clients-per-round, 0.1 is --client-fraction."),
]
Rounds = Annotated[int | None, typer.Option(help="Number of rounds.")]
Alpha = Annotated[float | None, typer.Option(help="Dirichlet concentration.")]
LearningRate = Annotated[float | None, typer.Option("--lr", help="Clients' learning rate.")]
Epochs = Annotated[int | None, typer.Option(help="Passes over a client's data in a round.")]
BatchSize = Annotated[int | None, typer.Option(help="Samples in a training step.")]
Optimizer = Annotated[
    str | None,
    typer.Option(help="Clients' optimizer.", autocompletion=completes("training.optimizer")),
]
Device = Annotated[
    str | None, typer.Option(help="Where networks compute.", autocompletion=completes("devices"))
]
Workers = Annotated[int | None, typer.Option(help="Processes of engine workers.")]
Seed = Annotated[int | None, typer.Option(help="Seed of all randomness.")]
Seeds = Annotated[int, typer.Option(min=1, help="Runs of each, with consecutive seeds.")]
Jobs = Annotated[
    int, typer.Option("--jobs", "-j", min=1, help="Runs at a time, each in its own process.")
]
Metrics = Annotated[
    str,
    typer.Option(
        help="Metrics beside the likelihood's own, between commas: auroc, sensitivity@0.3, ...; "
        "auto: those that suit it; empty: none.",
        autocompletion=completes("metrics"),
    ),
]
Engine = Annotated[
    str | None,
    typer.Option(help="Who runs clients.", autocompletion=completes("engine")),
]
Json = Annotated[bool, typer.Option("--json", help="Print the summary as JSON alone on stdout.")]
Setting = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        help="Any setting, as in training.lr=0.05; `fedbayes settings` lists them.",
        metavar="KEY=VALUE",
        autocompletion=complete_setting,
    ),
]
Mean = Annotated[
    str | None,
    typer.Option(
        help="For files that do not say it: what training subtracted from inputs, images in "
        "[0, 1], as in 0.49,0.48,0.45. Default: nothing.",
        metavar="X,X,X",
    ),
]
Std = Annotated[
    str | None,
    typer.Option(help="What training divided them by then. Default: 1.", metavar="X,X,X"),
]
Track = Annotated[
    list[str] | None, typer.Option("--track", help="Log rounds to tensorboard or mlflow too.")
]
RunFolder = Annotated[Path, typer.Argument(help="Run folder.", exists=True, file_okay=False)]
ConfigFile = Annotated[Path | None, typer.Argument(help="TOML file with settings.", exists=True)]
DataDir = Annotated[Path | None, typer.Option(help="Folder with data sets (FEDBAYES_DATA).")]

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
    "hostile": "attack.clients",
}
"""Likewise, where the option says all that there is to say."""


_OLDER = {"device": "devices"}
"""Names of settings that a config takes too."""


class SettingsCommand(TyperCommand):
    """A command whose options set settings: the help has their choices and defaults."""

    def settings(self) -> dict[str, "SettingRow"]:
        """The settings by the names of the options that set them."""
        from fedbayes.config.config import settings

        known = {row.key: row for row in settings(None)}
        return {name: known[key] for name, key in _KEYS.items() if key in known}

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The options, with help from the settings; without words of its own, theirs alone."""
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
                default = "" if row.default is None else f" Default: {row.default}."
                option.help = f"{about}.{default}"
            options.append(option)
        return options


class FusionCommand(SettingsCommand):
    """A command whose options are the settings of a fusion, by their names."""

    def settings(self) -> dict[str, "SettingRow"]:
        """The settings of the matching and of the combination."""
        from fedbayes.config.settings import rows
        from fedbayes.inference.combination import Combination
        from fedbayes.matching import MatchingSettings

        return {row.key: row for kind in (MatchingSettings, Combination) for row in rows(kind)}


def numbers(option: str, text: str | None) -> tuple[float, ...]:
    """Numbers from the command line with commas between them; none if there is no text.

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
    """The options that were given, as `key=value`, and what `--set` says.

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
