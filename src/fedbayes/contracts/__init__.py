"""What a method is, and what it works with."""

from fedbayes.contracts.changes import Changes, Clips, Total
from fedbayes.contracts.counted import Counted
from fedbayes.contracts.method import (
    UNIFORM,
    AnyMethod,
    Averaged,
    ClientState,
    Info,
    Method,
    Models,
    Nothing,
    Sampler,
    ServerState,
    Weights,
    single_draw,
    units_remarks,
)
from fedbayes.contracts.parts import Part, Reports
from fedbayes.contracts.point import PointEstimate
from fedbayes.contracts.prior import Prior
from fedbayes.contracts.recommended import Known, adam, sgd
from fedbayes.contracts.reports import Gathered, Report, Sum
from fedbayes.contracts.run import At, Run, nll
from fedbayes.inference.problem import Loss, Noise, Problem, Solved, Tree

__all__ = [
    "UNIFORM",
    "AnyMethod",
    "At",
    "Averaged",
    "Changes",
    "ClientState",
    "Clips",
    "Counted",
    "Gathered",
    "Info",
    "Known",
    "Loss",
    "Method",
    "Models",
    "Noise",
    "Nothing",
    "Part",
    "PointEstimate",
    "Prior",
    "Problem",
    "Report",
    "Reports",
    "Run",
    "Sampler",
    "ServerState",
    "Solved",
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
