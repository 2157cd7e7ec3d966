"""A fusion of model files into files: `fedbayes fuse`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from fedbayes.config.settings import SettingRow, explain, rows
from fedbayes.core.files import writable
from fedbayes.core.wording import listed
from fedbayes.data.plot import PICTURES
from fedbayes.errors import ConfigError, ModelError, RunError, did_you_mean
from fedbayes.models import PROGRAMS, ModelSettings, dense_layers
from fedbayes.workflows.fuse.adapter_files import is_adapter
from fedbayes.workflows.fuse.client_models import ClientModels, Seen, read_silos
from fedbayes.workflows.fuse.methods import ADAPTERS, FUSIONS, NETWORK, FusionKind, hearers
from fedbayes.workflows.fuse.posterior_files import alike
from fedbayes.workflows.serve.evaluation_set import is_program
from fedbayes.workflows.serve.export import FORMATS, require_format
from fedbayes.workflows.serve.model_files import WEIGHTS, ModelFiles, each_once

if TYPE_CHECKING:
    from rich.console import RenderableType

    from fedbayes.fusion.distillation import DistillationProgress

Kind = TypeVar("Kind", bound=BaseModel)


@dataclass(frozen=True)
class Fused:
    """The result of a fusion, as it is reported."""

    summary: dict[str, Any]
    """For JSON."""
    told: str
    """In words."""
    notes: tuple[str, ...] = ()
    """What a user should know before."""
    tables: tuple["RenderableType", ...] = ()
    hint: str = ""
    """What else to try."""


def ignore(at: object) -> None:
    """Watch nothing."""


@dataclass(frozen=True)
class FusionJob:
    """Model files, what becomes of them, and where it goes. Fields are options of the command."""

    models: Sequence[Path]
    out: Path
    """Where the fused model goes: weights, or a program of raw samples (`.pt2`, `.onnx`)."""
    method: str | None = None
    """A name of `FUSIONS`; by default `function`, where what goes into the networks is known."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the method, that are not the default."""
    counts: Path | None = None
    """Samples of each model and class."""
    seed: int = 0
    model: ModelSettings | None = None
    """The network of files that do not say theirs, and in function space of the fused one."""
    shape: tuple[int, ...] | None = None
    """Of one input, where files do not say it; so are the next three."""
    classes: int | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    like: Path | None = None
    """A file whose network the fused one is like; the first model by default."""
    inputs: str | None = None
    """The input prior; by default by the shape."""
    sums: Sequence[Path] = ()
    """Files of `fedbayes sums`, one of each client."""
    width: float | Literal["free"] | None = None
    """In that of `like`, 1 by default; free: the least of `frontier` within `bound`."""
    bound: float | None = None
    """Largest KL divergence to the teacher, in nats, that a free width may end at."""
    frontier: Sequence[float] = ()
    """Widths to try."""
    test: Path | None = None
    """NPZ file with raw samples to score networks on."""
    temperature_data: Path | None = None
    """NPZ file likewise that no model trained on, to fit the temperature of each to; by default
    that in its file."""
    minutes: float | None = None
    """Of training end to end; 0: none."""
    posterior: str | None = None
    """Its kind."""
    state: Path | None = None
    """Where distillation is kept, to go on from."""
    show_inputs: Path | None = None
    """A picture of some inputs."""
    select: Path | None = None
    """Data to choose settings on: raw samples if the models say how these are standardized, else
    as the networks see them."""
    grid: Mapping[str, Sequence[float]] = field(default_factory=dict)
    max_neurons: int | None = None
    report: Path | None = None
    """JSON, or of a fusion in function space a page in HTML."""
    picture: Path | None = None
    files: ModelFiles = field(default_factory=ModelFiles)
    """Those that were read before."""

    def run(
        self,
        watch: Callable[[str], None] = ignore,
        progress: "Callable[[DistillationProgress], object]" = ignore,
    ) -> Fused:
        """Read, fuse and write; nothing is written unless all went well.

        Args:
            watch: called with what is being done.
            progress: of training end to end.

        Raises:
            FedbayesError: what is wrong with an option or a file.
        """
        methods = self._methods()
        name = self._name(methods)
        kind = methods[name]
        self._refuse_idle(name, kind, methods)
        if methods is FUSIONS:
            self._check_paths(kind)
        each_once(self.models, 2)
        alike(self.models)
        job = kind.dense if kind.dense and self._dense() else kind.job
        found: Fused = resolve_name(f"{__package__}.{job}")(self, name, watch, progress)
        guessed = self.method is None and name == "gpi-fnm" and not self.settings
        if guessed and len(dense_layers(self.files[self.models[0]][0], "")[-1].weight) > 1:
            found = replace(found, notes=(*found.notes, _BY_WEIGHTS))
        return found

    @property
    def resumable(self) -> bool:
        """Whether its training can be resumed from a file (`state`)."""
        methods = self._methods()
        return "state" in methods[self._name(methods)].options

    @property
    def seen(self) -> Seen:
        """The description of inputs and outputs."""
        return Seen(self.shape, self.mean, self.std, self.classes)

    def silos(self) -> ClientModels:
        """The networks in the files.

        Raises:
            ModelError: as for `read_silos`.
        """
        return read_silos(self.models, self.model, self.seen, self.like, self.files, self.counts)

    def refuse(self, names: Sequence[str], why: str) -> None:
        """See that none of these options was given, or raise a ConfigError."""
        if odd := [_option(name) for name in names if name in self._given]:
            has = "has" if len(odd) == 1 else "have"
            raise ConfigError(f"{', '.join(odd)} {has} no effect on {why}")

    @property
    def some_sums(self) -> tuple[str, ...]:
        """A note if not every client sent sums."""
        files, models = len(self.sums), len(self.models)
        if files in (0, models):
            return ()
        told = f"{files} file{'s' * (files > 1)} of sums for {models} models"
        return (f"{told}: the inputs are drawn by the sums of those clients only",)

    def written(self, *more: Path | None) -> str:
        """The files that were written, in words."""
        paths = [path for path in (self.out, self.report, self.picture, *more) if path is not None]
        return f"wrote {', '.join(map(str, paths))}"

    @property
    def _given(self) -> set[str]:
        """Names of the options that were given, of those that not all methods hear."""
        heard = {name for kind in FUSIONS.values() for name in kind.options}
        given = [one for one in fields(self) if getattr(self, one.name) not in (None, (), {}, [])]
        return {one.name for one in given if getattr(self, one.name) != one.default} & heard

    def _methods(self) -> Mapping[str, FusionKind]:
        """The methods that there are of such models: adapters, or whole networks."""
        other = self.method is not None and self.method not in ADAPTERS
        if other and not any(path.is_dir() for path in self.models):
            return FUSIONS  # by the weights of whole networks, whatever trained of them
        whole = [path for path in self.models if not is_adapter(path, self.files)]
        if some := [path for path in self.models if path not in whole]:
            if whole:
                raise ModelError(
                    f"{some[0]} is a LoRA adapter and {whole[0]} is not. Fuse only adapters, or "
                    "only whole networks"
                )
            return ADAPTERS
        return FUSIONS

    def _name(self, methods: Mapping[str, FusionKind]) -> str:
        """The method: as named, else as the options or the files decide."""
        if self.method in methods:
            return str(self.method)
        if self.method is not None:
            if self.method in FUSIONS.keys() | ADAPTERS.keys():
                adapters = "LoRA adapters (folders of PEFT, or files of clients with lora)"
                kinds = (adapters, "whole networks")
                which, these = kinds if self.method in ADAPTERS else kinds[::-1]
                raise ConfigError(
                    f"{self.method} fuses {which}, but these are {these}. Choose "
                    f"{', '.join(methods)}"
                )
            raise ConfigError(
                "unknown fusion method "
                f"{self.method!r}{did_you_mean(self.method, tuple(methods))}. Choose "
                f"{', '.join(methods)}"
            )
        if methods is ADAPTERS:
            return "function"
        given = self._given - {"counts", "seed", "report", "picture"} | self.settings.keys()
        for name in ("function", "gpi-fnm"):
            if any(name in hearers(option) for option in given):
                return name
        known = all(is_program(path) or self.files[path][1] is not None for path in self.models)
        return "function" if known else "gpi-fnm"

    def _refuse_idle(self, name: str, kind: FusionKind, methods: Mapping[str, FusionKind]) -> None:
        """See that no option or setting was given that the method does not hear."""
        for one in (*self._given - set(kind.options), *self.settings.keys() - kind.own):
            if others := hearers(one, methods):
                raise ConfigError(
                    f"{_option(one)} has no effect on {name}. It works with {', '.join(others)}"
                )
            if methods is ADAPTERS and hearers(one):
                raise ConfigError(f"{_option(one)} has no effect on LoRA adapters. Leave it out")
            if one in self._given or hearers(one, ADAPTERS):
                raise ConfigError(f"{_option(one)} works only with LoRA adapters. Leave it out")
            these = [
                *(["settings of the model (model.KEY)"] * (methods is FUSIONS)),
                *sorted(kind.own),
            ]
            raise ConfigError(
                f"{name} has no setting {one}{did_you_mean(one, (*kind.own, *kind.options))}. It "
                f"has {listed(these) if these else 'none'}"
            )

    def _dense(self) -> bool:
        """Whether all files are fully connected networks by shapes, cards and options."""
        if self._given & set(NETWORK) or self.out.suffix.lower() in PROGRAMS:
            return False
        for path in self.models:
            if is_program(path):
                return False
            weights, card = self.files[path]
            if card is not None and card.model.get("name", "mlp") != "mlp":
                return False
            try:
                dense_layers(weights, str(path))
            except ModelError:
                return False
        return True

    def _check_paths(self, kind: FusionKind) -> None:
        """See that what is to be written can be, each to a path of its own."""
        outputs = {
            "the model": (self.out, FORMATS if kind.programs else WEIGHTS),
            "the report": (self.report, (".json", *((".html", ".htm") if kind.pages else ()))),
            "the picture": (self.picture, PICTURES),
            "the picture of inputs": (self.show_inputs, PICTURES),
            "the state": (self.state, ()),
        }
        if self.report is not None and self.report.suffix in (".html", ".htm") and not kind.pages:
            raise ConfigError(
                f"{self.report}: only --method function writes a page. Give --shape to use it, or "
                "a report that ends in .json"
            )
        require_format(self.out)
        inputs = [*self.models, self.counts, *self.sums, self.test, self.like, self.select]
        inputs.append(self.temperature_data)
        if isinstance(base := self.settings.get("base"), str | Path):
            inputs.append(Path(base))
        written: dict[Path, str] = {}
        for what, (path, formats) in outputs.items():
            if path is None:
                continue
            writable(path, what, formats, inputs)
            if (other := written.setdefault(path.resolve(), what)) != what:
                raise RunError(
                    f"{path} would be both {other} and {what}. Give another file for one of them"
                )


_BY_WEIGHTS = (
    "the networks were matched only by their weights (gpi-fnm), because the shape of an input is "
    "unknown. Give --shape, such as 1,28,28 for images or 30 for rows, to fuse by predictions, "
    "which is mostly far better"
)


def checked(
    kind: type[Kind],
    given: Mapping[str, Any],
    prefix: str = "",
    known: Sequence[SettingRow] = (),
) -> Kind:
    """Settings of a method.

    Args:
        kind: of settings.
        given: those that are not the default; the word none is None where a setting may be that.
        prefix: of their names, in errors.
        known: all settings that errors may name; those of the kind by default.

    Raises:
        ConfigError: there is no such setting, or it is out of range.
    """
    fields = kind.model_fields.items()
    may_be_none = {name for name, one in fields if type(None) in get_args(one.annotation)}
    none = {name: None for name, value in given.items() if value == "none" and name in may_be_none}
    try:
        return kind.model_validate({**given, **none})
    except ValidationError as error:
        raise ConfigError(explain(kind, error, known or list(rows(kind, prefix)), prefix)) from None


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
