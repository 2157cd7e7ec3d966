"""VIRTUAL: variational federated multi-task learning."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import log
from typing import Annotated, Any
from weakref import WeakKeyDictionary

import torch
from pydantic import Field
from torch import Tensor, nn

from fedbayes.contracts import (
    About,
    Federation,
    Info,
    Known,
    Loss,
    Models,
    Noise,
    Problem,
    Report,
    RoundContext,
    Sampler,
    Solved,
    Tree,
)
from fedbayes.contracts.factors import VariationalFactor, precisions
from fedbayes.contracts.natural import is_unlearnt, means_and_stds
from fedbayes.core.fields import Chosen, Only
from fedbayes.core.messages import Message
from fedbayes.core.tensors import Samples, Tensors, named, part, to
from fedbayes.errors import ConfigError, ModelError
from fedbayes.inference.gaussian import NaturalGaussian, alike, divergence, kl_terms
from fedbayes.likelihoods.categorical import Categorical
from fedbayes.models import Network, variational
from fedbayes.models.layout import PORTION, channels_last
from fedbayes.models.variational import (
    Estimator,
    GaussianWeights,
    GivenDraws,
    LayerStage,
    Perturbation,
    Repeated,
    Requests,
    Source,
    Stack,
    WeightDraws,
)


@dataclass(frozen=True)
class VirtualClient:
    """What never leaves a client: its factor s_i(θ), its posterior c_i(φ) and its gates.

    Empty before the client's first refinement.
    """

    factor: NaturalGaussian
    """s_i, float64."""
    mean: Tensors
    """Of c_i, by name."""
    log_std: Tensors
    """Of c_i, by name."""
    gates: Tensors
    """g_l by layer, [units]."""


class Virtual(VariationalFactor[VirtualClient]):
    """Server and clients as a star-shaped Bayesian network (paper, section 2).

    The server's weights θ are shared, a client's φ_i are its own. The posterior is approximated
    by s(θ) Π_i c_i(φ_i) with s = Π_i s_i, mean-field Gaussians all. Refining client i minimizes
    the free energy (Eq. 3)

        KL(s_new ‖ s/s_i · p(θ)^{1/K}) + KL(c_i ‖ p(φ)) − E[log p(D_i given θ, φ_i)]

    with s_new = s_i,new · s/s_i. The factor's precision is positive by construction, so is every
    product of factors. What leaves the client is the change of its factor's natural parameters,
    damped if several clients are refined side by side. c_i and the gates are never sent. s_i is
    known to who kept every change of the client's from the start.

    The client's network reads the server's through lateral connections (Eq. 4):
    a_l = f(W_l a_{l−1} + b_l + g_l ∘ U_l f(V_l h_l + d_l)), with h_l the server's activations.
    For refinements one by one in a fixed order (Algorithm 1) set `clients_per_round = 1` and
    `sampling = "cyclic"`.
    """

    name = "virtual"
    about = About(
        "a posterior at the server, a private one at every client", "Corinzia and Buhmann 2019"
    )
    client_state = VirtualClient

    samples: Annotated[int, Chosen()] = Field(
        20, ge=1, description="Monte-Carlo samples of a training step"
    )
    predictions: int = Field(20, ge=1, description="Monte-Carlo samples of a prediction")
    estimator: Estimator = Field("flipout", description="perturbation of weights in training")
    server_likelihood: Annotated[float, Chosen(), Only("lateral", True)] = Field(
        0.0,
        ge=0,
        description="weight of the likelihood of the server's own outputs in training. 0: as in "
        "the paper. With a larger value the server's network learns to predict too",
    )
    server_trust: Annotated[float | None, Chosen(), Only("lateral", True)] = Field(
        None,
        ge=0,
        description="weight of the server's probabilities in a client's predictions, relative to "
        "the client's own with weight 1. none: the value of server_likelihood",
    )
    lateral: bool = Field(
        True, description="whether clients have their own networks. false: all share one"
    )

    def recommended(self, known: Known) -> dict[str, Any]:
        """One sample a step, and a server's network that learns to predict. For numbers and times
        Bayes' rule with a narrower prior: a client's own network would overfit them.
        """
        chosen: dict[str, Any] = {**super().recommended(known), "method.samples": 1}
        if known.real:
            chosen |= {"method.kl_weight": 1.0, "method.prior_std": 0.3}
        if not self.lateral:
            return chosen
        trust = None if isinstance(known.run.likelihood, Categorical) else 0.0
        return {**chosen, "method.server_likelihood": 1.0, "method.server_trust": trust}

    def check(self, run: Federation) -> None:
        """Plain stacks of trained layers; the server's outputs need classes."""
        super().check(run)
        variational.stack(run.network.module)
        if names := ", ".join(sorted(run.network.constants)):
            raise ModelError(
                f"virtual needs a network that gradients train completely, but not {names}"
            )
        if self.trust and self.lateral and not isinstance(run.likelihood, Categorical):
            raise ConfigError(
                "method.server_trust (where it is not set, method.server_likelihood) mixes "
                f"probabilities of classes, but the likelihood is {run.likelihood.name}. Set "
                "method.server_trust = 0"
            )

    @property
    def models(self) -> Models:  # type: ignore[override]  # by its settings
        """The server's network is a model if it learns to predict, or clients have no other."""
        predicts = not self.lateral or self.server_likelihood > 0
        return Models.BOTH if predicts else Models.PERSONAL

    @property
    def trust(self) -> float:
        """Weight of the server's predictions in a client's."""
        return self.server_likelihood if self.server_trust is None else self.server_trust

    def remarks(self, run: Federation) -> list[str]:
        """Warn of a server's network that was never trained to predict by itself."""
        notes = super().remarks(run)
        if self.lateral and self.trust and not self.server_likelihood:
            notes.append(
                "method.server_trust uses predictions of a network that does not learn to "
                "predict: method.server_likelihood is 0"
            )
        return notes

    def join(self, at: RoundContext) -> VirtualClient:
        """An empty state, which the first refinement fills."""
        return VirtualClient(NaturalGaussian({}, {}), {}, {}, {})

    def problem(
        self, message: Message, client: VirtualClient, samples: Samples, at: RoundContext
    ) -> Problem:
        """Minimize the free energy from the posterior that came."""
        shared, given = self.taken_out(message, client, samples, at)
        start = shared | self._own_start(client, at)
        noise = Noise("weights", self._draw(start, given["rest"], at.run))
        return Problem(start, given=given, noise=noise)

    def _draw(
        self, start: Tensors, rest: Tensors, run: Federation
    ) -> Callable[[torch.Generator, Samples], Tree]:
        """What draws the noise of one pass: that which a pass without values asks for."""
        plans = _PLANS.setdefault(run.network, {})

        def draw(rng: torch.Generator, batch: Samples) -> Tree:
            key = (self, batch.x.shape)
            if key not in plans:
                requests = Requests()
                shapes, others = _without_values(start), _without_values(rest)
                x = torch.empty_like(batch.x, device="meta")
                with torch.no_grad():
                    shared = _shared_weights(shapes, precisions(shapes, others))
                    self._outputs(run, shared, self._own(shapes), shapes, x, requests)
                plans[key] = requests
            return {"draws": plans[key].draw(rng)}

        return draw

    def _own(self, parameters: Tensors) -> GaussianWeights | None:
        """The posterior of the client's own weights."""
        if not self.lateral:
            return None
        spread = {n: t.exp() for n, t in part(parameters, "own_log_std").items()}
        return GaussianWeights(part(parameters, "own_mean"), spread)

    def _outputs(
        self,
        run: Federation,
        shared: GaussianWeights,
        own: GaussianWeights | None,
        parameters: Tensors,
        x: Tensor,
        source: Source,
        *,
        training: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Outputs of the client and of the server, [samples · n, width]."""
        noise = Perturbation(self.samples, self.estimator, source)
        network = variational.stack(run.network.module)
        x, gates = variational.repeat(x, self.samples), part(parameters, "gate")
        if network.convolutional:
            x = channels_last(x)
        return _beside(network, shared, own, gates, x, noise, training=training)

    def loss(self, run: Federation) -> Loss:
        """The free energy of Eq. 3 per sample, by Monte Carlo, its KL terms times `kl_weight`."""
        return self._free_energy(run, training=True)

    def validation(self, run: Federation) -> Loss:
        """Only the likelihood term of the free energy, without dropout."""
        return self._free_energy(run, training=False)

    def _free_energy(self, run: Federation, *, training: bool) -> Loss:
        def loss(parameters: Tensors, batch: Samples, given: Tree, noise: Tree) -> Tensor:
            precision = precisions(parameters, given["rest"])
            shared, own = _shared_weights(parameters, precision), self._own(parameters)
            source = GivenDraws(noise["draws"])
            outputs, common = self._outputs(
                run, shared, own, parameters, batch.x, source, training=training
            )
            y = batch.y.repeat(self.samples, *[1] * (batch.y.ndim - 1))
            nll = run.likelihood.nll(outputs, y)
            if self.lateral and self.server_likelihood:
                nll = nll + self.server_likelihood * run.likelihood.nll(common, y)
            if not training:
                return nll
            prior = given["prior"]["precision"], given["prior"]["mean"]
            cost = divergence(kl_terms, shared.mean, precision, *prior)
            if own is not None:
                inverse = {n: d.pow(-2) for n, d in own.std.items()}
                private = alike(own.mean, self.prior_std**-2), alike(own.mean, 0.0)
                cost = cost + divergence(kl_terms, own.mean, inverse, *private)
            energy: Tensor = nll + self.kl_weight * cost / given["count"]
            return energy

        return loss

    def report(
        self, solved: Solved, problem: Problem, client: VirtualClient, at: RoundContext
    ) -> tuple[Report, VirtualClient, Info]:
        """Report the change of the factor; keep what never leaves the client."""
        ended = solved.parameters
        shared = part(ended, "mean"), part(ended, "log_precision")
        report, factor = self.refined(*shared, problem.given, at)
        after = VirtualClient(
            factor, part(ended, "own_mean"), part(ended, "own_log_std"), part(ended, "gate")
        )
        return report, after, solved.info

    def _own_start(self, client: VirtualClient, at: RoundContext) -> Tensors:
        """Where the training of the client's own network starts."""
        if not self.lateral:
            return {}
        if client.mean:
            own, spread, gates = client.mean, client.log_std, client.gates
        else:
            device = at.run.network.device
            own, gates = (to(tensors, device) for tensors in _newcomer(at))
            spread = {n: torch.full_like(t, log(self.start_std)) for n, t in own.items()}
        start = named("own_mean", own) | named("own_log_std", spread)
        return start | named("gate", gates)

    def personal_model(
        self, message: Message, report: Report | None, client: VirtualClient, run: Federation
    ) -> Tensors | None:
        """The client's posteriors: of the shared weights (refined, right after its E-step), of its
        own weights, and its gates.
        """
        posterior = self.known(message, report).to(run.network.device, torch.float32)
        own = named("own_mean", client.mean)
        own |= named("own_log_std", client.log_std)
        return means_and_stds(posterior) | own | named("gate", client.gates)

    def draws(self, model: Tensors, run: Federation) -> Sampler:
        """Outputs under draws from the posteriors.

        They are of the server's network alone, or of the client's together with the server's where
        the model has both.
        """
        network = run.network
        shared, own = GaussianWeights(part(model, "mean"), part(model, "std")), None
        if own_mean := part(model, "own_mean"):
            spread = {n: t.exp() for n, t in part(model, "own_log_std").items()}
            own = GaussianWeights(own_mean, spread)
        elif is_unlearnt(shared.mean):
            # Nothing is learnt yet; the prior's noise would be all there is.
            initial = {n: t.to(network.device) for n, t in network.initial.items()}
            shared = GaussianWeights(initial, {n: 0 * t for n, t in initial.items()})
        stack = variational.stack(network.module)
        trust = self.trust if own is not None else 0.0
        return partial(sampled, stack, shared, own, part(model, "gate"), self.predictions, trust)


_PLANS: WeakKeyDictionary[Network, dict[tuple[Virtual, torch.Size], Requests]] = WeakKeyDictionary()
"""Which noise a pass asks for, by network, method and shape of a batch: the same in every round."""


def _shared_weights(parameters: Tensors, precision: Tensors) -> GaussianWeights:
    """Means and stds of the shared weights."""
    return GaussianWeights(part(parameters, "mean"), {n: p.rsqrt() for n, p in precision.items()})


def _without_values(tensors: Tensors) -> Tensors:
    return {n: torch.empty_like(t, device="meta") for n, t in tensors.items()}


def sampled(
    network: Stack,
    shared: GaussianWeights,
    own: GaussianWeights | None,
    gates: Tensors,
    samples: int,
    trust: float,
    x: Tensor,
) -> Tensor:
    """Outputs [samples, n, width] under weights drawn from the posteriors.

    With `trust`, a draw is the mean of the client's probabilities of classes, with weight 1, and of
    the server's, with weight `trust`. The draws are the same on every call.
    """
    if network.convolutional:
        x = channels_last(x)
    pieces = torch.split(x, PORTION if network.convolutional else max(1, len(x)))
    source = WeightDraws(torch.Generator().manual_seed(0))
    found = []
    for _ in range(samples):
        draw = Repeated(source)
        outputs = []
        for piece in pieces:
            noise = Perturbation(1, "reparametrization", draw)
            predicted, common = _beside(network, shared, own, gates, piece, noise)
            if trust:
                predicted = torch.log_softmax(predicted, dim=-1)
                other = torch.log_softmax(common, dim=-1) + log(trust)
                predicted = torch.logaddexp(predicted, other) - log(1 + trust)
            outputs.append(predicted)
            draw.again()
        found.append(torch.cat(outputs))
    return torch.stack(found)


def _beside(
    network: Stack,
    shared: GaussianWeights,
    own: GaussianWeights | None,
    gates: Tensors,
    x: Tensor,
    noise: Perturbation,
    *,
    training: bool = False,
) -> tuple[Tensor, Tensor]:
    """The client's outputs (Eq. 4) and the server's, which are one if it has no own network."""
    common, seen = variational.forward(network, shared, x, noise, training=training)
    if own is None:
        return common, common
    for stage, h in zip(network.stages, seen, strict=True):
        across = _UNIT_TO_UNIT if isinstance(stage.layer, nn.Linear) else _PIXEL_BY_PIXEL
        x = variational.through(stage.before, x, training)
        side = variational.affine(across, h, *own.of(_in(stage)), noise)
        side = variational.activate(stage, side)
        side = variational.affine(across, side, *own.of(_out(stage)), noise)
        gate = gates[stage.name].reshape(-1, *[1] * (side.ndim - 2))
        x = variational.affine(stage.layer, x, *own.of(stage.name), noise) + gate * side
        x = variational.activate(stage, x)
    return variational.with_noise(network, own, x, noise), common


def _in(stage: LayerStage) -> str:
    return f"lateral-in-{stage.name}"


def _out(stage: LayerStage) -> str:
    return f"lateral-out-{stage.name}"


def _newcomer(at: RoundContext) -> tuple[Tensors, Tensors]:
    """Means of a client's own network and lateral connections, and its gates in U(0, 0.1)."""
    rng = at.rng("lateral connections")
    means = dict(at.own_network().initial)
    gates = {}
    for stage in variational.stack(at.run.network.module).stages:
        width = stage.width
        pixels = (1, 1) if isinstance(stage.layer, nn.Conv2d) else ()
        bound = width**-0.5
        for name in (f"{_in(stage)}.weight", f"{_out(stage)}.weight"):
            draw = torch.rand(width, width, *pixels, generator=rng)
            means[name] = bound * (2 * draw - 1)
        means[f"{_in(stage)}.bias"] = torch.zeros(width)
        gates[stage.name] = 0.1 * torch.rand(width, generator=rng)
    return means, gates


_UNIT_TO_UNIT = nn.Linear(1, 1, device="meta")
_PIXEL_BY_PIXEL = nn.Conv2d(1, 1, 1, device="meta")
"""Which map V and U of a stage are, without weights: in a convolution pixel by pixel."""
