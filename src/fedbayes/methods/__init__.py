"""The methods, one file each."""

from fedbayes.contracts import AnyMethod
from fedbayes.methods.fedavg import FedAvg
from fedbayes.methods.fedopt import FedAdam, FedAvgM, FedYogi, Reptile
from fedbayes.methods.fedprox import FedProx
from fedbayes.methods.local import Local
from fedbayes.methods.matching import GpiFnm, Pfnm
from fedbayes.methods.pooled import Global

METHODS: dict[str, type[AnyMethod]] = {
    method.name: method
    for method in (FedAvg, FedProx, Reptile, FedAvgM, FedAdam, FedYogi, GpiFnm, Pfnm, Local, Global)
}
"""Every built-in method by its name."""
