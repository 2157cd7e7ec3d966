"""The Laplace prior: entries that a client has no need to change stay exactly the server's."""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedbayes.contracts import (
    At,
    Gathered,
    Info,
    Method,
    Nothing,
    Prior,
    Problem,
    Report,
    Run,
    Solved,
    Tree,
    Weights,
)
from fedbayes.errors import ConfigError
from fedbayes.fields import Only
from fedbayes.inference.problem import Projection
from fedbayes.messages import Masked, Message, dense
from fedbayes.tensors import Samples, Tensors


class Laplace(Method[Weights, Nothing, Gathered]):
    """Hard EM on p(φ_s | w) = Lap(w, 1/(λ N_s)) (EM paper, appendix J.1).

    A client minimizes its mean nll(φ) + λ ‖φ − w‖₁ by proximal steps (Eq. 43), which leave many
    entries exactly equal to the server's; only the others are sent. The server takes the median of
    the clients, coordinate by coordinate (Eq. 46), or a step along the mean of the signs (Eq. 45).
    """

    name = "laplace"
    summary = "sparse changes and the clients' median: the Laplace prior"
    paper = "Louizos et al. 2021, appendix J.1"
    server_state = Weights
    reduction = Gathered
    absent = "unchanged"

    scale: float = Field(
        1e-4,
        ge=0,
        description="λ, the price of leaving the server: factor of ‖φ − w‖₁ beside the mean loss "
        "of a client; the inverse scale of the prior is λ N_s",
    )
    m_step: Literal["median", "sign"] = Field(
        "median", description="server update: the median (Eq. 46) or a sign gradient step (45)"
    )
    server_lr: Annotated[float, Only("m_step", "sign")] = Field(
        1e-3, gt=0, description="step along the mean sign (m_step = sign)"
    )

    def prior(self, samples: int) -> Prior | None:
        """A Laplace distribution of inverse scale λ N_s."""
        return Prior("inverse scale", self.scale * samples) if self.scale else None

    def init(self, run: Run) -> Weights:
        """The network's initialization."""
        return Weights(run.network.initial)

    def check(self, run: Run) -> None:
        """Proximal steps need plain SGD."""
        if run.training.optimizer != "sgd":
            raise ConfigError(
                "laplace takes proximal steps, which need training.optimizer = 'sgd', not "
                f"{run.training.optimizer!r}"
            )

    def message(self, server: Weights, at: At) -> Message:
        """The weights, the same to all."""
        return dict(server.weights)

    def problem(self, message: Message, client: Nothing, samples: Samples, at: At) -> Problem:
        """Proximal gradient steps from the server's weights."""
        start = at.run.network.prepare(dense(message))
        centre = {n: w for n, w in start.items() if n not in at.run.network.buffers}
        return Problem(start, given={"centre": centre}, project=proximal(self.scale))

    def report(
        self, solved: Solved, problem: Problem, client: Nothing, at: At
    ) -> tuple[Report, Nothing, Info]:
        """Report what has changed."""
        report: Message = {}
        changed = total = 0
        for name, tensor in solved.parameters.items():
            moved = tensor != problem.start[name]
            axes = tuple(range(tensor.ndim))
            report[name] = Masked.keep(tensor, {axes: moved}) if tensor.ndim else tensor
            changed, total = changed + int(moved.sum()), total + moved.numel()
        return Report(report), client, {**solved.info, "changed": changed / total}

    def update(self, server: Weights, reports: Gathered, at: At) -> tuple[Weights, Info]:
        """The median, or a step along the mean sign; the mean of what is not a real number."""
        following = {}
        for name, w in server.weights.items():
            found = torch.stack(
                [_filled(report.tensors[name], w) for report in reports.reports.values()]
            )
            if self.m_step == "median":
                following[name] = median(found)
            else:
                following[name] = w + self.server_lr * torch.sign(found - w).mean(dim=0)
        return Weights(following), {}

    def model(self, server: Weights, run: Run) -> Tensors:
        """The server's weights."""
        return server.weights

    def personal_model(
        self, message: Message, report: Report | None, client: Nothing, run: Run
    ) -> Tensors | None:
        """The server's network with the client's changes."""
        if report is None:
            return None
        prior = dense(message)
        return {name: _filled(item, prior[name]) for name, item in report.tensors.items()}


def proximal(scale: float) -> Projection:
    """The proximal map of scale · ‖φ − centre‖₁, to follow every gradient step.

    φ ← centre + sign(d) max(|d| − lr · scale, 0) with d = φ − centre; the centre is given.
    """

    def project(parameters: Tensors, given: Tree, lr: float) -> None:
        for name, w in given["centre"].items():
            change = torch.nn.functional.softshrink(parameters[name] - w, lr * scale)
            parameters[name].copy_(torch.where(change == 0, w, w + change))

    return project


def median(points: Tensor) -> Tensor:
    """The median of each coordinate of [n, ...]; the middle of the inner two if n is even."""
    ordered = points.sort(dim=0).values
    low, high = ordered[(len(points) - 1) // 2], ordered[len(points) // 2]
    return low if len(points) % 2 else low + (high - low) / 2


def _filled(item: Tensor | Masked, prior: Tensor) -> Tensor:
    """A report's tensor with the server's value wherever nothing was sent."""
    if not isinstance(item, Masked):
        return item
    return torch.where(item.mask(), item.dense(), prior)
