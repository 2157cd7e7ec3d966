"""The methods, one file each."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedbayes.contracts import AnyMethod


class _Methods(Mapping[str, "type[AnyMethod]"]):
    """Classes by name; a file is imported when its method is asked for."""

    _places: Mapping[str, tuple[str, str]] = {
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
        "combined": ("combined", "Combined"),
        "gpi-fnm": ("matching", "GpiFnm"),
        "pfnm": ("matching", "Pfnm"),
        "local": ("local", "Local"),
        "global": ("pooled", "Global"),
    }

    def __getitem__(self, name: str) -> "type[AnyMethod]":
        module, kind = self._places[name]
        method: type[AnyMethod] = getattr(import_module(f"fedbayes.methods.{module}"), kind)
        return method

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


METHODS: Mapping[str, "type[AnyMethod]"] = _Methods()
"""Every built-in method by its name; the names are known without importing PyTorch."""
