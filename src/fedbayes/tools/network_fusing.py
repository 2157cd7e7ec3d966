"""Fusion in function space, from files to files: network, report, pictures."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedbayes.data.plot import PICTURES
from fedbayes.errors import ConfigError, ModelError, RunError
from fedbayes.fusion.distillation import Progress
from fedbayes.fusion.function import FunctionFusion, Likeness, check_width, fuse_functions
from fedbayes.fusion.settings import FunctionSettings
from fedbayes.inputs import InputPrior, Inputs, build_prior, plot_inputs, read_sums
from fedbayes.likelihoods import Classes
from fedbayes.models import MLP, ModelSettings
from fedbayes.runs.card import Card, network_outputs, program_outputs
from fedbayes.runs.folder import writable, write_beside
from fedbayes.tools.export import write_program
from fedbayes.tools.model_files import WEIGHTS, read_counts, write_model
from fedbayes.tools.silos import Seen, Silos, names_of, read_silos

PROGRAM = ".pt2"


@dataclass(frozen=True)
class NetworkFusionJob:
    """A fusion of networks in function space; `fedbayes fuse --method function`."""

    models: Sequence[Path]
    out: Path
    """Where the fused network goes: weights, or a `.pt2` program of raw samples."""
    network: ModelSettings | None = None
    """Of files that do not say theirs, and of the fused one."""
    seen: Seen = field(default_factory=Seen)
    like: Path | None = None
    """A file whose network the fused one is like; the first model by default."""
    inputs: str = "auto"
    """The input prior."""
    sums: Path | None = None
    """Of the clients' rows, for the prior `gaussian`."""
    counts: Path | None = None
    widths: Mapping[str, float] | float = 1.0
    settings: FunctionSettings = field(default_factory=FunctionSettings)
    seed: int = 0
    report: Path | None = None
    """JSON."""
    show_inputs: Path | None = None
    """A picture of some inputs."""
    state: Path | None = None
    """Where distillation is kept, to go on from."""

    def run(
        self,
        watch: Callable[[str], object],
        progress: Callable[[Progress], object] | None = None,
    ) -> tuple[FunctionFusion, InputPrior]:
        """Read, fuse and write; nothing is written unless all went well.

        Raises:
            FedbayesError: what is wrong with an option or a file.
        """
        check_width(self.widths)
        self._check_paths()
        silos = read_silos(self.models, self.network, self.seen, self.like)
        prior, inputs = drawn(silos, self.inputs, self.sums, self.seed)
        counts = None
        if self.counts is not None:
            counts = read_counts(self.counts, self.models)
            outputs = silos.likelihood.outputs
            if isinstance(silos.likelihood, Classes) and counts.shape[1] not in (1, outputs):
                raise ModelError(
                    f"{self.counts} has counts of {counts.shape[1]} classes, and the models tell "
                    f"{outputs}"
                )
        resized = self.widths != 1.0
        if resized and self.out.suffix.lower() != PROGRAM and not isinstance(silos.like, MLP):
            raise ModelError(
                f"weights of another width load into no network that files are read with; write a "
                f"program, as in -o {self.out.with_suffix(PROGRAM)}, or leave the width at 1"
            )
        short = names_of(silos.networks)
        fusion = fuse_functions(
            {short[path]: network for path, network in silos.networks.items()},
            silos.like,
            inputs,
            counts=counts,
            likelihood=silos.likelihood,
            widths=self.widths,
            settings=self.settings,
            state=self.state,
            watch=watch,
            progress=progress,
        )
        self._write(fusion, silos, prior)
        return fusion, prior

    def _check_paths(self) -> None:
        """See that what is to be written can be, and that there is something to fuse.

        Raises:
            RunError: a path cannot be written, or is one of the inputs.
            ModelError: there are fewer than two models.
        """
        outputs = {
            "the model": (self.out, (*WEIGHTS, PROGRAM)),
            "the report": (self.report, (".json",)),
            "the picture": (self.show_inputs, PICTURES),
        }
        for what, (path, formats) in outputs.items():
            if path is not None:
                writable(path, what, formats)
        if self.out.resolve() in {path.resolve() for path in self.models}:
            raise RunError(f"the model {self.out} is one of the inputs; name another file")
        if len(self.models) < 2:
            raise ModelError("there is one model, and nothing to fuse it with; name two or more")

    def _write(self, fusion: FunctionFusion, silos: Silos, prior: InputPrior) -> None:
        likelihood = silos.likelihood
        model = silos.settings
        if isinstance(silos.like, MLP):
            model = None  # by its shapes, whatever the width
        card = Card(
            silos.preprocessing,
            {} if model is None else model.model_dump(mode="json", exclude={"weights"}),
            {"name": "fuse function", "inputs": prior.name},
            {} if silos.card is None else silos.card.data,
            0,
            outputs=network_outputs(likelihood),
            task={} if silos.card is None else silos.card.task,
        )
        if self.out.suffix.lower() == PROGRAM:
            network: nn.Module = fusion.module
            if fusion.temperature != 1:
                network = nn.Sequential(network, Cooled(fusion.temperature)).eval()
            card = replace(card, outputs=program_outputs(likelihood))
            raw = silos.preprocessing.example(16, torch.Generator().manual_seed(0))
            content = write_program(network, silos.preprocessing, likelihood, card, raw)
            write_beside(self.out, content)
        else:
            write_model(self.out, dict(fusion.module.state_dict()), card)
        if self.report is not None:
            content = json.dumps(report(fusion, prior), indent=1, allow_nan=False).encode()
            write_beside(self.report, content)
        if self.show_inputs is not None:
            plot_inputs(prior, self.show_inputs, seed=self.seed)


class Cooled(nn.Module):
    """Logits by a temperature, so that their probabilities are as sure as the teacher's.

    Args:
        temperature: what they are divided by.
    """

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, logits: Tensor) -> Tensor:
        """Of the same shape."""
        return logits / self.temperature


def drawn(
    silos: Silos, name: str, sums: Path | None = None, seed: int = 0
) -> tuple[InputPrior, Inputs]:
    """A prior for the inputs of networks, and its draws as they see them.

    Raises:
        ConfigError: there is no such prior.
        DataError: samples or sums cannot be read, or do not fit.
    """
    seen = silos.preprocessing
    prior = build_prior(
        name,
        seen.shape,
        sums=None if sums is None else read_sums(sums),
        features=seen.features,
    )
    mean, std = torch.tensor(seen.mean), torch.tensor(seen.std)
    if len(seen.shape) == 1:  # rows are in their own units, images in [0, 1]
        mean, std = mean * seen.scale, std * seen.scale
        if prior.name == "gaussian" and sums is None:  # as networks see rows
            if silos.programs and silos.card is None:
                raise ConfigError(
                    "programs take rows in units that are not known here; give the clients' sums "
                    "with --sums, or real samples with --inputs"
                )
            mean, std = torch.zeros_like(mean), torch.ones_like(std)
            if silos.programs and silos.card is not None:
                own = silos.card.preprocessing
                deviation = torch.tensor(own.std) * own.scale
                std = 1 / deviation
                mean = -torch.tensor(own.mean) * own.scale / deviation
    return prior, Inputs(prior, mean, std, seed)


def report(fusion: FunctionFusion, prior: InputPrior) -> dict[str, Any]:
    """All there is to know of a fusion, for JSON."""
    distilled = fusion.distilled
    return {
        **summary(fusion),
        "inputs": {"name": prior.name, "assumes": prior.assumes},
        "sent": "the networks' weights, and counts or sums where they were given; no data",
        "after_least_squares": _shown(fusion.solved),
        "temperature": fusion.temperature,
        "distillation": None
        if distilled is None
        else {
            "step": distilled.step,
            "ended": distilled.ended,
            "checks": [list(check) for check in distilled.checks],
        },
        "clients": {name: _shown(likeness) for name, likeness in fusion.clients.items()},
        "agreement_by_class": [
            [None if math.isnan(share) else share for share in row]
            for row in fusion.by_class.tolist()
        ],
        "seconds": fusion.seconds,
        "notes": [*prior.notes, *fusion.notes],
    }


def summary(fusion: FunctionFusion) -> dict[str, Any]:
    """What came out, in short."""
    return {
        "method": "function",
        "parameters": fusion.parameters,
        **_shown(fusion.likeness),
        "seconds_in_all": sum(fusion.seconds.values()),
    }


def _shown(likeness: Likeness) -> dict[str, float | None]:
    agreement = likeness.agreement
    return {
        "divergence": likeness.divergence,
        "agreement": None if math.isnan(agreement) else agreement,
    }
