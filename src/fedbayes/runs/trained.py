"""A model that is done with training: raw samples in, predictions out."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbayes.data import Preprocessing
from fedbayes.data.wording import describe
from fedbayes.errors import ConfigError, DataError, FedbayesWarning, ModelError
from fedbayes.likelihoods import Classes, Likelihood, Numeric
from fedbayes.likelihoods.answers import Answers, answers
from fedbayes.likelihoods.categorical import Categorical
from fedbayes.likelihoods.conformal import Conformal

LEVEL = 0.9
"""Probability that a number is in its interval, unless said otherwise."""
_BATCH = 1000
"""Samples that are predicted at a time."""


@dataclass(frozen=True)
class TrainedModel:
    """A model of a run or of a file, or several that predict together."""

    draw: Callable[[Any], Tensor]
    """Raw samples, a tensor, an array or a DataFrame of n, to what the network says of them,
    [draws, n, width]: a posterior, or an ensemble, has several draws."""
    likelihood: Likelihood
    """What that means for the target."""
    preprocessing: Preprocessing
    """What the network sees of a raw sample; names of classes and features."""
    source: str
    """Where it is from, for messages."""
    means: bool = False
    """Whether it gives predictive means of numbers alone, without a distribution."""
    conformal: Conformal | None = None
    """The threshold of sets or intervals with a promised coverage, where it was calibrated."""

    def __post_init__(self) -> None:
        """See that the threshold is of such a model."""
        if self.conformal is not None and not self.conformal.fits(self.likelihood):
            raise ModelError(
                f"the conformal calibration of {self.source} is not of what it predicts; make it "
                "anew: fedbayes conformal RUN"
            )

    def predict(self, x: Any) -> Tensor:
        """Probabilities of classes or labels [n, names], or means [n, columns] in the unit of the
        target.

        Args:
            x: samples as the data set has them, [n, ...], NaN where a value is missing; of a table
                also a DataFrame with its features as columns, in any order.

        Raises:
            DataError: the samples are not such as the model was trained on.
        """
        return torch.cat([self.likelihood.mean(self.draw(batch)) for batch in _batches(x)])

    def predict_frame(self, x: Any, *, level: float | None = None) -> Any:
        """Predictions as a DataFrame, a row for each sample.

        Args:
            x: as for `predict`. Of a DataFrame the index is kept, and the columns that are no
                features, before the predictions.
            level: probability that a number is in its interval; 0.9 by default, or if a network
                that learnt quantiles has not these, the widest that it has. Of a calibrated model
                that of its calibration, and no other.

        Returns:
            `p_CLASS` and `predicted`; `p_LABEL`; or `mean`, `low` and `high`; of a calibrated
            model also `set`: see `fedbayes.likelihoods.answers`.

        Raises:
            ConfigError: the level is invalid, or there are no intervals of it.
            DataError: as for `predict`; or a column has the name of one that is added.
        """
        import pandas as pd

        columns = self.columns(x, self.level(level))
        if not hasattr(x, "columns"):
            return pd.DataFrame(columns)
        own = set(self.preprocessing.features)
        kept = x[[name for name in x.columns if str(name).strip() not in own]]
        self.refuse_taken(kept.columns, columns, "the table")
        return pd.concat([kept, pd.DataFrame(columns, index=x.index)], axis=1)

    def columns(self, x: Any, level: float | None) -> Answers:
        """Predictions alone, by column; `level` as the method of this name gives it."""
        found = [
            answers(self.likelihood, self.draw(batch), level, self.conformal)
            for batch in _batches(x)
        ]
        return {name: np.concatenate([one[name] for one in found]) for name in found[0]}

    def level(self, asked: float | None) -> float | None:
        """The level of sets, or of intervals of numbers; None where there are none.

        Raises:
            ConfigError: one is asked for, and there are none, or the model was calibrated for
                another.
        """
        likelihood = self.likelihood
        if self.conformal is not None:
            if asked not in (None, self.conformal.level):
                raise ConfigError(
                    f"{self.source} is calibrated for the level {self.conformal.level:g}, and not "
                    f"for {asked:g}: calibrate it anew (fedbayes conformal RUN --level {asked:g}), "
                    "or leave the calibration out with --no-conformal (conformal=False)"
                )
            if None in self.conformal.threshold:
                self._note(
                    f"{self.conformal.rows:,} rows are too few for a level of "
                    f"{self.conformal.level:.0%}: sets hold all classes, intervals are endless"
                )
            return self.conformal.level
        if isinstance(likelihood, Numeric) and not self.means:
            if asked is not None:
                return asked
            there = likelihood.interval_levels
            if LEVEL in there:
                return LEVEL
            self._note(
                f"its quantiles have no interval of {LEVEL:.0%}"
                + (f"; low and high are of {there[-1]:.0%}" if there else ", so there is none")
            )
            return there[-1] if there else None
        if asked is not None:
            what = (
                "it gives means alone, without a distribution; predict with its run or its weights"
                if self.means
                else f"a level is of intervals of numbers, and it predicts "
                f"{describe(self.target)}; fedbayes conformal RUN makes sets of classes"
            )
            raise ConfigError(f"{self.source} has no intervals: {what}")
        if self.means:
            self._note("it gives means alone, so there are no intervals")
        return None

    @property
    def target(self) -> Any:
        """What is predicted."""
        return self.preprocessing.target

    def _note(self, text: str) -> None:
        warnings.warn(f"{self.source}: {text}", FedbayesWarning, stacklevel=4)

    def refuse_taken(self, kept: Sequence[str], added: Sequence[str] | Answers, where: str) -> None:
        """See that no column that is kept has the name of one that is added.

        Raises:
            DataError: one has.
        """
        taken = [name for name in kept if name in added]
        if taken:
            raise DataError(
                f"{where} has a column '{taken[0]}' already, which is the name of a prediction; "
                "rename it or leave it out"
            )


def _batches(x: Any) -> list[Any]:
    """The samples, some at a time.

    Raises:
        DataError: there are none.
    """
    if not len(x):
        raise DataError("there are no samples to predict")
    rows = x.iloc if hasattr(x, "columns") else x
    return [rows[start : start + _BATCH] for start in range(0, len(x), _BATCH)]


def together(models: Sequence[TrainedModel]) -> TrainedModel:
    """Several models as one, whose prediction is the mean of their predictive distributions.

    Each sees samples as it was trained to. Its draws are theirs; all have the same weight, however
    many draws they have.

    Raises:
        ModelError: they predict other things, or some have no distribution.
    """
    first = models[0]
    if len(models) == 1:
        return first
    for other in models[1:]:
        one, two = first.target, other.target
        if (one.kind, one.names) != (two.kind, two.names):
            raise ModelError(
                f"{first.source} predicts {describe(one)}, and {other.source} {describe(two)}; "
                "models that predict together have the same target, in the same order"
            )
    likelihood, draws = first.likelihood, [model.draw for model in models]
    if any(model.likelihood != likelihood for model in models):
        kinds = [model.likelihood for model in models]
        if not all(isinstance(kind, Classes) for kind in kinds):
            raise ModelError(
                f"the outputs of {first.source} and those of the others mean different things "
                "(their likelihoods, or the units of their targets, differ), so their predictions "
                "have no common distribution; predict with each alone"
            )
        likelihood = Categorical(target=first.target)
        draws = [_normalized(model) for model in models]
    source = f"{first.source} and {len(models) - 1} more"
    means = any(model.means for model in models)
    return TrainedModel(joined(draws), likelihood, first.preprocessing, source, means)


def _normalized(model: TrainedModel) -> Callable[[Any], Tensor]:
    """Log-probabilities of classes, which are logits too."""
    likelihood = model.likelihood
    assert isinstance(likelihood, Classes)
    return lambda x: likelihood.normalized(model.draw(x))


def joined(draws: Sequence[Callable[[Any], Tensor]]) -> Callable[[Any], Tensor]:
    """The draws of several models as those of one, each model with the same weight."""

    def draw(x: Any) -> Tensor:
        each = [one(x) for one in draws]
        count = lcm(*map(len, each))
        return torch.cat([one.repeat(count // len(one), 1, 1) for one in each])

    return draw
