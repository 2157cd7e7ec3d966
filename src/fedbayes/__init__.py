"""Probabilistic federated learning on PyTorch.

import fedbayes

run = fedbayes.run(method={"name": "fedprox", "proximal": 0.1}, rounds=10)
print(run.summary["global_accuracy"])
"""

from typing import TYPE_CHECKING

from fedbayes.lazy import attributes

if TYPE_CHECKING:
    from fedbayes.fusion import Fusion, fuse
    from fedbayes.runs.config import Config
    from fedbayes.runs.result import Result
    from fedbayes.runs.simulation import Simulation, Step
    from fedbayes.start import resume, run
    from fedbayes.tools.seed_runs import SeedRuns, resume_seeds, run_seeds

__all__ = [
    "Config",
    "Fusion",
    "Result",
    "SeedRuns",
    "Simulation",
    "Step",
    "fuse",
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
        "fuse": "fedbayes.fusion",
        "resume": "fedbayes.start",
        "resume_seeds": "fedbayes.tools.seed_runs",
        "run": "fedbayes.start",
        "run_seeds": "fedbayes.tools.seed_runs",
    },
)
