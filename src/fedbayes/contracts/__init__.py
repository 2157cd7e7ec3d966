"""What a method is and works with: `Method`, `Federation`, `RoundContext`, reports and parts.

`method.py` is the contract, `parts.py` declares reports, and the other files are bases that several
methods share. Add a base here when two methods have the same body. A new name in `Method` is a cost
for every method: first ask whether the declaration of the reports says it already. Nothing here
knows an engine, a stage or a method.

A `Federation` holds what no round changes; a `RoundContext` is a round and a client in it, and
gives random generators by purpose (`at.rng`). States are carried from round to round, `Info` is
only reported and no method reads it. `core.tensors.pack` flattens every state into named tensors,
so that checkpoints and private states are stored in one way.
"""

import warnings
from typing import Any

from fedbayes.contracts.changes import ChangeCoordinates, Changes, Chart, Clips, Total
from fedbayes.contracts.counted import ClassCountedMethod, CountsClasses
from fedbayes.contracts.method import (
    UNIFORM,
    About,
    AnyMethod,
    Averaged,
    ClientState,
    Info,
    Method,
    Models,
    Sampler,
    ServerState,
    Stateless,
    Weights,
    single_draw,
    units_remarks,
)
from fedbayes.contracts.parts import Part, Reports
from fedbayes.contracts.point import PointEstimate
from fedbayes.contracts.prior import ClientNote, Prior
from fedbayes.contracts.recommended import Known, adam, sgd
from fedbayes.contracts.reports import Report, ReportList, Sum
from fedbayes.contracts.run import Federation, RoundContext, nll
from fedbayes.inference.problem import Loss, Noise, Problem, Solved, Tree

__all__ = [
    "UNIFORM",
    "About",
    "AnyMethod",
    "Averaged",
    "ChangeCoordinates",
    "Changes",
    "Chart",
    "ClassCountedMethod",
    "ClientNote",
    "ClientState",
    "Clips",
    "CountsClasses",
    "Federation",
    "Info",
    "Known",
    "Loss",
    "Method",
    "Models",
    "Noise",
    "Part",
    "PointEstimate",
    "Prior",
    "Problem",
    "Report",
    "ReportList",
    "Reports",
    "RoundContext",
    "Sampler",
    "ServerState",
    "Solved",
    "Stateless",
    "Sum",
    "Total",
    "Tree",
    "Weights",
    "adam",
    "nll",
    "sgd",
    "single_draw",
    "units_remarks",
]

FORMER = {
    "At": "RoundContext",
    "Run": "Federation",
    "Counted": "ClassCountedMethod",
    "Gathered": "ReportList",
    "Nothing": "Stateless",
}
"""Names of version 0.2, for one version."""


def __getattr__(name: str) -> Any:
    if name not in FORMER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"fedbayes.contracts.{name} is now {FORMER[name]}", FutureWarning, 2)
    return globals()[FORMER[name]]
