"""Models from files on test data: each alone, their average, their ensembles."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedbayes import models as networks
from fedbayes.config.config import Config
from fedbayes.contracts import Sampler, single_draw
from fedbayes.core.targets import Target
from fedbayes.core.tensors import PREDICTED, Samples, Tensors, parameter_count
from fedbayes.core.wording import describe, listed, size
from fedbayes.data import Preprocessing
from fedbayes.data.differences import SCALE, differences
from fedbayes.errors import ConfigError, DataError, ModelError, warn
from fedbayes.fusion import Layers, combination
from fedbayes.fusion.class_counts import class_shares
from fedbayes.fusion.combining import combine
from fedbayes.fusion.function import teacher_of
from fedbayes.inputs import Inputs
from fedbayes.likelihoods import Likelihood, Predictor, evaluate, parted, predictor, total
from fedbayes.likelihoods.categorical import Categorical
from fedbayes.likelihoods.cox import Cox
from fedbayes.likelihoods.gaussian import Gaussian
from fedbayes.likelihoods.measures import AUTO, check_names, fitting, measured
from fedbayes.likelihoods.multilabel import Multilabel
from fedbayes.likelihoods.temperature import sampled_at
from fedbayes.models import (
    ModelSettings,
    Network,
    dense_layers,
    read_program,
    relu_network,
)
from fedbayes.models.files import single
from fedbayes.models.open import absent_classes, open_weights
from fedbayes.runs.build import build_run
from fedbayes.runs.trained import joined
from fedbayes.storage.card import Card
from fedbayes.workflows.fuse.network_fusing import drawn_for
from fedbayes.workflows.fuse.posterior_files import is_posterior, read_posterior
from fedbayes.workflows.serve.evaluation_set import (
    EvaluationSet,
    is_program,
    refuse_own_order,
    require_answers,
    stated,
    trained_in,
)
from fedbayes.workflows.serve.inputs_told import InputsTold
from fedbayes.workflows.serve.model_files import read_with_card
from fedbayes.workflows.serve.output_order import warn_of_order

_TRIED = 5000
"""Samples by which the order of outputs is checked."""
UNIFORM = "ensemble, uniform"
"""The mean of the predictive distributions of models."""


@dataclass(frozen=True)
class Score:
    """How one predictor did on the test samples."""

    name: str
    metrics: dict[str, float]
    """Those of its likelihood, the headline first."""
    parameters: int
    """Scalars that a prediction needs."""
    rows: int
    """Samples that it was tried on."""
    standardized: str
    """By whose numbers they were standardized."""
    clients: dict[str, dict[str, float]] = field(default_factory=dict)
    """Its metrics on the rows of each client, by name, where it is known whose rows they are."""
    note: str = ""
    """What a user should know of it."""


@dataclass(frozen=True)
class Candidate:
    """A model to try."""

    draw: Sampler
    """Raw samples [n, ...] to outputs [draws, n, width]."""
    likelihood: Likelihood
    """What the outputs mean."""
    parameters: int
    preprocessing: Preprocessing
    """What its network sees."""
    standardized: str
    layers: Layers | None = None
    """Of a fully connected ReLU network."""
    weights: Tensors | None = None
    """Of another network, and what `draw` is under other weights."""
    rebuild: Callable[[Tensors], Sampler] | None = None
    means: bool = False
    """Whether it gives predictive means alone, which have no likelihood."""
    temperature: float | None = None
    """Of its probabilities, which `draw` is without; None where there is none."""
    note: str = ""
    """What a user should know of it."""
    unnamed: bool = False
    """Whether its file does not say which output is of which class."""


def open_models(
    paths: Sequence[Path], tests: EvaluationSet, settings: ModelSettings | None = None
) -> dict[str, Candidate]:
    """Models from files, by path; arguments and errors as for `open_model`.

    Raises:
        ConfigError: a user stated a mean or standard deviation, and all files say their own.
    """
    found = {str(path): open_model(path, tests, settings) for path in paths}
    beside = tests.silent not in (None, tests.preprocessing)  # a card that says other numbers
    if beside and all(model.preprocessing != tests.silent for model in found.values()):
        raise ConfigError(
            "--mean and --std have no effect: the models describe their standardization. Leave "
            "them out"
        )
    return found


def open_model(
    path: Path, tests: EvaluationSet, settings: ModelSettings | None = None
) -> Candidate:
    """A model from a file, with the temperature that its posterior or its card tells.

    Args:
        path: weights, or a `.pt2` program.
        tests: what it will be tried on.
        settings: its network, instead of the one that its card names.

    Raises:
        ModelError: it cannot be read, or is not of this network.
    """
    if is_program(path):
        return _program(path, tests)
    stored, card = read_with_card(path, tests.trusted)
    found = _of_weights(str(path), stored, card, tests, settings)
    found = replace(found, unnamed=card is None or card.by_hand)
    if is_posterior(path) and (sent := read_posterior(path)[0].temperature) is not None:
        return replace(found, temperature=sent)
    return found if card is None else replace(found, temperature=card.temperature)


def _of_weights(
    name: str,
    stored: Tensors,
    card: Card | None,
    tests: EvaluationSet,
    settings: ModelSettings | None,
) -> Candidate:
    """A model of such weights; arguments as for `open_model`."""
    weights = single(stored)
    refuse_own_order(card, name)
    if card is not None and settings is not None and ":" in settings.name:
        # Its name alone says no more than that the card's own network may be imported.
        card = replace(card, trusted=card.trusted | {settings.name})
        if settings.only_named and card.model.get("name") == settings.name:
            settings = None
    preprocessing, whose, likelihood = _seen(card, name, tests)
    count = parameter_count(weights)
    given = settings
    if settings is None and card is not None:
        settings = card.network()
    if settings is None and tests.model is not None and tests.model.name != "mlp":
        settings = tests.model
    if settings is None:
        layers = dense_layers(weights, name)
        return Candidate(
            _dense(layers, preprocessing), likelihood, count, preprocessing, whose, layers
        )
    frozen = None if card is None else card.frozen
    opened = open_weights(weights, settings, preprocessing.shape, likelihood, name, frozen=frozen)
    network, weights, named = opened.network, opened.weights, opened.named
    wanted = network.start
    cut = settings.name == "mlp" or (card is not None and given is None)
    if not cut and not opened.fits:
        named = None  # as of LeNet-5 and of another network of as many layers
    network.adopt(weights if named is None else named)
    rebuild: Callable[[Tensors], Sampler]
    if named is not None and (given is not None or card is None or card.client or card.fused):
        rebuild = partial(_network_draws, settings, preprocessing, likelihood)
    elif card is not None and given is None:
        rebuild = partial(_method_draws, card, network, preprocessing, likelihood)
    else:
        raise replace(opened, named=None).unlike()
    named = weights if named is None else named
    count = parameter_count(network.parameters(named))
    draw = rebuild(named)
    _try_out(draw, preprocessing, name, settings)
    plain = named.keys() == wanted.keys()
    if plain and settings.name == "mlp" and settings.hidden and likelihood.head() is None:
        layers = dense_layers(named, name)
        return Candidate(draw, likelihood, count, preprocessing, whose, layers)
    mixed = (named, rebuild) if plain else (None, None)
    return Candidate(draw, likelihood, count, preprocessing, whose, None, *mixed)


def _network_draws(
    settings: ModelSettings, preprocessing: Preprocessing, likelihood: Likelihood, weights: Tensors
) -> Sampler:
    """A network with weights, of raw samples."""
    own = _network(settings, preprocessing, likelihood)
    own.adopt(weights)
    return _raw(single_draw(weights, own), preprocessing)


def _method_draws(
    card: Card,
    network: Network,
    preprocessing: Preprocessing,
    likelihood: Likelihood,
    model: Tensors,
) -> Sampler:
    """The model of the method that a card names, of raw samples."""
    card.require_trusted("method.name")
    config = Config.create(method=card.method)
    run = build_run(config, network, preprocessing, likelihood, 1)
    return _raw(config.build_method().draws(model, run), preprocessing)


def _try_out(
    draw: Sampler, preprocessing: Preprocessing, name: str, settings: ModelSettings
) -> None:
    """See that a model gives outputs."""
    try:
        with torch.no_grad():
            draw(preprocessing.example(2, torch.Generator().manual_seed(0)))
    except (KeyError, RuntimeError, IndexError) as error:
        raise ModelError(
            f"{name} does not fit model {settings.name!r}: {str(error).splitlines()[0]}. Weights "
            "of --compact may no longer fit. Use a .pt2 file"
        ) from None


def _seen(
    card: Card | None, name: str, tests: EvaluationSet
) -> tuple[Preprocessing, str, Likelihood]:
    """What a network sees of the samples, by whose numbers, and what its outputs mean."""
    here = tests.preprocessing
    if card is None:
        told = InputsTold.read(Path(name))
        unclear = tests.silent is None and not here.target.classes
        if told is None or not told.mean or unclear:
            return *tests.of_silent(name), tests.likelihood
        if told.shape and prod(told.shape) != prod(here.shape):
            raise ModelError(
                f"{name} takes inputs of {size(told.shape)}; the samples have {size(here.shape)}"
            )
        if here.target.classes and told.names != here.target.names:
            raise ModelError(
                f"{name} has the classes {listed(told.names)}; the samples have "
                f"{listed(here.target.names)}. Set data.classes to those of the model"
            )
        seen = stated(here, told.mean, told.std)
        return seen, f"as {name} says", tests.likelihood
    own = card.preprocessing
    if not card.by_hand:
        return own, trained_in(name), card.likelihood
    # Classes have the names of the samples' own, and images are brought into [0, 1] first.
    ours = own.target.names == here.target.names or _numbered(own.target.names)
    if ours and own.shape == here.shape and own.target.classes == here.target.classes:
        unit = here.scale / own.scale
        bounds = own.bounds and (own.bounds[0] * unit, own.bounds[1] * unit)
        own = replace(
            own, scale=here.scale, bounds=bounds, target=here.target, features=here.features
        )
    return own, f"as for the fusion of {name}", card.likelihood


def _numbered(names: Sequence[str]) -> bool:
    """Whether classes are called 0, 1, 2 and so on."""
    return list(names) == [str(number) for number in range(len(names))]


def _network(
    settings: ModelSettings, preprocessing: Preprocessing, likelihood: Likelihood
) -> Network:
    """The network that these settings name, for such samples."""
    return networks.build(
        settings, preprocessing.shape, likelihood.outputs, head=likelihood.head(), seed=0
    )


def _dense(layers: Layers, preprocessing: Preprocessing) -> Sampler:
    """A fully connected ReLU network of raw samples."""
    return _raw(lambda x: relu_network(layers, x)[None], preprocessing)


def _raw(draw: Sampler, preprocessing: Preprocessing) -> Sampler:
    """The same of raw samples."""
    return lambda x: draw(preprocessing.apply(x))


def _program(path: Path, tests: EvaluationSet) -> Candidate:
    """A program, which takes raw samples if it has a card."""
    module, text = read_program(path)
    size = sum(parameter.numel() for parameter in module.parameters())
    card = Card.load(text, str(path)) if text else None
    refuse_own_order(card, str(path))
    seen, whose, _ = _seen(card, str(path), tests)
    unit = card is not None and card.by_hand and seen.scale != card.preprocessing.scale

    def answer(x: Tensor) -> Tensor:
        given = seen.apply(x) if card is None else x / seen.scale if unit else x
        try:
            found: Tensor = module(given)
        except RuntimeError as error:  # such as of images that are standardized already
            said = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelError(f"{path} fails on these samples: {said}") from None
        return found

    require_answers(answer, seen, str(path))
    found = _answering(answer, size, seen, whose)
    found = replace(found, unnamed=card is None or card.by_hand)
    return found if card is None else replace(found, temperature=card.temperature)


def _answering(
    answer: Predictor, parameters: int, preprocessing: Preprocessing, standardized: str
) -> Candidate:
    """A candidate that gives log-probabilities, probabilities of labels, or means."""
    target = preprocessing.target
    draw: Sampler = lambda x: answer(x)[None]  # noqa: E731
    if target.kind == "class":
        likelihood: Likelihood = Categorical(target=target)
    elif target.kind == "labels":
        draw = lambda x: answer(x).logit(eps=1e-7)[None]  # noqa: E731
        likelihood = Multilabel(target=target)
    elif target.kind == "survival":
        likelihood = Cox(target=target)
    else:
        # In its own unit, with any noise: none is known.
        columns = target.columns
        own = Target("real", target.names, (0.0,) * columns, (1.0,) * columns)
        likelihood = Gaussian(target=own, noise=1.0)
    means = target.kind in ("real", "count")
    return Candidate(draw, likelihood, parameters, preprocessing, standardized, means=means)


def compare(
    models: Mapping[str, Candidate],
    tests: EvaluationSet,
    *,
    inputs: Sequence[str] = (),
    counts: npt.NDArray[np.int64] | None = None,
    metrics: Sequence[str] = (AUTO,),
) -> list[Score]:
    """Metrics of models on test samples.

    Args:
        models: by name.
        tests: the samples.
        inputs: names of those models that were fused: their average (where their shapes agree)
            and their ensemble (the mean of their predictive distributions) are tried as well.
        counts: training samples of each input and class [S, K], or of each input [S, 1]; by class,
            an ensemble weighted by class share too: p_k ∝ Σ_s (N_sk / Σ_s N_sk) p_sk.
            With them, or with temperatures of inputs, there is also the teacher of a fusion in
            function space (`fedbayes.fusion.teacher.Teacher`). Without both that is the ensemble.
        metrics: names of metrics in addition to a likelihood's own (`likelihoods.measures`); NaN
            where one is undefined.

    Raises:
        ModelError: a model does not fit the data, or the counts do not fit the inputs.
        ConfigError: there is no such metric, or it is not for such targets.
    """
    check_names(metrics)
    if not len(tests.samples.y):
        raise ModelError(f"there are no test samples: {tests.what}")
    target = tests.preprocessing.target
    for name, model in models.items():
        check_fits(name, model, tests)
    fused = [models[name] for name in inputs]
    if counts is not None and (
        len(counts) != len(fused) or counts.shape[1] not in {1, target.classes}
    ):
        each = f"{target.classes} numbers, one for each class, or " if target.classes else ""
        raise ModelError(
            f"the counts have shape {counts.shape}, but the target is {describe(target)}. Give a "
            f"row for each of the {len(fused)} input models, with {each}one number, its samples. "
            "Leave them out for equal weights"
        )
    candidates = dict(models)
    if fused:
        first = fused[0]
        alike = all(one.preprocessing.same_inputs(first.preprocessing) for one in fused)
        average = _average(fused, counts) if alike else None
        if average is not None:
            candidates["average of the inputs"] = replace(
                first, draw=average, layers=None, weights=None, rebuild=None, temperature=None
            )
        candidates[UNIFORM] = _ensemble(fused, alike)
        if counts is not None and counts.shape[1] > 1:
            shares = class_shares(counts)
            candidates["ensemble, by class share"] = _ensemble(fused, alike, shares)
        uniform = counts is None and all(one.temperature is None for one in fused)
        known = all(one.likelihood == first.likelihood and not one.means for one in fused)
        if target.classes or (known and not uniform):
            name = UNIFORM if uniform else "ensemble, as fuse learns it"
            try:
                candidates[name] = _taught(fused, inputs, alike, counts, mirrored=not uniform)
            except (ConfigError, DataError) as error:  # of synthetic inputs, or of log-risks
                warn(f"there is no row '{name}': {error}")
    unnamed = [name for name, one in models.items() if one.unnamed]
    odd = all(map(str.isdecimal, target.names)) and not _numbered(target.names)
    if unnamed and target.kind == "class" and odd:
        warn(
            f"{listed(unnamed, 3)}: files that do not name their classes. Outputs are read as "
            f"{listed(target.names, 12)}, in this order"
        )
    for name, one in models.items():
        doubt_order(name, one, tests)
    asked = {name: _asked(name, one, metrics) for name, one in candidates.items()}
    return [_score(name, one, tests, asked[name]) for name, one in candidates.items()]


def _asked(name: str, one: Candidate, metrics: Sequence[str]) -> tuple[str, ...]:
    """Metrics of a candidate in addition to those of its likelihood."""
    found = fitting(metrics, one.likelihood)
    if not one.means:
        return found
    if "crps" in metrics:
        raise ConfigError(
            f"metrics lists crps, but {name} gives only means, without a distribution"
        )
    return tuple(metric for metric in found if metric != "crps")


def _score(name: str, one: Candidate, tests: EvaluationSet, asked: tuple[str, ...]) -> Score:
    """The metrics of a candidate, of all rows and of each client's."""
    draw = sampled_at(one.likelihood, one.draw, one.temperature)
    found = evaluate(one.likelihood, draw, tests.samples, measures=asked, sizes=tests.sizes)

    def metrics(rows: Tensors) -> dict[str, float]:
        terms, columns = parted(rows)
        own = one.likelihood.metrics(total(terms)) | measured(asked, columns)
        return {n: value for n, value in own.items() if not (one.means and n == "nll")}

    sizes = list(tests.sizes or (len(tests.samples.y),))
    split = {column: torch.split(values, sizes) for column, values in found.items()}
    clients = {
        client: metrics({column: parts[number] for column, parts in split.items()})
        for number, client in enumerate(tests.clients)
        if tests.sizes[number]
    }
    rows = len(tests.samples.y)
    return Score(name, metrics(found), one.parameters, rows, one.standardized, clients, one.note)


def doubt_order(name: str, model: Candidate, tests: EvaluationSet) -> None:
    """Print a warning if outputs without names seem to be in another order than the classes."""
    target, samples = tests.preprocessing.target, tests.samples
    if not model.unnamed or not target.classes:
        return
    some = Samples(samples.x[:_TRIED], samples.y[:_TRIED])
    with torch.no_grad():
        says = [model.likelihood.mean(model.draw(x)).argmax(-1) for x, _ in some.batches(PREDICTED)]
    warn_of_order(name, torch.cat(says).cpu(), some.y.cpu(), target)


def check_fits(name: str, model: Candidate, tests: EvaluationSet) -> None:
    """See that a model fits the samples, and say where it sees others than they."""
    here, own = tests.preprocessing, model.preprocessing
    for what, then, now in differences(own, here):
        if what != SCALE:  # of which the next lines tell
            raise ModelError(f"{name} was trained on {what} {then}; the samples have {now}")
    if not own.same_inputs(here):
        warn(
            f"{name} has another standardization than these samples ({tests.standardized}), and is "
            "evaluated with its own"
        )
    if model.layers is not None:
        shape = (prod(here.shape), model.likelihood.outputs)
        fits = (model.layers[0].weight.shape[1], len(model.layers[-1].weight))
        if fits != shape:
            what = "classes" if here.classes else "outputs"
            raise ModelError(
                f"{name} maps {fits[0]} inputs to {fits[1]} {what}, "
                f"{here.dataset} has {shape[0]} and {shape[1]}"
                f"{absent_classes(fits[1], model.likelihood)}"
            )


def _average(models: Sequence[Candidate], counts: npt.NDArray[np.int64] | None) -> Sampler | None:
    """The mean weight by weight, by samples if known; None where networks differ."""
    samples = np.ones(len(models)) if counts is None else counts.sum(1)
    alpha = (samples / samples.sum()).tolist()
    if any(model.likelihood != models[0].likelihood for model in models):
        return None
    layers = [model.layers for model in models if model.layers is not None]
    if len(layers) == len(models):
        average = combination(layers, alpha)
        if average is None:
            return None
        return _dense(average, models[0].preprocessing)
    weights = [model.weights for model in models if model.weights is not None]
    shapes = [{name: tensor.shape for name, tensor in one.items()} for one in weights]
    rebuild = models[0].rebuild
    if rebuild is None or len(weights) < len(models) or any(one != shapes[0] for one in shapes):
        return None
    return rebuild(combine(weights, alpha))


def _ensemble(models: Sequence[Candidate], alike: bool, shares: Tensor | None = None) -> Candidate:
    """The mean of the predictive distributions, by shares [S, K] of models in classes."""
    first, size = models[0], sum(model.parameters for model in models)
    whose = _whose(models, alike)
    alone = [predictor(model.likelihood, model.draw) for model in models]
    if first.likelihood.target.classes:
        if shares is None:
            shares = torch.ones(len(models), first.likelihood.target.classes)
        return _answering(ensemble(alone, shares), size, first.preprocessing, whose)
    if any(model.means or model.likelihood != first.likelihood for model in models):
        # Their outputs are in other units, or unknown: what is left is the mean of their means.
        return _answering(
            lambda x: torch.stack([predict(x) for predict in alone]).mean(dim=0),
            size,
            first.preprocessing,
            whose,
        )

    def draw(x: Tensor) -> Tensor:
        return joined([model.draw(x) for model in models])

    return Candidate(draw, first.likelihood, size, first.preprocessing, whose)


def _taught(
    models: Sequence[Candidate],
    names: Sequence[str],
    alike: bool,
    counts: npt.NDArray[np.int64] | None,
    mirrored: bool,
) -> Candidate:
    """What a fusion in function space learns: see `fedbayes.fusion.teacher.Teacher`."""
    first, size = models[0], sum(model.parameters for model in models)
    short = [Path(name).name for name in names]
    short = short if len(set(short)) == len(names) else list(names)
    warmth, inputs = [model.temperature for model in models], _RawInputs(first.preprocessing)
    if first.likelihood.target.classes:
        alone = [predictor(model.likelihood, model.draw) for model in models]
        said = dict(zip(short, alone, strict=True))
        teacher, _ = teacher_of(said, counts, None, warmth, inputs, mirrored)
        found = _answering(teacher, size, first.preprocessing, _whose(models, alike))
        return replace(found, note=teacher.told)
    said = {name: partial(_outputs, model) for name, model in zip(short, models, strict=True)}
    teacher, _ = teacher_of(said, counts, first.likelihood, warmth, inputs)
    teacher(first.preprocessing.example(1, torch.Generator().manual_seed(0)))  # some have no mean
    draw: Sampler = lambda x: teacher(x)[None]  # noqa: E731
    whose = _whose(models, alike)
    return Candidate(draw, first.likelihood, size, first.preprocessing, whose, note=teacher.told)


def _outputs(model: Candidate, x: Tensor) -> Tensor:
    """Outputs [n, width] whose prediction is nearest to that of all draws."""
    draws = model.draw(x)
    return model.likelihood.pooled(draws, draws.new_full((len(draws),), 1 / len(draws)))


class _RawInputs:
    """Synthetic inputs of `fuse`, by its defaults, as raw samples.

    Few teachers need any, and not every network has a prior. So it is built when inputs are drawn.
    """

    def __init__(self, preprocessing: Preprocessing) -> None:
        self.preprocessing = preprocessing

    @cached_property
    def inputs(self) -> Inputs:
        """The same, as networks see them."""
        return drawn_for(self.preprocessing, None, "auto")[1]

    @property
    def mirrors(self) -> bool:
        """As `Batches.mirrors`."""
        if len(self.preprocessing.shape) != 3:
            return False
        try:
            return self.inputs.mirrors
        except ConfigError:  # no prior is like these images
            return False

    def batch(self, number: int, count: int) -> Tensor:
        """As `Batches.batch`."""
        return self.preprocessing.restored(self.inputs.batch(number, count))


def _whose(models: Sequence[Candidate], alike: bool) -> str:
    """By whose numbers the models of an ensemble standardize."""
    return models[0].standardized if alike else "each with its own"


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
