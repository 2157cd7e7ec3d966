"""What methods choose their recommended settings by, and what several of them choose alike."""

from dataclasses import dataclass
from math import ceil
from typing import Any

from torch import Tensor

from fedbayes.contracts.run import Federation


@dataclass(frozen=True)
class Known:
    """What is known of a federation before its first round.

    Examples:
        >>> from pathlib import Path
        >>> import fedbayes
        >>> from fedbayes.contracts import Known
        >>> config = fedbayes.Config.create(
        ...     rounds=1, model={"hidden": [8]}, data={"clients": 2, "limit": 200}
        ... )
        >>> with fedbayes.Simulation(config, Path("known")) as simulation:
        ...     known = Known(simulation.run, samples=150, median=75)
        >>> known.real, known.epochs(steps=20)
        (False, 7)
    """

    run: Federation
    """Network, likelihood, rounds and numbers of clients; its training has published values for
    settings that are still to be chosen."""
    samples: int
    """Training samples of all clients."""
    median: int
    """Training samples of a client in the middle."""
    pretrained: bool = False
    """Whether training starts from a network that others trained, which long steps destroy."""

    @property
    def weights(self) -> int:
        """Numbers that are trained in the network."""
        return sum(t.numel() for t in self.run.network.split()[0].values())

    @property
    def deep(self) -> bool:
        """Whether three layers or more have weights. Long steps of drawn weights then diverge."""
        return len(self._layers) > 2

    @property
    def filters(self) -> bool:
        """Whether weights have more than two axes, as those of convolutions, on which long steps
        of plain SGD diverge.
        """
        return any(t.ndim > 2 for t in self._layers)

    @property
    def narrowest(self) -> float:
        """Smallest standard deviation of a layer's weights where training starts; 0: of none."""
        found = [float(t.float().std(correction=0)) for t in self._layers]
        return min((std for std in found if std), default=0.0)

    @property
    def _layers(self) -> list[Tensor]:
        """Weights of dense layers and convolutions, and the like."""
        return [t for t in self.run.network.split()[0].values() if t.ndim > 1]

    def tempered(self, share: float) -> float:
        """A weight of the KL term under which a mean-field posterior learns.

        The KL term grows with the number of weights P, the log-likelihood with the number of
        samples N, so the weight is `share` N h / P, at most 1. h is how much of the clients'
        factors the server has after the last round: a client is in T B / K rounds, and each adds
        1/B of what is missing. A weight below 1 tempers the posterior: it is narrower than by
        Bayes' rule.
        """
        run = self.run
        heard = 1 - (1 - 1 / run.cohort) ** (run.rounds * run.cohort / run.clients)
        return float(f"{min(1.0, share * self.samples * heard / max(self.weights, 1)):.1g}")

    @property
    def real(self) -> bool:
        """Whether numbers or times are predicted, which long steps overfit or diverge on."""
        return self.run.likelihood.target.kind not in ("class", "labels")

    @property
    def epoch(self) -> int:
        """Steps of a client's epoch."""
        return max(ceil(self.median / self.run.training.batch_size), 1)

    def epochs(self, steps: int) -> int:
        """Epochs for about `steps` steps at a client, at least 2 and at most 20."""
        return min(max(round(steps / self.epoch), 2), 20)


def sgd(known: Known, *, lr: float = 0.2, steps: int = 20) -> dict[str, Any]:
    """Plain SGD at the clients, with about this number of steps and this learning rate.

    Convolutions take half of the rate, real targets an eighth.

    Examples:
        >>> from pathlib import Path
        >>> import fedbayes
        >>> from fedbayes.contracts import Known, sgd
        >>> config = fedbayes.Config.create(
        ...     rounds=1, model={"hidden": [8]}, data={"clients": 2, "limit": 200}
        ... )
        >>> with fedbayes.Simulation(config, Path("sgd")) as simulation:
        ...     known = Known(simulation.run, samples=150, median=75)
        >>> sgd(known)["training.lr"]
        0.2
    """
    part = 8 if known.real else 2 if known.filters else 1
    return {
        "training.optimizer": "sgd",
        "training.lr": 0.01 if known.pretrained else lr / part,
        "training.epochs": known.epochs(steps),
    }


def adam(known: Known, *, lr: float = 0.01, steps: int = 20, drawn: bool = False) -> dict[str, Any]:
    """Adam at the clients, for parameters of different scales, such as means and log-precisions.

    Where weights are `drawn` in each step, steps are shorter in deep networks.

    Examples:
        >>> from pathlib import Path
        >>> import fedbayes
        >>> from fedbayes.contracts import Known, adam
        >>> config = fedbayes.Config.create(
        ...     rounds=1, model={"hidden": [8]}, data={"clients": 2, "limit": 200}
        ... )
        >>> with fedbayes.Simulation(config, Path("adam")) as simulation:
        ...     known = Known(simulation.run, samples=150, median=75)
        >>> adam(known, lr=0.003)["training.lr"]
        0.003
    """
    if drawn and known.deep and not known.real:
        lr /= 5
    return {
        "training.optimizer": "adam",
        "training.lr": 1e-4 if known.pretrained else lr / 4 if known.real else lr,
        "training.epochs": known.epochs(steps),
    }
