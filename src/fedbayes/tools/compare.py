"""Models from files on test data: each alone, their average, their ensembles."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedbayes import models as networks
from fedbayes.contracts import point_predictor
from fedbayes.data import Preprocessing
from fedbayes.data.differences import SCALE, differences
from fedbayes.errors import FedbayesWarning, ModelError
from fedbayes.fusion import Layers, coordinate_average
from fedbayes.metrics import Predictor, evaluate
from fedbayes.models import (
    ModelSettings,
    dense_layers,
    named_as,
    read_program,
    relu_network,
    unlike,
)
from fedbayes.runs.card import Card
from fedbayes.runs.config import Config
from fedbayes.tensors import Tensors, parameter_count
from fedbayes.tools.evaluation_set import EvaluationSet, is_program, trained_in
from fedbayes.tools.model_files import read_with_card


@dataclass(frozen=True)
class Score:
    """How one predictor did on the test samples."""

    name: str
    accuracy: float
    nll: float
    """Mean negative log-likelihood, in nats."""
    parameters: int
    """Scalars that a prediction needs."""
    rows: int
    """Samples that it was tried on."""
    standardized: str
    """By whose numbers they were standardized."""


@dataclass(frozen=True)
class Candidate:
    """A model to try."""

    predict: Predictor
    """Of raw samples."""
    parameters: int
    preprocessing: Preprocessing
    """What its network sees."""
    standardized: str
    layers: Layers | None = None
    """Of a fully connected ReLU network."""
    weights: Tensors | None = None
    """Of another network, and the predictor of raw samples that other weights are."""
    rebuild: Callable[[Tensors], Predictor] | None = None


def open_model(
    path: Path, tests: EvaluationSet, settings: ModelSettings | None = None
) -> Candidate:
    """A model from a file.

    Args:
        path: weights, or a `.pt2` program.
        tests: what it will be tried on.
        settings: its network, in place of the one that its card names.

    Raises:
        ModelError: it cannot be read, or is not of this network.
    """
    name = str(path)
    if is_program(path):
        return _program(path, tests)
    stored, card = read_with_card(path)
    weights = {n: t.float() if t.is_floating_point() else t for n, t in stored.items()}
    _refuse_own_order(card, name)
    preprocessing, whose = tests.preprocessing, tests.standardized
    if card is not None:
        preprocessing, whose = card.preprocessing, trained_in(name)
    count = parameter_count(weights)
    given = settings
    if settings is None and card is not None and card.model:
        settings = ModelSettings.model_validate(card.model)
    if settings is None and tests.model is not None and tests.model.name != "mlp":
        settings = tests.model
    if settings is None:
        layers = dense_layers(weights, name)
        predict = _raw(partial(relu_network, layers), preprocessing)
        return Candidate(predict, count, preprocessing, whose, layers)
    network = networks.build(settings, preprocessing.shape, len(preprocessing.classes), seed=0)
    wanted = network.whole(network.initial)
    named = named_as(weights, wanted)
    cut = settings.name == "mlp" or (card is not None and given is None)
    if named is not None and not cut and _shapes(named) != _shapes(wanted):
        named = None  # as of LeNet-5 and of another network of as many layers
    network.adopt(weights if named is None else named)
    if named is not None and (given is not None or card is None or card.client):

        def rebuild(tensors: Tensors) -> Predictor:
            own = networks.build(settings, preprocessing.shape, len(preprocessing.classes), seed=0)
            own.adopt(tensors)
            return _raw(point_predictor(tensors, own), preprocessing)
    elif card is not None and given is None:
        method = Config.create(method=card.method).build_method()

        def rebuild(tensors: Tensors) -> Predictor:
            return _raw(method.predict(tensors, network), preprocessing)
    else:
        raise ModelError(
            f"{name} holds no weights of model {settings.name!r}: {unlike(weights, wanted)}"
        )
    named = weights if named is None else named
    predict = rebuild(named)
    try:
        with torch.no_grad():
            predict(preprocessing.example(2, torch.Generator().manual_seed(0)))
    except (KeyError, RuntimeError, IndexError) as error:
        raise ModelError(
            f"{name} does not fit model {settings.name!r}: {str(error).splitlines()[0]}. Weights "
            "that were cut (--compact) may fit no longer; a .pt2 does"
        ) from None
    plain = named.keys() == wanted.keys()
    if plain and settings.name == "mlp":
        return Candidate(predict, count, preprocessing, whose, dense_layers(named, name))
    mixed = (named, rebuild) if plain else (None, None)
    return Candidate(predict, count, preprocessing, whose, None, *mixed)


def _refuse_own_order(card: Card | None, name: str) -> None:
    """See that a model sees pixels in the data's order.

    Raises:
        ModelError: it is a client's, which has an order of its own.
    """
    if card is not None and card.client and card.preprocessing.permuted:
        raise ModelError(
            f"{name} is the own network of client {card.client}, which sees pixels in an order of "
            "its own; try it on that client's samples: fedbayes calibrate RUN --client "
            f"{card.client}"
        )


def _shapes(weights: Tensors) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in weights.items()}


def _raw(predict: Predictor, preprocessing: Preprocessing) -> Predictor:
    """A predictor of raw samples."""
    return lambda x: predict(preprocessing.apply(x))


def _program(path: Path, tests: EvaluationSet) -> Candidate:
    """A program, which takes raw samples if it has a card."""
    module, text = read_program(path)
    size = sum(parameter.numel() for parameter in module.parameters())
    card = Card.load(text, str(path)) if text else None
    _refuse_own_order(card, str(path))
    if card is None:
        seen, predict, whose = (
            tests.preprocessing,
            _raw(module, tests.preprocessing),
            tests.standardized,
        )
    else:
        seen, predict, whose = card.preprocessing, module, trained_in(str(path))
    logits: object = None
    reason = ""
    try:
        with torch.no_grad():
            logits = predict(seen.example(2, torch.Generator().manual_seed(0)))
    except Exception as error:  # a program's own, of any class
        reason = f": {(str(error).strip() or type(error).__name__).splitlines()[0]}"
    shape = (2, len(seen.classes))
    if not isinstance(logits, Tensor) or tuple(logits.shape) != shape:
        raise ModelError(
            f"{path} gives no logits of {shape[1]} classes for samples of shape "
            f"({', '.join(map(str, ('n', *seen.shape)))}) and type float32{reason}"
        )
    return Candidate(predict, size, seen, whose)


def compare(
    models: Mapping[str, Candidate],
    tests: EvaluationSet,
    *,
    inputs: Sequence[str] = (),
    counts: npt.NDArray[np.int64] | None = None,
) -> list[Score]:
    """Accuracy of models on test samples.

    Args:
        models: by name.
        tests: the samples.
        inputs: names of those models that were fused: their average (where their shapes agree)
            and their ensemble (the mean of their softmaxes) are tried as well.
        counts: training samples of each input and class [S, K]; with them, an ensemble weighted
            by class share too: p_k ∝ Σ_s (N_sk / Σ_s N_sk) p_sk.

    Raises:
        ModelError: a model does not fit the data, or the counts do not fit the inputs.
    """
    if not len(tests.samples.y):
        raise ModelError(f"there is nothing to try the models on: {tests.what}")
    classes = len(tests.preprocessing.classes)
    for name, model in models.items():
        _check(name, model, tests)
    fused = [models[name] for name in inputs]
    if counts is not None and counts.shape != (len(fused), classes):
        raise ModelError(
            f"the counts are of shape {counts.shape}; {(len(fused), classes)} is wanted: a row "
            "for each input model, a column for each class"
        )
    candidates = {
        name: (model.predict, model.parameters, model.standardized)
        for name, model in models.items()
    }
    if fused:
        alike = all(one.preprocessing.same_inputs(fused[0].preprocessing) for one in fused)
        whose = fused[0].standardized if alike else "each by its own"
        average = _average(fused) if alike else None
        if average is not None:
            candidates["average of the inputs"] = (average, fused[0].parameters, whose)
        size = sum(model.parameters for model in fused)
        uniform = torch.ones(len(fused), classes)
        alone = [model.predict for model in fused]
        candidates["ensemble, uniform"] = (ensemble(alone, uniform), size, whose)
        if counts is not None:
            shares = torch.as_tensor(counts / np.maximum(counts.sum(0), 1), dtype=torch.float32)
            candidates["ensemble, by class share"] = (ensemble(alone, shares), size, whose)
    scores = []
    for name, (predict, parameters, whose) in candidates.items():
        found = evaluate(predict, tests.samples)
        accuracy, nll = found.correct / found.count, found.nll / found.count
        scores.append(Score(name, accuracy, nll, parameters, found.count, whose))
    return scores


def _check(name: str, model: Candidate, tests: EvaluationSet) -> None:
    """See that a model fits the samples, and say where it sees others than they.

    Raises:
        ModelError: it does not.
    """
    here, own = tests.preprocessing, model.preprocessing
    for what, then, now in differences(own, here):
        if what != SCALE:  # of which the next lines tell
            raise ModelError(f"{name} was trained on {what} {then}; the samples have {now}")
    if not own.same_inputs(here):
        warnings.warn(
            f"{name} is tried as it was trained, on samples standardized by other numbers than "
            f"those {tests.standardized.removeprefix('by ')}",
            FedbayesWarning,
            stacklevel=3,
        )
    if model.layers is not None:
        shape = (prod(here.shape), len(here.classes))
        fits = (model.layers[0].weight.shape[1], len(model.layers[-1].weight))
        if fits != shape:
            raise ModelError(
                f"{name} maps {fits[0]} inputs to {fits[1]} classes, "
                f"{here.dataset} has {shape[0]} and {shape[1]}"
            )


def _average(models: Sequence[Candidate]) -> Predictor | None:
    """The mean weight by weight; None where networks differ."""
    layers = [model.layers for model in models if model.layers is not None]
    if len(layers) == len(models):
        average = coordinate_average(layers)
        if average is None:
            return None
        return _raw(partial(relu_network, average), models[0].preprocessing)
    weights = [model.weights for model in models if model.weights is not None]
    shapes = [_shapes(one) for one in weights]
    rebuild = models[0].rebuild
    if rebuild is None or len(weights) < len(models) or any(one != shapes[0] for one in shapes):
        return None
    return rebuild(
        {
            name: torch.stack([one[name].double() for one in weights]).mean(0).to(tensor.dtype)
            for name, tensor in weights[0].items()
        }
    )


def ensemble(models: Sequence[Predictor], shares: Tensor) -> Predictor:
    """Mean of the softmaxes, class k of model s weighted by shares[s, k]."""

    def predict(x: Tensor) -> Tensor:
        total = torch.stack(
            [
                share * predict(x).softmax(dim=-1)
                for predict, share in zip(models, shares, strict=True)
            ]
        ).sum(dim=0)
        return total.clamp_min(torch.finfo(total.dtype).tiny).log()

    return predict
