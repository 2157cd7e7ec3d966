"""Attacks that send another change than was learnt, or values that no honest client sends."""

from math import nan

import torch
from pydantic import Field

from fedbayes.contracts import Report
from fedbayes.federation.attacks.base import Attack, View
from fedbayes.federation.attacks.shifts import filled

HUGE = 3e38
"""Close to the largest number in float32."""
HEAVY = 2.0**53
"""The largest weight that a report has ever been allowed."""


class Scaled(Attack):
    """An attack that multiplies the change that a client reports."""

    scale: float = Field(1.0, description="factor of the change")

    def report(self, report: Report, view: View) -> Report:
        """The change times `scale`."""
        if self.scale == 1.0:
            return report
        wanted = {name: self.scale * change for name, change in view.changes(report).items()}
        return view.shifted(report, wanted)

    @property
    def on_reports(self) -> bool:
        """Not where the change stays as it is, and nothing else is done."""
        return self.scale != 1.0 or type(self).report is not Scaled.report


class SignFlip(Attack):
    """Reports −scale · Δ instead of its change Δ."""

    summary = "the reversed change: −scale · Δ"
    paper = "Blanchard et al. 2017; Karimireddy et al. 2021"

    scale: float = Field(1.0, description="factor of the change")

    def report(self, report: Report, view: View) -> Report:
        """The change times −scale."""
        wanted = {name: -self.scale * change for name, change in view.changes(report).items()}
        return view.shifted(report, wanted)


class Scaling(Scaled):
    """Reports scale · Δ instead of its change Δ, to outweigh the others."""

    summary = "the scaled change: scale · Δ"
    paper = "Bagdasaryan et al. 2020 (model replacement)"

    scale: float = Field(10.0, description="factor of the change")


class GaussianNoise(Attack):
    """Reports Gaussian noise instead of its change."""

    summary = "Gaussian noise instead of the change"
    paper = "Blanchard et al. 2017"

    std: float = Field(1.0, gt=0, description="standard deviation of the noise")

    def report(self, report: Report, view: View) -> Report:
        """Independent noise in every real number, drawn in the order of the names."""
        rng, changes = view.rng, view.changes(report)
        wanted = {
            name: self.std * torch.randn(changes[name].shape, generator=rng, dtype=torch.float64)
            for name in sorted(changes)
        }
        return view.shifted(report, wanted)


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
