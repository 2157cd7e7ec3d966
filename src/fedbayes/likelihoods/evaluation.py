"""How good predictions are: terms of single samples, and the scores that they add up to."""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from fedbayes.core.tensors import Samples, Tensors
from fedbayes.likelihoods.base import Classes, Likelihood, example_scores
from fedbayes.likelihoods.measures import PREDICTION, SCORE, measured, predictions

Scores = dict[str, float]
"""Sums over samples by name, `count` among them; those of several sets of samples add."""


@torch.no_grad()
def evaluate(
    likelihood: Likelihood,
    draw: Callable[[Tensor], Tensor],
    samples: Samples,
    batch_size: int = 1000,
    measures: Collection[str] = (),
    sizes: Sequence[int] = (),
) -> Tensors:
    """Predict samples batch by batch and compare with their targets.

    Args:
        likelihood: of the targets.
        draw: inputs [n, ...] to outputs [draws, n, width].
        samples: to be predicted; on the device of the network.
        batch_size: samples that are predicted at a time.
        measures: names of metrics that need more than sums, as `measures.fitting` gives them.
        sizes: numbers of samples of each client, one client after the other; all are of one
            without. They count where the likelihood couples samples.

    Returns:
        What each sample adds to the scores, float64 [n] by name (`Likelihood.terms`), and what
        the measures need of it (`measures.predictions`), on the CPU; nothing if there are no
        samples.
    """

    def piece(draws: Tensor, y: Tensor) -> Tensors:
        return likelihood.terms(draws, y) | predictions(likelihood, measures, draws, y)

    if not len(samples.y):
        return {}
    if likelihood.coupled:
        parts = [*sizes] or [len(samples.y)]
        outputs = [draw(batch.x) for batch in samples.batches(batch_size)]
        split = torch.split(torch.cat(outputs, dim=1), parts, dim=1)
        each = zip(split, torch.split(samples.y, parts), strict=True)
        pieces = [piece(draws, y) for draws, y in each if len(y)]
    else:
        batches = samples.batches(batch_size)
        pieces = [piece(draw(batch.x), batch.y) for batch in batches]
    return {name: torch.cat([piece[name] for piece in pieces]).cpu() for name in pieces[0]}


Predictor = Callable[[Tensor], Tensor]
"""Inputs [n, ...] to predictions: log-probabilities [n, classes]; or means [n, columns] in the unit
of the target, probabilities where it is labels."""


def predictor(likelihood: Likelihood, draw: Callable[[Tensor], Tensor]) -> Predictor:
    """What the draws of a model predict, all of them together.

    Args:
        likelihood: of the targets.
        draw: inputs [n, ...] to outputs [draws, n, width].
    """
    if isinstance(likelihood, Classes):
        return lambda x: likelihood.log_probabilities(draw(x))
    return lambda x: likelihood.mean(draw(x))


def score_names(likelihood: Likelihood) -> frozenset[str]:
    """Names of the scores of a likelihood."""
    return frozenset(example_scores(likelihood))


def scored(
    likelihood: Likelihood,
    draw: Callable[[Tensor], Tensor],
    samples: Samples,
    measures: Collection[str],
) -> Scores:
    """A client's scores of a model: sums of terms, and each metric of `measures` on these samples
    as `metric/NAME`, NaN if undefined. Arguments as for `evaluate`.
    """
    terms, columns = parted(evaluate(likelihood, draw, samples, measures=measures))
    values = measured(measures, columns)
    return total(terms) | {f"{SCORE}{name}": value for name, value in values.items()}


def parted(columns: Tensors) -> tuple[Tensors, Tensors]:
    """What `evaluate` gives, as terms of scores and as what metrics need of predictions."""
    needed = {name: values for name, values in columns.items() if name.startswith(PREDICTION)}
    return {name: values for name, values in columns.items() if name not in needed}, needed


def total(terms: Tensors) -> Scores:
    """The scores that terms add up to; nothing if there are none."""
    return {name: float(values.sum()) for name, values in terms.items()}
