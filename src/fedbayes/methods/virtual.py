"""VIRTUAL: variational federated multi-task learning."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import log
from weakref import WeakKeyDictionary

import torch
from pydantic import Field
from torch import Tensor, nn

from fedbayes.contracts import (
    At,
    Changes,
    Clips,
    Info,
    Loss,
    Method,
    Noise,
    Problem,
    Report,
    Run,
    Sampler,
    Solved,
    Sum,
    Total,
    Tree,
)
from fedbayes.contracts.changes import norm
from fedbayes.errors import ConfigError, MessageError, ModelError
from fedbayes.inference.gaussian import Gaussian, kl, standard
from fedbayes.likelihoods.categorical import Categorical
from fedbayes.messages import Message, dense
from fedbayes.models import Network, variational
from fedbayes.models.variational import (
    Drawn,
    Estimator,
    GaussianWeights,
    Given,
    Perturbation,
    Requests,
    Source,
    Stack,
    Stage,
)
from fedbayes.tensors import Samples, Tensors, named, part


@dataclass(frozen=True)
class Server:
    """The posterior s(θ) of the shared weights."""

    posterior: Gaussian
    """In natural parameters, float64."""


@dataclass(frozen=True)
class Client:
    """What never leaves a client: its factor s_i(θ), its posterior c_i(φ) and its gates.

    Empty before the client's first refinement.
    """

    factor: Gaussian
    """s_i, float64."""
    mean: Tensors
    """Of c_i, by name."""
    log_std: Tensors
    """Of c_i, by name."""
    gates: Tensors
    """g_l by layer, [units]."""


class Virtual(Method[Server, Client, Sum]):
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
    For refinements one by one in a fixed order (Algorithm 1) set `cohort = 1` and
    `sampling = "cyclic"`.
    """

    name = "virtual"
    summary = "a posterior at the server, a private one at every client"
    paper = "Corinzia and Buhmann 2019"
    server_state = Server
    client_state = Client
    repeats_changes = True
    keeps_models = True
    headline = "local"

    samples: int = Field(20, ge=1, description="Monte-Carlo samples of a training step")
    predictions: int = Field(20, ge=1, description="Monte-Carlo samples of a prediction")
    estimator: Estimator = Field("flipout", description="how weights are perturbed in training")
    prior_std: float = Field(
        1.0, gt=0, description="standard deviation of the Gaussian priors p(θ) and p(φ)"
    )
    start_std: float = Field(
        0.03, gt=0, description="of the weights where training starts; small, or nothing is learnt"
    )
    kl_weight: float = Field(
        1.0, gt=0, description="factor of the KL terms; 1 is the free energy, less trusts data more"
    )
    server_likelihood: float = Field(
        0.0,
        ge=0,
        description="weight of the likelihood of the server's own outputs in training; 0 is the "
        "paper, with more the server's network learns to predict too",
    )
    server_trust: float | None = Field(
        None,
        ge=0,
        description="weight of the server's probabilities beside a client's own, which have 1, in "
        "a client's predictions; none: the value of server_likelihood",
    )
    damping: float | None = Field(
        None,
        gt=0,
        le=1,
        description="share of a factor's change that is made in a round; none: 1 by the number "
        "of clients in it, since each assumes that the others stand still",
    )
    lateral: bool = Field(
        True, description="whether clients have networks of their own; if not, all share one"
    )

    def check(self, run: Run) -> None:
        """Plain stacks of trained layers, in float32; the server's outputs need classes.

        Raises:
            ModelError: the network has buffers, or layers without a variational form.
            ConfigError: it is to compute in bf16, or predictions cannot be mixed.
        """
        network = run.network
        if network.precision != "float32":
            raise ConfigError("virtual computes in float32; leave precision as it is")
        variational.stack(network.module)
        if fixed := [*network.buffers, *network.constants]:
            names = ", ".join(sorted(fixed))
            raise ModelError(f"virtual has no place for what no gradient trains: {names}")
        if self.trust and self.lateral and not isinstance(run.likelihood, Categorical):
            raise ConfigError(
                "method.server_trust (where it is not set, method.server_likelihood) mixes "
                "probabilities of classes in predictions, and the likelihood is "
                f"{run.likelihood.name}; set method.server_trust = 0"
            )

    @property
    def trust(self) -> float:
        """Weight of the server's predictions in a client's."""
        return self.server_likelihood if self.server_trust is None else self.server_trust

    def remarks(self, run: Run) -> list[str]:
        """Settings of the server's network beside clients' own have no effect without these; and a
        network that was never asked to predict is not to be trusted.
        """
        if not self.lateral:
            given = [n for n in ("server_likelihood", "server_trust") if getattr(self, n)]
            return [f"method.{n} has no effect: with lateral = false all share one" for n in given]
        if self.trust and not self.server_likelihood:
            return [
                "method.server_trust weighs in a network that does not learn to predict: "
                "method.server_likelihood is 0"
            ]
        return []

    def init(self, run: Run) -> Server:
        """The product of the factors p(θ)^{1/K}: the prior."""
        return Server(standard(run.network.initial, self.prior_std))

    def join(self, at: At) -> Client:
        """An empty state, which the first refinement fills."""
        return Client(Gaussian({}, {}), {}, {}, {})

    def message(self, server: Server, at: At) -> Message:
        """Means and precisions of the posterior."""
        message: Message = {}
        for name, mean in server.posterior.mean.items():
            message[f"mean/{name}"] = mean.float()
            message[f"precision/{name}"] = server.posterior.precision[name].float()
        return message

    def expected(self, message: Message, run: Run) -> Message:
        """Changes of precisions and shifts."""
        precision = part(message, "precision")
        return named("precision", precision) | named("shift", precision)

    def problem(self, message: Message, client: Client, samples: Samples, at: At) -> Problem:
        """Minimize the free energy from the posterior that came."""
        run, posterior = at.run, _posterior(dense(message))
        device, kind = run.network.device, next(iter(run.network.initial.values())).dtype
        prior_factor = standard(posterior.precision, self.prior_std) ** (1 / run.clients)
        prior_factor = prior_factor.to(device, torch.float64)
        factor = client.factor if client.factor.precision else prior_factor
        cavity = _floored(posterior / factor, posterior)
        prior = (cavity * prior_factor).to(device, kind)
        start = self._start(posterior, factor, cavity, client, at)
        rest = cavity.to(device, kind).precision
        given: Tree = {
            "cavity": vars(cavity),
            "factor": vars(factor),
            "rest": rest,
            "mean": posterior.mean,
            "prior": vars(prior),
            "count": torch.tensor(len(samples.y), device=device),
        }
        return Problem(
            start, given=given, noise=Noise("weights", self._draw(start, given["rest"], run))
        )

    def _draw(
        self, start: Tensors, rest: Tensors, run: Run
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
                    shared = _shared_weights(shapes, _precision(shapes, others))
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
        run: Run,
        shared: GaussianWeights,
        own: GaussianWeights | None,
        parameters: Tensors,
        x: Tensor,
        source: Source,
        *,
        training: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Outputs of the client and of the server, [samples · n, width].

        Args:
            run: with the network.
            shared: posterior of the shared weights.
            own: posterior of the client's own.
            parameters: of the E-step, for the gates.
            x: inputs [n, ...].
            source: where noise comes from.
            training: whether dropout is as in training.
        """
        noise = Perturbation(self.samples, self.estimator, source)
        network = variational.stack(run.network.module)
        x, gates = variational.repeat(x, self.samples), part(parameters, "gate")
        return _beside(network, shared, own, gates, x, noise, training=training)

    def loss(self, run: Run) -> Loss:
        """The free energy of Eq. 3 per sample, by Monte Carlo, its KL terms times `kl_weight`."""
        return self._free_energy(run, training=True)

    def validation(self, run: Run) -> Loss:
        """The likelihood term of the free energy alone, without dropout."""
        return self._free_energy(run, training=False)

    def _free_energy(self, run: Run, *, training: bool) -> Loss:
        def loss(parameters: Tensors, batch: Samples, given: Tree, noise: Tree) -> Tensor:
            precision = _precision(parameters, given["rest"])
            complexity = kl(part(parameters, "mean"), precision, Gaussian(**given["prior"]))
            shared, own = _shared_weights(parameters, precision), self._own(parameters)
            if own is not None:
                first = next(iter(own.mean.values()))
                private = standard(own.mean, self.prior_std).to(first.device, first.dtype)
                inverse = {n: d.pow(-2) for n, d in own.std.items()}
                complexity = complexity + kl(own.mean, inverse, private)
            source = Given(noise["draws"])
            outputs, common = self._outputs(
                run, shared, own, parameters, batch.x, source, training=training
            )
            y = batch.y.repeat(self.samples, *[1] * (batch.y.ndim - 1))
            nll = run.likelihood.nll(outputs, y)
            if self.lateral and self.server_likelihood:
                nll = nll + self.server_likelihood * run.likelihood.nll(common, y)
            if not training:
                return nll
            energy: Tensor = nll + self.kl_weight * complexity / given["count"]
            return energy

        return loss

    def report(
        self, solved: Solved, problem: Problem, client: Client, at: At
    ) -> tuple[Report, Client, Info]:
        """Report the change of the factor, damped, and no longer than the server lets it be; keep
        the factor with that change, so that the posterior stays the product of the factors.
        """
        ended = solved.parameters
        cavity, factor = Gaussian(**problem.given["cavity"]), Gaussian(**problem.given["factor"])
        log_precision = part(ended, "log_precision")
        refined = {n: t.double().exp() for n, t in log_precision.items()}
        mean = {n: t.double() for n, t in part(ended, "mean").items()}
        shift = {n: (cavity.precision[n] + refined[n]) * mean[n] - cavity.shift[n] for n in mean}
        change = (Gaussian(refined, shift) / factor) ** (self.damping or 1 / at.run.cohort)
        change = rounded(_shortened(change, problem.given["mean"], at.run.clips))
        after = Client(
            factor * change.to(at.run.network.device, torch.float64),
            part(ended, "own_mean"),
            part(ended, "own_log_std"),
            part(ended, "gate"),
        )
        tensors = named("precision", change.precision) | named("shift", change.shift)
        return Report(dict(tensors)), after, solved.info

    def _start(
        self,
        posterior: Gaussian,
        factor: Gaussian,
        cavity: Gaussian,
        client: Client,
        at: At,
    ) -> Tensors:
        """Where training starts: the posterior, or the initialization if there is none yet.

        Stds of a newcomer start small: the first accounts for all of the precision, a later
        one for its share. So do all where changes are shortened: factors then know less than they
        were trained to, and from stds that are so wide training diverges.
        """
        mean = posterior.mean
        unlearnt = not any(bool(m.any()) for m in mean.values())
        floor = self.start_std**-2
        start: Tensors = {}
        for name, m in mean.items():
            began = at.run.network.initial[name].to(m) if unlearnt else m
            precision = factor.precision[name]
            if not client.factor.precision or at.run.clips:
                precision = torch.maximum(precision, floor - cavity.precision[name])
                precision = torch.maximum(precision, posterior.precision[name] / at.run.clients)
            kind = at.run.network.initial[name].dtype
            start[f"mean/{name}"] = began.to(kind)
            start[f"log_precision/{name}"] = precision.log().to(kind)
        if not self.lateral:
            return start
        if client.mean:
            own, spread, gates = client.mean, client.log_std, client.gates
        else:
            own, gates = _newcomer(at)
            spread = {n: torch.full_like(t, log(self.start_std)) for n, t in own.items()}
        start |= named("own_mean", own) | named("own_log_std", spread)
        return start | named("gate", gates)

    def ordinary(self, server: Server, run: Run) -> dict[str, float]:
        """The posterior's own natural parameters, all that was learnt so far; or those that a
        newcomer starts with.
        """
        posterior, start = server.posterior, self.start_std**-2
        began = [w.double() for w in run.network.initial.values()]
        return {
            "precision": norm(p.clamp_min(start) for p in posterior.precision.values()),
            "shift": max(norm(posterior.shift.values()), start * norm(began)),
        }

    def accept(self, server: Server, report: Report, run: Run) -> None:
        """A change leaves the posterior's precisions positive."""
        changes = part(dense(report.tensors), "precision")
        for name, precision in server.posterior.precision.items():
            if bool((precision + changes[name] <= 0).any()):
                raise MessageError(f"it takes more precision off {name!r} than the posterior has")

    def changes(self, report: Report, server: Server, run: Run) -> Changes:
        """Changes of precisions, and of shifts beyond those that leave the means where they are: so
        bounds and noise on the one do not move the other.
        """
        found = super().changes(report, server, run)
        return {**found, "shift": _recentred(found, _sent_mean(server), -1.0)}

    def resummed(self, total: Total, server: Server, run: Run) -> Sum:
        """Changes of precisions and of shifts."""
        shift = _recentred(total.changes, _sent_mean(server), 1.0)
        return super().resummed(
            replace(total, changes={**total.changes, "shift": shift}), server, run
        )

    def update(self, server: Server, reports: Sum, at: At) -> tuple[Server, Info]:
        """Multiply the changes of the factors into the posterior: add natural parameters.

        Changes that are each possible, but come to a negative precision, are no honest clients';
        the posterior then keeps its mean, and a little of its precision.
        """
        before = server.posterior
        after = before * Gaussian(
            part(reports.tensors, "precision"), part(reports.tensors, "shift")
        )
        precision, shift = dict(after.precision), dict(after.shift)
        for name, least in _least(before).items():
            gone = after.precision[name] < least
            precision[name] = torch.where(gone, least, after.precision[name])
            shift[name] = torch.where(gone, least * before.mean[name], after.shift[name])
        mean = sum(float(p.sum()) for p in precision.values())
        count = sum(p.numel() for p in precision.values())
        return Server(Gaussian(precision, shift)), {"mean_precision": mean / count}

    def model(self, server: Server, run: Run) -> Tensors:
        """Means and stds of the shared weights, float32."""
        posterior = server.posterior.to("cpu", torch.float64)
        return _shared(posterior)

    def personal_model(
        self, message: Message, report: Report | None, client: Client, run: Run
    ) -> Tensors | None:
        """The client's posteriors: of the shared weights (refined, right after its E-step), of its
        own weights, and its gates.
        """
        posterior = _posterior(dense(message))
        if report is not None:
            change = dense(report.tensors)
            posterior = posterior * Gaussian(
                {n: t.double() for n, t in part(change, "precision").items()},
                {n: t.double() for n, t in part(change, "shift").items()},
            )
        posterior = posterior.to(run.network.device, torch.float32)
        own = named("own_mean", client.mean)
        own |= named("own_log_std", client.log_std)
        return _shared(posterior) | own | named("gate", client.gates)

    def draws(self, model: Tensors, run: Run) -> Sampler:
        """Outputs under draws from the posteriors: of the server's network alone, or of the
        client's with the server's beside it where the model has both.
        """
        network = run.network
        shared, own = GaussianWeights(part(model, "mean"), part(model, "std")), None
        if own_mean := part(model, "own_mean"):
            spread = {n: t.exp() for n, t in part(model, "own_log_std").items()}
            own = GaussianWeights(own_mean, spread)
        elif not any(bool(m.any()) for m in shared.mean.values()):
            # Nothing is learnt yet; the prior's noise would be all there is.
            initial = {n: t.to(network.device) for n, t in network.initial.items()}
            shared = GaussianWeights(initial, {n: 0 * t for n, t in initial.items()})
        stack = variational.stack(network.module)
        trust = self.trust if own is not None else 0.0
        return partial(sampled, stack, shared, own, part(model, "gate"), self.predictions, trust)


_PLANS: WeakKeyDictionary[Network, dict[tuple[Virtual, torch.Size], Requests]] = WeakKeyDictionary()
"""Which noise a pass asks for, by network, method and shape of a batch: the same in every round."""


def rounded(change: Gaussian) -> Gaussian:
    """A change in float32, so that client and server add the very same numbers.

    A fall of precision is rounded towards zero: no factor's precision can reach it.
    """
    return Gaussian(
        {n: torch.where(p < 0, p * (1 - 1e-6), p).float() for n, p in change.precision.items()},
        {n: h.float() for n, h in change.shift.items()},
    )


def _shortened(change: Gaussian, mean: Tensors, clips: Clips) -> Gaussian:
    """A change as long as the server lets it be, which looks at `Virtual.changes`."""
    if not clips:
        return change
    shares = {n: m * change.precision[n] for n, m in mean.items()}
    rest = clips.shortened("shift", {n: h - shares[n] for n, h in change.shift.items()})
    precision = clips.shortened("precision", change.precision)
    return Gaussian(precision, {n: h + mean[n] * precision[n] for n, h in rest.items()})


def _precision(parameters: Tensors, rest: Tensors) -> Tensors:
    """Precisions of the shared weights: the client's factor and the other factors."""
    log_precision = part(parameters, "log_precision")
    return {n: t.exp() + rest[n].to(t) for n, t in log_precision.items()}


def _shared_weights(parameters: Tensors, precision: Tensors) -> GaussianWeights:
    """Means and stds of the shared weights."""
    return GaussianWeights(part(parameters, "mean"), {n: p.rsqrt() for n, p in precision.items()})


def _without_values(tensors: Tensors) -> Tensors:
    return {n: torch.empty_like(t, device="meta") for n, t in tensors.items()}


def _shared(posterior: Gaussian) -> Tensors:
    """Means and stds by name, float32."""
    means = {n: t.float() for n, t in posterior.mean.items()}
    stds = {n: t.float() for n, t in posterior.std.items()}
    return named("mean", means) | named("std", stds)


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
        # Maps of every draw at once would fill the memory.
        rows = max(1, _MAPS // samples)
        if len(x) > rows:
            pieces = [
                sampled(network, shared, own, gates, samples, trust, part)
                for part in torch.split(x, rows)
            ]
            return torch.cat(pieces, dim=1)
    noise = Perturbation(samples, "reparametrization", Drawn(torch.Generator().manual_seed(0)))
    x = variational.repeat(x, samples)
    predicted, common = _beside(network, shared, own, gates, x, noise)
    if trust:
        predicted = torch.log_softmax(predicted, dim=-1)
        other = torch.log_softmax(common, dim=-1) + log(trust)
        predicted = torch.logaddexp(predicted, other) - log(1 + trust)
    return predicted.reshape(samples, len(x) // samples, -1)


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


def _in(stage: Stage) -> str:
    return f"lateral-in-{stage.name}"


def _out(stage: Stage) -> str:
    return f"lateral-out-{stage.name}"


def _newcomer(at: At) -> tuple[Tensors, Tensors]:
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


def _posterior(message: Tensors) -> Gaussian:
    precision = {n: t.double() for n, t in part(message, "precision").items()}
    mean = part(message, "mean")
    return Gaussian(precision, {n: p * mean[n].double() for n, p in precision.items()})


def _sent_mean(server: Server) -> Tensors:
    """The posterior's means as clients know them."""
    return {n: m.float() for n, m in server.posterior.mean.items()}


def _recentred(changes: Changes, mean: Tensors, sign: float) -> Tensors:
    """Changes of shifts plus or minus those of precisions times the means."""
    return {
        f"shift/{n}": changes["shift"][f"shift/{n}"]
        + sign * m.cpu().double() * changes["precision"][f"precision/{n}"]
        for n, m in mean.items()
    }


def _least(posterior: Gaussian) -> Tensors:
    """Precisions that rounding must not bring to zero, at least."""
    return {n: _ROUNDING * p for n, p in posterior.precision.items()}


def _floored(cavity: Gaussian, posterior: Gaussian) -> Gaussian:
    """The cavity, whose precision the rounding of a message must not bring to zero."""
    floor = _least(posterior)
    return Gaussian(
        {n: torch.maximum(p, floor[n]) for n, p in cavity.precision.items()}, cavity.shift
    )


_UNIT_TO_UNIT = nn.Linear(1, 1, device="meta")
_PIXEL_BY_PIXEL = nn.Conv2d(1, 1, 1, device="meta")
"""Which map V and U of a stage are, without weights: in a convolution pixel by pixel."""
_MAPS = 1000
"""Images times draws that convolutions see at once in a prediction."""
_ROUNDING = 1e-6
"""Relative precision of the numbers in a message, on the safe side."""
