"""Combined Learning: linear combinations, convex or not, of models trained to convergence."""

from dataclasses import dataclass
from math import inf
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field

from fedbayes.contracts import (
    About,
    Federation,
    Info,
    Known,
    Method,
    Models,
    Part,
    Problem,
    Report,
    ReportList,
    Reports,
    RoundContext,
    Solved,
    Stateless,
    sgd,
    single_draw,
)
from fedbayes.core.fields import Chosen, Only, unused
from fedbayes.core.messages import Message, dense
from fedbayes.core.tensors import Samples, Tensors, named, part
from fedbayes.errors import ConfigError, MessageError
from fedbayes.inference.combination import Combination, factors
from fedbayes.likelihoods import evaluate, total


@dataclass(frozen=True)
class CombinedServer:
    """The combined model, and the quantities for the coordinator's decision."""

    weights: Tensors
    buffers: Tensors
    history: torch.Tensor
    """What the clients said of the combined model of each round, float64 [rounds]: its headline
    metric or its loss on their data."""
    stopped: str
    """Why there are no further rounds; empty while there are."""


class Combined(Combination, Method[CombinedServer, Stateless, ReportList]):
    """The coordinator takes w = Σ_s α_s φ_s of the clients' models (paper, Eq. 2).

    α_s = 1/S (Eq. 1), c + r_s (Eq. 3) or exp(c r_s) (Eq. 4), with r_s the client's share of the
    samples. Clients train to local convergence before every round: give `training.patience`, and
    `training.epochs` as the most.

    A client also says how good the combined model that it received is on its own data (on what
    is set aside by `training.validation`, if anything). The coordinator ends the rounds at a
    stable point: when that moved by no more than `tolerance` within `window` rounds. Then every
    client gets a copy.

    Weights of the non-convex rules grow by Σ_s α_s a round, in every layer, or shrink where that is
    below 1. Before they can overflow or vanish, or when a client's training overflows, the rounds
    end at the last sound combined model. `normalized` divides the factors by their sum.
    """

    name = "combined"
    about = About(
        "linear combinations, convex or not, of converged models", "Ioste and Finger 2022"
    )
    server_state = CombinedServer
    # Weights are what the rules are made of.
    reports = Reports(
        {"weights": Part(compared="tensors"), "received": Part(origin="zero", typical=inf)},
        reduce="set",
        weighted=True,
    )
    models = Models.COPIED

    normalized: Annotated[bool, Only("alpha", "linear", "exp"), Chosen()] = Field(
        False,
        description="whether the factors are divided by their sum, which keeps the scale of "
        "weights. false: as in the paper",
    )
    watch: Literal["metric", "loss"] = Field(
        "metric",
        description="quantity of the combined model on the clients' data that must become "
        "stable: the primary metric (such as accuracy), or the loss",
    )
    window: int = Field(5, ge=2, description="number of past rounds that the coordinator compares")
    tolerance: float | None = Field(
        None, ge=0, description="largest movement that counts as stable. none: run all rounds"
    )
    safe: float = Field(
        30.0,
        gt=0,
        description="orders of magnitude by which a network may amplify or weaken its inputs "
        "(linear, exp). The limit of float32 is 38",
    )

    def recommended(self, known: Known) -> dict[str, Any]:
        """Clients train to convergence, and weights keep their scale."""
        return {
            **sgd(known, lr=0.1 if known.real else 0.2),
            "training.epochs": 50,
            "training.patience": 3,
            "method.normalized": self.alpha != "mean",
        }

    def remarks(self, run: Federation) -> list[str]:
        """What does nothing; and the non-convex rules scale what the network puts out, and may
        shrink it to nothing.
        """
        watched = ("window", "watch") if self.tolerance is None else ()
        notes = unused(self, watched, "method.tolerance is unset", "method.")
        if not self._scales:
            return notes + unused(self, ("safe",), "nothing is scaled", "method.")
        total = float(factors(self.alpha, self.c, np.ones(run.cohort)).sum())
        if abs(total) < 1 - 1e-9:
            notes.append(
                f"the factors of method.alpha = {self.alpha!r} with c = {self.c:g} sum to "
                f"{total:.3g} for {run.cohort} clients of equal size, so weights shrink in every "
                "round. Set method.normalized = true to keep their scale"
            )
        if run.likelihood.target.classes:
            return notes
        return [
            *notes,
            f"{self.name} with alpha = {self.alpha!r} scales a network's outputs, which changes "
            f"all predictions except the most probable class ({run.likelihood.name}). Set "
            "method.alpha = 'mean' to avoid this",
        ]

    def check(self, run: Federation) -> None:
        """Factors to normalize must have a sum above 0."""
        super().check(run)
        factors(self.alpha, self.c, np.ones(run.cohort), normalized=self.normalized)

    def init(self, run: Federation) -> CombinedServer:
        """The network's initialization."""
        weights, buffers = run.network.split()
        return CombinedServer(weights, buffers, torch.zeros(0, dtype=torch.float64), "")

    def expected(self, message: Message, run: Federation) -> Message:
        """A model, and three numbers."""
        number = torch.zeros((), dtype=torch.float64)
        return {**message, **named("received", dict.fromkeys(_RECEIVED, number))}

    def problem(
        self, message: Message, client: Stateless, samples: Samples, at: RoundContext
    ) -> Problem:
        """Evaluate the combined model, and train from it."""
        run = at.run
        start = run.network.prepare(dense(message))
        terms = evaluate(run.likelihood, single_draw(start, run.network), at.held_out or samples)
        metrics = run.likelihood.metrics(total(terms))
        received = {
            "metric": min(metrics[run.likelihood.metric], _LARGEST),
            "loss": min(metrics["nll"], _LARGEST),
        }
        values = {name: torch.tensor(x, dtype=torch.float64) for name, x in received.items()}
        return Problem(start, given={"received": values})

    def report(
        self, solved: Solved, problem: Problem, client: Stateless, at: RoundContext
    ) -> tuple[Report, Stateless, Info]:
        """Report the weights if they are finite, and the metric of the combined model at this
        client.
        """
        weights, received = solved.parameters, problem.given["received"]
        overflowed = not all(bool(torch.isfinite(w).all()) for w in weights.values())
        sent = {**received, "overflowed": torch.tensor(overflowed, dtype=torch.float64)}
        info = {"steps": float(solved.steps)} if overflowed else solved.info
        info |= {f"received_{_word(name, at.run)}": float(x) for name, x in received.items()}
        tensors: Message = {**(problem.start if overflowed else weights), **named("received", sent)}
        return Report(tensors, float(solved.count)), client, info

    def accept(self, server: CombinedServer, report: Report, run: Federation) -> str | None:
        """Reject impossible statements about the combined model; a network may be missing."""
        received = {n: float(t) for n, t in part(dense(report.tensors), "received").items()}
        least, most = run.likelihood.possible
        if not least <= received["metric"] <= most:
            raise MessageError(
                f"its {run.likelihood.metric} of the combined model is {received['metric']:g}"
            )
        if not run.likelihood.least_nll <= received["loss"] <= _LARGEST:
            raise MessageError(f"its loss of the combined model is {received['loss']:g}")
        if received["overflowed"] not in (0.0, 1.0):
            raise MessageError("it does not report whether its training overflowed")
        if _overflowed(report):
            return "its weights are not finite, so its network is not combined"
        return None

    def update(
        self, server: CombinedServer, reports: ReportList, at: RoundContext
    ) -> tuple[CombinedServer, Info]:
        """Combine the models, and decide whether to stop.

        A client whose training overflowed has no model; if that is half of them, there is no
        further round.
        """
        everyone = list(reports.reports.values())
        heard = [report for report in everyone if not _overflowed(report)]
        overflowed = 2 * len(heard) <= len(everyone)
        if overflowed:
            heard = everyone
        found = [dense(report.tensors) for report in heard]
        sizes = np.array([report.weight for report in heard])
        shares = torch.from_numpy(sizes / sizes.sum())
        values = torch.stack([tensors[f"received/{self.watch}"] for tensors in found])
        history = torch.cat([server.history, (shares * values).sum()[None]])
        try:
            raw = factors(self.alpha, self.c, sizes, normalized=self.normalized)
        except ConfigError as error:  # fewer clients than were to be combined
            return self._last(server, history, str(error))
        alpha = torch.from_numpy(raw)
        info = {"alpha_sum": float(alpha.sum())}
        if overflowed:
            why = "overflow: the weights of half of the clients are not finite"
            return self._last(server, history, why)
        weights = _combination(alpha, found, server.weights)
        orders = amplification(weights)
        if self._scales and not orders <= self.safe:
            why = f"overflow: inputs would be amplified by {orders:.1f} orders of magnitude"
            return self._last(server, history, why)
        if self._scales and orders < -self.safe:
            much = "to nothing" if orders == -inf else f"by {-orders:.1f} orders of magnitude"
            why = (
                f"underflow: inputs would be weakened {much}, since the factors sum to "
                f"{float(alpha.sum()):.3g}"
            )
            return self._last(server, history, why)
        info["amplification"] = orders
        buffers = _combination(shares, found, server.buffers)
        return CombinedServer(weights, buffers, history, self._stability(history, at.run)), info

    @property
    def _scales(self) -> bool:
        """Whether the combined weights are no mean, and may grow or shrink."""
        return self.alpha != "mean" and not self.normalized

    def _last(
        self, server: CombinedServer, history: torch.Tensor, why: str
    ) -> tuple[CombinedServer, Info]:
        """The last sound model, for good."""
        return CombinedServer(server.weights, server.buffers, history, why), {}

    def _stability(self, history: torch.Tensor, run: Federation) -> str:
        """Whether what is watched is flat over the window, in words; empty if not."""
        if self.tolerance is None or len(history) < self.window:
            return ""
        recent = history[-self.window :]
        movement = float(recent.max() - recent.min())
        if movement > self.tolerance:
            return ""
        watched = _word(self.watch, run)
        return f"stable point: {watched} moved by {movement:.2g} in {self.window} rounds"


def _overflowed(report: Report) -> bool:
    """Whether a client says that its training left what is finite."""
    return bool(dense(report.tensors)["received/overflowed"])


_LARGEST = float(torch.finfo(torch.float32).max)
"""Instead of an infinite metric or loss."""
_RECEIVED = ("metric", "loss", "overflowed")
"""What a client says besides its weights."""


def _word(watched: str, run: Federation) -> str:
    """What is watched, by its own name: the headline metric of the likelihood, or the loss."""
    return run.likelihood.metric if watched == "metric" else watched


def amplification(weights: Tensors) -> float:
    """Orders of magnitude by which a network can amplify its inputs at most: log10 Π_l ‖W_l‖_∞.

    The bound holds for sequential layers with activations that do not grow; biases are left out.
    It ignores normalization and shortcuts, so it is loose for residual networks.
    """
    rows = [w.double().flatten(1).abs().sum(dim=1) for w in weights.values() if w.ndim > 1]
    return sum(float(row.max().log10()) for row in rows if row.numel())


def _combination(alpha: torch.Tensor, found: list[Tensors], like: Tensors) -> Tensors:
    """Σ_s α_s φ_s in float64, in the types of `like`."""
    combined = {}
    for name, own in like.items():
        total = torch.zeros(own.shape, dtype=torch.float64)
        for factor, tensors in zip(alpha.tolist(), found, strict=True):
            total.add_(tensors[name], alpha=factor)
        combined[name] = total.to(own.dtype)
    return combined
