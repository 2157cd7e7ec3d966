"""Matching of networks of any kind, from files to files: `fedbayes fuse --method match`."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedbayes.core.files import writable, write_beside
from fedbayes.data.plot import PICTURES
from fedbayes.errors import ConfigError, ModelError
from fedbayes.fusion import fusion_settings
from fedbayes.fusion.dense import refuse_idle
from fedbayes.fusion.graph_matching import GraphMatching, match_graph
from fedbayes.matching import MatchingSettings
from fedbayes.models import ModelSettings, dense_layers
from fedbayes.workflows.fuse.client_models import ClientModels, Seen, read_silos
from fedbayes.workflows.fuse.fusing import plot_matching
from fedbayes.workflows.fuse.network_fusing import PROGRAM, counts_of, write_network
from fedbayes.workflows.serve.evaluation_set import is_program
from fedbayes.workflows.serve.model_files import WEIGHTS, ModelFiles, require_several

METHOD = "match"


@dataclass(frozen=True)
class GraphFusionJob:
    """A matching of model files into files."""

    models: Sequence[Path]
    out: Path
    """Where the fused network goes: a `.pt2` program of raw samples, or weights."""
    settings: Mapping[str, Any]
    """Settings of the matching that are not the default."""
    network: ModelSettings | None = None
    """Of files that do not say theirs."""
    seen: Seen = field(default_factory=Seen)
    counts: Path | None = None
    """Samples of each model and class."""
    seed: int = 0
    report: Path | None = None
    """JSON."""
    picture: Path | None = None
    files: ModelFiles = field(default_factory=ModelFiles)
    """Those that were read before."""

    def run(self, watch: Callable[[str], None]) -> GraphMatching:
        """Read, match and write; nothing is written unless all went well.

        Raises:
            FedbayesError: what is wrong with an option or a file.
        """
        settings = fusion_settings("gpi-fnm", self.settings)
        if not isinstance(settings, MatchingSettings):
            raise ConfigError(f"{METHOD} has settings of the matching alone")
        refuse_idle(settings)
        outputs = {
            "the model": (self.out, (*WEIGHTS, PROGRAM)),
            "the report": (self.report, (".json",)),
            "the picture": (self.picture, PICTURES),
        }
        inputs = [*self.models, self.counts]
        for what, (path, formats) in outputs.items():
            if path is not None:
                writable(path, what, formats, inputs)
        require_several(self.models)
        silos = read_silos(
            self.models, self.network, self.seen, files=self.files, counts=self.counts
        )
        if silos.programs and self.out.suffix.lower() != PROGRAM:
            raise ModelError(
                "weights of a program's graph load into no network; write a program, as in "
                f"-o {self.out.with_suffix(PROGRAM)}"
            )
        counts, notes = counts_of(self.counts, self.models, silos, self.files)
        short = silos.short
        example = silos.preprocessing.apply(
            silos.preprocessing.example(2, torch.Generator().manual_seed(0))
        )
        matching = match_graph(
            {short[path]: network for path, network in silos.networks.items()},
            settings,
            example,
            counts=None if counts is None else counts.astype(np.float64),
            seed=self.seed,
            watch=watch,
        )
        matching = replace(matching, notes=(*notes, *matching.notes))
        self._check_form(matching, silos)
        expects = self._write(matching, silos, list(short.values()))
        return replace(matching, notes=(*matching.notes, expects)) if expects else matching

    def _check_form(self, matching: GraphMatching, silos: ClientModels) -> None:
        """See that weights load into what the files' were read with.

        Raises:
            ModelError: they are of other widths.
        """
        if self.out.suffix.lower() == PROGRAM or silos.dense or not matching.wider:
            return
        raise ModelError(
            f"the fused network is wider than a model ({sizes(matching)}), and its weights load "
            "into no network that files are read with; write a program, as in -o "
            f"{self.out.with_suffix(PROGRAM)}, or ask for fewer units with a smaller --gamma"
        )

    def _write(self, matching: GraphMatching, silos: ClientModels, names: Sequence[str]) -> str:
        layers = [(group.layer, group.places.size, group.places.of) for group in matching.groups]
        if self.picture is not None:
            plot_matching(METHOD, names, matching.parameters, layers, self.picture)
        if self.report is not None:
            write_beside(self.report, json.dumps(report(matching, names), indent=1).encode())
        return write_network(self.out, matching.module, silos, {"name": f"fuse {METHOD}"})


def all_dense(paths: Sequence[Path], files: ModelFiles) -> bool:
    """Whether all files hold weights of fully connected networks, as shapes and cards say."""
    for path in paths:
        if is_program(path):
            return False
        weights, card = files[path]
        if card is not None and card.model.get("name", "mlp") != "mlp":
            return False
        try:
            dense_layers(weights, str(path))
        except ModelError:
            return False
    return True


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
