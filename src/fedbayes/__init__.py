"""Probabilistic federated learning on PyTorch.

import fedbayes

run = fedbayes.run(method={"name": "fedprox", "proximal": 0.1}, rounds=10)
print(run.summary["global_accuracy"])
"""

import sys

if (
    sys.argv[:1] == ["-m"]
    and not sys.flags.safe_path
    and {"fedbayes", "fedbayes.cli", "-mfedbayes", "-mfedbayes.cli"} & {*sys.orig_argv}
):
    # Python looks into the current directory first: nothing that lies there is run unasked.
    sys.path[:] = sys.path[1:]

from typing import TYPE_CHECKING

from fedbayes.core.lazy import attributes
from fedbayes.core.moved import keep_former_names
from fedbayes.version import __version__

if TYPE_CHECKING:
    from fedbayes.biostatistics import cox, glm, kaplan_meier, meta_analysis
    from fedbayes.config.config import Config
    from fedbayes.estimators import FederatedClassifier, FederatedRegressor
    from fedbayes.fusion import Fusion
    from fedbayes.runs.simulation import Simulation, Step
    from fedbayes.runs.trained import TrainedModel
    from fedbayes.workflows.clients.contributions import contributions
    from fedbayes.workflows.clients.forgetting import forget
    from fedbayes.workflows.experiments.comparing import compare
    from fedbayes.workflows.experiments.seed_runs import SeedRuns, resume_seeds, run_seeds
    from fedbayes.workflows.experiments.tuning import tune
    from fedbayes.workflows.fuse.from_python import FusedModel, fuse
    from fedbayes.workflows.running import Result, resume, run
    from fedbayes.workflows.serve.prediction import predict_file
    from fedbayes.workflows.serve.trained_models import load
    from fedbayes.workflows.studies.client_tables import client_tables

__all__ = [
    "Config",
    "FederatedClassifier",
    "FederatedRegressor",
    "FusedModel",
    "Fusion",
    "Result",
    "SeedRuns",
    "Simulation",
    "Step",
    "TrainedModel",
    "__version__",
    "client_tables",
    "compare",
    "contributions",
    "cox",
    "forget",
    "fuse",
    "glm",
    "kaplan_meier",
    "load",
    "meta_analysis",
    "predict_file",
    "resume",
    "resume_seeds",
    "run",
    "run_seeds",
    "tune",
]

__getattr__, __dir__ = attributes(
    __name__,
    {
        "fedbayes.biostatistics": "cox glm kaplan_meier meta_analysis",
        "fedbayes.config.config": "Config",
        "fedbayes.estimators.classifier": "FederatedClassifier",
        "fedbayes.estimators.regressor": "FederatedRegressor",
        "fedbayes.fusion": "Fusion",
        "fedbayes.runs.simulation": "Simulation Step",
        "fedbayes.runs.trained": "TrainedModel",
        "fedbayes.workflows.clients.contributions": "contributions",
        "fedbayes.workflows.clients.forgetting": "forget",
        "fedbayes.workflows.experiments.comparing": "compare",
        "fedbayes.workflows.experiments.seed_runs": "SeedRuns resume_seeds run_seeds",
        "fedbayes.workflows.experiments.tuning": "tune",
        "fedbayes.workflows.fuse.from_python": "FusedModel fuse",
        "fedbayes.workflows.running": "Result resume run",
        "fedbayes.workflows.serve.prediction": "predict_file",
        "fedbayes.workflows.serve.trained_models": "load",
        "fedbayes.workflows.studies.client_tables": "client_tables",
    },
)
keep_former_names()
