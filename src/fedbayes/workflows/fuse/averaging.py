"""Networks of one graph made one weight by weight, as they are or by posteriors; from files."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name
from time import perf_counter
from typing import Any

import numpy as np
from torch import Tensor

from fedbayes.core.tensors import Tensors
from fedbayes.errors import ModelError, warn
from fedbayes.fusion.combining import MergedWeights, Merging
from fedbayes.models.resize import with_weights
from fedbayes.models.steps import module_size, require_finite, stored
from fedbayes.storage.card import Card
from fedbayes.workflows.fuse.client_models import read_silos
from fedbayes.workflows.fuse.job import Fused, FusionJob, checked
from fedbayes.workflows.fuse.methods import FUSIONS, SELECTING
from fedbayes.workflows.fuse.network_fusing import drawn
from fedbayes.workflows.fuse.posterior_files import FROM_FILES, alike, read_posterior, sent_counts
from fedbayes.workflows.serve.model_files import read_counts, write_model


def posteriors(job: FusionJob, name: str, watch: Callable[[str], None], _: object) -> Fused:
    """Fuse by the posterior statistics of the clients; arguments as for `FusionJob.run`."""
    begin, merge, settings = perf_counter(), *_row(job, name)
    watch("reading posteriors")
    job.files.card(job.models)  # with classes in one order
    found = [read_posterior(path, job.files) for path in job.models]
    cards = [card for _, card in found]
    first = cards[0]
    if first is not None and any(
        card is None or not card.preprocessing.same_inputs(first.preprocessing) for card in cards
    ):
        raise ModelError("the models have different inputs, so they have no average")
    if len({card.preprocessing.target for card in cards if card is not None}) > 1:
        raise ModelError(
            "the models have different standardizations of the target, so they have no average"
        )
    watch(f"solving by {name}")
    weights: Tensors = merge([one for one, _ in found], settings)
    told = {"samples": [one.samples for one, _ in found]}
    size = sum(weights[parameter].numel() for parameter in found[0][0].diagonal)
    card = first if all(cards) else None
    known = alike(job.models) if first is None else None
    if known is not None and known.mean and known.shape and found[0][0].counts is not None:
        card = known.card(name)
    return _written(job, name, weights, card, told, begin, size)


def networks(job: FusionJob, name: str, watch: Callable[[str], None], _: object) -> Fused:
    """Fuse networks by their weights alone; arguments as for `FusionJob.run`."""
    job.refuse((*SELECTING, "report", "picture"), f"{name} of networks of any kind")
    begin, merge, settings = perf_counter(), *_row(job, name)
    repair = getattr(settings, "repair", None)
    if not repair:
        job.refuse(("seed", "inputs", "sums", "mean", "std"), f"{name} without --repair")
    silos = job.silos()
    if silos.programs:
        raise ModelError(
            "programs cannot be averaged. Give files of weights, or use --method function"
        )
    for path, network in silos.networks.items():
        require_finite(network, silos.short[path])
    clients = list(silos.networks.values())
    samples = np.ones(len(clients))
    if job.counts is not None:
        samples = read_counts(job.counts, job.models).sum(1).astype(np.float64)
    elif (sent := sent_counts(job.models, job.files, by_class=False)) is not None:
        samples = sent[:, 0].astype(np.float64)
        warn(FROM_FILES)
    alpha = (samples / samples.sum()).tolist()
    watch(f"fusing by {name}")
    states = [stored(one) for one in clients]
    base = getattr(settings, "base", None)
    if base is not None:  # in the order of layers and classes of the first network
        both = read_silos([job.models[0], base], job.model, job.seen, job.like, job.files)
        start = list(both.networks.values())[-1]
        require_finite(start, "--base")
        base = stored(start)
    draw: Callable[[int], Tensor] | None = None
    notes: tuple[str, ...] = ()
    if repair:
        prior, inputs = drawn(silos, job.inputs or "auto", job.sums, job.seed)
        draw, notes = partial(inputs.batch, 0), prior.notes
    found: MergedWeights = merge(
        Merging(states, alpha, clients[0], silos.example(), base, draw), settings
    )
    fused = with_weights(clients[0], found.weights)
    weights = silos.written(dict(fused.state_dict()))
    card = silos.card
    if card is None and silos.told:
        card = silos.described({})
    result = _written(job, name, weights, card, found.told, begin, module_size(fused))
    return replace(result, notes=(*notes, *result.notes))


def _row(job: FusionJob, name: str) -> tuple[Callable[..., Any], object]:
    """The mathematics of a method, and its settings."""
    kind = FUSIONS[name]
    settings = None if kind.settings is None else checked(kind.settings, job.settings)
    return resolve_name(f"fedbayes.fusion.{kind.merge}"), settings


def _written(
    job: FusionJob,
    name: str,
    weights: Tensors,
    card: Card | None,
    told: dict[str, Any],
    begin: float,
    size: int,
) -> Fused:
    """Write the weights, and tell of it."""
    write_model(job.out, weights, None if card is None else card.of_fused(name))
    seconds = perf_counter() - begin
    spread = ""
    if "spread_after" in told:
        before, after = told["spread_before"], told["spread_after"]
        spread = f"; their spread decreased from {before:.4g} to {after:.4g}"
        if not before:
            spread = ""
        elif after >= before * (1 - 1e-6):
            spread = "; their units are in one order already"
    return Fused(
        {"method": name, "parameters": size, **told, "seconds": seconds},
        f"{name}: {len(job.models)} models to one of {size:,} parameters in {seconds:.1f} s"
        f"{spread}\n{job.written()}",
        (
            *(f"{one} keeps its order: {why}" for one, why in told.get("untouched", {}).items()),
            *(f"{one} was not repaired: {why}" for one, why in told.get("unrepaired", {}).items()),
        ),
    )
