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
from pydantic import ValidationError
from torch import Tensor

from fedbayes import models as networks
from fedbayes.contracts import point_predictor
from fedbayes.data import Dataset, DataSettings, Preprocessing, load_dataset
from fedbayes.data.wording import listed, size
from fedbayes.errors import ConfigError, DataError, FedbayesWarning, ModelError
from fedbayes.experiment.build import build_data, stored_data
from fedbayes.experiment.card import Card
from fedbayes.experiment.config import Config
from fedbayes.experiment.record import RunFolder
from fedbayes.fusion import Layers, coordinate_average
from fedbayes.metrics import Predictor, evaluate
from fedbayes.models import (
    PROGRAMS,
    ModelSettings,
    dense_layers,
    named_as,
    read_model,
    read_program,
    relu_network,
)
from fedbayes.tensors import Samples, Tensors, parameter_count


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
class EvaluationSet:
    """Samples to try models on."""

    samples: Samples
    """As the data set has them."""
    what: str
    """How many of what."""
    preprocessing: Preprocessing
    """Of models that bring none of their own; its classes are those of the labels."""
    standardized: str
    """By whose numbers that is."""
    model: ModelSettings | None = None
    """The network of models that do not say theirs, where a run is known that they are of."""


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


def find_tests(model: Path, run: Path | None, given: Sequence[str]) -> EvaluationSet:
    """The samples to try a model on.

    Args:
        model: its file, which may say what it was trained on.
        run: a run folder whose clients' test sets are used, or that says how to standardize
            other data.
        given: settings, of which those of `[data]` name the data.

    Raises:
        FedbayesError: what cannot be read, or does not fit.
    """
    keys = {entry.partition("=")[0].strip() for entry in given}
    named = bool(keys & {"data.path", "data.name"})
    if run is not None and not named:
        idle = sorted(key for key in keys if key.startswith("data.") and key != "data.dir")
        if idle:
            raise ConfigError(
                f"{idle[0]} has no effect on the test sets of {run}; name other data with "
                "--set data.path=FILE or --dataset, or leave it out"
            )
        return _of_run(run, given)
    card, source = _known(model, run)
    if card is not None and not named:
        if card.data.get("name") == "own":
            raise ConfigError(
                f"{model} was trained on data of its user's own: name what to try it on with "
                "--set data.path=FILE, or --run RUN for the test sets of a run"
            )
        given = [f"data.name={card.data.get('name')}", *given]
    config = Config.load(None, ["data.partition=iid", *given])
    if card is not None and config.data.path is not None:
        return _new_rows(config.data, config.data.path, card, source)
    return _of_set(config, card, source)


def _known(model: Path, run: Path | None) -> tuple[Card | None, str]:
    """The card that says how data are standardized, and where it is from."""
    if run is not None:
        folder = RunFolder(run)
        config = folder.config()
        preprocessing = folder.preprocessing() or stored_data(config, folder).preprocessing
        return Card.of(config, preprocessing, 0), str(run)
    text = (read_program if _is_program(model) else read_model)(model)[1]
    return (Card.load(text, str(model)), str(model)) if text else (None, "")


def _is_program(path: Path) -> bool:
    return path.suffix.lower() == PROGRAMS[0]


def _of_run(run: Path, given: Sequence[str]) -> EvaluationSet:
    """The test sets of the clients of a run."""
    folder = RunFolder(run)
    config = folder.config()
    where = [entry for entry in given if entry.partition("=")[0].strip() == "data.dir"]
    if where:
        config = Config.load(folder.config_file, where)
    data = stored_data(config, folder)
    return EvaluationSet(
        Samples(data.raw_test(0, data.test_total), data.test_union(0, data.test_total).y),
        f"{data.test_total:,} test samples of the clients of {run}",
        data.preprocessing,
        _training(str(run)),
        config.model,
    )


def _training(source: str) -> str:
    return f"by the numbers of its training, in {source}"


def _of_set(config: Config, card: Card | None, source: str) -> EvaluationSet:
    """The test part of a data set."""
    data = build_data(config)
    name = data.dataset.name if config.data.path is None else str(config.data.path)
    if data.dataset.official_train is None:
        warnings.warn(
            f"{name} has no official test part: some of its samples, drawn with seed "
            f"{config.seed}, are used, on which the models may have been trained. With --run they "
            "are tried on the test sets of a run.",
            FedbayesWarning,
            stacklevel=3,
        )
    preprocessing, whose = data.preprocessing, "by their own statistics, for the model names none"
    if card is not None:
        _fit(data.dataset, card.preprocessing, name)
        preprocessing, whose = card.preprocessing, _training(source)
    return EvaluationSet(
        Samples(data.raw_test(0, data.test_total), data.test_union(0, data.test_total).y),
        f"{data.test_total:,} of {data.dataset.samples:,} samples of {name}",
        preprocessing,
        whose,
    )


def _new_rows(settings: DataSettings, path: Path, card: Card, source: str) -> EvaluationSet:
    """All rows of a user's own data, columns and labels by the names of the training's."""
    before = card.preprocessing
    asked = settings.model_fields_set - {"name", "partition"}
    idle = sorted(asked - {"path", "dir", "label", "group", "split", "missing"})
    if idle:
        raise ConfigError(
            f"data.{idle[0]} has no effect here: all rows are used, with the features and classes "
            f"that {source} names"
        )
    read = {name: getattr(settings, name) for name in asked}
    read = {"label": before.label or "label", "missing": "impute", **read}
    if path.suffix.lower() != ".npz" and before.features:
        read["features"] = before.features
    try:
        dataset = load_dataset(DataSettings(**{**read, "classes": before.classes}))
    except ValidationError as error:
        raise ConfigError(f"data: {error.errors()[0]['msg']}") from None
    for note in dataset.notes:
        warnings.warn(note, FedbayesWarning, stacklevel=3)
    _fit(dataset, before, str(path))
    if _same(path, card):
        warnings.warn(
            f"{path} holds the very data that the model of {source} was trained on",
            FedbayesWarning,
            stacklevel=3,
        )
    first = dataset.official_train or 0
    kind = (
        f"the {dataset.samples - first:,} test rows" if first else f"all {dataset.samples:,} rows"
    )
    x, y = np.array(dataset.x[first:]), np.array(dataset.y[first:])
    samples = Samples(torch.from_numpy(x), torch.from_numpy(y))
    return EvaluationSet(samples, f"{kind.format(len(y))} of {path}", before, _training(source))


def _same(path: Path, card: Card) -> bool:
    """Whether this is the very file that a model was trained on."""
    try:
        dataset = load_dataset(DataSettings(**{**card.data, "name": "own", "path": path}))
    except (DataError, ValidationError):
        return False
    return dataset.digest == card.preprocessing.digest


def _fit(dataset: Dataset, before: Preprocessing, name: str) -> None:
    """See that a data set is of the kind that a model was trained on.

    Raises:
        ModelError: it is not.
    """
    kinds = {
        "samples of shape": (before.shape, dataset.shape),
        "samples that are divided by": ((before.scale,), (dataset.scale,)),
        "features": (before.features, dataset.features or before.features),
        "classes": (before.classes, dataset.classes),
    }
    for kind, (then, now) in kinds.items():
        if then != now:
            raise ModelError(
                f"{name} has {kind} {listed(now)}; the model was trained on {listed(then)}"
            )


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
    if _is_program(path):
        return _program(path, tests)
    weights, text = read_model(path)
    card = _card(text, name)
    preprocessing, whose = tests.preprocessing, tests.standardized
    if card is not None:
        preprocessing, whose = card.preprocessing, _training(name)
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
            return _raw(point_predictor(tensors, network), preprocessing)
    elif card is not None and given is None:
        method = Config.create(method=card.method).build_method()

        def rebuild(tensors: Tensors) -> Predictor:
            return _raw(method.predict(tensors, network), preprocessing)
    else:
        raise ModelError(
            f"{name} holds no weights of model {settings.name!r}: {_unlike(weights, wanted)}"
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


def _card(text: str, name: str) -> Card | None:
    """The card of a model, if it has one.

    Raises:
        ModelError: it is damaged, or of a model that sees pixels in an order of its own.
    """
    card = Card.load(text, name) if text else None
    if card is not None and card.client and card.preprocessing.permuted:
        raise ModelError(
            f"{name} is the own network of client {card.client}, which sees pixels in an order of "
            "its own; try it on that client's samples: fedbayes calibrate RUN --client "
            f"{card.client}"
        )
    return card


def _unlike(weights: Tensors, wanted: Tensors) -> str:
    """How names of tensors differ."""
    absent = [name for name in wanted if name not in weights]
    if absent:
        return f"it lacks {listed(absent, 3)}"
    more = [name for name in weights if name not in wanted]
    if more:
        return f"it has {listed(more, 3)} besides"
    name = next(name for name, tensor in wanted.items() if weights[name].shape != tensor.shape)
    return f"{name} is {size(weights[name].shape)}, not {size(wanted[name].shape)}"


def _shapes(weights: Tensors) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in weights.items()}


def _raw(predict: Predictor, preprocessing: Preprocessing) -> Predictor:
    """A predictor of raw samples."""
    return lambda x: predict(preprocessing.apply(x))


def _program(path: Path, tests: EvaluationSet) -> Candidate:
    """A program, which takes raw samples if it has a card."""
    module, text = read_program(path)
    size = sum(parameter.numel() for parameter in module.parameters())
    card = _card(text, str(path))
    if card is None:
        predict = _raw(module, tests.preprocessing)
        return Candidate(predict, size, tests.preprocessing, tests.standardized)
    return Candidate(module, size, card.preprocessing, _training(str(path)))


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
    if own.classes != here.classes or own.shape != here.shape or own.features != here.features:
        raise ModelError(
            f"{name} was trained on samples of shape {own.shape} and classes "
            f"{listed(own.classes)}, not on {here.shape} and {listed(here.classes)}"
            if own.features == here.features or own.shape != here.shape
            else f"{name} was trained on features {listed(own.features)}; the samples have "
            f"{listed(here.features)}"
        )
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
