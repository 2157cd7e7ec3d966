"""What the server does with reports before a method whose reports add sees them.

Clipping bounds the effect of one client, and robust rules replace the mean. A method sees none of
it: it asks for the sum of the reports and gets the result of the rule.
"""

from typing import Any

from fedbayes.contracts import AnyMethod, ChangeCoordinates, Federation, Report, ReportList, Reports
from fedbayes.contracts.changes import clipped
from fedbayes.errors import ConfigError
from fedbayes.federation.settings import Aggregation
from fedbayes.federation.stages.fold import ChangeReducer, Fold, PlainReducer
from fedbayes.federation.stages.robust import Robust, RobustGather

__all__ = [
    "Aggregation",
    "Clipped",
    "Robust",
    "clipped",
    "fold",
]


class Clipped(ChangeReducer):
    """A sum of reports whose weight times change is bounded.

    So a client cannot move the sum by more, however heavy it says that it is. The intake makes the
    weights multiples of the cohort's median, and bounds them.
    """

    def __init__(self, way: ChangeCoordinates, clip: float) -> None:
        super().__init__(way)
        self._clip = clip

    def add(self, client: int, report: Report) -> None:
        """Fold one report in."""
        bound = self._clip / report.weight
        self._add(clipped(self._way.changes(report), bound), report, report.weight)


def check(
    settings: Aggregation,
    method: AnyMethod,
    *,
    min_reports: int,
) -> None:
    """See that the settings go together, and with the rest.

    Args:
        settings: the `[aggregation]` table.
        method: of the run.
        min_reports: good reports that an update needs.

    Raises:
        ConfigError: they do not; the text says what would.
    """
    if settings.plain:
        return
    declared = Reports.of(method)
    if settings.rule in ("median", "trimmed-mean") and declared.joint:
        raise ConfigError(
            f"aggregation.rule = {settings.rule!r} does not work with {method.name} and these "
            f"settings: {declared.joint}, or aggregation.rule = 'krum'"
        )
    least = {"trimmed-mean": 2 * settings.hostile + 1, "krum": 2 * settings.hostile + 3}
    if min_reports < least.get(settings.rule, 1):
        raise ConfigError(
            f"aggregation.rule = {settings.rule!r} with `hostile = {settings.hostile}` needs "
            f"min_reports of at least {least[settings.rule]}, got {min_reports}"
        )


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
