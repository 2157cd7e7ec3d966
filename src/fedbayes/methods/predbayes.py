"""β-PredBayes: clients' predictions, between their mixture and their product."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from fedbayes.contracts import (
    About,
    ClientNote,
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
    Stateless,
    sgd,
    single_draw,
)
from fedbayes.contracts.drawn import sampler_over
from fedbayes.contracts.needs import langevin, of_first_round, own_prior, weights_alone
from fedbayes.contracts.run import with_prior
from fedbayes.core.fields import Chosen, Only, unused
from fedbayes.core.messages import Message, dense
from fedbayes.core.tensors import Samples, Tensors, named, part
from fedbayes.errors import MessageError
from fedbayes.fusion.rounds import drawable, input_remarks, learnt
from fedbayes.fusion.settings import DistillationSettings
from fedbayes.fusion.teacher import Teacher
from fedbayes.inference.sampling import Langevin, sampled
from fedbayes.likelihoods import Classes, Likelihood


@dataclass(frozen=True)
class PredBayesServer:
    """The initialization, the clients' samples once they are there, and β."""

    weights: Tensors
    """The initialization; or the network that learnt the joint prediction."""
    networks: Tensors = field(default_factory=dict)
    """The samples of each client, stacked [clients, samples, ...]."""
    shares: Tensor = field(default_factory=lambda: torch.zeros(0))
    """Each client's share of the rows, [clients]."""
    beta: Tensor = field(default_factory=lambda: torch.zeros(()))
    """β, a scalar."""
    stopped: str = ""
    """Why there are no further rounds; empty while there are."""


class PredBayes(Method[PredBayesServer, Stateless, ReportList]):
    """β-Predictive Bayes (Hasan et al. 2024).

    In round 1 clients draw networks from their posteriors by Langevin dynamics, each with a share
    1/K of the prior N(0, s²), and send them. With the predictive distribution p_k of client k the
    joint prediction is

        p(y | x) ∝ [Π_k p_k(y | x)]^β [Σ_k r_k p_k(y | x)]^(1 − β),   r_k = n_k/Σ n_k.

    In round 2 clients get all networks. They report the mean negative log-likelihood of rows that
    they held out of training, for each β on a grid. The server takes the best, and no round
    follows. With `beta` set, round 1 is the only one.

    Probabilities of classes are combined. Under other likelihoods the outputs are combined: p_k is
    the Gaussian of the outputs' mean and variance over the client's samples, the mixture has its
    own mean and variance, and precisions and precisions times means are interpolated by β.
    """

    name = "predbayes"
    about = About(
        "mixes or multiplies clients' posterior predictions",
        "Hasan et al. 2024",
        needs=(langevin, own_prior, weights_alone, drawable),
        notes=(input_remarks, of_first_round),
    )
    server_state = PredBayesServer
    reports = Reports(
        {
            "draw": Part(compared="tensors"),
            "nll": Part(origin="zero", typical=torch.inf),
        },
        reduce="set",
        weighted=True,
    )

    beta: float | None = Field(
        None,
        ge=0,
        le=1,
        description="β. 0: the mixture of clients' predictions. 1: the product. Default: the "
        "best on held-out rows of clients, chosen in round 2",
    )
    samples: int = Field(5, ge=2, description="largest number of networks that a client samples")
    burn_in: float = Field(
        0.5, ge=0, lt=1, description="share of a client's steps before its first sample"
    )
    temperature: Annotated[float, Chosen()] = Field(
        1.0, ge=0, description="T of the clients' posteriors; 1 is Bayes' rule, 0 has no noise"
    )
    prior_std: float = Field(1.0, gt=0, description="s, standard deviation of the prior")
    held_out: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="share of a client's rows held out to choose β, if beta is not set",
    )
    inputs: str | None = Field(
        None,
        description="inputs on which one network learns the joint prediction at the end: auto "
        "(synthetic, by their shape), leaves, strokes, noise, gaussian, "
        "package.module:function, or a folder or file of real samples at the server. none: "
        "all networks predict",
    )
    steps: Annotated[int, Only("inputs")] = Field(
        1500, ge=1, description="steps of the server's training"
    )
    drawn: Annotated[int, Only("inputs")] = Field(4096, ge=64, description="different inputs")
    server_lr: Annotated[float, Only("inputs")] = Field(
        5e-4, gt=0, description="highest learning rate at the server"
    )

    def recommended(self, known: Known) -> dict[str, Any]:
        """All training in one round, and a temperature that lets the model fit the data."""
        tempered = min(1.0, 0.2 * known.samples / max(known.weights, 1))
        return {
            **sgd(known, lr=0.5),
            "training.epochs": max(20, round(300 / known.epoch)),
            "method.temperature": float(f"{tempered:.1g}"),
        }

    def remarks(self, run: Federation) -> list[str]:
        """Notes on the choice of β too."""
        notes = super().remarks(run)
        if self.inputs is None:
            names = ("steps", "drawn", "server_lr")
            notes += unused(self, names, "method.inputs is unset", "method.")
        if run.rounds < 2 and self.beta is None:
            notes.append(
                f"{self.name} chooses method.beta in round 2, but this run has one round, so it "
                "uses the mixture (0). Run 2 rounds, or set method.beta"
            )
        return notes

    def note(self, samples: int, run: Federation) -> ClientNote:
        """A client with fewer steps than samples sends some of them twice."""
        few = int(self.held_out * samples) if self.beta is None else 0
        if self._steps(samples - few, run)[1] >= self.samples:
            return ClientNote()
        why = (
            f"take fewer steps after method.burn_in = {self.burn_in:g} than method.samples = "
            f"{self.samples}, so they send some networks twice. Set more training.epochs"
        )
        return ClientNote(falls_short=why)

    def init(self, run: Federation) -> PredBayesServer:
        """The network's initialization."""
        return PredBayesServer(run.network.initial, beta=torch.tensor(self.beta or 0.0))

    def message(self, server: PredBayesServer, at: RoundContext) -> Message:
        """The initialization; in round 2 the networks of all."""
        if not server.networks:
            return dict(server.weights)
        return {**named("network", server.networks), "shares": server.shares}

    def expected(self, message: Message, run: Federation) -> Message:
        """Networks that were drawn, or a value for each β."""
        if "shares" in message:
            return {NLL: torch.zeros(len(GRID))}
        like = {n: t.expand(self.samples, *t.shape) for n, t in dense(message).items()}
        return {**named("draw", like)}

    def origin(self, server: PredBayesServer, run: Federation) -> Tensors:
        """The initialization, which samples start from."""
        initial = run.network.initial
        return named("draw", {n: t.expand(self.samples, *t.shape) for n, t in initial.items()})

    def accept(self, server: PredBayesServer, report: Report, run: Federation) -> None:
        """Reject values that no client can have measured."""
        found = dense(report.tensors).get(NLL)
        if found is not None and bool((found.abs() > _MOST).any()):
            raise MessageError(f"a mean negative log-likelihood is beyond {_MOST:g}")

    def problem(
        self, message: Message, client: Stateless, samples: Samples, at: RoundContext
    ) -> Problem:
        """Train from the initialization, with a share of the prior."""
        network = at.run.network
        total = torch.tensor(float(len(samples.y) * at.run.cohort), device=network.device)
        return Problem(network.prepare(network.initial), given={"total": total})

    def loss(self, run: Federation) -> Loss:
        """The negative log-likelihood plus the prior's share of it."""
        return with_prior(run, self.prior_std)

    def local(
        self, message: Message, client: Stateless, samples: Samples, at: RoundContext
    ) -> tuple[Report, Stateless, Info]:
        """Draw networks in round 1; then measure every β on the rows that were held out."""
        training, kept = self._parted(samples, at)
        if "shares" in message:
            return self._measured(dense(message), kept, at), client, {}
        problem, count = self.problem(message, client, training, at), len(training.y)
        steps, after = self._steps(count, at.run)
        noise = Langevin(at.rng("langevin"), count, self.temperature)

        def solve(stated: Problem) -> Solved:
            return at.solve(stated, self.loss(at.run), training)

        if after < 2:
            solved = solve(problem)
            found = {n: t[None] for n, t in solved.parameters.items()}
        else:
            solved, found = sampled(
                problem,
                solve,
                list(problem.start),
                burn_in=steps - after,
                every=max(1, after // self.samples),
                langevin=noise,
            )
        last = {n: t[-self.samples :] for n, t in found.items()}
        count = len(next(iter(last.values())))
        chosen = torch.arange(self.samples) * count // self.samples  # again where they are few
        draws = named("draw", {n: t[chosen.to(t.device)] for n, t in last.items()})
        return Report({**draws}, self.weight(solved)), client, solved.info

    def _steps(self, rows: int, run: Federation) -> tuple[int, int]:
        """Steps of a client with a number of rows: all, and those after burn-in."""
        steps = run.training.step_count(rows)
        return steps, steps - int(self.burn_in * steps)

    def _parted(self, samples: Samples, at: RoundContext) -> tuple[Samples, Samples]:
        """A client's rows to train on, and those held out, the same in every round."""
        count = len(samples.y)
        few = int(self.held_out * count) if self.beta is None else 0
        order = torch.randperm(count, generator=replace(at, round=1).rng("held out"))
        order = order.to(samples.y.device)
        return tuple(  # type: ignore[return-value]
            Samples(samples.x[rows], samples.y[rows]) for rows in (order[few:], order[:few])
        )

    def _measured(self, sent: Tensors, rows: Samples, at: RoundContext) -> Report:
        """The mean negative log-likelihood of rows for every β; of weight 0 if there are none."""
        if not len(rows.y):
            return Report({NLL: torch.zeros(len(GRID))}, 0.0)
        run, networks = at.run, part(sent, "network")
        with torch.no_grad():
            every = _outputs(run, networks, rows.x)
            found = [
                -run.likelihood.log_predictive(
                    combined(run.likelihood, every, sent["shares"], beta), rows.y
                ).mean()
                for beta in GRID
            ]
        values = torch.stack(found).nan_to_num(_MOST, _MOST, -_MOST).clamp(-_MOST, _MOST)
        return Report({NLL: values.float().cpu()}, float(len(rows.y)))

    def update(
        self, server: PredBayesServer, reports: ReportList, at: RoundContext
    ) -> tuple[PredBayesServer, Info]:
        """Gather the networks, or choose β; then let one network learn if that is wanted."""
        found = [dense(r.tensors) for _, r in sorted(reports.reports.items())]
        rows = torch.tensor([r.weight for _, r in sorted(reports.reports.items())]).double()
        if not server.networks:
            networks = {
                n: torch.stack([tensors[f"draw/{n}"] for tensors in found]) for n in server.weights
            }
            shares = (rows / rows.sum()).float()
            server = PredBayesServer(server.weights, networks, shares, server.beta)
            if self.beta is None:
                return server, {}
        elif rows.sum() > 0:
            means = torch.stack([tensors[NLL].double() for tensors in found])
            best = int(torch.tensordot(rows, means, dims=1).argmin())
            server = replace(server, beta=torch.tensor(GRID[best]))
        info: Info = {"beta": float(server.beta)}
        why = f"its networks are combined with β = {float(server.beta):g}"
        if self.inputs is None:
            return replace(server, stopped=why), info
        weights, told = self._learnt(server, at)
        return PredBayesServer(weights, beta=server.beta, stopped=why), info | told

    def _learnt(self, server: PredBayesServer, at: RoundContext) -> tuple[Tensors, Info]:
        """One network that learns the joint prediction, from the mean of all networks."""
        run, inputs = at.run, self.inputs
        assert inputs is not None
        joint = self.draws(self.model(server, run), run)

        def function(x: Tensor) -> Tensor:
            outputs = joint(x)
            alike = outputs.new_full((len(outputs),), 1 / len(outputs))
            return run.likelihood.pooled(outputs, alike)

        settings = DistillationSettings(
            steps=self.steps, draws=self.drawn, lr=self.server_lr, held_out=_HELD_OUT
        )
        start = {n: t.mean(dim=(0, 1)) for n, t in server.networks.items()}
        teacher = Teacher([function], None, run.likelihood)
        return learnt(teacher, start, inputs, settings, at)

    def model(self, server: PredBayesServer, run: Federation) -> Tensors:
        """All networks with their shares and β; or a single network."""
        if not server.networks:
            return server.weights
        return {
            **named("network", server.networks),
            "shares": server.shares,
            "beta": server.beta,
        }

    def personal_model(
        self, message: Message, report: Report | None, client: Stateless, run: Federation
    ) -> Tensors | None:
        """None: clients predict with the global model."""
        return None

    def draws(self, model: Tensors, run: Federation) -> Sampler:
        """Outputs of the joint prediction."""
        if not (networks := part(model, "network")):
            return single_draw(model, run.network)
        beta = float(model["beta"])

        def sampler(x: Tensor) -> Tensor:
            return combined(run.likelihood, _outputs(run, networks, x), model["shares"], beta)

        return sampler


def combined(likelihood: Likelihood, every: Tensor, shares: Tensor, beta: float) -> Tensor:
    """Outputs of the joint prediction of clients.

    Args:
        likelihood: what outputs mean.
        every: outputs of each client's samples, [clients, samples, n, width].
        shares: of the mixture, [clients].
        beta: β.

    Returns:
        [1, n, width] under classes; else [samples, n, width], of the mean and the variance of the
        joint Gaussian.
    """
    shares = shares.to(every)
    if isinstance(likelihood, Classes):
        each = torch.stack([likelihood.log_probabilities(draws) for draws in every])
        mixture = torch.logsumexp(each + shares.log()[:, None, None], dim=0)
        return likelihood.outputs_of(beta * each.sum(dim=0) + (1 - beta) * mixture)[None]
    variance, mean = torch.var_mean(every.double(), dim=1, correction=0)
    precision = 1 / variance.clamp_min(_LEAST)
    weight = shares.double()[:, None, None]
    middle = (weight * mean).sum(dim=0)
    spread = (weight * (variance + (mean - middle).square())).sum(dim=0).clamp_min(_LEAST)
    total = beta * precision.sum(dim=0) + (1 - beta) / spread
    shift = beta * (precision * mean).sum(dim=0) + (1 - beta) * middle / spread
    places = (torch.arange(every.shape[1]).double() + 0.5) / every.shape[1]
    normal = torch.special.ndtri(places)
    normal = (normal / normal.square().mean().sqrt()).to(every.device)[:, None, None]
    found: Tensor = shift / total + normal / total.sqrt()
    return found.to(every.dtype)


def _outputs(run: Federation, networks: Tensors, x: Tensor) -> Tensor:
    """Outputs of all networks, [clients, samples, n, width]."""
    clients = len(next(iter(networks.values())))
    every = [{n: t[k] for n, t in networks.items()} for k in range(clients)]
    return torch.stack([sampler_over(one, run.network)(x) for one in every])


NLL = "nll/beta"
"""Name of what clients measure."""
GRID = tuple(i / 20 for i in range(21))
"""Values of β that clients try."""
_MOST = 1e4
"""Nats beyond which nobody's mean negative log-likelihood is."""
_LEAST = 1e-12
"""Smallest variance of outputs that counts."""
_HELD_OUT = 512
"""Inputs that the best step is chosen by."""
