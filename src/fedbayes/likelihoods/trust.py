"""How far predictions can be trusted: calibration of probabilities, coverage of intervals."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedbayes.likelihoods.base import Classes, Likelihood, finite
from fedbayes.likelihoods.evaluation import parted, total
from fedbayes.likelihoods.measures import measured, predictions
from fedbayes.likelihoods.numeric import Numeric, Parametric
from fedbayes.metrics import Calibration, Coverage, Uncertainty, calibrate
from fedbayes.targets import Target
from fedbayes.tensors import Samples, Tensors

PIECE = 500
"""Samples that are predicted at a time."""


@dataclass(frozen=True)
class Trust:
    """What predictions of some samples show when they are compared with the targets."""

    metrics: dict[str, float]
    """Those of the likelihood, the headline first, and others that were asked for; NaN where one of
    these is undefined."""
    target: Target
    """What is predicted: names of classes, or of columns and their units."""
    true: Tensor
    """The targets, [n] or [n, columns]."""
    predicted: Tensor | None = None
    """Classes [n], or predictive means of numbers [n, columns]; None of labels."""
    finite: Tensor | None = None
    """Of classes, whether the prediction is a number at all, bool [n]."""
    calibration: Calibration | None = None
    """Of probabilities: of classes, or of labels, each label of a sample by itself."""
    coverage: Coverage | None = None
    """Of intervals of numbers."""
    right: Tensor | None = None
    """Whether each prediction of a class is right, bool [n]."""
    uncertainty: Uncertainty | None = None
    """Of classes, for methods with a posterior, or an ensemble."""
    std: Tensor | None = None
    """Of numbers, standard deviation of each prediction in the unit of the target, [n, columns]."""
    between: Tensor | None = None
    """The part of it that is between draws, for methods with several."""


@torch.no_grad()
def examine(
    likelihood: Likelihood,
    tests: Iterable[tuple[Callable[[Tensor], Tensor], Samples]],
    measures: Collection[str] = (),
) -> Trust | None:
    """Predict samples and compare with their targets, in all that the likelihood can tell.

    Args:
        likelihood: of the targets.
        tests: models as inputs [n, ...] to outputs [draws, n, width], and samples of each; where
            the likelihood couples samples, those of one client.
        measures: names of metrics beside its own, as `measures.fitting` gives them.

    Returns:
        Of all samples together, on the CPU; None if there are none.
    """
    gathered: dict[str, list[Tensor]] = defaultdict(list)
    for draw, samples in tests:
        outputs: Iterator[tuple[Tensor, Tensor]] = (
            (draw(piece.x), piece.y) for piece in _pieces(samples)
        )
        if likelihood.coupled and len(samples.y):
            outputs = iter([(torch.cat([draws for draws, _ in outputs], dim=1), samples.y)])
        for draws, y in outputs:
            needed = predictions(likelihood, measures, draws, y)
            for name, values in (_measured(likelihood, draws, y) | needed).items():
                gathered[name].append(values.cpu())
    if not gathered:
        return None
    found, needed = parted({name: torch.cat(parts) for name, parts in gathered.items()})
    told = _joined(likelihood, found)
    return replace(told, metrics=told.metrics | measured(measures, needed))


def _pieces(samples: Samples) -> Iterator[Samples]:
    for start in range(0, len(samples.y), PIECE):
        yield Samples(samples.x[start : start + PIECE], samples.y[start : start + PIECE])


def _measured(likelihood: Likelihood, draws: Tensor, y: Tensor) -> Tensors:
    """What is known of each prediction, [n, ...] by name; terms of scores among it."""
    found = dict(likelihood.terms(draws, y))
    several = len(draws) > 1
    match likelihood:
        case Classes():
            found["right"] = found["correct"] > 0
            found["finite"] = found["confidence"] > 0
            found["class"] = likelihood.log_probabilities(draws).argmax(dim=-1)
            if several:
                found |= vars(likelihood.uncertainty(draws))
        case Numeric():
            found["mean"] = likelihood.mean(draws)
            ends = [likelihood.interval(draws, level) for level in likelihood.interval_levels]
            if ends:
                inside = [(low <= y) & (y <= high) for low, high in ends]
                found["interval_inside"] = torch.stack(inside, dim=-1)
                found["interval_width"] = torch.stack([high - low for low, high in ends], dim=-1)
            if isinstance(likelihood, Parametric):
                std = likelihood.std(draws)
                found["std"] = std.total
                if several:
                    found["between"] = std.between
        case _ if likelihood.target.kind == "labels":
            p, told = likelihood.mean(draws), finite(draws)[:, None]
            found["label_confidence"] = torch.where(told, torch.maximum(p, 1 - p), 0.0)
            found["label_right"] = ((p > 0.5) == (y > 0.5)) & told
    return found | {"true": y}


def _joined(likelihood: Likelihood, found: Tensors) -> Trust:
    """What all predictions together come to."""
    metrics = likelihood.metrics(total({n: t for n, t in found.items() if t.ndim == 1}))
    calibration, coverage, uncertainty = None, None, None
    match likelihood:
        case Classes():
            calibration = calibrate(found["confidence"], found["right"])
            if "entropy" in found:
                uncertainty = Uncertainty(found["entropy"], found["information"])
        case Numeric() if "interval_inside" in found:
            inside = found["interval_inside"].flatten(0, 1).double()
            coverage = Coverage(
                likelihood.interval_levels,
                tuple(inside.mean(dim=0).tolist()),
                tuple(map(tuple, found["interval_width"].median(dim=0).values.T.tolist())),
                len(inside),
            )
        case _ if "label_right" in found:
            certain, right = found["label_confidence"], found["label_right"]
            calibration = calibrate(certain.flatten(), right.flatten())
    return Trust(
        metrics,
        likelihood.target,
        found["true"],
        found.get("class", found.get("mean")),
        calibration=calibration,
        coverage=coverage,
        finite=found.get("finite"),
        right=found.get("right"),
        uncertainty=uncertainty,
        std=found.get("std"),
        between=found.get("between"),
    )
