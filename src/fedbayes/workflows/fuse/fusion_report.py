"""The report of a fusion in function space: as JSON, and as a page for people."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

from fedbayes.core.files import write_beside
from fedbayes.errors import ConfigError
from fedbayes.fusion.function import FunctionFusion, Likeness, TeacherAgreement
from fedbayes.fusion.laplace import LastLayer
from fedbayes.inputs import InputPrior, Inputs
from fedbayes.inputs.picture import draw_inputs
from fedbayes.inputs.samples import RealSamples
from fedbayes.models.steps import module_size
from fedbayes.reports.fusion import render
from fedbayes.storage.formatting import number, words
from fedbayes.workflows.fuse.client_models import ClientModels
from fedbayes.workflows.fuse.frontier import FrontierPoint, finite, multiplications
from fedbayes.workflows.fuse.job import Fused, FusionJob

PAGES = (".html", ".htm")
"""Suffixes of reports that are pages; others are JSON."""


@dataclass(frozen=True)
class FusionResult:
    """What came of a fusion in function space."""

    fusion: FunctionFusion
    """The network that was written, and how it came about."""
    width: float
    """Of it."""
    prior: InputPrior
    """Where inputs came from."""
    silos: ClientModels
    """What was fused."""
    inputs: Inputs
    """Draws of the prior, as networks see them."""
    marks: list[FrontierPoint]
    """Of all widths, and the clients' networks; none where one width was asked for alone."""
    trust: dict[str, dict[str, float]]
    """Where there is a posterior and test samples, metrics of the `network` as it is, with a
    `temperature` alone and with the `posterior`."""
    sent: tuple[str, ...]
    """What clients sent, in words."""
    told: tuple[str, ...] = ()
    """What a user should know of inputs and counts."""
    expects: str = ""
    """What the program that was written takes, or how to use weights; empty if that is plain."""


def write_report(outcome: FusionResult, path: Path) -> None:
    """Write all there is to know of a fusion, in the format that the file's suffix says."""
    content = report(outcome)
    if path.suffix.lower() not in PAGES:
        write_beside(path, json.dumps(content, indent=1, allow_nan=False).encode())
        return
    pictures = {}
    try:
        pictures["inputs"] = draw_inputs(outcome.prior, seed=outcome.inputs.seed)
    except ConfigError as error:  # which have too many axes for a picture
        content["notes"].append(str(error))
    write_beside(path, render(content, pictures).encode())


def report(outcome: FusionResult) -> dict[str, Any]:
    """All there is to know of a fusion, for JSON."""
    fusion, prior, silos = outcome.fusion, outcome.prior, outcome.silos
    distilled, short = fusion.distilled, silos.short
    likelihood = silos.likelihood
    return {
        **summary(outcome),
        "models": [
            {"name": short[path], "file": path, **_size(network, outcome)}
            for path, network in silos.networks.items()
        ],
        "network": {
            "name": silos.settings.name if silos.settings is not None else "",
            **_size(fusion.module, outcome),
            "layers": {
                name: list(tensor.shape)
                for name, tensor in fusion.module.state_dict().items()
                if tensor.ndim > 1
            },
        },
        "likelihood": likelihood.name,
        "target": list(likelihood.target.names),
        "inputs": {
            "name": prior.name,
            "kind": _kind(prior),
            "assumes": prior.assumes,
            "shape": list(prior.shape),
            "seed": outcome.inputs.seed,
        },
        "sent": list(outcome.sent),
        "after_least_squares": _shown(fusion.solved),
        "temperature": fusion.temperature,
        "posterior": _posterior(outcome),
        "distillation": None
        if distilled is None
        else {
            "step": distilled.step,
            "ended": distilled.ended,
            "checks": [list(map(finite, check)) for check in distilled.checks],
        },
        "clients": {name: _shown(likeness) for name, likeness in fusion.clients.items()},
        "with_each_client": _with_each([*fusion.clients, "ensemble"], fusion),
        "seconds": fusion.seconds,
    }


def summary(outcome: FusionResult) -> dict[str, Any]:
    """What came out, in short."""
    fusion = outcome.fusion
    return {
        "method": "function",
        "width": outcome.width,
        "parameters": fusion.parameters,
        **_shown(fusion.likeness),
        "seconds_in_all": sum(fusion.seconds.values()),
        "frontier": [mark.record() for mark in outcome.marks],
        "notes": [*outcome.told, *fusion.notes],
    }


def _size(network: nn.Module, outcome: FusionResult) -> dict[str, int]:
    example = outcome.inputs.batch(-1, 1)
    return {
        "parameters": module_size(network),
        "multiplications": multiplications(network, example),
    }


def _posterior(outcome: FusionResult) -> dict[str, Any] | None:
    """What the posterior did."""
    found = outcome.fusion.calibration
    if found is None:
        return None
    gaussian = found.gaussian
    of: dict[str, Any]
    if isinstance(gaussian, LastLayer):
        of = {"kind": "last-layer", "layer": gaussian.layer, "factors": bool(gaussian.left.numel())}
    else:
        of = {"kind": "kronecker", "layers": list(gaussian.spectra), "fixed": list(gaussian.fixed)}
    return {
        **of,
        "multiplications": multiplications(found.module, outcome.inputs.batch(-1, 1)),
        "samples": found.samples,
        "precision": found.gaussian.precision,
        "temperature": found.gaussian.temperature,
        "temperature_alone": found.cooled.temperature,
        "divergence": {
            "network": outcome.fusion.likeness.divergence,
            "temperature": found.divergence_cooled,
            "posterior": found.divergence,
        },
        "test": outcome.trust or None,
    }


def _with_each(names: Sequence[str], fusion: FunctionFusion) -> list[dict[str, Any]]:
    """How far the fused network and the ensemble say what each client says."""
    return [
        {
            "name": name,
            "draws_by_class": fusion.agreement.draws[row].tolist(),
            "fused": _agreeing(fusion.agreement, row),
            "ensemble": _agreeing(fusion.ensemble, row),
        }
        for row, name in enumerate(names)
    ]


def _agreeing(found: TeacherAgreement, row: int) -> dict[str, Any]:
    return {
        "divergence": float(found.divergence[row]),
        "by_class": _numbers(found.by_class[row]),
        "correlation": _numbers(found.correlation[row]),
    }


def _numbers(values: Tensor) -> list[float | None]:
    """Numbers for JSON, which has no NaN."""
    return [None if math.isnan(value) else value for value in values.tolist()]


def _shown(likeness: Likeness) -> dict[str, float | None]:
    agreement = likeness.agreement
    return {
        "divergence": likeness.divergence,
        "agreement": None if math.isnan(agreement) else agreement,
    }


def told(outcome: FusionResult, job: FusionJob) -> Fused:
    """What came out, in words and tables."""
    fusion, prior = outcome.fusion, outcome.prior
    expects = f"\n{outcome.expects}" if outcome.expects else ""
    return Fused(
        summary(outcome),
        f"function: {len(job.models)} models to one of {fusion.parameters:,} parameters in "
        f"{sum(fusion.seconds.values()):.1f} s, on {_kind(prior)} inputs "
        f"({prior.name}: {prior.assumes})\n"
        f"{job.written(job.show_inputs)}{expects}",
        (*outcome.told, *fusion.notes),
        (_networks(fusion, prior), *((_frontier(outcome),) if outcome.marks else ())),
    )


def _kind(prior: InputPrior) -> str:
    return "real" if isinstance(prior, RealSamples) else "synthetic"


def _networks(fusion: FunctionFusion, prior: InputPrior) -> Table:
    """How near the networks are to the teacher."""
    table = Table("network", "parameters", "KL divergence to\nthe teacher (nats)", pad_edge=False)
    classes = not math.isnan(fusion.likeness.agreement)
    if classes:
        table.add_column(f"same class as the teacher\n({_kind(prior)} inputs)")
    rows = [(name, "", likeness) for name, likeness in fusion.clients.items()]
    if fusion.distilled is not None:
        rows.append(("fused, least squares", "", fusion.solved))
    rows.append(("fused", f"{fusion.parameters:,}", fusion.likeness))
    for name, size, likeness in rows:
        share = [f"{likeness.agreement:.3f}"] if classes else []
        table.add_row(escape(name), size, f"{likeness.divergence:.3f}", *share)
    return table


def _frontier(outcome: FusionResult) -> Table:
    """Sizes and what they are worth."""
    metrics = list(outcome.marks[0].metrics)
    table = Table("", "parameters", "multiplications", "nats", *map(words, metrics), pad_edge=False)
    for mark in outcome.marks:
        table.add_row(
            escape(mark.name),
            f"{mark.parameters:,}",
            f"{mark.multiplications:,}",
            f"{mark.likeness.divergence:.3f}",
            *(number(mark.metrics.get(name)) for name in metrics),
            style="bold" if mark.width == outcome.width else None,
        )
    return table
