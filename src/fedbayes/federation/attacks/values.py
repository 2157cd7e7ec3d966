"""Attacks that send values that no honest client sends."""

from math import nan

from fedbayes.contracts import Report
from fedbayes.federation.attacks.base import Attack, View
from fedbayes.federation.attacks.changes import Scaled
from fedbayes.federation.attacks.shifts import filled

HUGE = 3e38
"""Close to the largest number in float32."""
HEAVY = 2.0**53
"""The largest weight that a report has ever been allowed."""


class NotANumber(Attack):
    """Reports NaN in every real number."""

    summary = "NaN in every real number of the report"

    def report(self, report: Report, view: View) -> Report:
        """The report, filled with NaN."""
        return filled(report, nan)


class Huge(Attack):
    """Reports 3e38 in every real number: well-formed and finite."""

    summary = "3e38 in every real number of the report"

    def report(self, report: Report, view: View) -> Report:
        """The report, filled with 3e38 or, in types that end before it, their largest number."""
        return filled(report, HUGE)


class Weight(Scaled):
    """Says that it trained on 2^53 samples; with a scale of −1 it lies about its change too."""

    summary = "a weight of 2^53, the change times scale"

    def report(self, report: Report, view: View) -> Report:
        """The report with a weight of 2^53."""
        return Report(super().report(report, view).tensors, HEAVY)
