"""FedLPA: networks of clients, multiplied as Gaussians with Kronecker products by layer."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from fedbayes.contracts import (
    About,
    Federation,
    Info,
    Known,
    Loss,
    Method,
    Part,
    Problem,
    Report,
    ReportList,
    Reports,
    RoundContext,
    Stateless,
    Weights,
    sgd,
)
from fedbayes.contracts.natural import KNOWN_STD
from fedbayes.contracts.needs import own_prior, weights_alone
from fedbayes.contracts.run import with_prior
from fedbayes.core.fields import Chosen
from fedbayes.core.messages import Message, dense
from fedbayes.core.tensors import Samples, Tensors, part
from fedbayes.errors import MessageError, ModelError
from fedbayes.fusion.curvature import curvature_at, factored_layers, fisher_matrix
from fedbayes.fusion.posterior_settings import CurvatureSettings
from fedbayes.fusion.posteriors import product_mode
from fedbayes.inference.kronecker import layered, rows_of


def _typical(kind: str, method: "FedLpa", server: Weights, run: Federation) -> float:
    """The norm of one kind of curvature that a row may well have in every entry."""
    entries = sum(t.numel() for t in part(_curvature(run, method.largest), kind).values())
    return float(KNOWN_STD**-2 * entries**0.5)


class FedLpa(Method[Weights, Stateless, ReportList]):
    """Layer-wise posterior aggregation (Liu et al. 2024).

    A client finds the mode W_k of its posterior, with a share 1/K of the prior N(0, s²), and there
    for each layer the Kronecker factors of the Fisher matrix. The server takes the mode of the
    product of these Gaussians: the M of each layer with

        Σ_k [n_k B_k (M − W_k) A_k + (M − W_k)/(K s²)] = 0,

    with means A_k and B_k over the client's n_k rows. Conjugate gradients solve it. `damping` is
    added to the diagonals of A_k and B_k. Where clients fit their rows well, B_k is much smaller
    than it, and the inputs alone decide. In other weights the Fisher matrix is diagonal. It is that
    of the network's own prediction, where the paper has the empirical one. One round is the
    published method. In further rounds clients start from the mode of the last one.
    """

    name = "fedlpa"
    about = About(
        "product of clients' Gaussians with Kronecker factors",
        "Liu et al. 2024",
        needs=(weights_alone, own_prior, fisher_matrix),
    )
    server_state = Weights
    reports = Reports(
        {
            "weights": Part(compared="tensors"),
        }
        | {
            kind: Part(origin="zero", typical=partial(_typical, kind))
            for kind in ("inputs", "outputs", "diagonal")
        },
        reduce="set",
        weighted=True,
    )

    prior_std: Annotated[float, Chosen()] = Field(
        1.0, gt=0, description="s, standard deviation of the prior"
    )
    damping: Annotated[float, Chosen()] = Field(
        0.0,
        ge=0,
        description="number that is added to the diagonals of both Kronecker factors, and its "
        "square to other curvature. The authors' program has 0.03, the published equation 0",
    )
    largest: int = Field(
        1000,
        ge=1,
        description="largest number of inputs or outputs of a layer with Kronecker factors; "
        "wider layers have a diagonal",
    )
    fisher_draws: int | None = Field(
        None,
        ge=1,
        description="number of targets sampled per sample for the Fisher matrix; each needs a "
        "backward pass. Default: all classes if there are at most 20",
    )

    def recommended(self, known: Known) -> dict[str, Any]:
        """About 300 steps of SGD, in one round or in all together; a strict prior of numbers, which
        networks that fit them too well say with confidence. In a single round classes need damping:
        networks that are certain of theirs have next to no curvature.
        """
        steps = max(20, 300 // known.run.rounds)
        damped = known.run.rounds == 1 and known.run.likelihood.target.classes
        return {
            **sgd(known),
            "training.epochs": max(2, round(steps / known.epoch)),
            "method.prior_std": 0.1 if known.real else 1.0 if damped else 0.5,
            "method.damping": 0.03 if damped else 0.0,
        }

    def problem(
        self, message: Message, client: Stateless, samples: Samples, at: RoundContext
    ) -> Problem:
        """Train from the server's weights, with a share of the prior."""
        problem = super().problem(message, client, samples, at)
        total = torch.tensor(float(len(samples.y) * at.run.cohort), device=at.run.network.device)
        return replace(problem, given={"total": total})

    def loss(self, run: Federation) -> Loss:
        """The negative log-likelihood plus the prior's share of it."""
        return with_prior(run, self.prior_std)

    def local(
        self, message: Message, client: Stateless, samples: Samples, at: RoundContext
    ) -> tuple[Report, Stateless, Info]:
        """Find the mode, and the curvature there."""
        problem = self.problem(message, client, samples, at)
        solved = at.solve(problem, self.loss(at.run), samples, validation=self.validation(at.run))
        settings = CurvatureSettings(largest=self.largest, draws=self.fisher_draws)
        found = curvature_at(solved.parameters, samples, settings, at, "factors")
        tensors: Message = dict(solved.parameters)
        for name in _curvature(at.run, self.largest):
            kind, _, place = name.partition("/")
            if kind == "diagonal":
                tensors[name] = found.diagonal[place]
            elif place not in found.factors:
                raise ModelError(
                    f"the Fisher matrix of {place} has no Kronecker factors on this data. Set "
                    "method.largest = 1 for a diagonal"
                )
            elif kind == "inputs":
                tensors[name] = _packed(found.factors[place].inputs)
            else:
                tensors[name] = _packed(found.factors[place].outputs)
        return Report(tensors, self.weight(solved)), client, solved.info

    def expected(self, message: Message, run: Federation) -> Message:
        """A network, upper triangles of symmetric factors, and diagonals of other weights."""
        return {**message, **_curvature(run, self.largest)}

    def accept(self, server: Weights, report: Report, run: Federation) -> None:
        """Reject curvature that is negative."""
        for name, t in _curvature_of(dense(report.tensors)).items():
            entries = t.diagonal() if name.startswith(("inputs/", "outputs/")) else t
            if bool((entries < 0).any()):
                raise MessageError(f"{name!r} has a negative curvature")

    def update(
        self, server: Weights, reports: ReportList, at: RoundContext
    ) -> tuple[Weights, Info]:
        """Multiply the Gaussians, layer by layer."""
        found = [dense(report.tensors) for report in reports.reports.values()]
        rows = [report.weight for report in reports.reports.values()]
        curvature = [_curvature_of(tensors) for tensors in found]
        each = self.prior_std**-2 / at.run.cohort
        mean = {
            n: torch.stack([tensors[n].double() for tensors in found]).mean(dim=0)
            for n in server.weights
        }
        moved = [{n: tensors[n].double() - m for n, m in mean.items()} for tensors in found]
        after = dict(mean)
        for name in part(curvature[0], "diagonal"):
            total = torch.stack(
                [
                    n * (one[f"diagonal/{name}"] + self.damping**2)
                    for n, one in zip(rows, curvature, strict=True)
                ]
            )
            shift = torch.stack([one[name] for one in moved])
            after[name] += (total * shift).sum(dim=0) / (total.sum(dim=0) + each * len(found))
        for layer in part(curvature[0], "inputs"):
            pairs = [
                (self._damped(one[f"outputs/{layer}"]), self._damped(one[f"inputs/{layer}"]))
                for one in curvature
            ]
            step = product_mode(
                pairs,
                [rows_of(layer, one) for one in moved],
                rows,
                each * len(found),
                tolerance=_TOLERANCE,
                iterations=_ITERATIONS,
            )
            after |= {n: mean[n] + t for n, t in layered(layer, step, mean)}
        length = sum(float((after[n] - m).square().sum()) for n, m in mean.items()) ** 0.5
        weights = {n: t.to(server.weights[n].dtype) for n, t in after.items()}
        return Weights(weights), {"off_mean": length}

    def _damped(self, factor: Tensor) -> Tensor:
        return factor + self.damping * torch.eye(len(factor), dtype=factor.dtype)


def _curvature(run: Federation, largest: int) -> Tensors:
    """What a client sends next to its weights, as zeros of no memory."""
    layers = factored_layers(run.network, largest)
    covered = {f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")}
    shapes: dict[str, tuple[int, ...]] = {
        f"diagonal/{n}": tuple(t.shape) for n, t in run.network.initial.items() if n not in covered
    }
    for layer, (d, o) in layers.items():
        shapes[f"inputs/{layer}"] = (d * (d + 1) // 2,)
        shapes[f"outputs/{layer}"] = (o * (o + 1) // 2,)
    return {name: torch.zeros(()).expand(shape) for name, shape in shapes.items()}


def _curvature_of(tensors: Mapping[str, Tensor]) -> Tensors:
    """Symmetric matrices from the triangles of a report, and its diagonals; float64."""
    found = {f"diagonal/{n}": t.double() for n, t in part(tensors, "diagonal").items()}
    for kind in ("inputs", "outputs"):
        found |= {f"{kind}/{n}": _symmetric(t) for n, t in part(tensors, kind).items()}
    return found


def _packed(matrix: Tensor) -> Tensor:
    """The upper triangle of a symmetric matrix [n, n], as [n (n + 1)/2]."""
    row, column = torch.triu_indices(*matrix.shape)
    return matrix[row, column]


def _symmetric(triangle: Tensor) -> Tensor:
    """The inverse of `_packed`; float64."""
    size = int(((8 * len(triangle) + 1) ** 0.5 - 1) / 2)
    row, column = torch.triu_indices(size, size)
    matrix = torch.zeros(size, size, dtype=torch.float64)
    matrix[row, column] = matrix[column, row] = triangle.cpu().double()
    return matrix


_TOLERANCE = 1e-8
"""Relative residual at which conjugate gradients stop."""
_ITERATIONS = 500
"""Most steps of conjugate gradients for a layer."""
