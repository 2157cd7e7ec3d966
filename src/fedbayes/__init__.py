"""Probabilistic federated learning on PyTorch.

import fedbayes

run = fedbayes.run(method={"name": "fedprox", "proximal": 0.1}, rounds=10)
print(run.summary["global_accuracy"])
"""

import sys

if sys.orig_argv[1:3] == ["-m", "fedbayes.cli"]:
    # Python looks into the current directory first: nothing that lies there is run unasked.
    sys.path[:] = [*sys.path[1:], ""]

from typing import TYPE_CHECKING

from fedbayes.lazy import attributes
from fedbayes.version import __version__

if TYPE_CHECKING:
    from fedbayes.biostatistics import cox, glm, kaplan_meier, meta_analysis
    from fedbayes.fusion import Fusion, fuse
    from fedbayes.runs.config import Config
    from fedbayes.runs.result import Result
    from fedbayes.runs.simulation import Simulation, Step
    from fedbayes.start import resume, run
    from fedbayes.tools.client_tables import client_tables
    from fedbayes.tools.seed_runs import SeedRuns, resume_seeds, run_seeds

__all__ = [
    "Config",
    "Fusion",
    "Result",
    "SeedRuns",
    "Simulation",
    "Step",
    "__version__",
    "client_tables",
    "cox",
    "fuse",
    "glm",
    "kaplan_meier",
    "meta_analysis",
    "resume",
    "resume_seeds",
    "run",
    "run_seeds",
]

__getattr__, __dir__ = attributes(
    __name__,
    {
        "Config": "fedbayes.runs.config",
        "Fusion": "fedbayes.fusion",
        "Result": "fedbayes.runs.result",
        "SeedRuns": "fedbayes.tools.seed_runs",
        "Simulation": "fedbayes.runs.simulation",
        "Step": "fedbayes.runs.simulation",
        "client_tables": "fedbayes.tools.client_tables",
        "cox": "fedbayes.biostatistics",
        "fuse": "fedbayes.fusion",
        "glm": "fedbayes.biostatistics",
        "kaplan_meier": "fedbayes.biostatistics",
        "meta_analysis": "fedbayes.biostatistics",
        "resume": "fedbayes.start",
        "resume_seeds": "fedbayes.tools.seed_runs",
        "run": "fedbayes.start",
        "run_seeds": "fedbayes.tools.seed_runs",
    },
)
