"""Methods whose clients correct their gradients by control variates, as SCAFFOLD does."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Generic, Protocol, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from fedbayes.contracts.changes import norm
from fedbayes.contracts.method import Averaged, Method
from fedbayes.contracts.parts import Part, Reports
from fedbayes.contracts.recommended import Known, sgd
from fedbayes.contracts.reports import Sum
from fedbayes.contracts.run import Federation, RoundContext
from fedbayes.core.tensors import Tensors, part
from fedbayes.inference.controls import less, zeros


@dataclass(frozen=True)
class Control:
    """A client's control variate c_s, like the weights."""

    control: Tensors


class HasControl(Protocol):
    """A server's state with the federation's control variate."""

    @property
    def control(self) -> Mapping[str, Tensor]:
        """c, like the weights."""
        ...

    @property
    def heard(self) -> Tensor:
        """Of all reports so far, the sum of their weights and their number, float64 [2]."""
        ...


def nobody() -> Tensor:
    """What is `heard` before the first report."""
    return torch.zeros(2, dtype=torch.float64)


AnyServer = TypeVar("AnyServer", bound=HasControl)


def _retracted(client: Control, missed: Tensors) -> Control:
    """The variate moves by what arrived, so that c remains the mean of the c_s."""
    return Control(less(client.control, missed))


def _size_of_control(method: object, server: HasControl, run: Federation) -> float:
    """A client's variate may move by as much as the federation's is."""
    return norm(c.double() for c in server.control.values())


VARIATES = Reports(
    {
        "weights": Part(),
        "control": Part(
            origin="zero",
            tracked=True,
            retract=_retracted,
            compared="whole",
            typical=_size_of_control,
        ),
        "norms": Part(origin="zero", exact=True, typical=inf, optional=True),
    }
)
"""Weights, the change of the client's variate, and a distribution of variates' norms."""


class ControlVariateMethod(Averaged, Method[AnyServer, Control, Sum], Generic[AnyServer]):
    """What methods with control variates have in common.

    A client keeps c_s. It reports its weights, and the change of c_s as `control/…`. The server
    keeps c, the mean of the c_s over all clients, weighted as the weights are.
    """

    client_state = Control
    reports = VARIATES

    damping: float = Field(1.0, ge=0, le=1, description="factor of the correction c − c_s")
    variate_bound: float | None = Field(
        None,
        gt=0,
        description="largest norm of a client's variate c_s, as a multiple of the median norm of "
        "the last round. Larger ones are scaled down. none: no bound, as published",
    )

    def recommended(self, known: Known) -> dict[str, Any]:
        """Plain steps, shorter where there are more of them: a variate is the mean gradient of a
        whole round, and long ways make it stale.
        """
        chosen = sgd(known)
        taken = chosen["training.epochs"] * known.epoch
        chosen["training.lr"] = float(f"{chosen['training.lr'] * min(1.0, 20 / taken):.2g}")
        return chosen

    def control_after(
        self, server: AnyServer, reports: Sum, run: Federation
    ) -> tuple[Tensors, Tensor]:
        """The federation's variate after a round, and what was `heard` up to then.

        c is the mean of the c_s over all clients, Σ_s n_s c_s / N, of which reports have the
        changes. N is the mean weight of the reports so far, times the number of clients. That is
        exact where clients weigh alike or all of them report. Else it is an estimate, which scales
        c as a whole.
        """
        change = part(reports.mean(), "control")
        heard = server.heard + torch.tensor([reports.weight, reports.clients], dtype=torch.float64)
        before, after = (float(h[0] / h[1]) if h[1] else 0.0 for h in (server.heard, heard))
        kept = before / after if before else 1.0
        share = reports.weight / (run.clients * after)
        control = {n: kept * c + share * change[n] for n, c in server.control.items()}
        return control, heard

    def join(self, at: RoundContext) -> Control:
        """A control variate of zero."""
        return Control(zeros(at.run.network.split()[0]))
