"""FedPer: the last layers stay with the clients, the others are averaged."""

from fedbayes.contracts import About
from fedbayes.contracts.personal import LastLayers


class FedPer(LastLayers):
    """Base layers that are shared, and personalization layers (Arivazhagan et al. 2019).

    A client trains all layers at once (Algorithm 1), reports the base layers, which the server
    averages, and keeps the others for its next round.
    """

    name = "fedper"
    about = About(
        "FedAvg whose last layers stay with the clients",
        "Arivazhagan et al. 2019",
    )
