"""Matching of networks of any kind, from files to files: `fedbayes fuse --method match`."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedbayes.core.files import write_beside
from fedbayes.errors import ModelError
from fedbayes.fusion.dense import refuse_idle
from fedbayes.fusion.graph_matching import GraphMatching, match_graph
from fedbayes.matching import MatchingSettings
from fedbayes.models import PROGRAMS
from fedbayes.workflows.fuse.client_models import ClientModels
from fedbayes.workflows.fuse.fusing import plot_matching
from fedbayes.workflows.fuse.job import Fused, FusionJob, checked
from fedbayes.workflows.fuse.methods import SELECTING
from fedbayes.workflows.fuse.network_fusing import counts_of, require_onnx, write_network

METHOD = "match"


def fuse_graphs(job: FusionJob, name: str, watch: Callable[[str], None], _: object) -> Fused:
    """Match networks of one graph; arguments and errors as for `FusionJob.run`."""
    job.refuse(SELECTING, f"{METHOD} of networks that are not fully connected")
    settings = checked(MatchingSettings, job.settings)
    refuse_idle(settings)
    silos = job.silos()
    if silos.programs and job.out.suffix.lower() not in PROGRAMS:
        raise ModelError(
            "weights of a program fit no network. Write a program, as in -o "
            f"{job.out.with_suffix(PROGRAMS[0])}"
        )
    require_onnx(job.out, silos)
    counts, notes = counts_of(job.counts, job.models, silos, job.files)
    short = silos.short
    matching = match_graph(
        {short[path]: network for path, network in silos.networks.items()},
        settings,
        silos.example(),
        counts=None if counts is None else counts.astype(np.float64),
        seed=job.seed,
        watch=watch,
    )
    matching = replace(matching, notes=(*notes, *matching.notes))
    _check_form(job.out, matching, silos)
    expects = _write(job, matching, silos, list(short.values()))
    if expects:
        matching = replace(matching, notes=(*matching.notes, expects))
    hint = ""
    if len(matching.groups) > 1 and not settings.alternations:
        hint = (
            "the number of shared units depends on settings. Try --alternations 4 too, or more "
            "units by --epsilon 1 --sigma0 10 --gamma 30"
        )
    told = (
        f"match: {len(job.models)} models to one with units of {sizes(matching)}, "
        f"{matching.parameters:,} parameters, in {matching.seconds:.2f} s\n{job.written()}"
    )
    return Fused(summary(matching), told, matching.notes, hint=hint)


def _check_form(out: Path, matching: GraphMatching, silos: ClientModels) -> None:
    """See that weights load into what the files' were read with."""
    if out.suffix.lower() in PROGRAMS or silos.dense or not matching.wider:
        return
    raise ModelError(
        f"the fused network is wider than a model ({sizes(matching)}), so its weights fit no "
        f"known network. Write a program, as in -o {out.with_suffix(PROGRAMS[0])}, or set a "
        "smaller --gamma"
    )


def _write(
    job: FusionJob, matching: GraphMatching, silos: ClientModels, names: Sequence[str]
) -> str:
    layers = [(group.layer, group.places.size, group.places.of) for group in matching.groups]
    if job.picture is not None:
        plot_matching(METHOD, names, matching.parameters, layers, job.picture)
    if job.report is not None:
        write_beside(job.report, json.dumps(report(matching, names), indent=1).encode())
    return write_network(job.out, matching.module, silos, {"name": f"fuse {METHOD}"})


def sizes(matching: GraphMatching) -> str:
    """Units of each group, in words."""
    return ", ".join(f"{group.layer}: {group.places.size}" for group in matching.groups)


def summary(matching: GraphMatching) -> dict[str, Any]:
    """What came out, in short."""
    return {
        "method": METHOD,
        "sizes": {group.layer: group.places.size for group in matching.groups},
        "seconds": matching.seconds,
        "parameters": matching.parameters,
        "notes": list(matching.notes),
    }


def report(matching: GraphMatching, names: Sequence[str]) -> dict[str, Any]:
    """All there is to know of a matching, for JSON."""
    return {
        **summary(matching),
        "settings": matching.settings.model_dump(),
        "inputs": list(names),
        "objective": matching.objective,
        "layers": [
            {
                "layer": group.layer,
                "size": group.places.size,
                "fixed": group.fixed,
                "seconds": group.seconds,
                "members": group.places.members.tolist(),
                "assignments": {
                    name: own.tolist() for name, own in zip(names, group.places.of, strict=True)
                },
            }
            for group in matching.groups
        ],
    }
