"""Networks of one graph averaged, by posteriors or with their units in one order; from files."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import numpy as np
import torch

from fedbayes.core.files import writable
from fedbayes.core.tensors import parameter_count
from fedbayes.errors import ConfigError, FedbayesWarning, ModelError
from fedbayes.fusion.combining import combine
from fedbayes.fusion.permutation import permuted_average
from fedbayes.fusion.posterior_settings import AveragingSettings
from fedbayes.fusion.posteriors import fisher, kfac, regmean
from fedbayes.models import ModelSettings
from fedbayes.models.resize import with_weights
from fedbayes.models.steps import stored
from fedbayes.models.units import find_units
from fedbayes.workflows.fuse.client_models import Seen, read_silos
from fedbayes.workflows.fuse.posterior_files import FROM_FILES, read_posterior, sent_counts
from fedbayes.workflows.serve.model_files import (
    WEIGHTS,
    ModelFiles,
    read_counts,
    require_several,
    write_model,
)

AveragingMethod = Literal["average", "regmean", "fisher", "kfac", "permute"]
BY_POSTERIORS = {"regmean": regmean, "fisher": fisher, "kfac": kfac}
"""Methods that need more than weights."""


@dataclass(frozen=True)
class AveragingJob:
    """An average of model files into a file; `fedbayes fuse --method regmean` and its like."""

    models: Sequence[Path]
    out: Path
    method: AveragingMethod
    network: ModelSettings | None = None
    """Of files that do not say theirs; `permute` asks which network it is."""
    seen: Seen = field(default_factory=Seen)
    counts: Path | None = None
    """Samples of each model and class; where there are none, those that posteriors bring."""
    settings: AveragingSettings = field(default_factory=AveragingSettings)
    files: ModelFiles = field(default_factory=ModelFiles)
    """Those that were read before."""

    def run(self, watch: Callable[[str], object]) -> dict[str, Any]:
        """Read, average and write; nothing is written unless all went well.

        Returns:
            What came out, in short.

        Raises:
            FedbayesError: what is wrong with an option or a file.
        """
        writable(self.out, "the model", WEIGHTS, [*self.models, self.counts])
        require_several(self.models)
        if self.method in BY_POSTERIORS and self.counts is not None:
            raise ConfigError(f"--counts has no effect on {self.method}: posteriors say their own")
        begin = perf_counter()
        told = self._by_posteriors(watch) if self.method in BY_POSTERIORS else self._plainly(watch)
        return {
            "method": self.method,
            **told,
            "seconds": perf_counter() - begin,
        }

    def _by_posteriors(self, watch: Callable[[str], object]) -> dict[str, Any]:
        watch("reading posteriors")
        self.files.card(self.models)  # with classes in one order
        found = [read_posterior(path, self.files) for path in self.models]
        cards = [card for _, card in found]
        first = cards[0]
        if first is not None and any(
            card is None or not card.preprocessing.same_inputs(first.preprocessing)
            for card in cards
        ):
            raise ModelError("the models do not see the same inputs, and have no average")
        if len({card.preprocessing.target for card in cards if card is not None}) > 1:
            raise ModelError(
                "the models have targets that were standardized by other numbers, and have no "
                "average"
            )
        watch(f"solving by {self.method}")
        weights = BY_POSTERIORS[self.method]([one for one, _ in found], self.settings)
        card = first if all(cards) else None
        if card is not None:
            card = card.of_fused(self.method)
        write_model(self.out, weights, card)
        told = {"parameters": parameter_count(weights)}
        return told | {"samples": [one.samples for one, _ in found]}

    def _plainly(self, watch: Callable[[str], object]) -> dict[str, Any]:
        silos = read_silos(
            self.models, self.network, self.seen, files=self.files, counts=self.counts
        )
        if silos.programs:
            raise ModelError(
                "programs are not averaged; give files of weights, or use --method function"
            )
        networks = list(silos.networks.values())
        samples = np.ones(len(networks))
        if self.counts is not None:
            samples = read_counts(self.counts, self.models).sum(1).astype(np.float64)
        elif (sent := sent_counts(self.models, self.files, by_class=False)) is not None:
            samples = sent[:, 0].astype(np.float64)
            warnings.warn(FROM_FILES, FedbayesWarning, stacklevel=3)
        alpha = (samples / samples.sum()).tolist()
        states = [stored(network) for network in networks]
        told: dict[str, Any] = {}
        if self.method == "average":
            mean = combine(states, alpha)
        else:
            watch("bringing units into one order")
            example = silos.preprocessing.apply(
                silos.preprocessing.example(2, torch.Generator().manual_seed(0))
            )
            units = find_units(networks[0], example)
            permuted = permuted_average(states, units.groups, alpha)
            mean = permuted.weights
            told = {
                "spread_before": permuted.before,
                "spread_after": permuted.after,
                "untouched": dict(units.untouched),
            }
        weights = silos.written(dict(with_weights(networks[0], mean).state_dict()))
        card = silos.card
        if card is not None:
            card = card.of_fused(self.method)
        write_model(self.out, weights, card)
        return {"parameters": parameter_count(mean), **told}
