"""The baseline without federation: one model per client."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedbayes.contracts import (
    About,
    Federation,
    Info,
    Method,
    Models,
    Problem,
    Report,
    ReportList,
    Reports,
    RoundContext,
    Solved,
    Weights,
    single_draw,
)
from fedbayes.core.messages import Message
from fedbayes.core.tensors import Samples, Tensors


@dataclass(frozen=True)
class LocalClient:
    """The client's own weights."""

    weights: Tensors
    temperature: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    """Of its predictions, by its validation rows; 0 where it has none. A scalar."""


class Local(Method[Weights, LocalClient, ReportList]):
    """Every client trains alone and nothing is sent: the lower bound of sharing.

    There is no global model: none is evaluated or saved. With `data.validation` a client fits a
    temperature to its validation rows, which its file for `fedbayes fuse` then has.
    """

    name = "local"
    about = About("one model per client, nothing is sent (baseline)")
    server_state = Weights
    client_state = LocalClient
    reports = Reports(reduce="set")
    models = Models.PERSONAL

    start: Literal["own", "common"] = Field(
        "own", description="whether clients start from their own weights or from common ones"
    )

    def init(self, run: Federation) -> Weights:
        """The common initialization, which no round changes."""
        return Weights(run.network.initial)

    def join(self, at: RoundContext) -> LocalClient:
        """The initialization of the client."""
        network = at.own_network() if self.start == "own" else at.run.network
        return LocalClient(network.initial)

    def message(self, server: Weights, at: RoundContext) -> Message:
        """Nothing: clients do not communicate."""
        return {}

    def problem(
        self, message: Message, client: LocalClient, samples: Samples, at: RoundContext
    ) -> Problem:
        """Go on where the client's last round ended."""
        return Problem(at.run.network.prepare(client.weights))

    def report(
        self, solved: Solved, problem: Problem, client: LocalClient, at: RoundContext
    ) -> tuple[Report, LocalClient, Info]:
        """Report nothing, and keep the weights and a temperature."""
        weights = solved.parameters
        temperature = at.temperature(single_draw(weights, at.run.network))
        return (
            Report({}),
            LocalClient(weights, torch.tensor(temperature, dtype=torch.float64)),
            solved.info,
        )

    def update(
        self, server: Weights, reports: ReportList, at: RoundContext
    ) -> tuple[Weights, Info]:
        """Nothing to learn from."""
        return server, {}

    def personal_model(
        self, message: Message, report: Report | None, client: LocalClient, run: Federation
    ) -> Tensors:
        """The client's own weights."""
        return client.weights
