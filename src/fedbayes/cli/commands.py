"""Commands as the help screens show them: in groups, with examples; and their former names."""

from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints

import click
import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup
from typer.models import ArgumentInfo

from fedbayes.errors import warn

PANELS = {
    "Train": ("run", "resume", "compare", "tune", "forget"),
    "Use a model": ("predict", "evaluate", "calibrate", "export"),
    "Fuse models": ("fuse", "posterior", "sums"),
    "Inspect": (
        "report",
        "plot",
        "contributions",
        "data",
        "methods",
        "settings",
        "doctor",
        "version",
    ),
    "Federate": ("federate",),
    "Statistics": ("stats",),
    "Research": ("reproduce", "attack"),
}
"""The groups of the first help screen, in this order."""

EXAMPLES = {
    "run": (
        "fedbayes run --method fedprox --dataset digits --rounds 10 --out runs/first",
        "fedbayes run patients.csv --set data.label=outcome --set data.group=hospital",
        "fedbayes run experiment.toml --seeds 5",
    ),
    "resume": ("fedbayes resume runs/first", "fedbayes resume runs/first --rounds 40"),
    "compare": ("fedbayes compare --methods fedavg,fedprox:proximal=0.1 --seeds 3 --rounds 10",),
    "tune": ("fedbayes tune --methods fedavg,fedprox --budget 10 --set training.lr=0.01..1",),
    "forget": ("fedbayes forget runs/first --client client-3 --out runs/without",),
    "contributions": ("fedbayes contributions runs/first",),
    "predict": (
        "fedbayes predict runs/first new.csv --out predictions.csv",
        "fedbayes predict model.safetensors new.csv --threshold 0.3",
    ),
    "evaluate": (
        "fedbayes evaluate runs/first",
        "fedbayes evaluate model.safetensors --set data.path=new.csv",
    ),
    "calibrate": (
        "fedbayes calibrate runs/first --plot reliability.png",
        "fedbayes calibrate runs/first --method temperature,conformal --level 0.9",
        "fedbayes calibrate runs/survival --method hazards",
        "fedbayes calibrate fused.pt2 --sums a.json --sums b.json -o calibrated.pt2",
    ),
    "export": (
        "fedbayes export runs/first --out model.safetensors",
        "fedbayes export runs/first --out model.pt2",
    ),
    "fuse": (
        "fedbayes fuse north.safetensors south.safetensors --out fused.safetensors",
        "fedbayes fuse north_adapter/ south_adapter/ --out merged_adapter/ --rank 8",
    ),
    "posterior": ("fedbayes posterior model.safetensors --data mine.csv --out mine.safetensors",),
    "sums": ("fedbayes sums model.safetensors --data mine.csv --out sums.json",),
    "report": (
        "fedbayes report runs/first --out report.html",
        "fedbayes report runs/first runs/second --out both.html",
        "fedbayes report runs/first --watch --open",
    ),
    "plot": ("fedbayes plot runs/first runs/second --figure bytes --out bytes.svg",),
    "methods": ("fedbayes methods", "fedbayes methods fedprox"),
    "settings": (
        "fedbayes settings training",
        "fedbayes settings method.fedprox",
        "fedbayes settings --schema",
    ),
    "doctor": ("fedbayes doctor", "fedbayes doctor --json"),
    "version": ("fedbayes version",),
    "reproduce": ("fedbayes reproduce", "fedbayes reproduce virtual-table2 --scale small"),
    "attack": ("fedbayes attack --kinds sign-flip,huge --rules mean,median --plot attacks.png",),
    "data list": ("fedbayes data list",),
    "data show": ("fedbayes data show digits --partition dirichlet --alpha 0.1 --out digits.png",),
    "data check": (
        "fedbayes data check patients.csv",
        "fedbayes data check mine.csv --schema runs/first",
    ),
    "data summarize": ("fedbayes data summarize mine.csv --out columns.json",),
    "federate run": (
        "fedbayes federate run study.toml --superlink localhost:8000 "
        "--root-certificates keys/ca.crt",
    ),
    "federate resume": ("fedbayes federate resume runs/study --root-certificates keys/ca.crt",),
    "federate init": ("fedbayes federate init project --config study.toml",),
    "federate keys": ("fedbayes federate keys keys --host hub.example.org --clients 3",),
    "federate superlink": ("fedbayes federate superlink keys --nodes 0.0.0.0:9092",),
    "federate node": (
        "fedbayes federate node --superlink hub.example.org:9092 --root-certificates ca.crt "
        "--key client-0 --node-config 'client=0 data=\"/data/mine.csv\"'",
    ),
    "federate register": (
        "fedbayes federate register keys/client-0.pub --root-certificates keys/ca.crt",
    ),
    "federate nodes": ("fedbayes federate nodes --root-certificates keys/ca.crt",),
    "stats glm": (
        "fedbayes stats glm patients.csv --group hospital --family binomial --outcome died",
        "fedbayes stats glm north.csv south.csv --outcome days --features age,sex",
    ),
    "stats cox": (
        "fedbayes stats cox patients.csv --group hospital --time days --event died "
        "--features age,stage",
    ),
    "stats km": (
        "fedbayes stats km patients.csv --group hospital --time days --event died --by arm",
    ),
}
"""Of every command, by its name; the help shows them, and so does the page of commands."""

FORMER_COMMANDS = {
    "conformal": ("calibrate", "--method", "conformal"),
    "hazards": ("calibrate", "--method", "hazards"),
    "glm": ("stats", "glm"),
    "survival": ("stats",),
    "nodes": ("federate", "nodes"),
    "federate hub": ("superlink",),
    "federate admit": ("register",),
}
"""Names of version 0.2, and the words that replace them."""

FORMER_OPTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "attack": {
        "--picture": ("--plot",),
        "--markdown": ("--report",),
        "--hostile": ("--malicious",),
    },
    "calibrate": {"--picture": ("--plot",), "--temperature": ("--method", "temperature")},
    "data check": {"--like": ("--schema",)},
    "stats glm": {"--happened": ("--event-value",), "--by-client": ("--per-client",)},
    "stats cox": {"--happened": ("--event-value",), "--by-client": ("--per-client",)},
    "stats km": {"--happened": ("--event-value",)},
}
"""Likewise of options, by command."""

_MEANT = {"train": "run", "fit": "run", "test": "evaluate", "list": "methods' or 'data list"}
"""Commands that other programs have, and what they are called here."""


def path_of(ctx: click.Context) -> str:
    """The name of a command below `fedbayes`, as in `federate run`."""
    names: list[str] = []
    while ctx.parent is not None:
        names.insert(0, ctx.info_name or "")
        ctx = ctx.parent
    return " ".join(names)


def renamed(old: str, new: str) -> None:
    """Print that a name has changed."""
    warn(f"use {new} instead of {old}: the old name works until version 0.4")


class Command(TyperCommand):
    """A command that takes the former names of its options too."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters; arguments with their help, which Typer loses with Click 8.5."""
        parameters = super().get_params(ctx)
        arguments = [one for one in parameters if isinstance(one, TyperArgument) and not one.help]
        if arguments and self.callback is not None:
            hints = get_type_hints(self.callback, include_extras=True)
            for one in arguments:
                for info in getattr(hints.get(one.name or ""), "__metadata__", ()):
                    if isinstance(info, ArgumentInfo):
                        one.help = info.help
        return parameters

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Replace former names of options, and print their new ones."""
        former = FORMER_OPTIONS.get(path_of(ctx), {})
        given: list[str] = []
        for place, word in enumerate(args):
            if word == "--":
                given += args[place:]
                break
            name, equals, value = word.partition("=")
            if name in former:
                new = former[name]
                renamed(name, " ".join(new))
                given += [*new[:-1], f"{new[-1]}{equals}{value}"]
            else:
                given.append(word)
        return super().parse_args(ctx, given)


class Commands(TyperGroup):
    """Commands with their examples; former names lead to the new commands, with a note."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        prefix = f"{self.name} " if self.name in _NESTED else ""
        for name, command in self.commands.items():
            command.epilog = _examples(EXAMPLES.get(prefix + name, ()))
        if not prefix:
            self._arrange()

    def _arrange(self) -> None:
        """Sort the commands into the groups of the first help screen."""
        arranged = {}
        for panel, names in PANELS.items():
            for name in (one for one in names if one in self.commands):
                command = self.commands.pop(name)
                command.rich_help_panel = panel  # type: ignore[attr-defined]
                arranged[name] = command
        self.commands.update(arranged)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Replace the former name of a command, and print the new one."""
        path = path_of(ctx)
        name = f"{path} {args[0]}".strip()
        if args[0] in self.commands:
            return super().resolve_command(ctx, args)
        if name in FORMER_COMMANDS:
            new = FORMER_COMMANDS[name]
            renamed(f"fedbayes {name}", " ".join(["fedbayes", *path.split(), *new]))
            args = [*new, *args[1:]]
        elif not path and args[0] in _MEANT:
            raise click.UsageError(
                f"No such command {args[0]!r}. Did you mean '{_MEANT[args[0]]}'?", ctx
            )
        return super().resolve_command(ctx, args)


_NESTED = ("data", "federate", "stats")
"""Names of the groups of commands below `fedbayes`."""


def _examples(lines: tuple[str, ...]) -> str | None:
    """The end of a help text; a blank line keeps the next one a line of its own."""
    return "\n\n".join(["Examples:", *(f"  {line}" for line in lines)]) if lines else None


class Application(typer.Typer):
    """A Typer application whose commands are `Command` by default."""

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = Command, **options: Any
    ) -> Callable[[Any], Any]:
        """Register a command; options of an argument that is a dataclass are its fields."""
        register = super().command(name, cls=cls, **options)
        return lambda function: register(_spread(function))


def _spread(function: Callable[..., Any]) -> Callable[..., Any]:
    """A command with the fields of dataclasses in the place of the arguments that they annotate."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters = []
    for name, parameter in signature(function).parameters.items():
        if name not in groups:
            parameters.append(parameter.replace(annotation=hints[name]))
            continue
        own = get_type_hints(groups[name], include_extras=True)
        for field in fields(groups[name]):
            default = Parameter.empty if field.default is MISSING else field.default
            kind = Parameter.KEYWORD_ONLY
            parameters.append(
                Parameter(field.name, kind, default=default, annotation=own[field.name])
            )

    @wraps(function)
    def command(**given: Any) -> Any:
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        return function(**given)

    ordered = sorted(parameters, key=lambda one: one.kind)
    command.__signature__ = Signature(ordered)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command if groups else function
