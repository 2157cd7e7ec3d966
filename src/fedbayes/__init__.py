"""Probabilistic federated learning on PyTorch.

import fedbayes

run = fedbayes.run(method={"name": "fedprox", "proximal": 0.1}, rounds=10)
print(run.summary["global_accuracy"])
"""

from typing import TYPE_CHECKING

from fedbayes.lazy import attributes

if TYPE_CHECKING:
    from fedbayes.experiment.config import Config
    from fedbayes.experiment.run import Run, Simulation, Step, resume, run
    from fedbayes.experiment.seed_runs import SeedRuns, resume_seeds, run_seeds
    from fedbayes.fusion import Fusion, fuse

__all__ = [
    "Config",
    "Fusion",
    "Run",
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
        "Config": "fedbayes.experiment.config",
        "Fusion": "fedbayes.fusion",
        "Run": "fedbayes.experiment.run",
        "SeedRuns": "fedbayes.experiment.seed_runs",
        "Simulation": "fedbayes.experiment.run",
        "Step": "fedbayes.experiment.run",
        "fuse": "fedbayes.fusion",
        "resume": "fedbayes.experiment.run",
        "resume_seeds": "fedbayes.experiment.seed_runs",
        "run": "fedbayes.experiment.run",
        "run_seeds": "fedbayes.experiment.seed_runs",
    },
)
