"""What stays the same in a run, and where in it one is: what the engine lends to a method."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from fedbayes.contracts.changes import Clips
from fedbayes.core import seeds
from fedbayes.core.brief import Brief
from fedbayes.core.tensors import Samples, Tensors
from fedbayes.data.preprocessing import Preprocessing
from fedbayes.inference.problem import Loss, Problem, Solved, Tree
from fedbayes.inference.settings import LocalTraining
from fedbayes.inference.solve import solve
from fedbayes.likelihoods import Likelihood
from fedbayes.likelihoods.temperature import has_temperature, sums_of
from fedbayes.models import Network


@dataclass(frozen=True, repr=False)
class Federation(Brief):
    """What no round of a run changes: the same for the server and for every client.

    Examples:
        >>> from pathlib import Path
        >>> import fedbayes
        >>> from fedbayes.contracts import Federation
        >>> config = fedbayes.Config.create(
        ...     rounds=1, model={"hidden": [8]}, data={"clients": 2, "limit": 200}
        ... )
        >>> with fedbayes.Simulation(config, Path("federation")) as simulation:
        ...     run = simulation.run
        >>> isinstance(run, Federation), run.clients, run.cohort
        (True, 2, 2)
    """

    network: Network
    """The network that all clients share, as a function of its weights."""
    preprocessing: Preprocessing
    """What is done to a sample before the network sees it."""
    likelihood: Likelihood
    """The distribution of a target given the network's outputs."""
    training: LocalTraining
    """Optimizer, epochs and batch size of clients' training: `[training]` of the config."""
    clients: int
    """Number of clients, S."""
    cohort: int
    """Number of clients sampled in a round, B."""
    rounds: int
    """Number of rounds, T."""
    seed: int
    """Seed of the run; use `RoundContext.rng` for randomness."""
    clips: Clips = field(default_factory=Clips)
    """How long the server lets changes be: `aggregation.clip` and `privacy.clips` of the config."""
    measures: tuple[str, ...] = ()
    """Metrics that clients tell of their own models besides those of the likelihood: `metrics` of
    the config, as `likelihoods.measures.fitting` gives them; none of `auto`."""


def _no_network() -> Network:
    raise TypeError("only clients have their own networks")


def _no_rows() -> Samples | None:
    return None


@dataclass(frozen=True, repr=False)
class RoundContext(Brief):
    """A place in a run: a round, and a client where it is about one.

    Examples:
        >>> from pathlib import Path
        >>> import fedbayes
        >>> from fedbayes.contracts import RoundContext
        >>> config = fedbayes.Config.create(
        ...     rounds=1, model={"hidden": [8]}, data={"clients": 2, "limit": 200}
        ... )
        >>> with fedbayes.Simulation(config, Path("context")) as simulation:
        ...     at = RoundContext(simulation.run, round=1, client=1)
        >>> at.rng("noise").initial_seed() == at.rng("noise").initial_seed()
        True
    """

    run: Federation
    round: int
    """The round, from 1."""
    client: int = 0
    """Index of the client, 0..S-1; 0 where it is about none."""
    own_network: Callable[[], Network] = _no_network
    """Builds a network with an initialization that is this client's own."""
    held_out: Samples | None = None
    """Training samples set aside for early stopping, if the config asks for it."""
    calibration: Callable[[], Samples | None] = _no_rows
    """Gives labelled samples of this client that it does not train on, for a temperature of its own
    predictions; None where there are none."""

    def temperature(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> float:
        """The temperature of the client's own predictions, by samples that it does not train on.

        Args:
            draw: from inputs [n, ...] to outputs [draws, n, width], such as `single_draw` gives.

        Returns:
            T above 0, under the prior of `TemperatureSums.with_prior`; 0 where the client has no
            such samples, or predictions of its likelihood have no temperature.
        """
        likelihood, rows = self.run.likelihood, self.calibration()
        if rows is None or not has_temperature(likelihood):
            return 0.0
        sums = sums_of(likelihood, draw, rows)
        return sums.with_prior().temperature() if sums.rows else 0.0

    def rng(self, purpose: str) -> torch.Generator:
        """The generator of this client in this round for one purpose, on the CPU."""
        return seeds.torch_rng(self.run.seed, purpose, round=self.round, client=self.client)

    @property
    def lr(self) -> float:
        """Learning rate of the client's weights in this round."""
        return self.run.training.learning_rate(self.round, self.run.rounds)

    def solve(
        self, problem: Problem, loss: Loss, samples: Samples, *, validation: Loss | None = None
    ) -> Solved:
        """Solve a problem with the round's settings; see `inference.solve`."""
        return solve(
            problem,
            loss,
            samples,
            self.run.training,
            lr=self.lr,
            rng=self.rng,
            buffers=self.run.network.buffers,
            held_out=self.held_out,
            validation=validation,
        )


View = Callable[[Tensors, Tree], Tensors]
"""The weights of a network, of parameters that are trained and what is given."""


def nll(run: Federation, *, training: bool = True, weights: View | None = None) -> Loss:
    """The mean negative log-likelihood of a batch under the network.

    Args:
        run: network and likelihood.
        training: whether dropout and the like are as in training.
        weights: the network's, of the parameters that are trained and of what is given; None:
            these are all.

    Examples:
        >>> from pathlib import Path
        >>> import fedbayes
        >>> from fedbayes.contracts import nll
        >>> config = fedbayes.Config.create(
        ...     rounds=1, model={"hidden": [8]}, data={"clients": 2, "limit": 200}
        ... )
        >>> with fedbayes.Simulation(config, Path("nll")) as simulation:
        ...     run, batch = simulation.run, simulation.data.train(0)
        ...     loss = nll(run)(run.network.prepare(run.network.initial), batch, {}, {})
        >>> loss.shape
        torch.Size([])
    """
    network, likelihood = run.network, run.likelihood

    def loss(parameters: Tensors, batch: Samples, given: Tree, noise: object) -> torch.Tensor:
        own = parameters if weights is None else weights(parameters, given)
        return likelihood.nll(network(own, batch.x, training=training), batch.y)

    return loss


def with_centre(run: Federation, strength: float, centre: View) -> Loss:
    """The mean negative log-likelihood plus λ/2 ‖φ − c‖².

    Args:
        run: network and likelihood.
        strength: λ.
        centre: c by name, of the parameters and of what is given.
    """
    likelihood = nll(run)

    def loss(parameters: Tensors, batch: Samples, given: Tree, noise: Tree) -> torch.Tensor:
        distance: torch.Tensor = sum(
            ((parameters[n] - w).square().sum() for n, w in centre(parameters, given).items()),
            start=torch.zeros((), device=run.network.device),
        )
        return likelihood(parameters, batch, given, noise) + strength / 2 * distance

    return loss


def given_centre(parameters: Tensors, given: Tree) -> Tensors:
    """The centre that a problem gives, as `with_centre` takes it."""
    centre: Tensors = given["centre"]
    return centre


def with_prior(run: Federation, std: float) -> Loss:
    """The mean negative log-likelihood plus a share of a Gaussian prior: ‖w‖²/(2 s² n).

    Args:
        run: network and likelihood.
        std: s, the standard deviation of each weight.

    Returns:
        A loss that is given n as `total`: the rows of the federation, or a client's own times the
        number of clients that share the prior.
    """
    likelihood = nll(run)

    def loss(parameters: Tensors, batch: Samples, given: Tree, noise: Tree) -> torch.Tensor:
        value = likelihood(parameters, batch, given, noise)
        squares = torch.stack([w.square().sum() for w in parameters.values()]).sum()
        energy: torch.Tensor = value + squares / (2 * std**2 * given["total"])
        return energy

    return loss
