"""The methods, one file each."""

from fedbayes.contracts import AnyMethod
from fedbayes.methods.combined import Combined
from fedbayes.methods.fedavg import FedAvg
from fedbayes.methods.feddrop import FedDrop
from fedbayes.methods.fedl1 import FedL1
from fedbayes.methods.fedopt import FedAdam, FedAvgM, FedYogi, Reptile
from fedbayes.methods.fedprox import FedProx
from fedbayes.methods.fedsparse import FedSparse, ScaffoldFedSparse
from fedbayes.methods.laplace import Laplace
from fedbayes.methods.local import Local
from fedbayes.methods.matching import GpiFnm, Pfnm
from fedbayes.methods.mixture import Mixture
from fedbayes.methods.pooled import Global
from fedbayes.methods.scaffold import Scaffold
from fedbayes.methods.virtual import Virtual

METHODS: dict[str, type[AnyMethod]] = {
    method.name: method
    for method in (
        FedAvg,
        FedProx,
        Reptile,
        FedAvgM,
        FedAdam,
        FedYogi,
        Scaffold,
        Laplace,
        Mixture,
        FedSparse,
        ScaffoldFedSparse,
        FedDrop,
        FedL1,
        Virtual,
        Combined,
        GpiFnm,
        Pfnm,
        Local,
        Global,
    )
}
"""Every built-in method by its name."""
