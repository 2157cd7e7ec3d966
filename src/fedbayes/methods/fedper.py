"""FedPer: the last layers stay with the clients, the others are averaged."""

from pydantic import Field

from fedbayes.contracts import About, Federation
from fedbayes.contracts.personal import PersonalLayers, last_layers


class FedPer(PersonalLayers):
    """Base layers that are shared, and personalization layers (Arivazhagan et al. 2019).

    A client trains all layers at once (Algorithm 1), reports the base layers, which the server
    averages, and keeps the others for its next round.
    """

    name = "fedper"
    about = About(
        "FedAvg whose last layers stay with the clients",
        "Arivazhagan et al. 2019",
    )

    layers: int = Field(
        1, ge=1, description="number of layers, counted from the output, that stay with the clients"
    )

    def check(self, run: Federation) -> None:
        """Some layer is shared.

        Raises:
            ConfigError: all of them would stay with the clients.
        """
        last_layers(self.name, run, self.layers)

    def personal(self, run: Federation) -> list[str]:
        """Name the tensors of the last layers."""
        return last_layers(self.name, run, self.layers)
