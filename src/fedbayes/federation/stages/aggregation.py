"""How the reports of a round become what the method's update gets.

Either as they are, in the method's own reduction, or by way of their changes: each is bounded, and
a robust rule may replace their sum (`robust.py`). Methods see none of it.
"""

from typing import Any, Protocol

from fedbayes.contracts import (
    AnyMethod,
    ChangeCoordinates,
    Federation,
    Report,
    ReportList,
    Reports,
    Sum,
)
from fedbayes.federation.settings import Aggregation
from fedbayes.federation.stages.robust import Clipped, Robust, RobustGather


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


def fold(settings: Aggregation, method: AnyMethod, server: Any, run: Federation) -> Fold:
    """What folds the reports of one round.

    Args:
        settings: the `[aggregation]` table.
        method: of the run.
        server: its state before the round.
        run: the run.
    """
    reduction = Reports.of(method).reduction
    if settings.plain:
        return PlainReducer(reduction)
    way = ChangeCoordinates.of(method, server, run)
    if reduction is ReportList:
        return RobustGather(way, settings.rule, settings.hostile, settings.clip)
    if settings.rule == "mean":
        return Clipped(way, float(settings.clip or 0))
    return Robust(way, settings.rule, settings.hostile, settings.clip)
