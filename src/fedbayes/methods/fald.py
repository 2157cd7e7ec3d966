"""FALD: federated averaging Langevin dynamics, whose server draws from the posterior."""

from dataclasses import replace
from typing import Any

import torch

from fedbayes.contracts import (
    About,
    Federation,
    Info,
    Known,
    Loss,
    PointEstimate,
    Problem,
    RoundContext,
    Stateless,
    Sum,
    Tree,
    sgd,
)
from fedbayes.contracts.chain import Chain, ChainServer
from fedbayes.contracts.needs import langevin, own_prior, weights_alone
from fedbayes.contracts.run import with_prior
from fedbayes.core.messages import Message
from fedbayes.core.tensors import Samples, Tensors
from fedbayes.inference.sampling import Langevin


class Fald(Chain, PointEstimate[ChainServer]):
    """Federated averaging Langevin dynamics (Plassier et al. 2023, Algorithm 1; Deng et al. 2021).

    In every step a client goes down the gradient of its mean loss ℓ_k, and adds noise,

        θ_k ← θ_k − η ∇[ℓ_k(θ_k) + ‖θ_k‖²/(2 s² N)] + N(0, 2 η T/n_k),

    with N = Σ n_k. The server averages with p_k = n_k/N. The noise of the mean then has the
    variance 2 η T/N. With one local step, rounds are Langevin dynamics of the posterior of all N
    rows under the prior N(0, s²), at the temperature T.
    """

    name = "fald"
    about = About(
        "Langevin dynamics over rounds, averaged in predictions",
        "Plassier et al. 2023; Deng et al. 2021",
        needs=(langevin, own_prior, weights_alone),
    )
    server_state = ChainServer

    def recommended(self, known: Known) -> dict[str, Any]:
        """Plain steps, and a temperature that lets the model fit the data."""
        return {**sgd(known), "method.temperature": known.tempered(0.2)}

    def problem(
        self, message: Message, client: Stateless, samples: Samples, at: RoundContext
    ) -> Problem:
        """Train from the server's weights, with noise after every step."""
        problem = super().problem(message, client, samples, at)
        count, names = len(samples.y), list(problem.start)
        noise = Langevin(at.rng("langevin"), count, self.temperature)

        def follow(parameters: Tensors, given: Tree, lr: float) -> None:
            noise.add(parameters, names, lr)

        # Σ p_k / (n_k K) is 1/N: on average it is the prior's share.
        total = torch.tensor(float(count * at.run.clients), device=at.run.network.device)
        return replace(problem, given={"total": total}, project=follow)

    def loss(self, run: Federation) -> Loss:
        """The negative log-likelihood plus the prior's share of it."""
        return with_prior(run, self.prior_std)

    def update(
        self, server: ChainServer, reports: Sum, at: RoundContext
    ) -> tuple[ChainServer, Info]:
        """Average, and keep a draw after burn-in."""
        return self.kept(server, reports.mean(), at)
