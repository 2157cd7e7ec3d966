"""Attacks by clients that know what the honest ones report."""

from math import floor
from statistics import NormalDist, median_low

import torch
from pydantic import Field
from torch import Tensor

from fedbayes.contracts import ChangeCoordinates, Report
from fedbayes.contracts.changes import norm
from fedbayes.core.tensors import Tensors
from fedbayes.federation.attacks.base import Attack, View


class LittleIsEnough(Attack):
    """Reports the honest mean plus z standard deviations, entry by entry: hidden in their spread.

    Of n reports m are malicious. z is the largest value at which enough honest reports are farther
    from the mean to make up a majority with the malicious ones: Φ(z) = (n − m − s)/(n − m) with
    s = ⌊n/2 + 1⌋ − m.
    """

    summary = "the honest mean plus z standard deviations (ALIE)"
    paper = "Baruch et al. 2019"
    collusion = True

    z: float | None = Field(None, description="standard deviations; the paper's if unset")

    def report(self, report: Report, view: View) -> Report:
        """Return one report for every malicious client, if the reports have the same entries."""
        z = largest_z(len(view.honest) + view.hostile, view.hostile) if self.z is None else self.z
        mean = _mean(view.honest)
        wanted = {
            name: mean[name] + z * _std([honest[name] for honest in view.honest], mean[name])
            for name in mean
        }
        return view.shifted(report, _where_known(wanted, view.changes(report)))

    def remarks(self, clients: int, cohort: int) -> list[str]:
        """Return a warning if there are too few malicious clients to hide among the honest ones."""
        z = largest_z(cohort, min(clients, cohort)) if self.z is None else self.z
        if self.z is not None or z > 0.1:
            return []
        return [
            f"little-is-enough has almost no effect: with {min(clients, cohort)} malicious of "
            f"{cohort} clients in a round the paper's z is {z:.2f}. Set attack.z, such as 1.5"
        ]


class InnerProduct(Attack):
    """Reports −ε times the mean of the honest changes."""

    summary = "−scale times the mean of the honest changes (IPM)"
    paper = "Xie et al. 2020"
    collusion = True

    scale: float = Field(0.5, description="ε")

    def report(self, report: Report, view: View) -> Report:
        """Return one report for every malicious client, if the reports have the same entries."""
        wanted = {name: -self.scale * mean for name, mean in _mean(view.honest).items()}
        return view.shifted(report, _where_known(wanted, view.changes(report)))


class Stretch(Attack):
    """Reports its change turned around, each part `scale` times as long as the honest median."""

    summary = "the reversed change, scale times as long as the honest median"
    collusion = True

    scale: float = Field(4.99, description="multiple of the median norm of each part")

    def report(self, report: Report, view: View) -> Report:
        """Longer by default than any honest change, and no longer than max_change lets it be."""
        wanted: Tensors = {}
        parts = ChangeCoordinates.of(view.method, view.server, view.at.run).changes(report)
        for own in parts.values():
            honest = [norm(t for name, t in one.items() if name in own) for one in view.honest]
            factor = self.scale * median_low(honest) / (norm(own.values()) or 1.0)
            wanted |= {name: -factor * change for name, change in own.items()}
        return view.shifted(report, wanted)


def largest_z(reports: int, hostile: int) -> float:
    """Return the paper's z for n reports, of which m are malicious."""
    honest = reports - hostile
    supporters = floor(reports / 2 + 1) - hostile
    share = (honest - supporters) / honest if honest else 0.5
    return NormalDist().inv_cdf(min(max(share, 1e-9), 1 - 1e-9))


def _mean(honest: list[Tensors]) -> Tensors:
    """Means over the clients that said something of an entry; NaN where none did."""
    return {name: torch.stack([one[name] for one in honest]).nanmean(0) for name in _shared(honest)}


def _std(values: list[Tensor], mean: Tensor) -> Tensor:
    """Standard deviations likewise, around the mean (the sum of squares over their number)."""
    return (torch.stack(values) - mean).square().nanmean(0).sqrt()


def _shared(honest: list[Tensors]) -> list[str]:
    """Names of tensors that all have in one shape."""
    first = honest[0] if honest else {}
    return [
        name
        for name, tensor in first.items()
        if all(name in one and one[name].shape == tensor.shape for one in honest)
    ]


def _where_known(wanted: Tensors, own: Tensors) -> Tensors:
    """The wanted changes where some honest client said something, else the client's own."""
    return {
        name: torch.where(wanted[name].isnan(), change, wanted[name])
        for name, change in own.items()
        if name in wanted and wanted[name].shape == change.shape
    }
