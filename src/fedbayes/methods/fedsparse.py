"""FedSparse: the spike-and-slab prior; whole units are gated, pruned and not sent."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Generic, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedbayes.contracts import (
    ClientState,
    Federation,
    Info,
    Method,
    Nothing,
    Report,
    Site,
    Sum,
    cross_entropy,
    point_predictor,
    units_remarks,
)
from fedbayes.inference import gates, optimizers
from fedbayes.inference.controls import along_path, corrected, require_plain_sgd
from fedbayes.inference.local import LocalTraining, Objective
from fedbayes.messages import Masked, Message, dense
from fedbayes.metrics import Predictor
from fedbayes.models import Network, units
from fedbayes.models.units import Group
from fedbayes.tensors import Samples, Tensors

STRENGTHS = {"low": 5e-7, "mid": 5e-6, "high": 5e-5}
"""The paper's λ0 for LeNet-5 and ResNet-20 (appendix A)."""


@dataclass(frozen=True)
class Server:
    """The prior's weights w and thresholds v, and what the two optimizers remember."""

    weights: Tensors
    """Global weights; those of pruned units, and all that read them, are zero."""
    buffers: Tensors
    """What no gradient trains."""
    thresholds: Tensors
    """v by gated layer, [units]."""
    memory: Tensors
    """Of the optimizer of w."""
    threshold_memory: Tensors
    """Of the optimizer of v."""
    structure: str
    """Units of the gated layers, as text."""


class Gated(optimizers.ServerOptimizer, Method[Server, ClientState, Sum], Generic[ClientState]):
    """What FedSparse is with control variates and without.

    A group g is a unit of a linear layer, or a filter, with its weights, its bias and its scale
    and shift in the normalization that follows; norms are over the weights. A unit of a residual
    stream has all that adds into its place: one norm, one gate. The gate of a group
    is open with probability θ_g = sigmoid((‖w_g‖₂ − softplus(v_g))/T) at the server, and π_sg,
    the same of w_s and v_s, at a client; no gradient flows through the norm (Eq. 23).
    """

    l0: Literal["low", "mid", "high"] | float = Field(
        "mid",
        description="λ0, the price of an open gate per weight; low, mid, high are the paper's",
    )
    cross_entropy: float = Field(
        1e-4, ge=0, description="β, how strongly a client's gates are drawn to the server's"
    )
    cross_entropy_per: Literal["gate", "weight"] = Field(
        "gate", description="whether β counts a gate once, or once per weight of its group"
    )
    drift: float = Field(0.0, ge=0, description="λ, precision of the slab around the server")
    temperature: float = Field(1e-3, gt=0, description="T, of the gates' probabilities")
    relaxation: float = Field(
        2 / 3, gt=0, description="temperature of the hard-concrete relaxation in training"
    )
    start: float = Field(0.99, gt=0, lt=1, description="probability of every gate at the start")
    gate_lr: float = Field(1e-3, gt=0, description="Adamax of the clients' thresholds")
    server_gate_lr: float = Field(1e-2, gt=0, description="Adamax of the server's thresholds")
    server_optimizer: Literal["sgd", "adam", "yogi"] = Field(
        "adam", description="optimizer of the server's weights"
    )
    update_rule: Literal["gradient", "average"] = Field(
        "gradient", description="M-step: gradient steps (Alg. 1), or the closed form (Eq. 21, 22)"
    )
    prune: bool = Field(True, description="whether units are pruned in training, for good")
    prune_below: float = Field(0.1, ge=0, lt=1, description="probability at which a unit is pruned")
    output_gates: bool = Field(
        False,
        description="whether the units of the last layer are gated too; classes may then go",
    )

    @property
    def strength(self) -> float:
        """λ0 as a number."""
        return STRENGTHS[self.l0] if isinstance(self.l0, str) else self.l0

    def remarks(self, network: Network) -> list[str]:
        """Layers that have no gates."""
        return units_remarks(self.name, network, self._gateable(network))

    def _gateable(self, network: Network) -> tuple[Group, ...]:
        return tuple(u for u in network.groups if self.output_gates or not u.output)

    def init(self, network: Network, federation: Federation) -> Server:
        """The network's initialization, with thresholds that leave every gate open."""
        gated = self._gateable(network)
        weights, buffers = network.split()
        level = torch.tensor(log(self.start / (1 - self.start)))
        thresholds = {
            u.layer: gates.thresholds(units.row_norms(weights, u), level, self.temperature)
            for u in gated
        }
        return Server(weights, buffers, thresholds, {}, {}, units.store_units(gated))

    def _levels(self, weights: Tensors, thresholds: Tensors, layer: Group) -> Tensor:
        """Logits of a layer's gates; detached from the weights."""
        norms = units.row_norms(weights, layer).detach()
        return gates.logits(norms, thresholds[layer.layer], self.temperature)

    def message(self, server: Server, client: int) -> Message:
        """Weights and thresholds of the units that survive, and buffers."""
        gated = units.load_units(server.structure)
        alive = _alive(server.weights, gated)
        message = units.mask(server.weights, units.masks(gated, alive)) | server.buffers
        for layer, keep in alive.items():
            message[_THRESHOLD + layer] = Masked.keep(server.thresholds[layer], {(0,): keep})
        return message

    def expected(self, message: Message) -> Message:
        """Weights and buffers; thresholds stay at the client."""
        return {n: item for n, item in message.items() if not n.startswith(_THRESHOLD)}

    def objective(self, start: Tensors, site: Site) -> Objective:
        """The relaxed local loss on a batch (Eq. 41, as a minimum and with the ½ it lost).

        nll(w_s ⊙ z) + Σ_g [λ0 n_g P_g + β H(P_g, θ_g)] + λ/2 Σ_j P_j (w_sj − w_j)², with
        hard-concrete z, P = P(z > 0), the cross-entropy H, the mean nll of the batch, and n_g
        the parameters of a group that the server sent. The paper's sum in H is over weights
        (n_g H); with its β = 1e-4 that term would outweigh every λ0 of the paper and nothing
        would be pruned, while once per gate gives the sparsities that it reports.
        """
        nll = cross_entropy(site.network)
        prior = site.network.prepare(start)
        stream = site.stream("relaxed gates")
        gated = self._gated(site.network, start)
        levels = {u.layer: self._levels(prior, _thresholds(prior), u) for u in gated}
        sizes = {u.layer: _sizes(prior, u) for u in gated}

        def loss(parameters: Tensors, batch: Samples) -> Tensor:
            weights, penalty = dict(parameters), torch.zeros((), device=site.network.device)
            thresholds = _thresholds(parameters)
            for layer in gated:
                level = self._levels(parameters, thresholds, layer)
                noise = torch.rand(layer.count, generator=stream).to(level.device)
                z = gates.relaxed(level, noise, self.relaxation)
                probability = gates.open_probability(level, self.relaxation)
                size = sizes[layer.layer]
                divergence = gates.cross_entropy(probability, levels[layer.layer])
                if self.cross_entropy_per == "weight":
                    divergence = size * divergence
                price = self.strength * size * probability + self.cross_entropy * divergence
                penalty = penalty + price.sum()
                for axis in layer.owned:
                    name, tensor = axis.tensor, parameters[axis.tensor]
                    weights[name] = weights[name] * axis.along(z, tensor)
                    if self.drift:
                        open_ = axis.along(probability, tensor, 0)
                        square = (tensor - prior[name]).square() * open_
                        penalty = penalty + 0.5 * self.drift * square.sum()
            return nll(weights, batch) + penalty

        return loss

    def _gated(self, network: Network, start: Tensors) -> list[Group]:
        return [u for u in network.groups if _THRESHOLD + u.layer in start]

    def train(
        self, message: Message, objective: Objective, data: Samples, site: Site
    ) -> tuple[Message, Tensors, Info]:
        """Train w_s and v_s, sample the gates: the report's tensors, w_s before the gates."""
        start = dense(message)
        gated = self._gated(site.network, start)
        apart = {_THRESHOLD: lambda leaves: torch.optim.Adamax(leaves, lr=self.gate_lr)}
        ended, info = site.fit(start, objective, data, apart=apart)
        stream = site.stream("gates")
        kept: dict[str, Tensor] = {}
        shifts = []
        for layer in gated:
            prior = torch.sigmoid(self._levels(start, _thresholds(start), layer))
            pi = torch.sigmoid(self._levels(ended, _thresholds(ended), layer))
            noise = torch.rand(layer.count, generator=stream).to(pi.device)
            kept[layer.layer] = noise < pi
            shifts.append((pi - prior.to(pi.device)).abs())
        weights = {n: t for n, t in ended.items() if not n.startswith(_THRESHOLD)}
        found = units.masks(tuple(gated), kept, readers=False)
        read = {axis.tensor: axis.axis for layer in gated for axis in layer.readers}
        for name, item in message.items():
            if isinstance(item, Masked) and (read.get(name),) in item.masks:
                found.setdefault(name, {})[(read[name],)] = item.masks[(read[name],)]
        if shifts:
            shift = torch.cat(shifts)
            info |= {"gate_shift_mean": float(shift.mean()), "gate_shift_max": float(shift.max())}
        return units.mask(weights, found), weights, info

    def update(self, server: Server, reports: Sum) -> tuple[Server, Info]:
        """Steps on w and v, then pruning (Algorithm 1; sums over clients are means here).

        With z̄ the share of clients whose gate was open, ∇w = z̄ w − mean(z_s ŵ_s) and
        ∇v = (z̄ − θ) sigmoid(v)/T; both go downhill.
        """
        gated = units.load_units(server.structure)
        before = units.masks(gated, _alive(server.weights, gated))
        mean = reports.mean()
        shares = {name: reports.share(name).to(w.dtype) for name, w in server.weights.items()}
        thresholds = dict(server.thresholds)
        opened = {u.layer: _opened(shares, u) for u in gated}
        memory, threshold_memory = server.memory, server.threshold_memory
        if self.update_rule == "average":
            weights = {
                name: torch.where(shares[name] > 0, mean[name] / shares[name].clamp_min(1e-12), w)
                for name, w in server.weights.items()
            }
            for layer in gated:
                level = torch.logit(opened[layer.layer], eps=1e-6)
                norms = units.row_norms(weights, layer)
                thresholds[layer.layer] = gates.thresholds(norms, level, self.temperature)
        else:
            drift = {n: shares[n] * w - mean[n] for n, w in server.weights.items()}
            weights, memory = self.server_step(server.weights, drift, memory)
            slopes = {}
            for layer in gated:
                v = server.thresholds[layer.layer]
                theta = torch.sigmoid(self._levels(server.weights, server.thresholds, layer))
                slope = (opened[layer.layer] - theta) * torch.sigmoid(v) / self.temperature
                slopes[layer.layer] = slope
            if gated:
                thresholds, threshold_memory = optimizers.step(
                    lambda leaves: torch.optim.Adamax(leaves, lr=self.server_gate_lr),
                    server.thresholds,
                    slopes,
                    threshold_memory,
                )
        weights = units.zero(weights, before)  # the optimizer's momentum revives nothing
        if self.prune:
            weights, thresholds = self._pruned(weights, thresholds, gated)
        alive = _alive(weights, gated)
        info = {f"alive_{layer}": float(keep.sum()) for layer, keep in alive.items()}
        buffers = {name: mean[name] for name in server.buffers}
        state = Server(weights, buffers, thresholds, memory, threshold_memory, server.structure)
        return state, info

    def _pruned(
        self, weights: Tensors, thresholds: Tensors, gated: tuple[Group, ...]
    ) -> tuple[Tensors, Tensors]:
        """Zero the units that are too improbable, and what reads them.

        A reader's norm falls with the columns that it loses; its threshold falls by the same, so
        that its gates stay as they were.
        """
        levels = {u.layer: self._levels(weights, thresholds, u) for u in gated}
        floor = torch.logit(torch.tensor(self.prune_below))
        keep = {u.layer: levels[u.layer] > floor for u in gated}
        pruned = units.zero(weights, units.masks(gated, keep))
        moved = {}
        for u in gated:
            norms = units.row_norms(pruned, u)
            same = ~keep[u.layer] | (norms == units.row_norms(weights, u))
            following = gates.thresholds(norms, levels[u.layer], self.temperature)
            moved[u.layer] = torch.where(same, thresholds[u.layer], following)
        return pruned, moved

    def model(self, server: Server) -> Tensors:
        """The weights without the units that are too improbable, and the buffers."""
        gated = units.load_units(server.structure)
        weights, _ = self._pruned(server.weights, server.thresholds, gated)
        return {**weights, **server.buffers}

    def personal(
        self, message: Message, report: Report, client: ClientState, network: Network
    ) -> Predictor:
        """The sampled network ŵ_s that the client reported."""
        tensors = {name: report.tensors[name] for name in network.initial}
        return point_predictor(dense(tensors), network)


class FedSparse(Gated[Nothing]):
    """Hard EM on the spike-and-slab prior with gated groups (EM paper, section 3, Alg. 1, 2)."""

    name = "fedsparse"
    summary = "units gated, pruned and not sent: the spike-and-slab prior"
    paper = "Louizos et al. 2021, section 3"
    server_state = Server

    def local(
        self, message: Message, client: Nothing, data: Samples, site: Site
    ) -> tuple[Report, Nothing, Info]:
        """Train weights and gates, report what a sample of the gates lets through."""
        objective = self.objective(dense(message), site)
        tensors, _, info = self.train(message, objective, data, site)
        return Report(tensors), client, info


@dataclass(frozen=True)
class Controlled(Server):
    """The server of FedSparse, and the federation's control variate."""

    control: Tensors
    """c, like the weights."""
    clients: int
    """Number of clients, S."""


@dataclass(frozen=True)
class Control:
    """A client's control variate c_s, like the weights; nothing before its first round."""

    control: Tensors


class ScaffoldFedSparse(Gated[Control]):
    """FedSparse whose clients correct the gradients of their weights as SCAFFOLD does.

    The control variates are of the weights alone (EM paper, appendix E), and go both ways for
    the units that the server still has.
    """

    name = "scaffold-fedsparse"
    summary = "FedSparse with SCAFFOLD's control variates"
    paper = "Louizos et al. 2021, appendix E"
    server_state = Controlled
    client_state = Control

    damping: float = Field(1.0, ge=0, le=1, description="factor of the correction c − c_s")

    def init(self, network: Network, federation: Federation) -> Controlled:
        """As FedSparse, with a control variate of zero."""
        server = super().init(network, federation)
        zero = {name: torch.zeros_like(w) for name, w in server.weights.items()}
        return Controlled(**vars(server), control=zero, clients=federation.clients)

    def check(self, training: LocalTraining) -> None:
        """Variates along the path need plain SGD."""
        require_plain_sgd(training)

    def join(self, site: Site) -> Control:
        """A control variate of zero."""
        weights, _ = site.network.split()
        return Control({name: torch.zeros_like(w) for name, w in weights.items()})

    def message(self, server: Server, client: int) -> Message:
        """As FedSparse, and the control variate of what survives."""
        assert isinstance(server, Controlled)
        gated = units.load_units(server.structure)
        found = units.masks(gated, _alive(server.weights, gated))
        control = units.mask(server.control, found)
        return super().message(server, client) | {_CONTROL + n: c for n, c in control.items()}

    def local(
        self, message: Message, client: Control, data: Samples, site: Site
    ) -> tuple[Report, Control, Info]:
        """Train with corrected gradients, report the gated weights and the change of c_s."""
        pattern = {
            n.removeprefix(_CONTROL): c for n, c in message.items() if n.startswith(_CONTROL)
        }
        prior = {n: item for n, item in message.items() if not n.startswith(_CONTROL)}
        start, common = dense(prior), site.network.prepare(dense(pattern))
        correction = {n: self.damping * (c - client.control[n]) for n, c in common.items()}
        objective = corrected(self.objective(start, site), correction)
        tensors, ended, info = self.train(prior, objective, data, site)
        own = along_path(start, ended, correction, steps=int(info["steps"]), lr=site.lr)
        change = {n: own[n] - client.control[n] for n in own}
        masked = {
            n: item.like(change[n]) if isinstance(item, Masked) else change[n]
            for n, item in pattern.items()
        }
        tensors |= {_CONTROL + n: item for n, item in masked.items()}
        return Report(tensors), Control(own), info

    def update(self, server: Server, reports: Sum) -> tuple[Server, Info]:
        """As FedSparse; c moves by the mean change times the share of clients heard."""
        assert isinstance(server, Controlled)
        following, info = super().update(server, reports)
        mean = reports.mean()
        share = reports.clients / server.clients
        control = {n: c + share * mean[_CONTROL + n] for n, c in server.control.items()}
        return Controlled(**vars(following), control=control, clients=server.clients), info


_THRESHOLD, _CONTROL = "threshold/", "control/"
"""What names of thresholds and control variates begin with in messages."""


def _thresholds(tensors: Mapping[str, Tensor]) -> Tensors:
    """The thresholds among a message's tensors, by layer."""
    return {n.removeprefix(_THRESHOLD): t for n, t in tensors.items() if n.startswith(_THRESHOLD)}


def _alive(weights: Tensors, gated: tuple[Group, ...]) -> dict[str, Tensor]:
    """Units that the server still has: those with a weight that is not zero, [units] by layer."""
    return {u.layer: units.row_norms(weights, u) > 0 for u in gated}


def _opened(shares: Tensors, layer: Group) -> Tensor:
    """Share of the clients whose gate was open, of each unit."""
    rows = [axis.rows(shares[axis.tensor], layer.count) for axis in layer.made]
    return torch.cat(rows, dim=1).amax(dim=1)


def _sizes(weights: Tensors, layer: Group) -> Tensor:
    """Parameters of each group that are not pruned, [units]."""
    sizes = torch.zeros(layer.count, dtype=torch.int64, device=weights[layer.weight].device)
    for axis in layer.owned:
        tensor = weights[axis.tensor]
        counted = tensor != 0 if axis in layer.made else torch.ones_like(tensor, dtype=torch.bool)
        sizes += axis.rows(counted.to(torch.int64), layer.count).sum(dim=1)
    return sizes
