"""Attacks as users write them."""

import torch

from fedbayes.contracts import Report
from fedbayes.core.messages import Masked
from fedbayes.core.messages import dense as dense_of
from fedbayes.federation.attacks import Attack, View


class Shrink(Attack):
    """Reports a part of its change."""

    summary = "reports a part of its change"

    share: float = 0.1

    def report(self, report: Report, view: View) -> Report:
        changes = view.changes(report)
        return view.shifted(report, {n: self.share * t for n, t in changes.items()})


class Midpoint(Attack):
    """Reports the middle of what the honest ones do, which it knows."""

    collusion = True

    def report(self, report: Report, view: View) -> Report:
        middle = {
            name: torch.stack([one[name] for one in view.honest]).median(0).values
            for name in view.honest[0]
        }
        return view.shifted(report, middle)


class Silent(Attack):
    """Says nothing of any entry."""

    def report(self, report: Report, view: View) -> Report:
        nothing = {
            name: Masked.keep(dense, {(0,): torch.zeros(len(dense), dtype=torch.bool)})
            for name, dense in dense_of(report.tensors).items()
        }
        return Report(nothing, report.weight)


class Honest(Attack):
    """Reports what it would honestly, in words of its own."""

    def report(self, report: Report, view: View) -> Report:
        return view.shifted(report, view.changes(report))
