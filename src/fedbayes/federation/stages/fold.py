"""How the reports of a round become what the method's update gets.

Either as they are, in the method's own reduction, or by way of their changes: each is bounded, and
a robust rule may replace their sum. Methods see none of it.
"""

from abc import ABC, abstractmethod
from typing import Protocol

from fedbayes.contracts import ChangeCoordinates, Changes, Report, ReportList, Sum, Total
from fedbayes.contracts.changes import types_of


class Fold(Protocol):
    """Takes the reports of one round, one by one in the order of the cohort."""

    @property
    def clients(self) -> int:
        """Number of reports."""

    def add(self, client: int, report: Report) -> None:
        """Fold one report in."""

    def reduced(self) -> Sum | ReportList:
        """What the update gets."""


class PlainReducer:
    """Reports as they are, in the reduction of the method."""

    def __init__(self, reduction: type[Sum] | type[ReportList]) -> None:
        self._reports = reduction()

    @property
    def clients(self) -> int:
        """Number of reports."""
        return self._reports.clients

    def add(self, client: int, report: Report) -> None:
        """Fold one report in."""
        self._reports.add(client, report)

    def reduced(self) -> Sum | ReportList:
        """Their sum, or all of them."""
        return self._reports


class ChangeReducer(ABC):
    """A fold by way of changes."""

    def __init__(self, way: ChangeCoordinates) -> None:
        self._way = way
        self._total = Total()

    @property
    def clients(self) -> int:
        """Number of reports."""
        return self._total.clients

    @abstractmethod
    def add(self, client: int, report: Report) -> None:
        """Fold one report in."""

    def _add(self, changes: Changes, report: Report, weight: float) -> None:
        self._total.add(changes, weight)
        self._total.dtypes |= types_of(report)

    def reduced(self) -> Sum:
        """The sum of reports that come to the total."""
        return self._way.resummed(self._total)
