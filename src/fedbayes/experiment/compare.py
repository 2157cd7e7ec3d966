"""Models from files on test data: each alone, their average, their ensembles."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedbayes.data import FederatedData
from fedbayes.errors import ModelError
from fedbayes.fusion import Layers, coordinate_average
from fedbayes.metrics import Predictor, evaluate
from fedbayes.models import relu_network


@dataclass(frozen=True)
class Score:
    """How one predictor did on the test samples."""

    name: str
    accuracy: float
    nll: float
    """Mean negative log-likelihood, in nats."""
    parameters: int
    """Scalars that a prediction needs."""


def compare(
    models: Mapping[str, Layers],
    data: FederatedData,
    *,
    inputs: Sequence[str] = (),
    counts: npt.NDArray[np.int64] | None = None,
) -> list[Score]:
    """Accuracy of models on the union of the clients' test samples.

    Args:
        models: networks by name.
        data: whose test samples.
        inputs: names of those models that were fused: their average (where their shapes agree)
            and their ensemble (the mean of their softmaxes) are tried as well.
        counts: training samples of each input and class [S, K]; with them, an ensemble weighted
            by class share too: p_k ∝ Σ_s (N_sk / Σ_s N_sk) p_sk.

    Raises:
        ModelError: a model does not fit the data, or the counts do not fit the inputs.
    """
    shape = (prod(data.shape), len(data.classes))
    for name, layers in models.items():
        fits = (layers[0].weight.shape[1], len(layers[-1].weight))
        if fits != shape:
            raise ModelError(
                f"{name} maps {fits[0]} inputs to {fits[1]} classes, "
                f"{data.dataset.name} has {shape[0]} and {shape[1]}"
            )
    fused = [models[name] for name in inputs]
    if counts is not None and counts.shape != (len(fused), shape[1]):
        raise ModelError(
            f"the counts are of shape {counts.shape}; {(len(fused), shape[1])} is wanted: a row "
            "for each input model, a column for each class"
        )
    candidates = {name: (_alone(layers), _size(layers)) for name, layers in models.items()}
    if fused:
        average = coordinate_average(fused)
        if average is not None:
            candidates["average of the inputs"] = (_alone(average), _size(average))
        size = sum(_size(layers) for layers in fused)
        uniform = torch.ones(len(fused), shape[1])
        candidates["ensemble, uniform"] = (ensemble(fused, uniform), size)
        if counts is not None:
            shares = torch.as_tensor(counts / np.maximum(counts.sum(0), 1), dtype=torch.float32)
            candidates["ensemble, by class share"] = (ensemble(fused, shares), size)
    samples = data.test_union(0, data.test_total)
    scores = []
    for name, (predict, parameters) in candidates.items():
        found = evaluate(predict, samples)
        accuracy, nll = found.correct / found.count, found.nll / found.count
        scores.append(Score(name, accuracy, nll, parameters))
    return scores


def _size(layers: Layers) -> int:
    return sum(
        layer.weight.numel() + (0 if layer.bias is None else layer.bias.numel()) for layer in layers
    )


def _alone(layers: Layers) -> Predictor:
    return lambda x: relu_network(layers, x)


def ensemble(models: Sequence[Layers], shares: Tensor) -> Predictor:
    """Mean of the softmaxes, class k of model s weighted by shares[s, k]."""

    def predict(x: Tensor) -> Tensor:
        total = torch.stack(
            [
                share * relu_network(layers, x).softmax(dim=-1)
                for layers, share in zip(models, shares, strict=True)
            ]
        ).sum(dim=0)
        return total.clamp_min(torch.finfo(total.dtype).tiny).log()

    return predict
