"""FedSparse: the spike-and-slab prior; units or single weights are gated, pruned and not sent."""

from dataclasses import dataclass, field, replace
from math import inf, log
from typing import Annotated, Any, Generic, Literal, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from fedbayes.contracts import (
    UNIFORM,
    About,
    Averaged,
    Changes,
    Chart,
    ClientNote,
    ClientState,
    Federation,
    Info,
    Known,
    Loss,
    Method,
    Noise,
    Part,
    Prior,
    Problem,
    Report,
    Reports,
    RoundContext,
    Solved,
    Stateless,
    Sum,
    Total,
    Tree,
    nll,
    sgd,
    units_remarks,
)
from fedbayes.contracts.needs import sum_of_gradients
from fedbayes.contracts.variates import Control, ControlVariateMethod, nobody
from fedbayes.core.devices import placed
from fedbayes.core.fields import Chosen, Only
from fedbayes.core.messages import Masked, Message, dense
from fedbayes.core.tensors import Samples, Tensors, named, part
from fedbayes.errors import ConfigError
from fedbayes.inference import gates
from fedbayes.inference.controls import NORMS, along_path, bounded, corrected, no_norms, zeros
from fedbayes.inference.gate_scale import CLOSED, GateScale
from fedbayes.inference.optimizers import ServerOptimizer
from fedbayes.inference.schedules import SCHEDULES, Schedule
from fedbayes.models import units
from fedbayes.models.units import Gateable

STRENGTHS = {"low": 5e-7, "mid": 5e-6, "high": 5e-5}
"""The paper's λ0 for LeNet-5 and ResNet-20 (appendix A)."""
UNIT_PRICE = 20
"""Nats of all samples for a unit whose gate is open, on average over units, if λ0 is chosen."""


_GATES = Part(origin="zero", typical=inf)
"""Votes on gates, which the chart makes of the masks; each is bounded anyway."""


@dataclass(frozen=True)
class FedSparseServer:
    """The prior's weights w and thresholds v, and the states of the two optimizers."""

    weights: Tensors
    """Global weights; those of pruned units, and all that read them, are zero."""
    buffers: Tensors
    """What no gradient trains."""
    thresholds: Tensors
    """v by gated layer, [units]."""
    optimizer: Tensors
    """State of the optimizer of w."""
    gate_optimizer: Tensors
    """State of the optimizer of v."""


AnyServer = TypeVar("AnyServer", bound=FedSparseServer)


class SpikeSlab(
    Averaged,
    ServerOptimizer,
    GateScale,
    Method[AnyServer, ClientState, Sum],
    Generic[AnyServer, ClientState],
):
    """What FedSparse is with control variates and without.

    A group g is a unit of a linear layer, or a filter, with its weights, its bias and its scale
    and shift in the normalization that follows; norms are over the weights. A unit of a residual
    stream has all that adds into its place: one norm, one gate. With `gates = "weights"` every
    entry of a weight is a group of its own, with its magnitude for a norm. The gate of a group
    is open with probability θ_g = sigmoid((‖w_g‖₂ − softplus(v_g))/T) at the server, and π_sg,
    the same of w_s and v_s, at a client; no gradient flows through the norm (Eq. 23).
    """

    about = About(published=UNIFORM)
    reports = Reports({"weights": Part(mask="chosen"), "gates": _GATES})

    gates: Literal["units", "weights"] = Field(
        "units",
        description="objects with a gate. units: a unit with all its weights. weights: a single "
        "weight of a matrix or filter; biases and scales then have no gate",
    )
    l0: Annotated[Literal["low", "mid", "high"] | float, Chosen()] = Field(
        "mid",
        description="λ0, penalty of an open gate per weight. low, mid, high: values of the paper",
    )
    cross_entropy: float = Field(
        1e-4,
        ge=0,
        description="β, strength of the regularization of a client's gates toward the server's",
    )
    cross_entropy_per: Annotated[Literal["gate", "weight"], Only("cross_entropy")] = Field(
        "gate", description="whether β counts a gate once, or once per weight of its group"
    )
    drift: float = Field(0.0, ge=0, description="λ, precision of the slab around the server")
    relaxation: float = Field(
        2 / 3, gt=0, description="temperature of the hard-concrete relaxation in training"
    )
    server_optimizer: Annotated[Literal["sgd", "adam", "yogi"], Only("update_rule", "gradient")] = (
        Field("adam", description="optimizer of the server's weights")
    )
    server_lr: Annotated[float | None, Only("update_rule", "gradient"), Chosen()] = Field(
        None, gt=0, description="learning rate of the server; none: 1 for sgd, or else 0.001"
    )
    server_schedule: Annotated[Schedule, Only("update_rule", "gradient")] = Field(
        "constant",
        description="schedule of server_lr over rounds: constant, exponential, step, cosine, or "
        "package.module:function of a round and the number of rounds",
        examples=list(SCHEDULES),
    )
    server_gate_lr: Annotated[float | None, Only("update_rule", "gradient"), Chosen()] = Field(
        None,
        gt=0,
        description="paper: Adamax of the server's thresholds, none: 0.01; logits: ρ, at most 1, "
        "by which its probabilities move to the share of open gates, none: 0.2",
    )
    update_rule: Literal["gradient", "average"] = Field(
        "gradient", description="M-step: gradient steps (Alg. 1), or the closed form (Eq. 21, 22)"
    )
    prune: bool = Field(True, description="whether groups are pruned permanently in training")
    prune_below: float = Field(
        0.1, ge=0, lt=1, description="probability at which a group is pruned"
    )
    output_gates: bool = Field(
        False,
        description="whether the last layer has gates too. With gates of units, classes "
        "can then be removed",
    )

    @property
    def strength(self) -> float:
        """λ0 as a number."""
        return STRENGTHS[self.l0] if isinstance(self.l0, str) else self.l0

    def recommended(self, known: Known) -> dict[str, Any]:
        """A server's rate that lets a first run learn; and gates of units on a scale on which the
        price decides, at the same price for a unit of any size. Names of prices are the paper's.
        """
        rate = None if self.server_optimizer == "sgd" else 0.01 if known.real else 0.02
        chosen = {**sgd(known), "method.server_lr": rate}
        published = "l0" not in self.open and isinstance(self.l0, str)
        published |= "scale" not in self.open and self.scale == "paper"
        if published or self.gates == "weights" or self.update_rule == "average":
            return chosen
        weights, gated = known.run.network.split()[0], self._gated(known.run)
        size = sum(float(_sizes(weights, u).sum()) for u in gated)
        price = UNIT_PRICE / known.samples * sum(u.count for u in gated) / max(size, 1)
        return {
            **chosen,
            "method.scale": "logits",
            "method.l0": float(f"{price:.1g}"),
            "method.server_gate_lr": 0.5,
        }

    def check(self, run: Federation) -> None:
        """What is zero counts as pruned: no layer may start so."""
        super().check(run)
        if self.gates == "units":
            return
        weights = run.network.split()[0]
        if dead := [u.tensor for u in run.network.entries if not weights[u.tensor].any()]:
            raise ConfigError(
                f"all of {', '.join(dead)} is zero at the start, and {self.name} with gates = "
                "'weights' treats a zero weight as pruned. Set model.init, or method.gates = "
                "'units'"
            )

    def remarks(self, run: Federation) -> list[str]:
        """Layers that have no gates, and gates that cannot start as open as they should."""
        gated = self._gated(run)
        if self.gates == "units":
            return units_remarks(self.name, run.network, gated)
        if not gated:
            return [
                f"{self.name} gates no weight of this network, which has only a last layer. Set "
                "method.output_gates = true"
            ]
        weights, thresholds = run.network.split()[0], self._init(run).thresholds
        logits = torch.cat([self._logits(weights, thresholds, u) for u in gated])
        less = int((torch.sigmoid(logits) < self.start - 1e-3).sum())
        if not less:
            return []
        return [
            f"{less:,} of {len(logits):,} gates start below {self.start}: these weights are too "
            "small for a positive threshold. method.scale = 'logits' allows negative ones"
        ]

    def note(self, samples: int, run: Federation) -> ClientNote:
        """The slab, a Gaussian of precision λ N_s for weights whose gate is open."""
        return ClientNote(
            Prior("precision of the slab", self.drift * samples) if self.drift else None
        )

    def _gated(self, run: Federation) -> tuple[Gateable, ...]:
        found = run.network.groups if self.gates == "units" else run.network.entries
        return tuple(u for u in found if self.output_gates or not u.output)

    def _init(self, run: Federation) -> FedSparseServer:
        """The network's initialization, with thresholds that leave every gate open."""
        weights, buffers = run.network.split()
        level = torch.tensor(log(self.start / (1 - self.start)))
        thresholds = {
            u.layer: self.gate_thresholds(units.row_norms(weights, u), level)
            for u in self._gated(run)
        }
        return FedSparseServer(weights, buffers, thresholds, {}, {})

    def _logits(self, weights: Tensors, thresholds: Tensors, layer: Gateable) -> Tensor:
        """Logits of a layer's gates; detached from the weights."""
        norms = units.row_norms(weights, layer).detach()
        return self.gate_logits(norms, thresholds[layer.layer])

    def message(self, server: AnyServer, at: RoundContext) -> Message:
        """Weights and thresholds of the units that survive, and buffers."""
        gated = self._gated(at.run)
        alive = _alive(server.weights, gated)
        message = units.mask(server.weights, units.masks(gated, alive)) | server.buffers
        thresholds = {
            layer: Masked.keep(server.thresholds[layer], {(0,): keep})
            for layer, keep in alive.items()
        }
        return message | named("threshold", thresholds)

    def expected(self, message: Message, run: Federation) -> Message:
        """Weights and buffers; thresholds stay at the client."""
        return {n: item for n, item in message.items() if not n.startswith("threshold/")}

    def problem(
        self, message: Message, client: ClientState, samples: Samples, at: RoundContext
    ) -> Problem:
        """Train weights and thresholds from the server's, under relaxed gates."""
        gated = self._gated(at.run)
        device = at.run.network.device
        prior = at.run.network.prepare(dense(message))
        for layer in gated:  # what was not sent is closed
            closed = units.row_norms(prior, layer) == 0
            name = f"threshold/{layer.layer}"
            prior[name] = prior[name].masked_fill(closed, CLOSED)
        thresholds = part(prior, "threshold")
        given = {
            "prior": prior,
            "logits": {u.layer: self._logits(prior, thresholds, u) for u in gated},
            "sizes": {u.layer: _sizes(prior, u) for u in gated},
        }

        def draw(rng: torch.Generator, batch: Samples) -> Tree:
            return {u.layer: placed(torch.rand(u.count, generator=rng), device) for u in gated}

        return Problem(
            prior,
            given=given,
            noise=Noise("relaxed gates", draw),
            message=message,
            param_groups={"threshold/": self.gate_optimizer} if gated else {},
        )

    def loss(self, run: Federation) -> Loss:
        """The relaxed local loss on a batch (Eq. 41, as a minimum and with the ½ it lost).

            nll(w_s ⊙ z) + Σ_g [λ0 n_g P_g + β H(P_g, θ_g)] + λ/2 Σ_j P_j (w_sj − w_j)²

        z is hard-concrete, P = P(z > 0), H the cross-entropy, nll the mean of the batch, and n_g
        the number of parameters in a group that the server sent.

        The paper's sum in H is over weights (n_g H). With its β = 1e-4 that term would outweigh
        every λ0 of the paper, and nothing would be pruned. H once per gate gives the sparsities
        that the paper reports.
        """
        likelihood, gated = nll(run), self._gated(run)

        def loss(parameters: Tensors, batch: Samples, given: Tree, noise: Tree) -> Tensor:
            weights, penalty = dict(parameters), torch.zeros((), device=run.network.device)
            thresholds = part(parameters, "threshold")
            for layer in gated:
                logits = self._logits(parameters, thresholds, layer)
                z = gates.relaxed(logits, noise[layer.layer], self.relaxation)
                probability = gates.open_probability(logits, self.relaxation)
                size = given["sizes"][layer.layer]
                divergence = gates.cross_entropy(probability, given["logits"][layer.layer])
                if self.cross_entropy_per == "weight":
                    divergence = size * divergence
                price = self.strength * size * probability + self.cross_entropy * divergence
                penalty = penalty + price.sum()
                for axis in layer.owned:
                    name, tensor = axis.tensor, parameters[axis.tensor]
                    weights[name] = weights[name] * axis.along(z, tensor)
                    if self.drift:
                        change = (tensor - given["prior"][name]).square()
                        square = change * axis.along(probability, tensor, 0)
                        penalty = penalty + 0.5 * self.drift * square.sum()
            return likelihood(weights, batch, given, noise) + penalty

        return loss

    def sampled(self, solved: Solved, problem: Problem, at: RoundContext) -> tuple[Message, Info]:
        """What a sample of the gates lets through of the trained weights."""
        gated, start, ended = self._gated(at.run), problem.start, solved.parameters
        before, after = part(start, "threshold"), part(ended, "threshold")
        rng = at.rng("gates")
        kept: dict[str, Tensor] = {}
        shifts = []
        for layer in gated:
            prior = torch.sigmoid(self._logits(start, before, layer))
            pi = torch.sigmoid(self._logits(ended, after, layer))
            noise = torch.rand(layer.count, generator=rng).to(pi.device)
            kept[layer.layer] = noise < pi
            shifts.append((pi - prior).abs())
        weights = {n: t for n, t in ended.items() if not n.startswith("threshold/")}
        found = units.masks(gated, kept, readers=False)
        read = {reader.tensor: reader.axis for layer in gated for reader in layer.readers}
        for name, axis in read.items():
            item = problem.message[name]
            if isinstance(item, Masked) and (axis,) in item.masks:
                found.setdefault(name, {})[(axis,)] = item.masks[(axis,)]
        info = solved.info
        if shifts:
            shift = torch.cat(shifts)
            info |= {"gate_shift_mean": float(shift.mean()), "gate_shift_max": float(shift.max())}
        return units.mask(weights, found), info

    def likely(self, solved: Solved, problem: Problem, at: RoundContext) -> Tensors:
        """The trained weights, with the gates open whose probability to be open is above 0.5."""
        ended = solved.parameters
        thresholds = part(ended, "threshold")
        gated = self._gated(at.run)
        kept = {u.layer: self._logits(ended, thresholds, u) > 0 for u in gated}
        weights = {n: t for n, t in ended.items() if not n.startswith("threshold/")}
        return units.zero(weights, units.masks(gated, kept, readers=False))

    def origin(self, server: AnyServer, run: Federation) -> Tensors:
        """Weights and buffers, also of units that the model leaves out."""
        return {**server.weights, **server.buffers}

    def chart(self, server: AnyServer, run: Federation) -> Chart:
        """Changes of the weights that the gates let through, and by how much more or less gates
        were open than the server takes them to be (`gates`, by layer): weights count as often as
        their gate was open.
        """
        gated = self._gated(run)
        believed = self._believed(server, gated)

        def votes(found: Changes) -> Changes:
            shares = {name: (~t.isnan()).double() for name, t in found["weights"].items()}
            gates = {u.layer: _opened(shares, u) - believed[u.layer] for u in gated}
            return {**found, "gates": gates} if gated else found

        return Chart(votes, lambda total: _counted(total, believed, gated))

    def _believed(self, server: AnyServer, gated: tuple[Gateable, ...]) -> Tensors:
        """θ, the server's probabilities of open gates, float64 by layer."""
        return {
            u.layer: torch.sigmoid(self._logits(server.weights, server.thresholds, u)).double()
            for u in gated
        }

    def _update(
        self, server: AnyServer, reports: Sum, at: RoundContext
    ) -> tuple[FedSparseServer, Info]:
        """Steps on w and v, then pruning (Algorithm 1; sums over clients are means here).

        With z̄ the share of clients whose gate was open, ∇w = z̄ w − mean(z_s ŵ_s) and
        ∇v = (z̄ − θ) sigmoid(v)/T; both go downhill.
        """
        gated = self._gated(at.run)
        before = units.masks(gated, _alive(server.weights, gated))
        mean = reports.mean()
        shares = {name: reports.share(name).to(w.dtype) for name, w in server.weights.items()}
        thresholds = dict(server.thresholds)
        opened = {u.layer: _opened(shares, u) for u in gated}
        optimizer, gate_optimizer = server.optimizer, server.gate_optimizer
        if self.update_rule == "average":
            weights = {
                name: torch.where(shares[name] > 0, mean[name] / shares[name].clamp_min(1e-12), w)
                for name, w in server.weights.items()
            }
        else:
            drift = {n: shares[n] * w - mean[n] for n, w in server.weights.items()}
            factor = self.server_factor(at.round, at.run.rounds)
            weights, optimizer = self.server_step(server.weights, drift, optimizer, factor)
        weights = units.zero(weights, before)  # the optimizer's momentum revives nothing
        norms = {u.layer: units.row_norms(weights, u) for u in gated}
        if self.update_rule == "average":
            thresholds = {layer: self.gates_of(norms[layer], opened[layer]) for layer in norms}
        elif gated:
            logits = {u.layer: self._logits(server.weights, thresholds, u) for u in gated}
            thresholds, gate_optimizer = self.server_gates(
                thresholds, logits, norms, opened, gate_optimizer
            )
        if self.prune:
            weights, thresholds = self._pruned(weights, thresholds, gated)
        alive = _alive(weights, gated)
        info = {f"alive_{layer}": float(keep.sum()) for layer, keep in alive.items()}
        buffers = {name: mean[name] for name in server.buffers}
        return FedSparseServer(weights, buffers, thresholds, optimizer, gate_optimizer), info

    def _pruned(
        self, weights: Tensors, thresholds: Tensors, gated: tuple[Gateable, ...]
    ) -> tuple[Tensors, Tensors]:
        """Zero the units that are too improbable, and what reads them."""
        # A reader's threshold falls as its norm does, so that its gates stay as they were.
        logits = {u.layer: self._logits(weights, thresholds, u) for u in gated}
        floor = torch.logit(torch.tensor(self.prune_below))
        keep = {u.layer: logits[u.layer] > floor for u in gated}
        pruned = units.zero(weights, units.masks(gated, keep))
        moved = {}
        for u in gated:
            norms = units.row_norms(pruned, u)
            same = ~keep[u.layer] | (norms == units.row_norms(weights, u))
            following = self.gate_thresholds(norms, logits[u.layer])
            moved[u.layer] = torch.where(same, thresholds[u.layer], following)
        return pruned, moved

    def model(self, server: AnyServer, run: Federation) -> Tensors:
        """The weights without the units that are too improbable, and the buffers."""
        weights, _ = self._pruned(server.weights, server.thresholds, self._gated(run))
        return {**weights, **server.buffers}


class FedSparse(SpikeSlab[FedSparseServer, Stateless]):
    """Hard EM on the spike-and-slab prior with gated groups (EM paper, section 3, Alg. 1, 2)."""

    name = "fedsparse"
    about = About(
        "gates and prunes units or weights: the spike-and-slab prior",
        "Louizos et al. 2021, section 3",
    )
    server_state = FedSparseServer

    def init(self, run: Federation) -> FedSparseServer:
        """The network's initialization, with thresholds that leave every gate open."""
        return self._init(run)

    def report(
        self, solved: Solved, problem: Problem, client: Stateless, at: RoundContext
    ) -> tuple[Report, Stateless, Info]:
        """Report the weights whose gates are open in a sample."""
        tensors, info = self.sampled(solved, problem, at)
        return Report(tensors, self.weight(solved)), client, info

    def update(
        self, server: FedSparseServer, reports: Sum, at: RoundContext
    ) -> tuple[FedSparseServer, Info]:
        """Steps on w and v, then pruning (Algorithm 1)."""
        return self._update(server, reports, at)


@dataclass(frozen=True)
class Controlled(FedSparseServer):
    """The server of FedSparse, and the federation's control variate."""

    control: Tensors
    """c, like the weights."""
    norms: Tensor = field(default_factory=no_norms)
    """Distribution function of the norms of the last round's variates; zeros where unknown."""
    heard: Tensor = field(default_factory=nobody)
    """Of all reports so far, the sum of their weights and their number, float64 [2]."""


class ScaffoldFedSparse(ControlVariateMethod[Controlled], SpikeSlab[Controlled, Control]):
    """FedSparse whose clients correct the gradients of their weights as SCAFFOLD does.

    The control variates are of the weights alone (EM paper, appendix E), and go both ways for
    the units that the server still has.
    """

    reports = Reports(
        {
            **ControlVariateMethod.reports.parts,
            **SpikeSlab.reports.parts,
            "control": replace(ControlVariateMethod.reports.parts["control"], mask="sent"),
        }
    )
    name = "scaffold-fedsparse"
    about = About(
        "FedSparse with SCAFFOLD's control variates",
        "Louizos et al. 2021, appendix E",
        needs=(sum_of_gradients,),
    )
    server_state = Controlled

    damping: Annotated[float, Chosen()] = Field(
        1.0, ge=0, le=1, description="factor of the correction c − c_s"
    )

    def recommended(self, known: Known) -> dict[str, Any]:
        """Those of FedSparse, and half of the correction: with all of it, clients of many steps
        learn less.
        """
        return {**SpikeSlab.recommended(self, known), "method.damping": 0.5}

    def init(self, run: Federation) -> Controlled:
        """As FedSparse, with a control variate of zero."""
        server = self._init(run)
        return Controlled(**vars(server), control=zeros(server.weights))

    def message(self, server: Controlled, at: RoundContext) -> Message:
        """As FedSparse, and the control variate of what survives."""
        gated = self._gated(at.run)
        found = units.masks(gated, _alive(server.weights, gated))
        norms = {} if self.variate_bound is None else {NORMS: server.norms}
        control = named("control", units.mask(server.control, found))
        return {**super().message(server, at), **control, **norms}

    def loss(self, run: Federation) -> Loss:
        """As FedSparse, with ⟨c − c_s, φ⟩."""
        return corrected(super().loss(run))

    def problem(
        self, message: Message, client: Control, samples: Samples, at: RoundContext
    ) -> Problem:
        """As FedSparse, given the correction."""
        beside = ("control/", NORMS)
        prior = {n: item for n, item in message.items() if not n.startswith(beside)}
        problem = super().problem(prior, client, samples, at)
        common = at.run.network.prepare(dense(part(message, "control")))
        given: Tree = {
            **problem.given,
            "correction": {n: self.damping * (c - client.control[n]) for n, c in common.items()},
        }
        if self.variate_bound is not None:
            given["norms"] = message[NORMS]
        return replace(problem, message=message, given=given)

    def report(
        self, solved: Solved, problem: Problem, client: Control, at: RoundContext
    ) -> tuple[Report, Control, Info]:
        """Report the gated weights and the change of c_s."""
        tensors, info = self.sampled(solved, problem, at)
        own = along_path(problem, solved, lr=at.lr)
        asked = part(problem.message, "control")
        norms = Tensors()
        if self.variate_bound is not None:
            held = {n: torch.where(_held(item), own[n], 0.0) for n, item in asked.items()}
            own, norms[NORMS], said = bounded(held, self.variate_bound, problem.given["norms"])
            info = {**info, **said}
        change = {n: own[n] - client.control[n] for n in own}
        if at.run.clips:  # what is kept is what the server adds
            sent = {n: torch.where(_held(item), change[n], 0.0) for n, item in asked.items()}
            change = at.run.clips.shortened("control", sent)
            own = {n: own[n] + (change[n] - sent[n]) for n in own}
        masked = {
            n: item.like(change[n]) if isinstance(item, Masked) else change[n]
            for n, item in asked.items()
        }
        report = Report({**tensors, **named("control", masked), **norms}, self.weight(solved))
        return report, Control(own), info

    def update(self, server: Controlled, reports: Sum, at: RoundContext) -> tuple[Controlled, Info]:
        """As FedSparse; c moves by the clients' changes of c_s."""
        following, info = self._update(server, reports, at)
        control, heard = self.control_after(server, reports, at.run)
        norms = reports.mean().get(NORMS, server.norms)
        return Controlled(**vars(following), control=control, norms=norms, heard=heard), info


def _counted(total: Total, believed: Tensors, gated: tuple[Gateable, ...]) -> Total:
    """Changes of weights that count as often as their gate was open, of a sum with votes."""
    changes = {part: tensors for part, tensors in total.changes.items() if part != "gates"}
    heard, moved = dict(total.present_weight["weights"]), dict(total.changes["weights"])
    for layer in gated:
        opened = total.changes["gates"][layer.layer] + believed[layer.layer] * total.weight
        opened = opened.clamp(0, total.weight)
        for axis in layer.owned:
            change, said = moved[axis.tensor], heard.get(axis.tensor)
            count = axis.along(opened, change, total.weight) * torch.ones_like(change)
            if said is not None:  # the mean change of those that spoke, as often as gates open
                moved[axis.tensor] = change * (count / said.clamp_min(1e-12))
            heard[axis.tensor] = count
    return replace(
        total,
        changes={**changes, "weights": moved},
        present_weight={**total.present_weight, "weights": heard},
    )


def _held(item: Masked | Tensor) -> Tensor:
    """Which entries a tensor of a message holds."""
    return item.mask() if isinstance(item, Masked) else torch.ones_like(item, dtype=torch.bool)


def _alive(weights: Tensors, gated: tuple[Gateable, ...]) -> dict[str, Tensor]:
    """Groups that the server still has: those with a weight that is not zero, [groups] by layer."""
    return {u.layer: units.row_norms(weights, u) > 0 for u in gated}


def _opened(shares: Tensors, layer: Gateable) -> Tensor:
    """Share of the clients whose gate was open, of each unit."""
    rows = [axis.rows(shares[axis.tensor], layer.count) for axis in layer.made]
    return torch.cat(rows, dim=1).amax(dim=1)


def _sizes(weights: Tensors, layer: Gateable) -> Tensor:
    """Parameters of each group that are not pruned, [units]."""
    sizes = torch.zeros(layer.count, dtype=torch.int64, device=weights[layer.weight].device)
    for axis in layer.owned:
        tensor = weights[axis.tensor]
        counted = tensor != 0 if axis in layer.made else torch.ones_like(tensor, dtype=torch.bool)
        sizes += axis.rows(counted.to(torch.int64), layer.count).sum(dim=1)
    return sizes
