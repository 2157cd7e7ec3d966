"""Robust averaging: an M-step that some hostile clients cannot spoil."""

from typing import Literal

import torch
from pydantic import Field

from fedbayes.contracts import (
    Federation,
    Gathered,
    Info,
    Method,
    Nothing,
    Report,
    Site,
    Weights,
    cross_entropy,
    point_predictor,
)
from fedbayes.inference.robust import krum, median, trimmed_mean
from fedbayes.messages import Message, dense
from fedbayes.metrics import Predictor
from fedbayes.models import Network
from fedbayes.tensors import Samples, Tensors


class Robust(Method[Weights, Nothing, Gathered]):
    """FedAvg whose server takes a robust location of the clients' weights, not their mean.

    Every report counts alike, whatever number of samples a client claims. With `clip`, the change
    φ_s − w of a report is first shortened to that Euclidean norm.
    """

    name = "robust"
    summary = "median, trimmed mean or Krum of the clients' weights, against hostile clients"
    paper = "Yin et al. 2018; Blanchard et al. 2017"
    server_state = Weights
    reduction = Gathered

    rule: Literal["median", "trimmed-mean", "krum", "multi-krum", "mean"] = Field(
        "median", description="location: median, trimmed-mean, krum, multi-krum, or mean"
    )
    trim: float = Field(
        0.2, ge=0, lt=0.5, description="share left out at either end (trimmed-mean)"
    )
    hostile: int = Field(1, ge=0, description="hostile clients in a cohort at most (krum)")
    clip: float | None = Field(
        None, gt=0, description="largest norm of a client's change; none: any"
    )

    def init(self, network: Network, federation: Federation) -> Weights:
        """The network's initialization."""
        return Weights(network.initial)

    def message(self, server: Weights, client: int) -> Message:
        """The weights, the same to all."""
        return dict(server.weights)

    def local(
        self, message: Message, client: Nothing, data: Samples, site: Site
    ) -> tuple[Report, Nothing, Info]:
        """Train from the server's weights and report the result."""
        weights, info = site.fit(
            dense(message),
            cross_entropy(site.network),
            data,
            validation=cross_entropy(site.network, training=False),
        )
        return Report(dict(weights)), client, info

    def update(self, server: Weights, reports: Gathered) -> tuple[Weights, Info]:
        """The location of the reports."""
        found = [dense(report.tensors) for report in reports.reports.values()]
        points = torch.stack([_flat(tensors) for tensors in found])
        centre = _flat(server.weights)
        changes = points - centre
        norms = changes.norm(dim=1)
        info = {"change_norm_max": float(norms.max()), "change_norm_median": float(norms.median())}
        if self.clip is not None:
            changes *= (self.clip / norms).clamp_max(1.0)[:, None]
            info["clipped"] = float((norms > self.clip).double().mean())
        return Weights(_shaped(centre + self._location(changes), server.weights)), info

    def _location(self, changes: torch.Tensor) -> torch.Tensor:
        match self.rule:
            case "mean":
                return changes.mean(dim=0)
            case "median":
                return median(changes)
            case "trimmed-mean":
                return trimmed_mean(changes, self.trim)
            case "krum":
                return changes[krum(changes, self.hostile, 1)[0]]
            case "multi-krum":
                keep = max(1, len(changes) - self.hostile)
                return changes[krum(changes, self.hostile, keep)].mean(dim=0)

    def model(self, server: Weights) -> Tensors:
        """The weights."""
        return server.weights

    def personal(
        self, message: Message, report: Report, client: Nothing, network: Network
    ) -> Predictor:
        """The network as the client reported it."""
        return point_predictor(dense(report.tensors), network)


def _flat(tensors: Tensors) -> torch.Tensor:
    """All values in one vector, float64."""
    return torch.cat([tensor.double().flatten() for tensor in tensors.values()])


def _shaped(values: torch.Tensor, like: Tensors) -> Tensors:
    """The inverse of `_flat`."""
    parts = torch.split(values, [tensor.numel() for tensor in like.values()])
    return {
        name: part.reshape(tensor.shape).to(tensor.dtype)
        for (name, tensor), part in zip(like.items(), parts, strict=True)
    }
