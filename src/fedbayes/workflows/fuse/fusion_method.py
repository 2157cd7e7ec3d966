"""Which method fuses models, and which options of `fedbayes fuse` have an effect on it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from fedbayes.errors import ConfigError, did_you_mean
from fedbayes.fusion import FusionMethod
from fedbayes.workflows.fuse.averaging import BY_POSTERIORS
from fedbayes.workflows.fuse.graph_fusing import all_dense
from fedbayes.workflows.fuse.network_fusing import PROGRAM
from fedbayes.workflows.serve.evaluation_set import is_program
from fedbayes.workflows.serve.model_files import ModelFiles

Way = Literal["function", "average", "graph", "layers"]
"""In function space; networks averaged as they are, or matched on their graph; fully connected
layers matched or combined."""
METHODS = ("function", "match", *get_args(FusionMethod), *BY_POSTERIORS, "permute")
"""What `--method` may be."""
OF_NETWORK = ("--model", "--shape", "--classes", "--mean", "--std", "--set")
"""Options that say which network files are of."""
SELECTING = ("--select", "--grid", "--max-neurons", "--alpha", "--c")
"""Options of matching that are for fully connected layers alone, or of combinations."""


@dataclass(frozen=True)
class FusionInputs:
    """Options by name, None where they were not given."""

    function: Mapping[str, object]
    """Of fusion in function space."""
    matching: Mapping[str, object]
    """Of matching and of combinations."""
    reports: Mapping[str, object]
    """Files that are written beside the model."""

    def choose(
        self, method: str | None, models: Sequence[Path], out: Path, files: ModelFiles
    ) -> "Choice":
        """The method, in whose place the files decide where none is named, and its way.

        Raises:
            ConfigError: there is no such method, or an option was given that has no effect on it.
            ModelError: a file cannot be read.
        """
        method = method or self._default(models, files)
        if method not in METHODS:
            raise ConfigError(
                f"no fusion is called {method!r}{did_you_mean(method, METHODS)}; choose "
                f"{', '.join(METHODS)}"
            )
        if method == "function":
            _refuse(self.matching, method, "they are of matching, or of a combination")
            return Choice(method, "function")
        if self._averages(method, models, files):
            heard = OF_NETWORK if method in ("average", "permute") else ()
            others = {**self.matching, **_without(self.function, heard), **self.reports}
            _refuse(others, method, "they are of other methods")
            return Choice(method, "average")
        if method == "match" and self._on_graph(models, out, files):
            others = {name: self.matching[name] for name in SELECTING}
            others |= _without(self.function, OF_NETWORK)
            _refuse(others, method, "they are of other methods")
            return Choice(method, "graph")
        _refuse(self.function, method, "they are of --method function")
        method = "gpi-fnm" if method == "match" else method
        return Choice(method, "layers")

    def _default(self, models: Sequence[Path], files: ModelFiles) -> str:
        if any(value is not None for value in self.function.values()):
            return "function"
        if any(value is not None for value in self.matching.values()):
            return "gpi-fnm"
        known = all(is_program(path) or files[path][1] is not None for path in models)
        return "function" if known else "gpi-fnm"

    def _on_graph(self, models: Sequence[Path], out: Path, files: ModelFiles) -> bool:
        """Whether networks are matched on their graph, and not as fully connected layers."""
        named = any(self.function[name] is not None for name in OF_NETWORK)
        return named or out.suffix.lower() == PROGRAM or not all_dense(models, files)

    def _averages(self, method: str, models: Sequence[Path], files: ModelFiles) -> bool:
        """Whether networks are averaged as they are, and not as fully connected layers."""
        if method in (*BY_POSTERIORS, "permute"):
            return True
        if method != "average":
            return False
        if any(self.function[name] is not None for name in OF_NETWORK) or is_program(models[0]):
            return True
        card = files[models[0]][1]
        return card is not None and card.model.get("name", "mlp") != "mlp"


@dataclass(frozen=True)
class Choice:
    """A method of `fedbayes fuse`."""

    method: str
    way: Way


def _refuse(options: Mapping[str, object], method: str, whose: str) -> None:
    """See that no option was given that has no effect.

    Raises:
        ConfigError: one was.
    """
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise ConfigError(f"{', '.join(given)} have no effect on {method}: {whose}")


def _without(options: Mapping[str, object], names: Collection[str]) -> dict[str, object]:
    return {name: value for name, value in options.items() if name not in names}
