"""Federated dropout: every client trains a smaller network."""

from dataclasses import replace
from math import floor
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from fedbayes.contracts import (
    UNIFORM,
    About,
    Averaged,
    Chart,
    Federation,
    Info,
    Known,
    Method,
    Part,
    Problem,
    Report,
    Reports,
    RoundContext,
    Solved,
    Stateless,
    Sum,
    Total,
    units_remarks,
)
from fedbayes.contracts.drift import DriftServer
from fedbayes.core.fields import Chosen, unused
from fedbayes.core.messages import Masked, Message
from fedbayes.core.tensors import Samples, Tensors
from fedbayes.inference.optimizers import ServerOptimizer
from fedbayes.models import units
from fedbayes.models.units import Group


class FedDrop(Averaged, ServerOptimizer, Method[DriftServer, Stateless, Sum]):
    """Federated dropout (Caldas et al. 2018).

    For every client of a round the server drops a fixed share of the units of each hidden layer
    and of the filters of each convolution, and sends the smaller network that is left: without
    their rows, and without the columns that read them. The client trains it as an ordinary
    network. Each weight moves to the mean over the clients that had it. Seen from the EM paper
    (section 4), the gates are the server's, with a fixed probability.

    A residual stream is one layer of units, and loses them in every convolution that adds into it.
    What group normalization counts loses the same share of every group. Units of which the trace
    does not know all readers are kept (`remarks` names them), and so are the outputs: the paper's
    rate of 0.01 on in- and outputs comes to less than one.
    """

    name = "feddrop"
    about = About(
        "every client trains a smaller network: federated dropout",
        "Caldas et al. 2018; Louizos et al. 2021, appendix A",
        published=UNIFORM,
    )
    server_state = DriftServer
    reports = Reports({"weights": Part(mask="sent")})

    conv_rate: float = Field(0.1, ge=0, lt=1, description="share of dropped filters")
    dense_rate: Annotated[float, Chosen()] = Field(
        0.5, ge=0, lt=1, description="share of dropped units"
    )

    def recommended(self, known: Known) -> dict[str, Any]:
        """For numbers and times few units go and steps are short: the whole network adds up more
        units than any client trained.
        """
        chosen = super().recommended(known)
        if not known.real:
            return {**chosen, "method.dense_rate": 0.5}
        return {**chosen, "training.lr": chosen["training.lr"] * 0.4, "method.dense_rate": 0.1}

    def remarks(self, run: Federation) -> list[str]:
        """Layers of which no unit is dropped."""
        dropped = self._droppable(run)
        few = [u for u in dropped if not self._dropped(u)]
        found = units_remarks(self.name, run.network, dropped)
        rates = {"conv": ("conv_rate", "filters"), "dense": ("dense_rate", "units")}
        for kind, (rate, what) in rates.items():
            if all(layer.kind != kind for layer in dropped):
                why = f"this network has no {what} to drop"
                found += unused(self, [rate], why, "method.")
        if few:
            layers = ", ".join(f"{u.layer} ({u.step})" for u in few)
            found.append(
                f"{self.name} drops no units of {'these' if len(few) < len(dropped) else 'all'} "
                "layers, which have too few units for their rate (number of units in brackets): "
                f"{layers}"
            )
        return found

    def _droppable(self, run: Federation) -> tuple[Group, ...]:
        return run.network.narrowing

    def message(self, server: DriftServer, at: RoundContext) -> Message:
        """The client's smaller network of the round."""
        rng = at.rng("dropped units")
        dropped = self._droppable(at.run)
        alive = {u.layer: self._kept(u, rng) for u in dropped}
        found = units.masks(dropped, alive, running=True)
        return units.mask({**server.weights, **server.buffers}, found)

    def _kept(self, layer: Group, rng: torch.Generator) -> Tensor:
        """The units that stay, bool [count]: the same share of every cell."""
        return layer.thinned(self._dropped(layer), torch.rand(layer.count, generator=rng))

    def _dropped(self, layer: Group) -> int:
        """How many units go, of every `step`."""
        rate = self.conv_rate if layer.kind == "conv" else self.dense_rate
        return floor(rate * layer.step)

    def problem(
        self, message: Message, client: Stateless, samples: Samples, at: RoundContext
    ) -> Problem:
        """Train the smaller network."""
        return Problem(at.run.network.prepare(units.slice(message)), message=message)

    def report(
        self, solved: Solved, problem: Problem, client: Stateless, at: RoundContext
    ) -> tuple[Report, Stateless, Info]:
        """Report the smaller network."""
        weights = solved.parameters
        report = {
            name: replace(item, values=weights[name].reshape(-1))
            if isinstance(item, Masked)
            else weights[name]
            for name, item in problem.message.items()
        }
        return Report(report, self.weight(solved)), client, solved.info

    def chart(self, server: DriftServer, run: Federation) -> Chart:
        """Where nothing says who had an entry, as under noise, as many count as are expected to
        have had it.
        """
        dropped, whole = self._droppable(run), self.model(server, run)
        stays = {
            u.layer: torch.full((u.count,), 1 - self._dropped(u) / u.step, dtype=torch.float64)
            for u in dropped
        }
        touched = units.masks(dropped, stays, running=True)
        touched = {name: axes for name, axes in touched.items() if name in whole}

        def as_expected(total: Total) -> Total:
            every = {name: torch.full(whole[name].shape, total.weight).double() for name in touched}
            likely = units.zero(every, touched)
            heard = {
                part: {name: likely[name] for name in tensors if name in likely}
                | total.present_weight[part]
                for part, tensors in total.changes.items()
            }
            return replace(total, present_weight=heard)

        return Chart(total=as_expected)

    def update(
        self, server: DriftServer, reports: Sum, at: RoundContext
    ) -> tuple[DriftServer, Info]:
        """A step towards each weight's mean over the clients that had it."""
        mean = reports.mean()
        drift = {}
        for name, w in server.weights.items():
            share = reports.share(name).to(w.dtype)
            drift[name] = torch.where(share > 0, w - mean[name] / share.clamp_min(1e-12), 0.0)
        factor = self.server_factor(at.round, at.run.rounds)
        weights, optimizer = self.server_step(server.weights, drift, server.optimizer, factor)
        buffers = dict(server.buffers)
        for name, before in server.buffers.items():
            share = reports.share(name)
            seen = mean[name] / share.clamp_min(1e-12) if name in reports.present else mean[name]
            buffers[name] = torch.where(share > 0, seen.to(before.dtype), before)
        return DriftServer(weights, buffers, optimizer), {}

    def personal_model(
        self, message: Message, report: Report | None, client: Stateless, run: Federation
    ) -> Tensors | None:
        """The smaller network that the client reported."""
        return units.slice(report.tensors) if report is not None else None
