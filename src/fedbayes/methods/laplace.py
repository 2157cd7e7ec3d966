"""The Laplace prior: entries that a client has no need to change stay exactly the server's."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedbayes.contracts import (
    UNIFORM,
    About,
    Averaged,
    ClientNote,
    Federation,
    Info,
    Known,
    Method,
    Part,
    Prior,
    Problem,
    Report,
    ReportList,
    Reports,
    RoundContext,
    Solved,
    Stateless,
    Tree,
    sgd,
)
from fedbayes.contracts.needs import sgd_steps
from fedbayes.core.fields import Chosen, Tuned, unused
from fedbayes.core.messages import Masked, Message, dense
from fedbayes.core.tensors import Samples, Tensors
from fedbayes.errors import ConfigError, MessageError, ModelError
from fedbayes.inference.optimizers import ServerOptimizer
from fedbayes.inference.problem import Projection
from fedbayes.inference.schedules import ServerSchedule
from fedbayes.models.units import Axis


@dataclass(frozen=True)
class LaplaceServer:
    """The global network, and the state of the server's optimizer."""

    weights: Tensors
    optimizer: Tensors = field(default_factory=dict)


class Laplace(Averaged, ServerSchedule, Method[LaplaceServer, Stateless, ReportList]):
    """Hard EM on p(φ_s | w) = Lap(w, 1/(λ N_s)) (EM paper, appendix J.1).

    A client minimizes its mean nll(φ) + λ ‖φ − w‖₁ by proximal steps (Eq. 43), which leave many
    entries exactly equal to the server's; only the others are sent. The server takes the median of
    the clients, coordinate by coordinate (Eq. 46), or a step along the mean of the signs (Eq. 45).

    Clients that lack a class outvote those that have it if they are the majority. With `class_rows`
    only clients with the class vote on its row of the last layer. A server optimizer takes steps
    along w − median, which is no gradient of the paper: generalized FedAvg with the median instead
    of the clients' mean.
    """

    name = "laplace"
    about = About(
        "sparse changes and the clients' median: the Laplace prior",
        "Louizos et al. 2021, appendix J.1",
        published=UNIFORM,
        needs=(sgd_steps,),
    )
    server_state = LaplaceServer
    reports = Reports({"weights": Part(mask="chosen", missing="unchanged")}, reduce="set")

    scale: Annotated[float, Tuned(1e-6, 1e-2)] = Field(
        1e-4,
        ge=0,
        description="λ, factor of the penalty ‖φ − w‖₁ added to the mean loss of a client; the "
        "inverse scale of the prior is λ N_s",
    )
    m_step: Literal["median", "sign"] = Field(
        "median", description="server update: the median (Eq. 46) or a sign gradient step (45)"
    )
    class_rows: Annotated[bool, Chosen()] = Field(
        False,
        description="whether only clients that have a class update its row of the last layer. "
        "Clients then send the list of their classes",
    )
    server_optimizer: Literal["none", "sgd", "adam", "yogi"] = Field(
        "none",
        description="optimizer of the steps along w − median, or minus the mean sign, with "
        "server_lr. none: w is the median itself, or takes plain steps along the mean sign",
    )
    server_lr: float = Field(
        1e-3,
        gt=0,
        description="learning rate of the server (m_step = sign, or server_optimizer not none)",
    )

    def recommended(self, known: Known) -> dict[str, Any]:
        """Clients without a class do not vote on its row: the median would be theirs."""
        return {**sgd(known), "method.class_rows": _by_class(known.run)}

    def note(self, samples: int, run: Federation) -> ClientNote:
        """A Laplace distribution of inverse scale λ N_s."""
        return ClientNote(Prior("inverse scale", self.scale * samples) if self.scale else None)

    def remarks(self, run: Federation) -> list[str]:
        """A rate of steps that the server does not take."""
        if self.m_step == "sign" or self.server_optimizer != "none":
            return []
        why = "with m_step = 'median' and server_optimizer = 'none' the server takes the median"
        return unused(self, ("server_lr", "server_schedule"), why, "method.")

    def check(self, run: Federation) -> None:
        """Votes by class need a last layer with a row for each."""
        super().check(run)
        if not self.class_rows:
            return
        if run.likelihood.outputs != run.likelihood.target.classes:
            raise ConfigError(
                "method.class_rows needs an output for each class, which the likelihood "
                f"{run.likelihood.name} does not have. Set method.class_rows = false"
            )
        if not _rows(run):
            raise ModelError(
                "method.class_rows: the rows of the network's outputs are unknown. Set "
                "method.class_rows = false"
            )

    def problem(
        self, message: Message, client: Stateless, samples: Samples, at: RoundContext
    ) -> Problem:
        """Proximal gradient steps from the server's weights."""
        start = at.run.network.prepare(dense(message))
        centre = {n: w for n, w in start.items() if n not in at.run.network.buffers}
        given: Tree = {"centre": centre}
        if self.class_rows:
            counts = torch.bincount(samples.y.cpu(), minlength=at.run.likelihood.target.classes)
            given[_PRESENT] = (counts > 0).to(torch.int64)
        return Problem(
            start, given=given, project=proximal(self.scale / (1 - at.run.training.momentum))
        )

    def expected(self, message: Message, run: Federation) -> Message:
        """Weights, and with `class_rows` the classes of a client."""
        if not self.class_rows:
            return message
        none = torch.zeros(1, dtype=torch.int64).expand(run.likelihood.target.classes)
        return {**message, _PRESENT: none}

    def accept(self, server: LaplaceServer, report: Report, run: Federation) -> None:
        """A class is there or not."""
        if self.class_rows and not set(dense(report.tensors)[_PRESENT].tolist()) <= {0, 1}:
            raise MessageError("its list of classes has values other than 0 and 1")

    def report(
        self, solved: Solved, problem: Problem, client: Stateless, at: RoundContext
    ) -> tuple[Report, Stateless, Info]:
        """Report what has changed."""
        report: Message = {}
        changed = total = 0
        for name, tensor in solved.parameters.items():
            moved = tensor != problem.start[name]
            axes = tuple(range(tensor.ndim))
            report[name] = Masked.keep(tensor, {axes: moved}) if tensor.ndim else tensor
            changed, total = changed + int(moved.sum()), total + moved.numel()
        if self.class_rows:
            report[_PRESENT] = problem.given[_PRESENT]
        info = {**solved.info, "changed": changed / total}
        return Report(report, self.weight(solved)), client, info

    def update(
        self, server: LaplaceServer, reports: ReportList, at: RoundContext
    ) -> tuple[LaplaceServer, Info]:
        """The median, or a step; of what no gradient trains the median.

        An entry on which nobody votes stays.
        """
        heard = list(reports.reports.values())
        sizes = torch.tensor([report.weight for report in heard], dtype=torch.float64)
        rows = _rows(at.run) if self.class_rows else {}
        trained = at.run.network.split()[0]
        factor = self.server_factor(at.round, at.run.rounds)
        following, slopes = dict[str, Tensor](), dict[str, Tensor]()
        for name, w in server.weights.items():
            found = torch.stack([_filled(report.tensors[name], w) for report in heard])
            votes = sizes.reshape(-1, *[1] * w.ndim)
            if name in rows:
                present = [dense(report.tensors)[_PRESENT] for report in heard]
                votes = votes * torch.stack([rows[name](one.double()) for one in present])
            if self.m_step == "median" or name in at.run.network.buffers:
                middle = median(found, votes)
                following[name] = torch.where(middle.isnan(), w, middle).to(w.dtype)
                slopes[name] = w - following[name]
            else:
                total = (votes + torch.zeros_like(found, dtype=torch.float64)).sum(dim=0)
                signs = (torch.sign(found - w) * votes).sum(dim=0) / total.clamp_min(1e-300)
                slopes[name] = -signs.to(w.dtype)
                following[name] = w - self.server_lr * factor * slopes[name]
        if self.server_optimizer == "none":
            return LaplaceServer(following, server.optimizer), {}
        steps = ServerOptimizer(server_optimizer=self.server_optimizer, server_lr=self.server_lr)
        weights = {name: server.weights[name] for name in trained}
        slopes = {name: slopes[name] for name in trained}
        stepped, optimizer = steps.server_step(weights, slopes, server.optimizer, factor)
        return LaplaceServer(following | stepped, optimizer), {}

    def personal_model(
        self, message: Message, report: Report | None, client: Stateless, run: Federation
    ) -> Tensors | None:
        """The server's network with the client's changes."""
        if report is None:
            return None
        prior = dense(message)
        return {name: _filled(report.tensors[name], w) for name, w in prior.items()}


def proximal(scale: float) -> Projection:
    """The proximal map of scale · ‖φ − centre‖₁, to follow every gradient step.

    φ ← centre + sign(d) max(|d| − lr · scale, 0) with d = φ − centre; the centre is given. Steps
    with momentum m add up to lr / (1 − m) times a slope, and the scale is to be as much larger.
    """

    def project(parameters: Tensors, given: Tree, lr: float) -> None:
        for name, w in given["centre"].items():
            change = torch.nn.functional.softshrink(parameters[name] - w, lr * scale)
            parameters[name].copy_(torch.where(change == 0, w, w + change))

    return project


def median(points: Tensor, votes: Tensor | None = None) -> Tensor:
    """The weighted median of each coordinate of [n, ...], a minimum of Σ_s votes_s |φ_s − m|.

    Args:
        points: [n, ...].
        votes: weights, at least 0, float64, of a shape that broadcasts with the points; equal ones
            by default.

    Returns:
        Where two points do equally well, their middle; NaN where all votes are 0.
    """
    votes = torch.ones(len(points), dtype=torch.float64) if votes is None else votes
    votes = votes.reshape(*votes.shape, *[1] * (points.ndim - votes.ndim)).expand(points.shape)
    ordered, order = points.sort(dim=0)
    sums = votes.gather(0, order).cumsum(dim=0)
    half = 0.5 * sums[-1]
    first, last = (sums >= half).int().argmax(dim=0), (sums > half).int().argmax(dim=0)
    low, high = (ordered.gather(0, place[None])[0] for place in (first, last))
    return torch.where(sums[-1] > 0, low + (high - low) / 2, torch.nan)


_PRESENT = "present"
"""Name of what a client says of its classes, int64 [K]: 1 where it has samples, else 0."""


def _by_class(run: Federation) -> bool:
    """Whether the network has outputs that belong to one class each."""
    one_each = run.likelihood.outputs == run.likelihood.target.classes
    return one_each and bool(_rows(run))


def _rows(run: Federation) -> dict[str, Callable[[Tensor], Tensor]]:
    """Of tensors that make the outputs, what gives values by class [K] to their entries."""
    found: dict[str, Callable[[Tensor], Tensor]] = {}
    for group in run.network.groups:
        if group.output and group.count == run.likelihood.target.classes:
            for axis in group.owned:
                found[axis.tensor] = partial(_along, axis, run.network.initial[axis.tensor].ndim)
    return found


def _along(axis: Axis, ndim: int, values: Tensor) -> Tensor:
    """Values of units, for the entries of an axis of a tensor of so many axes."""
    return axis.entries(values).reshape([-1 if i == axis.axis else 1 for i in range(ndim)])


def _filled(item: Tensor | Masked, prior: Tensor) -> Tensor:
    """A report's tensor with the server's value wherever nothing was sent."""
    if not isinstance(item, Masked):
        return item
    return torch.where(item.mask(), item.dense(), prior)
