"""How far predictions can be trusted: calibration of probabilities, coverage of intervals."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedbayes.core.brief import Brief
from fedbayes.core.metrics import (
    Calibration,
    Confidences,
    Coverage,
    Uncertainty,
    calibrate,
    uncertainty,
)
from fedbayes.core.targets import Target
from fedbayes.core.tensors import Samples, Tensors
from fedbayes.likelihoods.base import Classes, Likelihood, finite
from fedbayes.likelihoods.evaluation import parted, total
from fedbayes.likelihoods.measures import measured, predictions
from fedbayes.likelihoods.numeric import Numeric, Parametric
from fedbayes.likelihoods.temperature import at_temperature

PIECE = 500
"""Samples that are predicted at a time."""
_UNSURE = "unsure/"
"""Before the names of `uncertain` among what is gathered."""


@dataclass(frozen=True, repr=False)
class Trust(Brief):
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
    std: Tensor | None = None
    """Of numbers, standard deviation of each prediction in the unit of the target, [n, columns]."""
    between: Tensor | None = None
    """The part of it that is between draws, for methods with several."""
    confidences: Confidences | None = None
    """Of classes, the predictions counted by their confidence."""
    unsure: Tensors = field(default_factory=dict)
    """How uncertain each prediction is, [n] by name, as `uncertain` gives it."""
    temperature: float | None = None
    """That probabilities are at; None: as the model gives them."""

    @property
    def uncertainty(self) -> Uncertainty | None:
        """Of classes, for methods with a posterior, or an ensemble."""
        if self.right is None or "information" not in self.unsure:
            return None
        return Uncertainty(self.unsure["entropy"], self.unsure["information"])


@torch.no_grad()
def examine(
    likelihood: Likelihood,
    tests: Iterable[tuple[Callable[[Tensor], Tensor], Samples]],
    measures: Collection[str] = (),
    temperature: float | None = None,
) -> Trust | None:
    """Predict samples and compute all metrics of the likelihood.

    Args:
        likelihood: of the targets.
        tests: models as inputs [n, ...] to outputs [draws, n, width], and samples of each; where
            the likelihood couples samples, those of one client.
        measures: names of metrics in addition to its own, as `measures.fitting` gives them.
        temperature: of probabilities; None: as they are. It does not change the uncertainty of
            predictions, nor the part of it between draws.

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
            extra = {f"{_UNSURE}{name}": of for name, of in unsure(likelihood, draws).items()}
            if temperature is not None:
                draws = at_temperature(likelihood, draws.double(), temperature)
            extra |= predictions(likelihood, measures, draws, y)
            for name, values in (_measured(likelihood, draws, y) | extra).items():
                gathered[name].append(values.cpu())
    if not gathered:
        return None
    found, needed = parted({name: torch.cat(parts) for name, parts in gathered.items()})
    told = _joined(likelihood, found)
    metrics = told.metrics | measured(measures, needed)
    return replace(told, metrics=metrics, temperature=temperature)


@torch.no_grad()
def unsure(likelihood: Likelihood, draws: Tensor) -> Tensors:
    """Uncertainty of predictions, [n] by name; empty for times of events.

    Of classes `entropy`, of the mean prediction in nats, and under several draws `information`, the
    mutual information of class and draw; of labels their sums over labels. Of numbers `std`, the
    standard deviation in units of the target's own, the mean over columns, and under several draws
    `std_between`, the part between them. Infinite where an output is not finite.

    Args:
        likelihood: of the outputs.
        draws: outputs under draws from a posterior, [draws, n, width].
    """
    several, told = len(draws) > 1, finite(draws)
    match likelihood:
        case Classes():
            told = likelihood.told(draws)
            found = vars(likelihood.uncertainty(draws.double()))
        case Parametric():
            std, scale = likelihood.std(draws.double()), likelihood.target.scale
            unit = torch.tensor(scale or (1.0,) * likelihood.target.columns).to(std.total)
            found = {
                "std": (std.total / unit).mean(dim=-1),
                "std_between": (std.between / unit).mean(dim=-1),
            }
        case _ if likelihood.target.kind == "labels":
            p = torch.stack([likelihood.mean(draw[None]) for draw in draws.double()])
            coins = torch.stack([p, 1 - p], dim=-1).log()
            each = uncertainty(coins.flatten(1, 2))
            shape = p.shape[1:]
            found = {name: values.reshape(shape).sum(dim=-1) for name, values in vars(each).items()}
        case _:
            return {}
    kept = list(found)[: 2 if several else 1]
    return {name: torch.where(told, found[name].double(), torch.inf) for name in kept}


def _pieces(samples: Samples) -> Iterator[Samples]:
    for start in range(0, len(samples.y), PIECE):
        yield Samples(samples.x[start : start + PIECE], samples.y[start : start + PIECE])


def _measured(likelihood: Likelihood, draws: Tensor, y: Tensor) -> Tensors:
    """What is known of each prediction, [n, ...] by name; terms of scores among it."""
    found = dict(likelihood.terms(draws, y))
    match likelihood:
        case Classes():
            found["right"] = found["correct"] > 0
            found["finite"] = found["confidence"] > 0
            found["class"] = likelihood.log_probabilities(draws).argmax(dim=-1)
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
                if len(draws) > 1:
                    found["between"] = std.between
        case _ if likelihood.target.kind == "labels":
            p, told = likelihood.mean(draws), finite(draws)[:, None]
            found["label_confidence"] = torch.where(told, torch.maximum(p, 1 - p), 0.0)
            found["label_right"] = ((p > 0.5) == (y > 0.5)) & told
    return found | {"true": y}


def _joined(likelihood: Likelihood, found: Tensors) -> Trust:
    """What all predictions together come to."""
    terms = {n: t for n, t in found.items() if t.ndim == 1 and not n.startswith(_UNSURE)}
    metrics = likelihood.metrics(total(terms))
    calibration, coverage, confidences = None, None, None
    match likelihood:
        case Classes():
            calibration = calibrate(found["confidence"], found["right"])
            confidences = Confidences.of(found["confidence"], found["right"])
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
        std=found.get("std"),
        between=found.get("between"),
        confidences=confidences,
        unsure={
            name.removeprefix(_UNSURE): values
            for name, values in found.items()
            if name.startswith(_UNSURE)
        },
    )
