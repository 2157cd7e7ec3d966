"""FENS: one round of networks, and then a small aggregator over their ensemble."""

from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from fedbayes.contracts import (
    About,
    Averaged,
    Federation,
    Info,
    Known,
    Loss,
    Method,
    Part,
    Problem,
    Report,
    ReportList,
    Reports,
    RoundContext,
    Sampler,
    Solved,
    Tree,
    nll,
    sgd,
)
from fedbayes.contracts.drawn import sampler_over
from fedbayes.contracts.needs import of_first_round, weights_alone
from fedbayes.contracts.personal import PersonalTensors, solved_apart
from fedbayes.core.messages import Message, dense
from fedbayes.core.tensors import Samples, Tensors, named, part
from fedbayes.inference.problem import OptimizerBuilder
from fedbayes.models import Network

MIXER = "mixer/weights"
"""Name of the aggregator's weights, [clients, outputs]."""


@dataclass(frozen=True)
class FensServer:
    """The initialization, the ensemble once it is there, and the aggregator."""

    weights: Tensors
    mixer: Tensor
    """Weight of each client's outputs, [clients, outputs]."""
    networks: Tensors = field(default_factory=dict)
    """The clients' networks, stacked [clients, ...]."""


class Fens(Averaged, Method[FensServer, PersonalTensors, ReportList]):
    """Ensembling in one-shot federated learning (Allouah et al. 2024, Algorithm 1).

    In round 1 clients train alone and send their networks. In round 2 they get all of these, and
    keep them. From then on they train an aggregator by FedAvg: a linear map of the networks'
    outputs f_k(x), with a weight for each client and output,

        f(x) = Σ_k λ_k ⊙ f_k(x),

    which starts at λ_k = 1/K, the mean. So only K times the number of outputs travel in a round. A
    client that missed round 2 reports the aggregator as it came. Where not all clients are in
    every round, networks are sent in each.
    """

    name = "fens"
    about = About(
        "one round of networks, then an aggregator of their outputs",
        "Allouah et al. 2024",
        needs=(weights_alone,),
        notes=(of_first_round,),
    )
    server_state = FensServer
    client_state = PersonalTensors
    reports = Reports(
        {"weights": Part(), "mixer": Part()},
        reduce="set",
    )

    mixer_lr: float = Field(0.1, gt=0, description="learning rate of the aggregator, by SGD")
    mixer_epochs: int = Field(
        5, ge=1, description="passes over a client's rows in a round of the aggregator"
    )

    def recommended(self, known: Known) -> dict[str, Any]:
        """All training of a network is in one round, so that it takes many steps."""
        chosen = sgd(known, steps=300)
        return {**chosen, "training.epochs": max(20, round(300 / known.epoch))}

    def init(self, run: Federation) -> FensServer:
        """The network's initialization, and a mean."""
        initial = run.network.initial
        like = next(iter(initial.values()))
        width = _width(run)
        return FensServer(initial, like.new_full((run.clients, width), 1 / run.clients))

    def message(self, server: FensServer, at: RoundContext) -> Message:
        """Send the initialization; then the ensemble, once; and the aggregator."""
        if not server.networks:
            return dict(server.weights)
        whole = at.round == 2 or at.run.cohort < at.run.clients
        networks = named("network", server.networks) if whole else {}
        return {**networks, MIXER: server.mixer}

    def expected(self, message: Message, run: Federation) -> Message:
        """A network, or an aggregator."""
        return {MIXER: message[MIXER]} if MIXER in message else message

    def problem(
        self, message: Message, client: PersonalTensors, samples: Samples, at: RoundContext
    ) -> Problem:
        """Train a network, or the aggregator of the networks that the client keeps."""
        network, sent = at.run.network, dense(message)
        if MIXER not in sent:
            return Problem(network.prepare(sent))
        own = part(sent, "network") or client.tensors
        start = network.prepare({MIXER: sent[MIXER]})
        sgd_at: OptimizerBuilder = self._stepper
        return Problem(start, given={"networks": own}, param_groups={MIXER: sgd_at})

    def _stepper(self, leaves: list[Tensor]) -> torch.optim.Optimizer:
        """Plain steps of the aggregator."""
        return torch.optim.SGD(leaves, lr=self.mixer_lr)

    def loss(self, run: Federation) -> Loss:
        """The negative log-likelihood of the network, or of the mixed ensemble."""
        alone = nll(run)

        def loss(parameters: Tensors, batch: Samples, given: Tree, noise: Tree) -> Tensor:
            if MIXER not in parameters:
                return alone(parameters, batch, given, noise)
            with torch.no_grad():
                every = _outputs(run.network, given["networks"], batch.x)
            return run.likelihood.nll(_mixed(every, parameters[MIXER]), batch.y)

        return loss

    def validation(self, run: Federation) -> Loss:
        """The same, without dropout."""
        alone, mixed = nll(run, training=False), self.loss(run)

        def loss(parameters: Tensors, batch: Samples, given: Tree, noise: Tree) -> Tensor:
            chosen = mixed if MIXER in parameters else alone
            return chosen(parameters, batch, given, noise)

        return loss

    def local(
        self, message: Message, client: PersonalTensors, samples: Samples, at: RoundContext
    ) -> tuple[Report, PersonalTensors, Info]:
        """Train a network in round 1, and the aggregator in later rounds."""
        if MIXER not in message:
            return super().local(message, client, samples, at)
        kept = PersonalTensors(part(dense(message), "network") or client.tensors)
        problem = self.problem(message, kept, samples, at)
        if not kept.tensors:
            unchanged = Solved(problem.start, 0, 0.0, len(samples.y))
            return self.report(unchanged, problem, kept, at)
        solved = solved_apart(
            at, "mixer", problem, self.loss(at.run), samples, epochs=self.mixer_epochs
        )
        return self.report(solved, problem, kept, at)

    def update(
        self, server: FensServer, reports: ReportList, at: RoundContext
    ) -> tuple[FensServer, Info]:
        """Gather the networks, or average the aggregators.

        Networks that did not arrive have weight 0 in the mean that the aggregator starts from.
        """
        found = {k: dense(r.tensors) for k, r in sorted(reports.reports.items())}
        if not server.networks:
            mixer = torch.zeros_like(server.mixer)
            networks: Tensors = {}
            for name, start in server.weights.items():
                every = [found[k][name] if k in found else start for k in range(len(mixer))]
                networks[name] = torch.stack(every)
            for k in found:
                mixer[k] = 1 / len(found)
            return FensServer(server.weights, mixer, networks), {}
        weights = torch.tensor([reports.reports[k].weight for k in found], dtype=torch.float64)
        mixers = torch.stack([tensors[MIXER].double() for tensors in found.values()])
        mean = torch.tensordot(weights / weights.sum(), mixers, dims=1).to(server.mixer)
        spread = float((mean.sum(dim=0) - 1).abs().mean())
        return FensServer(server.weights, mean, server.networks), {"mixer_off_mean": spread}

    def model(self, server: FensServer, run: Federation) -> Tensors:
        """Return the networks and the aggregator; at first one network, the initialization."""
        networks = server.networks or {n: t[None] for n, t in server.weights.items()}
        mixer = server.mixer if server.networks else server.mixer[:1] * run.clients
        return {**named("network", networks), MIXER: mixer}

    def personal_model(
        self, message: Message, report: Report | None, client: PersonalTensors, run: Federation
    ) -> Tensors | None:
        """None: clients predict with the global model."""
        return None

    def draws(self, model: Tensors, run: Federation) -> Sampler:
        """Outputs of the mixed ensemble."""
        network = run.network
        networks = part(model, "network")
        mixer = model[MIXER].to(network.device)
        return lambda x: _mixed(_outputs(network, networks, x), mixer)[None]


def _width(run: Federation) -> int:
    """The number of outputs, behind the head if there is any."""
    network = run.network
    assert network.shape is not None
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        x = torch.zeros(1, *network.shape, device=network.device)
        return network(network.prepare(network.initial), x).shape[1]


def _outputs(network: Network, networks: Tensors, x: Tensor) -> Tensor:
    """Outputs of each network, [clients, n, outputs]."""
    return sampler_over(networks, network)(x)


def _mixed(every: Tensor, mixer: Tensor) -> Tensor:
    """Σ_k λ_k ⊙ f_k, [n, outputs]."""
    return torch.einsum("knc,kc->nc", every, mixer)
