"""FedPM: clients learn which weights of a fixed random network to keep, at one bit for each."""

from dataclasses import dataclass
from math import ceil, prod, sqrt
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedbayes.contracts import (
    About,
    AnyMethod,
    Federation,
    Info,
    Known,
    Loss,
    Method,
    Noise,
    Part,
    Problem,
    Report,
    ReportList,
    Reports,
    RoundContext,
    Sampler,
    Solved,
    Stateless,
    Tree,
    adam,
)
from fedbayes.contracts.needs import own_prior, weights_alone
from fedbayes.core import seeds
from fedbayes.core.devices import placed
from fedbayes.core.messages import Message, dense
from fedbayes.core.tensors import Samples, Tensors, named, part
from fedbayes.errors import MessageError, ModelError


@dataclass(frozen=True)
class FedPmServer:
    """Beta posteriors of the probabilities that weights are kept, by name of the weight."""

    alpha: Tensors
    """α, float64."""
    beta: Tensors
    """β, float64."""
    theta: Tensors
    """Probabilities that clients start from, float32."""


def _matrices(method: AnyMethod, run: Federation) -> None:
    """Some weight can be masked."""
    if not _masked(run):
        raise ModelError("fedpm masks weights with two or more axes, but the network has none")


class FedPm(Method[FedPmServer, Stateless, ReportList]):
    """Federated probabilistic mask training (Isik et al. 2023, Algorithms 1 and 2).

    The weights w of the network are fixed: ±√(2/inputs) at random, from the seed of the run.
    Vectors, such as biases, keep their start. A client draws masks m ~ Bernoulli(σ(s)) in every
    step, trains the scores s of the network w ⊙ m through the draws, as if ∂m/∂σ(s) = 1, and
    reports one mask: a bit for each weight. The server updates Beta posteriors by counts,

        α ← α + Σ_k m_k,   β ← β + Σ_k (1 − m_k),   θ = (α − 1)/(α + β − 2),

    and resets them to α = β = 1 as soon as about all clients have reported. Clients start from
    s = logit θ. The model predicts by networks whose masks are drawn from θ.
    """

    name = "fedpm"
    about = About(
        "masks over a fixed random network, one bit for each weight",
        "Isik et al. 2023",
        needs=(weights_alone, own_prior, _matrices),
    )
    server_state = FedPmServer
    reports = Reports({"bits": Part(origin="zero", exact=True)}, reduce="set")

    reset: int | None = Field(
        None,
        ge=1,
        description="rounds after which α and β are reset. Unset: clients / clients per round",
    )
    predictions: int = Field(20, ge=1, description="number of masks sampled for a prediction")

    def recommended(self, known: Known) -> dict[str, Any]:
        """Adam with the paper's large rate, since scores are far from where masks change."""
        return adam(known, lr=0.1, steps=60) | {"training.lr": 0.1}

    def remarks(self, run: Federation) -> list[str]:
        """Which tensors keep their start."""
        kept = [name for name in run.network.initial if name not in _masked(run)]
        names = ", ".join(kept)
        return (
            [f"fedpm does not train vectors; these stay at their initial values: {names}"]
            if kept
            else []
        )

    def init(self, run: Federation) -> FedPmServer:
        """Start at probabilities of one half."""
        ones = {n: torch.ones(t.shape, dtype=torch.float64) for n, t in _masked(run).items()}
        return FedPmServer(ones, dict(ones), {n: t.float() / 2 for n, t in ones.items()})

    def message(self, server: FedPmServer, at: RoundContext) -> Message:
        """Send the probabilities, the same to all."""
        return dict(named("theta", server.theta))

    def expected(self, message: Message, run: Federation) -> Message:
        """A bit for each weight, in bytes."""
        return {f"bits/{n}": _packed(torch.zeros(t.shape)) for n, t in _masked(run).items()}

    def problem(
        self, message: Message, client: Stateless, samples: Samples, at: RoundContext
    ) -> Problem:
        """Train scores from the server's probabilities."""
        network = at.run.network
        theta = {n: t.clamp(_EDGE, 1 - _EDGE) for n, t in part(dense(message), "theta").items()}
        start = network.prepare({n: t.logit() for n, t in theta.items()})
        shapes = {name: tensor.shape for name, tensor in start.items()}

        def draw(rng: torch.Generator, batch: Samples) -> Tree:
            drawn = {n: torch.rand(shape, generator=rng) for n, shape in shapes.items()}
            return {n: placed(t, network.device) for n, t in drawn.items()}

        given = {"fixed": network.prepare(_fixed(at.run))}
        return Problem(named("score", start), given=given, noise=Noise("masks", draw))

    def loss(self, run: Federation) -> Loss:
        """The negative log-likelihood of the network under a drawn mask."""

        def loss(parameters: Tensors, batch: Samples, given: Tree, noise: Tree) -> Tensor:
            weights = dict(given["fixed"])
            for name, score in part(parameters, "score").items():
                theta = score.sigmoid()
                mask = (noise[name] < theta).to(theta)
                weights[name] = weights[name] * (theta + (mask - theta).detach())
            return run.likelihood.nll(run.network(weights, batch.x, training=True), batch.y)

        return loss

    def validation(self, run: Federation) -> Loss:
        """The negative log-likelihood of the network of mean masks, without dropout."""

        def loss(parameters: Tensors, batch: Samples, given: Tree, noise: Tree) -> Tensor:
            weights = dict(given["fixed"])
            for name, score in part(parameters, "score").items():
                weights[name] = weights[name] * score.sigmoid()
            return run.likelihood.nll(run.network(weights, batch.x), batch.y)

        return loss

    def report(
        self, solved: Solved, problem: Problem, client: Stateless, at: RoundContext
    ) -> tuple[Report, Stateless, Info]:
        """Report a mask that is drawn from the client's probabilities."""
        rng, bits = at.rng("reported mask"), Tensors()
        for name, score in part(solved.parameters, "score").items():
            theta = score.sigmoid().cpu()
            bits[f"bits/{name}"] = _packed(torch.rand(theta.shape, generator=rng) < theta)
        return Report({**bits}), client, solved.info

    def accept(self, server: FedPmServer, report: Report, run: Federation) -> None:
        """The bits that fill the last byte are 0."""
        for name, tensor in part(dense(report.tensors), "bits").items():
            count = server.theta[name].numel()
            if bool(np.unpackbits(tensor.cpu().numpy())[count:].any()):
                raise MessageError(f"the mask of {name!r} has more bits than entries")

    def update(
        self, server: FedPmServer, reports: ReportList, at: RoundContext
    ) -> tuple[FedPmServer, Info]:
        """Add the masks to the counts, and take the mode of each Beta posterior."""
        every = self.reset or ceil(at.run.clients / at.run.cohort)
        anew = (at.round - 1) % every == 0
        alpha, beta, theta = Tensors(), Tensors(), Tensors()
        for name, before in server.theta.items():
            masks = [
                _unpacked(dense(r.tensors)[f"bits/{name}"], before.shape)
                for r in reports.reports.values()
            ]
            ones = torch.stack(masks).sum(dim=0).double()
            start = torch.ones_like(ones)
            alpha[name] = (start if anew else server.alpha[name]) + ones
            beta[name] = (start if anew else server.beta[name]) + len(masks) - ones
            theta[name] = ((alpha[name] - 1) / (alpha[name] + beta[name] - 2)).float()
        entries = sum(t.numel() for t in theta.values())
        kept = sum(float(t.sum()) for t in theta.values()) / entries
        return FedPmServer(alpha, beta, theta), {"kept_share": kept}

    def model(self, server: FedPmServer, run: Federation) -> Tensors:
        """Return the probabilities, with the fixed weights that they mask."""
        return {**_fixed(run), **named("theta", server.theta)}

    def personal_model(
        self, message: Message, report: Report | None, client: Stateless, run: Federation
    ) -> Tensors | None:
        """None: clients keep nothing."""
        return None

    def draws(self, model: Tensors, run: Federation) -> Sampler:
        """Outputs of networks with drawn masks, the same on every call."""
        network = run.network
        theta = network.prepare(part(model, "theta"))
        fixed = network.prepare({n: t for n, t in model.items() if n in network.initial})

        def outputs(x: Tensor) -> Tensor:
            rng, found = torch.Generator().manual_seed(0), []
            for _ in range(self.predictions):
                masks = {
                    n: placed(torch.rand(t.shape, generator=rng), network.device) < t
                    for n, t in theta.items()
                }
                found.append(network({n: w * masks.get(n, 1) for n, w in fixed.items()}, x))
            return torch.stack(found)

        return outputs


def _masked(run: Federation) -> Tensors:
    """The trained weights with two axes or more, at the start."""
    return {n: t for n, t in run.network.split()[0].items() if t.ndim > 1}


def _fixed(run: Federation) -> Tensors:
    """The network's fixed weights: random signs, scaled so that half of the weights suffices."""
    rng, found = seeds.torch_rng(run.seed, "fixed network"), dict(run.network.initial)
    for name, tensor in _masked(run).items():
        signs = 2.0 * torch.randint(2, tensor.shape, generator=rng) - 1
        found[name] = (signs * sqrt(2 / prod(tensor.shape[1:]))).to(tensor)
    return found


def _packed(mask: Tensor) -> Tensor:
    """A mask as bits, uint8 [entries / 8, rounded up]."""
    return torch.from_numpy(np.packbits(mask.bool().numpy().ravel()))


def _unpacked(bits: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `_packed`."""
    flat = np.unpackbits(bits.cpu().numpy(), count=prod(shape))
    return torch.from_numpy(flat).reshape(shape)


_EDGE = 1e-2
"""Nearest that probabilities come to 0 and 1 before training, so that they can change."""
