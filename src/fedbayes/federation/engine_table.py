"""The engines by name: what starts each, and what it can.

To add an engine is to write its file and a row here. An installed package adds its own by an entry
point in the group `fedbayes.engines` that names an `EngineKind`. This file imports no PyTorch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal

from fedbayes.core.lazy import installed, named
from fedbayes.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from fedbayes.federation.engines import Engine


@dataclass(frozen=True)
class EngineKind:
    """One row of the table."""

    summary: str
    """One line for lists."""
    start: str = ""
    """`module:function` that starts it for a `Simulation`; empty if a run cannot start it."""
    launcher: str = ""
    """The command that starts it and submits the run, where a run cannot."""
    exact: bool = True
    """Whether it computes the same bits as `sequential`; a run on one that does not says so."""
    needs: tuple[str, str] = ("", "")
    """A package that must be installed, and the extra of fedbayes that brings it."""
    secure: bool = False
    """Whether it can aggregate so that the server sees the sum of the reports alone."""
    states: Literal["run", "nodes", "remote"] = "run"
    """Where clients' private states are: in the run folder, in the folders of nodes inside of it,
    or on other machines."""
    here: bool = False
    """Whether clients are in this process, where they find Python objects that no module has."""
    clocked: bool = True
    """Whether clients go by a simulated clock, and take no time that anyone knows otherwise."""
    settings: tuple[str, ...] = ()
    """Keys of a config that have an effect on this engine, and not on all."""


_BUILT_IN: Mapping[str, EngineKind] = {
    "auto": EngineKind(
        "sequential, until worker processes would save time",
        start="fedbayes.federation.engines.auto:start",
        here=True,
    ),
    "sequential": EngineKind(
        "clients sequentially in this process",
        start="fedbayes.federation.engines.sequential:start",
        here=True,
    ),
    "stacked": EngineKind(
        "clients of small networks at once, in this process",
        start="fedbayes.federation.engines.sequential:start_stacked",
        exact=False,
        here=True,
    ),
    "workers": EngineKind(
        "clients in parallel in worker processes",
        start="fedbayes.federation.engines.workers:start",
        settings=("workers", "devices"),
    ),
    "ray": EngineKind(
        "clients in parallel in Ray actors, on one machine or many",
        start="fedbayes.federation.engines.ray:start",
        needs=("ray", "ray"),
        settings=("ray",),
    ),
    "flower-simulation": EngineKind(
        "Flower's simulation in this process",
        start="fedbayes.flower.simulated:start",
        needs=("flwr", "flower"),
        secure=True,
        states="nodes",
        settings=("round_timeout", "evaluate_at"),
    ),
    "flower": EngineKind(
        "the nodes of a SuperLink (fedbayes federate)",
        launcher="fedbayes federate",
        needs=("flwr", "flower"),
        secure=True,
        states="remote",
        clocked=False,
        settings=("round_timeout", "evaluate_at"),
    ),
}


class _Engines(Mapping[str, EngineKind]):
    """The engines of this package, and, asked for by name, those of installed packages."""

    def __getitem__(self, name: str) -> EngineKind:
        if name in _BUILT_IN:
            return _BUILT_IN[name]
        if not (place := name if ":" in name else installed("engines", name)):
            raise KeyError(name)
        found = named(place, "engine")
        if not isinstance(found, EngineKind):
            raise ConfigError(
                f"the engine {name!r} is {place}, which is not a {__name__}.EngineKind"
            )
        return found

    def __contains__(self, name: object) -> bool:
        if name in _BUILT_IN or not isinstance(name, str):
            return name in _BUILT_IN
        return ":" in name or bool(installed("engines", name))

    def __iter__(self) -> Iterator[str]:
        return iter(_BUILT_IN)

    def __len__(self) -> int:
        return len(_BUILT_IN)


ENGINES: Mapping[str, EngineKind] = _Engines()
"""Every engine by its name."""


def takers(key: str) -> tuple[str, ...]:
    """Names of the engines on which a key of a config has an effect."""
    return tuple(name for name, kind in ENGINES.items() if key in kind.settings)


def start(name: str, simulation: Any) -> "Engine":
    """Start the engine of this name for a `Simulation`.

    Raises:
        EngineError: it needs another command, or what is not installed.
    """
    kind = ENGINES[name]
    if not kind.start:
        raise EngineError(
            f"the clients of engine {name!r} are on other machines. Start with `{kind.launcher} "
            f"CONFIG`, or resume with `{kind.launcher} resume {simulation.folder.path}`"
        )
    engine: Engine = resolve_name(kind.start)(simulation)
    return engine
