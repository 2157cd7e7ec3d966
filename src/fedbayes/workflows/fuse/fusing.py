"""Around one-shot fusion: from files to files, settings by held-out data, report, picture."""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table
from torch import Tensor

from fedbayes.core.files import write_beside
from fedbayes.core.targets import Target
from fedbayes.core.tensors import Samples
from fedbayes.core.wording import describe
from fedbayes.data.plot import save_figure
from fedbayes.errors import ConfigError, ModelError, warn
from fedbayes.fusion import Fusion, Layers, fuse_layers, fusion_settings
from fedbayes.fusion.dense import refuse_idle
from fedbayes.likelihoods import Likelihood, evaluate, total
from fedbayes.likelihoods.categorical import Categorical
from fedbayes.matching import MatchingSettings
from fedbayes.models import relu_network
from fedbayes.storage.card import Card
from fedbayes.storage.formatting import number, words
from fedbayes.workflows.fuse.job import Fused, FusionJob
from fedbayes.workflows.fuse.posterior_files import FROM_FILES, sent_counts
from fedbayes.workflows.serve.model_files import (
    read_counts,
    read_models,
    read_samples,
    write_model,
)

GRID: dict[str, tuple[float, ...]] = {
    "sigma": (1.0,),
    "sigma0": (0.6, 1.0, 3.0, 10.0),
    "gamma": (1.0, 8.0, 30.0),
    "epsilon": (0.0, 0.1, 0.3, 1.0),
}
"""Values that are tried where none are given."""


def fuse_dense(job: FusionJob, name: str, watch: Callable[[str], None], _: object) -> Fused:
    """Match or combine fully connected networks; arguments and errors as for `FusionJob.run`."""
    method = "gpi-fnm" if name == "match" else name
    settings = fusion_settings(method, job.settings)
    refuse_idle(settings, job.grid)
    if job.select is None and (job.grid or job.max_neurons):
        raise ConfigError("--grid and --max-neurons need --select FILE")
    if job.select is not None and not isinstance(settings, MatchingSettings):
        raise ConfigError(f"{method} has no settings to select")
    card = job.files.card(job.models)
    models = read_models(job.models, job.files)
    counts = _counts(job, card, by_class=isinstance(settings, MatchingSettings))
    trials: list[GridPoint] = []
    if job.select is None:
        fusion = fuse_layers(models, settings, counts=counts, seed=job.seed, watch=watch)
    else:
        fusion, trials = select(
            models,
            _samples(job.select, models, card),
            likelihood=None if card is None else card.likelihood,
            method=method,
            settings=job.settings,
            grid=job.grid,
            max_neurons=job.max_neurons,
            counts=counts,
            seed=job.seed,
            on_trial=lambda done, total: watch(f"tried {done} of {total}"),
        )
    if job.picture is not None:
        plot_fusion(fusion, job.picture)
    if job.report is not None:
        content = {**report(fusion), "trials": [trial.record() for trial in trials]}
        write_beside(job.report, json.dumps(content, indent=1).encode())
    if card is not None:
        card = replace(card.of_fused(fusion.method), model={})
    write_model(job.out, fusion.weights, card)
    return _told(job, fusion, trials)


def _told(job: FusionJob, fusion: Fusion, trials: Sequence["GridPoint"]) -> Fused:
    """What came out, in words."""
    hint = ""
    if len(fusion.sizes) > 1 and fusion.matching and not (trials or "alternations" in job.settings):
        hint = (
            "for deep networks, try --alternations 12 --epsilon 1 --sigma0 10 --gamma 30, or "
            "--select"
        )
    told = (
        f"{fusion.method}: {len(job.models)} models to one with hidden layers of "
        f"{', '.join(map(str, fusion.sizes))}, {fusion.parameters:,} parameters, in "
        f"{fusion.seconds:.2f} s\n{job.written()}"
    )
    tables = (trial_table(trials, fusion),) if trials else ()
    return Fused(summary(fusion), told, tables=tables, hint=hint)


def _counts(job: FusionJob, card: Card | None, *, by_class: bool) -> npt.NDArray[np.float64] | None:
    """Samples of each model and class, from the file of counts or else from the models'."""
    if job.counts is not None:
        target = None if card is None else card.preprocessing.target
        if target is not None and not target.classes:
            raise ModelError(
                f"--counts needs classes, but the models predict {describe(target)}. Leave it "
                "out: the models then have equal shares"
            )
        return read_counts(job.counts, job.models).astype(np.float64)
    sent = sent_counts(job.models, job.files, by_class=by_class)
    if sent is None:
        return None
    warn(FROM_FILES)
    return sent.astype(np.float64)


def _samples(path: Path, models: Mapping[str, Layers], card: Card | None) -> Samples:
    """The held-out samples as the networks see them; it is told what they were taken for."""
    # Where each client has an order of pixels of its own, no numbers give what networks see.
    raw = card is not None and not card.preprocessing.permuted
    samples = read_samples(
        path,
        card.preprocessing if card is not None and raw else None,
        None if card is None else card.preprocessing.target,
    )
    _check(models, samples, _classes(models) if card is None else card.likelihood)
    warn(
        f"the samples of {path} are read as raw samples, and standardized as in training"
        if raw
        else f"the samples of {path} are used without standardization, because the files of the "
        "models do not agree on one. Standardize them as in training"
    )
    return samples


@dataclass(frozen=True)
class GridPoint:
    """One point of a grid on held-out samples."""

    values: dict[str, float]
    """The settings that were varied."""
    sizes: list[int]
    """Neurons in each hidden layer of the fused model."""
    metrics: dict[str, float]
    """Those of the likelihood, the headline first."""
    eligible: bool
    """Whether no layer is larger than allowed."""

    def record(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "values": self.values,
            "sizes": self.sizes,
            **self.metrics,
            "eligible": self.eligible,
        }


def select(
    models: Mapping[str, Layers],
    samples: Samples,
    *,
    likelihood: Likelihood | None = None,
    method: str,
    settings: Mapping[str, Any],
    grid: Mapping[str, Sequence[float]] | None = None,
    max_neurons: int | None = None,
    counts: npt.NDArray[np.float64] | None = None,
    seed: int = 0,
    on_trial: Callable[[int, int], None] | None = None,
) -> tuple[Fusion, list[GridPoint]]:
    """Fuse at every point of a grid and keep the model that is best on held-out samples.

    Args:
        models: networks by name.
        samples: held-out data, as the networks see them; never the test set, or its metrics
            mean nothing.
        likelihood: what the outputs mean; classes, one for each output, by default.
        method: `gpi-fnm` or `pfnm`, whose ε stays 0.
        settings: the ones that stay fixed; they are not varied.
        grid: values by setting, instead of those of `GRID`.
        max_neurons: models with a larger layer than this are not chosen.
        counts: training samples of each model and class [S, K].
        seed: of the order of models in sweeps.
        on_trial: called with the number of trials done and of all.

    Returns:
        The model with the highest likelihood, of classes only among those within one standard
        error of the best accuracy; and all trials in order.

    Raises:
        ModelError: no model is small enough, or the samples do not fit the models.
        ConfigError: a setting is unknown or out of range.
    """
    likelihood = likelihood or _classes(models)
    _check(models, samples, likelihood)
    for name in grid or {}:
        if name in settings or (name == "epsilon" and method == "pfnm"):
            why = "it is set" if name in settings else "pfnm is ε = 0"
            raise ConfigError(f"the grid over {name} has no effect: {why}")
    axes = {**GRID, **(grid or {})}
    if method == "pfnm":
        axes["epsilon"] = (0.0,)
    axes = {name: values for name, values in axes.items() if name not in settings}
    points = [dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]
    ready = [fusion_settings(method, {**settings, **point}) for point in points]
    fusions, trials = [], []
    for done, (point, chosen) in enumerate(zip(points, ready, strict=True), start=1):
        fusion = fuse_layers(models, chosen, counts=counts, seed=seed)
        terms = evaluate(likelihood, _single(fusion.layers), samples)
        small = max_neurons is None or max(fusion.sizes) <= max_neurons
        fusions.append(fusion)
        trials.append(GridPoint(point, fusion.sizes, likelihood.metrics(total(terms)), small))
        if on_trial is not None:
            on_trial(done, len(points))
    eligible = [index for index, trial in enumerate(trials) if trial.eligible]
    if not eligible:
        smallest = min(max(trial.sizes) for trial in trials)
        raise ModelError(
            f"no fused model has at most {max_neurons} neurons in every layer; the smallest one "
            f"has {smallest}. Allow more, or try a smaller gamma or sigma0"
        )
    if likelihood.target.classes:
        accuracy = [trial.metrics["accuracy"] for trial in trials]
        top = max(accuracy[index] for index in eligible)
        enough = top - sqrt(top * (1 - top) / len(samples.y))
        eligible = [index for index in eligible if accuracy[index] >= enough]
    best = min(eligible, key=lambda index: trials[index].metrics["nll"])
    return fusions[best], trials


def _classes(models: Mapping[str, Layers]) -> Likelihood:
    """A class for each output."""
    outputs = len(next(iter(models.values()))[-1].weight)
    return Categorical(target=Target("class", tuple(map(str, range(outputs)))))


def _single(layers: Layers) -> Callable[[Tensor], Tensor]:
    """The outputs [1, n, width] of one network."""
    return lambda x: relu_network(layers, x)[None]


def read_grid(entries: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """Grids from the command line, each `key=value,value`.

    Raises:
        ConfigError: an entry has another form, or its key is not one that a grid varies.
    """
    grid = {}
    for entry in entries:
        name, _, values = entry.partition("=")
        if name not in GRID:
            raise ConfigError(f"--grid {entry}: choose {', '.join(GRID)}")
        try:
            grid[name] = tuple(float(value) for value in values.split(","))
        except ValueError:
            raise ConfigError(f"--grid {entry}: write {name}=0.5,1,2") from None
    return grid


def trial_table(trials: Sequence[GridPoint], chosen: Fusion) -> Table:
    """The grid as a table, the chosen point marked."""
    varied = list(trials[0].values)
    metrics = list(trials[0].metrics)
    table = Table(*varied, "neurons", *map(words, metrics), "", pad_edge=False)
    for trial in trials:
        values = trial.values
        won = all(getattr(chosen.settings, name) == value for name, value in values.items())
        table.add_row(
            *(f"{values[name]:g}" for name in varied),
            ", ".join(map(str, trial.sizes)),
            *(number(trial.metrics[name]) for name in metrics),
            "chosen" if won else "" if trial.eligible else "too large",
            style="bold" if won else None,
        )
    return table


def report(fusion: Fusion) -> dict[str, Any]:
    """All there is to know of a fusion, for JSON."""
    content: dict[str, Any] = {
        **summary(fusion),
        "method": fusion.method,
        "settings": fusion.settings.model_dump(),
        "inputs": list(fusion.assignments),
        "layers": [],
    }
    if fusion.matching is None:
        return content
    content["objective"] = fusion.matching.objective
    for depth, (layer, seconds) in enumerate(
        zip(fusion.matching.layers, fusion.matching.seconds, strict=True)
    ):
        content["layers"].append(
            {
                "size": layer.size,
                "seconds": seconds,
                "objective": layer.objective,
                "members": layer.members.tolist(),
                "assignments": {
                    name: places[depth].tolist() for name, places in fusion.assignments.items()
                },
            }
        )
    return content


def summary(fusion: Fusion) -> dict[str, Any]:
    """What came out, in short."""
    return {
        "sizes": fusion.sizes,
        "seconds": fusion.seconds,
        "parameters": fusion.parameters,
    }


def plot_fusion(fusion: Fusion, path: Path) -> None:
    """Draw which model has a share in which fused neuron, layer by layer, into a picture."""
    layers = [
        (f"hidden layer {depth + 1}", size, [own[depth] for own in fusion.assignments.values()])
        for depth, size in enumerate(fusion.sizes)
    ]
    plot_matching(fusion.method, list(fusion.assignments), fusion.parameters, layers, path)


def plot_matching(
    method: str,
    models: Sequence[str],
    parameters: int,
    layers: Sequence[tuple[str, int, Sequence[npt.NDArray[np.int64]]]],
    path: Path,
) -> None:
    """Draw which model has a share in which fused unit into a picture.

    Args:
        method: that matched them.
        models: files.
        parameters: scalars of the fused model.
        layers: of each, its name, its fused units, and which of these each model's units became.
        path: the picture.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    names = [Path(name).stem for name in models]
    depths = len(layers)
    row = max(2.4, min(8.0, 0.22 * len(names) + 1.2))
    figure = Figure(figsize=(11.0, depths * row + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(depths, 2, squeeze=False, width_ratios=[4, 1])
    figure.suptitle(f"{method}: {len(names)} models, {parameters:,} parameters")
    for (layer, size, assignments), (left, right) in zip(layers, grid, strict=True):
        owned = np.zeros((len(names), size))
        for client, places in enumerate(assignments):
            owned[client, places] = 1.0
        members = owned.sum(axis=0).astype(int)
        # Colour is the number of owners, so that columns read as one neuron.
        image = np.where(owned > 0, members, np.nan)
        drawn = left.imshow(
            image, aspect="auto", interpolation="nearest", cmap="cividis", vmin=1, vmax=len(names)
        )
        left.set_title(f"{layer}: {size} neurons", loc="left", fontsize="medium")
        left.set_xlabel("fused neuron, the most shared first")
        if len(names) <= 40:
            left.set_yticks(range(len(names)), names, fontsize="small")
        left.set_ylabel("model")
        figure.colorbar(drawn, ax=left, label="models that share it", pad=0.01)
        right.bar(*np.unique(members, return_counts=True), color="0.35")
        right.xaxis.set_major_locator(MaxNLocator(integer=True))
        right.set_xlabel("models that share it")
        right.set_ylabel("neurons")
    save_figure(figure, path)


def _check(models: Mapping[str, Layers], samples: Samples, likelihood: Likelihood) -> None:
    """See that networks and held-out samples fit one another."""
    inputs, outputs = samples.x[0].numel(), likelihood.outputs
    classes = int(samples.y.max()) + 1 if likelihood.target.classes == outputs else 0
    for name, layers in models.items():
        own = layers[0].weight.shape[1], len(layers[-1].weight)
        if classes and (own[0] != inputs or own[1] < classes):
            raise ModelError(
                f"{name} maps {own[0]} inputs to {own[1]} classes; the held-out samples have "
                f"{inputs} features and labels up to {classes - 1}"
            )
        if not classes and own != (inputs, outputs):
            raise ModelError(
                f"{name} maps {own[0]} inputs to {own[1]} outputs; the held-out samples have "
                f"{inputs} features, and the likelihood {likelihood.name} reads {outputs}"
            )
