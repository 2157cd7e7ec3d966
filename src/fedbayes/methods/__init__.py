"""The methods, one file each; `METHODS` has them by name.

A new method is a file here and a line in `METHODS`; its docstring names the equation that it
implements. Change a method freely while `tests/methods/reference_models.json` keeps its numbers.
Methods never import one another: what two of them share is a base in `contracts/`. Rounds, engines
and storage never ask for a method's name.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fedbayes.core.lazy import Catalogue

if TYPE_CHECKING:
    from fedbayes.contracts import AnyMethod


METHODS: Mapping[str, "type[AnyMethod]"] = Catalogue(
    "fedbayes.methods",
    {
        "fedavg": ("fedavg", "FedAvg"),
        "fedprox": ("fedprox", "FedProx"),
        "reptile": ("fedopt", "Reptile"),
        "fedavgm": ("fedopt", "FedAvgM"),
        "fedadam": ("fedopt", "FedAdam"),
        "fedyogi": ("fedopt", "FedYogi"),
        "scaffold": ("scaffold", "Scaffold"),
        "laplace": ("laplace", "Laplace"),
        "mixture": ("mixture", "Mixture"),
        "fedsparse": ("fedsparse", "FedSparse"),
        "scaffold-fedsparse": ("fedsparse", "ScaffoldFedSparse"),
        "feddrop": ("feddrop", "FedDrop"),
        "fedl1": ("fedl1", "FedL1"),
        "virtual": ("virtual", "Virtual"),
        "pvi": ("pvi", "Pvi"),
        "fedlap": ("fedlap", "FedLap"),
        "fedep": ("fedep", "FedEP"),
        "fedgvi": ("fedgvi", "FedGvi"),
        "ivon-admm": ("ivon_admm", "IvonAdmm"),
        "combined": ("combined", "Combined"),
        "gpi-fnm": ("matching", "GpiFnm"),
        "pfnm": ("matching", "Pfnm"),
        "fedfuse": ("fedfuse", "FedFuse"),
        "fedpa": ("fedpa", "FedPa"),
        "pfedbayes": ("pfedbayes", "PFedBayes"),
        "fedbe": ("fedbe", "FedBe"),
        "fedbe-sums": ("fedbe", "FedBeSums"),
        "feddyn": ("feddyn", "FedDyn"),
        "fednova": ("fednova", "FedNova"),
        "qfedavg": ("qfedavg", "QFedAvg"),
        "moon": ("moon", "Moon"),
        "ditto": ("ditto", "Ditto"),
        "apfl": ("apfl", "Apfl"),
        "pfedme": ("pfedme", "PFedMe"),
        "perfedavg": ("perfedavg", "PerFedAvg"),
        "fedper": ("fedper", "FedPer"),
        "fedrep": ("fedrep", "FedRep"),
        "fedbn": ("fedbn", "FedBN"),
        "hierarchical": ("hierarchical", "Hierarchical"),
        "fedpm": ("fedpm", "FedPm"),
        "fald": ("fald", "Fald"),
        "fedivon": ("fedivon", "FedIvon"),
        "fens": ("fens", "Fens"),
        "fedlpa": ("fedlpa", "FedLpa"),
        "predbayes": ("predbayes", "PredBayes"),
        "qlsd": ("qlsd", "Qlsd"),
        "dsvgd": ("dsvgd", "Dsvgd"),
        "gaussian-head": ("gaussian_head", "GaussianHeadMethod"),
        "local": ("local", "Local"),
        "global": ("centralized", "Global"),
    },
)
"""Every built-in method by its name; the names are known without importing PyTorch."""
