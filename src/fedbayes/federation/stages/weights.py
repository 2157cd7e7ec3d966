"""What reports weigh: the number of samples that a client says, believed within bounds.

A client chooses the weight of its report, and nobody can check it. So it is 1 where a method does
not weight; it has a largest value; and a client cannot grow: what it said when it first came is
the most that it counts for later.
"""

from collections.abc import Collection
from typing import Self

import torch
from torch import Tensor

from fedbayes.contracts import AnyMethod, Report, Reports
from fedbayes.core.by_client import ByClient
from fedbayes.errors import MessageError
from fedbayes.federation.stages.checks import HEAVIEST

MOST_TIMES_MEDIAN = 10.0
"""With clipping, the most that a report weighs, as a multiple of the median weight."""


class ReportWeights:
    """The weights of a run's reports.

    Args:
        weighted: whether reports are weighted (`Reports.weighted`).
        most: the largest weight that is believed.
        first: of each client that a report has counted of, the weight of the first one, as
            `weight` float64 [n]. None: clients' weights are not compared with earlier ones.
    """

    def __init__(
        self, weighted: bool, most: float = HEAVIEST, first: ByClient | None = None
    ) -> None:
        self._weighted, self._most = weighted, most
        self._first = first
        self._new: dict[int, float] = {}

    @property
    def first(self) -> ByClient | None:
        """As the argument, with those that have counted since."""
        if self._first is not None and self._new:
            weights = torch.tensor(list(self._new.values()), dtype=torch.float64)
            self._first = self._first.having(torch.tensor(list(self._new)), {"weight": weights})
            self._new = {}
        return self._first

    def _first_of(self, client: int) -> float:
        """The weight that a client came with first; 0 where none has counted."""
        if self._first is None or client in self._new:
            return self._new.get(client, 0.0)
        row = self._first.row(client)
        return 0.0 if row is None else float(self._first.columns["weight"][row])

    @classmethod
    def of(cls, method: AnyMethod, most: float = HEAVIEST, first: ByClient | None = None) -> Self:
        """Those of a method's reports."""
        declared = Reports.of(method)
        # Where all data lie in one place, nobody else says how many there are.
        return cls(declared.weighted, HEAVIEST if declared.pooled else most, first)

    def believed(self, client: int, report: Report) -> tuple[float, str]:
        """The weight that a report counts with.

        Returns:
            It, and in words why it is another one than came; empty if it is not.

        Raises:
            MessageError: no client can have this weight.
        """
        said = report.weight
        if not self._weighted and said != 1.0:
            raise MessageError(
                f"its weight is {said:g}; with this method all updates have weight 1"
            )
        if said > self._most:
            raise MessageError(
                f"its weight is {said:g}; the limit is {self._most:g} (aggregation.max_weight)"
            )
        first = self._first_of(client)
        if first and said > first:
            why = f"its weight is {said:g}, but was {first:g} in its first update, which is used"
            return first, why
        return said, ""

    def counted(self, client: int, weight: float) -> None:
        """Note the weight of a report that counted."""
        if self._weighted and self._first is not None and not self._first_of(client):
            self._new[client] = weight


def reweighted(report: Report, weight: float, counts: Collection[str]) -> Report:
    """A report that counts with less weight than it came with.

    Args:
        report: that the server accepts.
        weight: above 0, less than its own.
        counts: names of tensors of it that count samples, which are lowered in proportion.
    """
    tensors = dict(report.tensors)
    for name in counts:
        if isinstance(count := tensors.get(name), Tensor):
            tensors[name] = (count.double() * (weight / report.weight)).to(count.dtype)
    return Report(tensors, weight)
