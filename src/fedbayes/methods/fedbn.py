"""FedBN: every client keeps its batch normalization to itself."""

from torch import nn

from fedbayes.contracts import About, Federation
from fedbayes.contracts.personal import PersonalLayers


class FedBN(PersonalLayers):
    """Averages all but batch normalization, which answers a client's shift of features.

    Scales, shifts and running moments of these layers stay with the clients (Li et al. 2021,
    Algorithm 1). `model.batch_norm = "local"` does the same under other methods that average.
    Where a network has none of them, all is averaged: FedAvg.
    """

    name = "fedbn"
    about = About(
        "FedAvg whose batch normalization stays with the clients",
        "Li et al. 2021 (FedBN)",
    )

    def remarks(self, run: Federation) -> list[str]:
        """Whether there is a layer that the clients keep."""
        if self.personal(run):
            return []
        return [
            "fedbn has no effect: this network has no trainable batch normalization. Set "
            "model.norm = 'batch' (mlp), or choose a network with batch normalization"
        ]

    def personal(self, run: Federation) -> list[str]:
        """Name the parameters and running moments of batch normalizations."""
        kinds = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
        found = [n for n, layer in run.network.module.named_modules() if isinstance(layer, kinds)]
        return [n for n in run.network.initial if n.rpartition(".")[0] in found]
