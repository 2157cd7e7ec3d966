"""VIRTUAL: variational federated multi-task learning."""

from dataclasses import dataclass
from functools import partial
from math import log

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from fedbayes.contracts import Federation, Info, Method, Report, Site, Sum
from fedbayes.errors import ConfigError, MessageError, ModelError
from fedbayes.inference.gaussian import Gaussian, kl, standard
from fedbayes.inference.local import Objective
from fedbayes.messages import Message, dense
from fedbayes.metrics import Predictor, Sampler
from fedbayes.models import Network, variational
from fedbayes.models.variational import Estimator, Noise, Stage, Weights
from fedbayes.tensors import Samples, Tensors


@dataclass(frozen=True)
class Server:
    """The posterior s(θ) of the shared weights, in natural parameters, float64."""

    precision: Tensors
    shift: Tensors
    """Precision times mean."""
    clients: int
    """Number of clients, K."""
    damping: float
    """Share of a factor's change that is made in a round."""


@dataclass(frozen=True)
class Client:
    """What never leaves a client: its factor s_i(θ), its posterior c_i(φ) and its gates.

    Empty before the client's first refinement.
    """

    precision: Tensors
    """Of the factor s_i, float64."""
    shift: Tensors
    """Of the factor s_i, float64."""
    mean: Tensors
    """Of c_i, by name."""
    log_deviation: Tensors
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
    headline = "local_accuracy"

    samples: int = Field(20, ge=1, description="Monte-Carlo samples of a training step")
    predictions: int = Field(20, ge=1, description="Monte-Carlo samples of a prediction")
    estimator: Estimator = Field("flipout", description="how weights are perturbed in training")
    prior_deviation: float = Field(1.0, gt=0, description="of the Gaussian priors p(θ) and p(φ)")
    start_deviation: float = Field(
        0.03, gt=0, description="of the weights where training starts; small, or nothing is learnt"
    )
    kl_weight: float = Field(
        1.0, gt=0, description="factor of the KL terms; 1 is the free energy, less trusts data more"
    )
    server_likelihood: float = Field(
        0.0,
        ge=0,
        description="weight of the likelihood of the server's own outputs, and of these in a "
        "client's predictions; 0 is the paper, with more the server's network predicts too",
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

    def init(self, network: Network, federation: Federation) -> Server:
        """The product of the factors p(θ)^{1/K}: the prior.

        Raises:
            ModelError: the network has buffers, or layers without a variational form.
            ConfigError: it is to compute in bf16.
        """
        if network.precision != "float32":
            raise ConfigError("virtual computes in float32; leave precision as it is")
        variational.stages(network.module)
        if fixed := [*network.buffers, *network.constants]:
            names = ", ".join(sorted(fixed))
            raise ModelError(f"virtual has no place for what no gradient trains: {names}")
        prior = standard(network.initial, self.prior_deviation)
        damping = self.damping or 1 / federation.cohort
        return Server(prior.precision, prior.shift, federation.clients, damping)

    def join(self, site: Site) -> Client:
        """Nothing yet."""
        return Client({}, {}, {}, {}, {})

    def message(self, server: Server, client: int) -> Message:
        """Means and precisions of the posterior, the number of clients and the damping."""
        posterior = Gaussian(server.precision, server.shift)
        message: Message = {
            _CLIENTS: torch.tensor(server.clients),
            _DAMPING: torch.tensor(server.damping, dtype=torch.float64),
        }
        for name, mean in posterior.mean.items():
            message[_MEAN + name] = mean.float()
            message[_PRECISION + name] = server.precision[name].float()
        return message

    def expected(self, message: Message) -> Message:
        """Changes of precisions and shifts."""
        precision = {n: t for n, t in message.items() if n.startswith(_PRECISION)}
        return precision | {_SHIFT + n.removeprefix(_PRECISION): t for n, t in precision.items()}

    def local(
        self, message: Message, client: Client, data: Samples, site: Site
    ) -> tuple[Report, Client, Info]:
        """Refine the client: minimize the free energy from the posterior that came."""
        sent = dense(message)
        posterior, clients = _posterior(sent), int(sent[_CLIENTS])
        share = standard(posterior.precision, self.prior_deviation) ** (1 / clients)
        share = share.to(site.network.device, torch.float64)
        factor = Gaussian(client.precision, client.shift) if client.precision else share
        cavity = _floored(posterior / factor, posterior)
        start = self._start(posterior, factor, cavity, client, clients, site)
        objective = self.objective(cavity, share, len(data.y), site)
        validation = self.objective(cavity, share, len(data.y), site, training=False)
        ended, info = site.fit(start, objective, data, validation=validation)

        log_precision = _part(ended, _LOG_PRECISION)
        refined = Gaussian({n: t.double().exp() for n, t in log_precision.items()}, {})
        mean = {n: t.double() for n, t in _part(ended, _MEAN).items()}
        shift = {
            n: (cavity.precision[n] + refined.precision[n]) * mean[n] - cavity.shift[n]
            for n in mean
        }
        change = Gaussian(refined.precision, shift) / factor
        report = _report(change, float(sent[_DAMPING]))
        precision = {n: p + report[_PRECISION + n].double() for n, p in factor.precision.items()}
        shift = {n: h + report[_SHIFT + n].double() for n, h in factor.shift.items()}
        after = Client(
            precision,
            shift,
            _part(ended, _OWN_MEAN),
            _part(ended, _OWN_LOG_DEVIATION),
            _part(ended, _GATE),
        )
        return Report(dict(report)), after, info

    def _start(
        self,
        posterior: Gaussian,
        factor: Gaussian,
        cavity: Gaussian,
        client: Client,
        clients: int,
        site: Site,
    ) -> Tensors:
        """Where training starts: the posterior, or the initialization if there is none yet.

        Deviations of a newcomer start small: the first accounts for all of the precision, a later
        one for its share.
        """
        mean = posterior.mean
        unlearnt = not any(bool(m.any()) for m in mean.values())
        floor = self.start_deviation**-2
        start: Tensors = {}
        for name, m in mean.items():
            began = site.network.initial[name].to(m) if unlearnt else m
            precision = factor.precision[name]
            if not client.precision:
                precision = torch.maximum(precision, floor - cavity.precision[name])
                precision = torch.maximum(precision, posterior.precision[name] / clients)
            kind = site.network.initial[name].dtype
            start[_MEAN + name] = began.to(kind)
            start[_LOG_PRECISION + name] = precision.log().to(kind)
        if not self.lateral:
            return start
        if client.mean:
            own, spread, gates = client.mean, client.log_deviation, client.gates
        else:
            own, gates = _newcomer(site)
            spread = {n: torch.full_like(t, log(self.start_deviation)) for n, t in own.items()}
        start |= {_OWN_MEAN + n: t for n, t in own.items()}
        start |= {_OWN_LOG_DEVIATION + n: t for n, t in spread.items()}
        return start | {_GATE + n: t for n, t in gates.items()}

    def objective(
        self, cavity: Gaussian, share: Gaussian, count: int, site: Site, *, training: bool = True
    ) -> Objective:
        """The free energy of Eq. 3 per sample, by Monte Carlo, its KL terms times `kl_weight`.

        To be watched on samples held out it is the likelihood term alone, without dropout.

        Args:
            cavity: s / s_i.
            share: p(θ)^{1/K}.
            count: the client's number of samples.
            site: where it is.
            training: whether it is to be minimized, or watched.
        """
        device = site.network.device
        kind = next(iter(site.network.initial.values())).dtype
        rest, prior = cavity.to(device, kind), (cavity * share).to(device, kind)
        stream = site.stream("weights" if training else "validation")
        noise = Noise(self.samples, self.estimator, stream)
        network = variational.stages(site.network.module)

        def loss(parameters: Tensors, batch: Samples) -> Tensor:
            mean = _part(parameters, _MEAN)
            precision = {
                n: t.exp() + rest.precision[n].to(t)
                for n, t in _part(parameters, _LOG_PRECISION).items()
            }
            complexity = kl(mean, precision, prior)
            shared = Weights(mean, {n: p.rsqrt() for n, p in precision.items()})
            own = None
            if self.lateral:
                own = Weights(
                    _part(parameters, _OWN_MEAN),
                    {n: t.exp() for n, t in _part(parameters, _OWN_LOG_DEVIATION).items()},
                )
                private = standard(own.mean, self.prior_deviation).to(device, kind)
                inverse = {n: d.pow(-2) for n, d in own.deviation.items()}
                complexity = complexity + kl(own.mean, inverse, private)
            x = variational.repeat(batch.x, self.samples)
            gates = _part(parameters, _GATE)
            y = batch.y.repeat(self.samples)
            logits, common = _logits(network, shared, own, gates, x, noise, training=training)
            nll = self.nll(logits, y)
            if self.lateral and self.server_likelihood:
                nll = nll + self.server_likelihood * self.nll(common, y)
            return nll + self.kl_weight * complexity / count if training else nll

        return loss

    def nll(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Mean −log p(label given output) over samples: the likelihood of a classifier."""
        return functional.cross_entropy(outputs, labels)

    def accept(self, server: Server, report: Report) -> None:
        """A change counts once, and leaves the posterior's precisions positive."""
        if report.weight != 1:
            raise MessageError(f"its weight is {report.weight:g}; a change of a factor has 1")
        changes = dense(report.tensors)
        for name, precision in server.precision.items():
            if bool((precision + changes[_PRECISION + name] <= 0).any()):
                raise MessageError(f"it takes more precision off {name!r} than the posterior has")

    def update(self, server: Server, reports: Sum) -> tuple[Server, Info]:
        """Multiply the changes of the factors into the posterior: add natural parameters.

        Changes that are each possible, but come to a negative precision, are no honest clients';
        the posterior then keeps a little of what it had.
        """
        changes = reports.tensors
        precision = {
            n: torch.maximum(p + changes[_PRECISION + n], _ROUNDING * p)
            for n, p in server.precision.items()
        }
        shift = {n: h + changes[_SHIFT + n] for n, h in server.shift.items()}
        mean = sum(float(p.sum()) for p in precision.values())
        count = sum(p.numel() for p in precision.values())
        after = Server(precision, shift, server.clients, server.damping)
        return after, {"mean_precision": mean / count}

    def model(self, server: Server) -> Tensors:
        """Means and deviations of the shared weights, float32."""
        posterior = Gaussian(server.precision, server.shift)
        means = {_MEAN + n: t.float() for n, t in posterior.mean.items()}
        return means | {_DEVIATION + n: t.float() for n, t in posterior.deviation.items()}

    def predict(self, model: Tensors, network: Network) -> Predictor:
        """The server's network alone: the mean of the Monte-Carlo softmaxes."""
        return _mean(self.sampler(model, network))

    def sampler(self, model: Tensors, network: Network) -> Sampler:
        """The server's network alone, under draws from its posterior."""
        weights = Weights(_part(model, _MEAN), _part(model, _DEVIATION))
        if not any(bool(m.any()) for m in weights.mean.values()):
            # Nothing is learnt yet; the prior's noise would be all there is.
            weights = Weights(network.initial, {n: 0 * t for n, t in network.initial.items()})
        return self._sampler(network, weights, None, {})

    def personal(
        self, message: Message, report: Report, client: Client, network: Network
    ) -> Predictor:
        """The client's network with the server's beside it, under both refined posteriors."""
        change = dense(report.tensors)
        posterior = _posterior(dense(message)) * Gaussian(
            {n: t.double() for n, t in _part(change, _PRECISION).items()},
            {n: t.double() for n, t in _part(change, _SHIFT).items()},
        )
        return _mean(self._beside(posterior, client, network))

    def personal_sampler(self, message: Message, client: Client, network: Network) -> Sampler:
        """The client's network with the server's beside it, as they are between rounds."""
        return self._beside(_posterior(dense(message)), client, network)

    def _beside(self, posterior: Gaussian, client: Client, network: Network) -> Sampler:
        posterior = posterior.to(network.device, torch.float32)
        own = None
        if self.lateral:
            own = Weights(client.mean, {n: t.exp() for n, t in client.log_deviation.items()})
        shared = Weights(posterior.mean, posterior.deviation)
        return self._sampler(network, shared, own, client.gates)

    def _sampler(
        self, network: Network, shared: Weights, own: Weights | None, gates: Tensors
    ) -> Sampler:
        stages = variational.stages(network.module)
        trust = self.server_likelihood if self.lateral else 0.0
        return partial(sampled, stages, shared, own, gates, self.predictions, trust)


def _report(change: Gaussian, damping: float) -> Tensors:
    """The damped change in float32, so that client and server add the very same numbers.

    A fall of precision is rounded towards zero: no factor's precision can reach it.
    """
    report = {}
    for name, p in change.precision.items():
        p = damping * p
        report[_PRECISION + name] = torch.where(p < 0, p * (1 - 1e-6), p).float()
        report[_SHIFT + name] = (damping * change.shift[name]).float()
    return report


def _mean(draw: Sampler) -> Predictor:
    """The logarithm of the mean probabilities of the draws."""

    def predict(x: Tensor) -> Tensor:
        each = draw(x)
        return torch.logsumexp(each, dim=0) - log(len(each))

    return predict


_CLIENTS, _DAMPING = "clients", "damping"
_MEAN, _PRECISION, _SHIFT = "mean/", "precision/", "shift/"
_LOG_PRECISION, _DEVIATION = "log_precision/", "deviation/"
_OWN_MEAN, _OWN_LOG_DEVIATION, _GATE = "own_mean/", "own_log_deviation/", "gate/"
"""What names of tensors begin with in messages, models and training."""


def sampled(
    network: tuple[Stage, ...],
    shared: Weights,
    own: Weights | None,
    gates: Tensors,
    samples: int,
    trust: float,
    x: Tensor,
) -> Tensor:
    """Log-probabilities [samples, n, classes] under weights drawn from the posteriors.

    A draw is the mean of the client's prediction, with weight 1, and of the server's, with weight
    `trust`. The draws are the same on every call.
    """
    if any(isinstance(stage.layer, nn.Conv2d) for stage in network):
        # Maps of every draw at once would fill the memory.
        rows = max(1, _MAPS // samples)
        if len(x) > rows:
            pieces = [
                sampled(network, shared, own, gates, samples, trust, part)
                for part in torch.split(x, rows)
            ]
            return torch.cat(pieces, dim=1)
    noise = Noise(samples, "reparametrization", torch.Generator().manual_seed(0))
    x = variational.repeat(x, samples)
    logits, common = _logits(network, shared, own, gates, x, noise)
    predicted = torch.log_softmax(logits, dim=-1)
    if trust:
        other = torch.log_softmax(common, dim=-1) + log(trust)
        predicted = torch.logaddexp(predicted, other) - log(1 + trust)
    return predicted.reshape(samples, len(x) // samples, -1)


def _logits(
    network: tuple[Stage, ...],
    shared: Weights,
    own: Weights | None,
    gates: Tensors,
    x: Tensor,
    noise: Noise,
    *,
    training: bool = False,
) -> tuple[Tensor, Tensor]:
    """The client's logits (Eq. 4) and the server's, which are one if it has no own network."""
    common, seen = variational.forward(network, shared, x, noise, training=training)
    if own is None:
        return common, common
    for stage, h in zip(network, seen, strict=True):
        inner, outer = _lateral(stage)
        x = variational.through(stage.before, x, training)
        side = variational.affine(inner, h, *own.of(_in(stage)), noise)
        side = variational.activate(stage, side)
        side = variational.affine(outer, side, *own.of(_out(stage)), noise)
        gate = gates[stage.name].reshape(-1, *[1] * (side.ndim - 2))
        x = variational.affine(stage.layer, x, *own.of(stage.name), noise) + gate * side
        x = variational.activate(stage, x)
    return x, common


def _lateral(stage: Stage) -> tuple[nn.Linear | nn.Conv2d, nn.Linear | nn.Conv2d]:
    """V and U of a stage: maps of units to units, pixel by pixel in a convolution."""
    width = stage.width
    with torch.device("meta"):
        if isinstance(stage.layer, nn.Linear):
            return nn.Linear(width, width), nn.Linear(width, width, bias=False)
        return nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1, bias=False)


def _in(stage: Stage) -> str:
    return f"lateral-in-{stage.name}"


def _out(stage: Stage) -> str:
    return f"lateral-out-{stage.name}"


def _newcomer(site: Site) -> tuple[Tensors, Tensors]:
    """Means of a client's own network and lateral connections, and its gates in U(0, 0.1)."""
    stream = site.stream("lateral connections")
    means = dict(site.own_network().initial)
    gates = {}
    for stage in variational.stages(site.network.module):
        width = stage.width
        pixels = (1, 1) if isinstance(stage.layer, nn.Conv2d) else ()
        bound = width**-0.5
        for name in (f"{_in(stage)}.weight", f"{_out(stage)}.weight"):
            draw = torch.rand(width, width, *pixels, generator=stream)
            means[name] = bound * (2 * draw - 1)
        means[f"{_in(stage)}.bias"] = torch.zeros(width)
        gates[stage.name] = 0.1 * torch.rand(width, generator=stream)
    return means, gates


def _part(tensors: Tensors, prefix: str) -> Tensors:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _posterior(message: Tensors) -> Gaussian:
    precision = {n: t.double() for n, t in _part(message, _PRECISION).items()}
    mean = _part(message, _MEAN)
    return Gaussian(precision, {n: p * mean[n].double() for n, p in precision.items()})


def _floored(cavity: Gaussian, posterior: Gaussian) -> Gaussian:
    """The cavity, whose precision the rounding of a message must not bring to zero."""
    floor = {n: _ROUNDING * p for n, p in posterior.precision.items()}
    return Gaussian(
        {n: torch.maximum(p, floor[n]) for n, p in cavity.precision.items()}, cavity.shift
    )


_MAPS = 1000
"""Images times draws that convolutions see at once in a prediction."""
_ROUNDING = 1e-6
"""Relative precision of the numbers in a message, on the safe side."""
