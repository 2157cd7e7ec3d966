"""The baseline without federation: one model per client."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedbayes.contracts import (
    About,
    CountsClasses,
    Federation,
    Info,
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
    """The client's own weights, and what its file for `fedbayes fuse` has with them."""

    weights: Tensors
    temperature: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    """Of its predictions, by the samples that it holds out; 0 where it has none. A scalar."""
    counts: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """Its training samples of each class [K]; [0] where its file does not have them."""


class Local(CountsClasses[Weights, LocalClient, ReportList]):
    """Every client trains alone and nothing is sent: the lower bound of sharing.

    There is no global model: none is evaluated or saved. A client's file for `fedbayes fuse` has
    its samples of each class and a temperature, which it fits to the samples that it holds out
    (`calibration`).
    """

    name = "local"
    about = About("one model per client, nothing is sent (baseline)")
    server_state = Weights
    client_state = LocalClient
    reports = Reports({}, reduce="set")
    models = Models.PERSONAL

    start: Literal["own", "common"] = Field(
        "own", description="whether clients start from their own weights or from common ones"
    )
    class_shares: Literal["auto"] | bool = Field(
        "auto",
        description="whether a client's file has its samples of each class, by which fedbayes "
        "fuse weights the client's outputs. auto: if outputs are classes",
    )

    def join(self, at: RoundContext) -> LocalClient:
        """The initialization of the client."""
        network = at.own_network() if self.start == "own" else at.run.network
        return LocalClient(network.initial, **self.count_pattern(at.run))

    def message(self, server: Weights, at: RoundContext) -> Message:
        """Nothing: clients do not communicate."""
        return {}

    def problem(
        self, message: Message, client: LocalClient, samples: Samples, at: RoundContext
    ) -> Problem:
        """Go on where the client's last round ended."""
        given = self.counted(samples, at.run)
        return Problem(at.run.network.prepare(client.weights), given={**given})

    def report(
        self, solved: Solved, problem: Problem, client: LocalClient, at: RoundContext
    ) -> tuple[Report, LocalClient, Info]:
        """Report nothing, and keep the weights, a temperature and counts."""
        weights = solved.parameters
        temperature = at.temperature(single_draw(weights, at.run.network))
        own = LocalClient(weights, torch.tensor(temperature, dtype=torch.float64), **problem.given)
        return Report({}), own, solved.info

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
