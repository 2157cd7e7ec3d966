"""A model that is done with training: raw samples in, predictions out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedbayes.contracts import Sampler
from fedbayes.core.brief import Brief
from fedbayes.core.tensors import PREDICTED
from fedbayes.core.wording import describe
from fedbayes.data import Preprocessing
from fedbayes.data.dataset import Array
from fedbayes.data.source_settings import SourceSettings
from fedbayes.data.sources.pictures import Framing, framing
from fedbayes.data.sources.tables import without
from fedbayes.data.tables.columns import Column
from fedbayes.data.tables.encoding import Unknown
from fedbayes.errors import ConfigError, DataError, ModelError, warn
from fedbayes.likelihoods import Classes, Likelihood, Numeric
from fedbayes.likelihoods.answers import Answers, answers, probabilities
from fedbayes.likelihoods.categorical import Categorical
from fedbayes.likelihoods.conformal import Conformal
from fedbayes.likelihoods.hazards import Hazards

LEVEL = 0.9
"""Probability that a number is in its interval, unless said otherwise."""


class Member(NamedTuple):
    """A network, or a posterior of one."""

    draw: Sampler
    """Raw samples, as `Preprocessing.raw` gives them, to what the network says of them,
    [draws, n, width]: a posterior has several draws."""
    preprocessing: Preprocessing
    """What it sees of a raw sample; names of classes and features."""
    reading: SourceSettings | None = None
    """How the data of the training were read: size and crop of pictures are of these."""


@dataclass(frozen=True, repr=False)
class TrainedModel(Brief):
    """A trained model from a run or a file, or an ensemble of several.

    Examples:
        >>> import fedbayes
        >>> from sklearn.datasets import load_digits
        >>> run = fedbayes.run(data="digits", rounds=1)
        >>> model = fedbayes.load(run.folder)
        >>> model.predict_proba(load_digits().images[:2, None]).shape
        (2, 10)
    """

    members: tuple[Member, ...]
    """One network or more, with the same weight each."""
    likelihood: Likelihood
    """What their outputs mean for the target."""
    source: str
    """Where it is from, for messages."""
    means: bool = False
    """Whether it gives predictive means of numbers alone, without a distribution."""
    conformal: Conformal | None = None
    """The threshold of sets or intervals with a guaranteed coverage, where it was calibrated."""
    hazards: Hazards | None = None
    """Of survival: the baseline hazard, where it was estimated."""
    times: tuple[float, ...] = ()
    """Of survival: times of the reported probability that the event has not happened yet."""
    temperature: float | None = None
    """That of the probabilities of classes or labels, where it was found."""
    threshold: float | None = None
    """Of two classes: from which probability on the second one is predicted; None: the more
    probable one is."""

    def __post_init__(self) -> None:
        """See that the threshold is of such a model."""
        if self.conformal is not None and not self.conformal.fits(self.likelihood):
            raise ModelError(
                f"the conformal calibration of {self.source} has another target. Run fedbayes "
                "calibrate RUN --method conformal"
            )

    @property
    def preprocessing(self) -> Preprocessing:
        """What the model, or the first one of several, sees of a raw sample."""
        return self.members[0].preprocessing

    @property
    def table(self) -> tuple[Column, ...]:
        """The columns of a table that are read; none if samples have no names."""
        found = {
            column.name: column
            for member in reversed(self.members)
            for column in member.preprocessing.table
        }
        first = [column.name for column in self.preprocessing.table]
        return tuple(found[name] for name in [*first, *(n for n in found if n not in first)])

    @property
    def reading(self) -> SourceSettings:
        """How files of the training were read. What separates decimals is decided for each file
        again (see `Preprocessing.decimal`).
        """
        reading = self.members[0].reading or SourceSettings()
        return reading.model_copy(update={"decimal": "auto"})

    def framing(self) -> Framing:
        """How pictures of any size become raw samples.

        Raises:
            DataError: a pretrained network's processor says how, and cannot be loaded.
            ModelError: members see them in different ways.
        """
        found = []
        for reading in (member.reading or SourceSettings() for member in self.members):
            frame = framing(reading)
            found.append(replace(frame, scale=reading.scale or frame.scale))
        # What is left is done by the network, from the same pixels.
        seen = [replace(one, mean=(), std=(), channels=0) for one in found]
        if any(one != seen[0] for one in seen):
            raise ModelError(
                f"the models {self.source} use different picture sizes or crops. Predict with "
                "each alone"
            )
        return found[0]

    def foretelling(self, times: Sequence[float]) -> "TrainedModel":
        """The same model, which also predicts survival probabilities, `survival_TIME`.

        Args:
            times: in the unit of the target; the event has happened by then, or not.

        Raises:
            ConfigError: it predicts no risks, has no baseline hazard, or none of such times.
        """
        if self.target.kind != "survival":
            raise ConfigError(
                f"times work only with survival, and {self.source} predicts {describe(self.target)}"
            )
        if self.hazards is None:
            raise ConfigError(
                f"{self.source} has only relative log-risks and no baseline hazard. Estimate it "
                "for a run with fedbayes calibrate RUN --method hazards"
            )
        self.hazards.require(times, self.source)
        return replace(self, times=tuple(dict.fromkeys(map(float, times))))

    @property
    def classes_(self) -> Array:
        """The names of the classes or labels [K], in the order of `predict_proba`."""
        return np.array(self.target.names, dtype=object)

    def predict(self, x: Any) -> Array:
        """Predict the class, the labels or the number of each sample, as scikit-learn does.

        Args:
            x: samples [n, ...] in the units of the data set, NaN where a value is missing; for a
                table also a DataFrame with its columns in any order.

        Returns:
            The names of the most probable classes [n] (with two classes and a `threshold`, those
            at the threshold); of labels 0 or 1 [n, K]; of numbers the predictive means [n], or
            [n, T] for several targets; of survival the log-risks [n]. Names of classes are text,
            also those of classes 0 and 1: model files have the names, not the type of the labels.
            `predict(x).astype(int)` makes them integers.

        Raises:
            DataError: the samples do not have the shape or the columns of the training data.

        Examples:
            >>> import fedbayes
            >>> from sklearn.datasets import load_digits
            >>> run = fedbayes.run(data="digits", rounds=1)
            >>> digits = fedbayes.load(run.folder).predict(load_digits().images[:3, None])
            >>> type(digits[0]).__name__, digits.astype(int).dtype.kind
            ('str', 'i')
        """
        found = self.expectation(x).double().numpy()
        kind = self.target.kind
        if kind == "labels":
            whole: Array = (found >= 0.5).astype(np.int64)
            return whole
        if kind == "class":
            chosen = found.argmax(1)
            if self.threshold is not None:
                chosen = (found[:, 1] >= self.threshold).astype(np.int64)
            named: Array = self.classes_[chosen]
            return named
        return found[:, 0] if found.shape[1] == 1 else found

    def predict_proba(self, x: Any) -> Array:
        """Predict the probability of each class or label, float64 [n, K], in the order `classes_`.

        Args:
            x: as for `predict`.

        Raises:
            ConfigError: the model predicts numbers or times, which have no probabilities.
            DataError: as for `predict`.
        """
        if self.target.kind not in ("class", "labels"):
            raise ConfigError(
                f"predict_proba needs classes, and {self.source} predicts "
                f"{describe(self.target)}. Use predict or predict_interval"
            )
        found = self.expectation(x).double().numpy()
        if self.target.kind == "class":
            found = found / found.sum(axis=1, keepdims=True)
        return found

    def predict_interval(self, x: Any, level: float | None = None) -> tuple[Array, Array]:
        """Predict the central interval that contains each number with a given probability.

        Args:
            x: as for `predict`.
            level: the probability, above 0 and below 1; by default 0.9, or the level of the
                conformal calibration.

        Returns:
            Lower and upper ends, float64 [n], or [n, T] for several targets.

        Raises:
            ConfigError: the model does not predict numbers, or has no interval of this level.
            DataError: as for `predict`.
        """
        if not isinstance(self.likelihood, Numeric) or self.means:
            raise ConfigError(
                f"predict_interval needs numbers with a distribution, and {self.source} predicts "
                f"{describe(self.target)}. Use predict or predict_proba"
            )
        columns = self.columns(self._raw(x), self.level(level))
        low, high = (
            np.stack([v for k, v in columns.items() if k == end or k.startswith(f"{end}_")], 1)
            for end in ("low", "high")
        )
        return (low[:, 0], high[:, 0]) if low.shape[1] == 1 else (low, high)

    def expectation(self, x: Any) -> Tensor:
        """Probabilities of classes or labels [n, names], or means [n, columns] in the unit of the
        target.

        Args:
            x: as for `predict`.

        Raises:
            DataError: as for `predict`.
        """
        likelihood = self.likelihood
        draws = self._draws(self._raw(x))
        return torch.cat([probabilities(likelihood, d, self.temperature) for d in draws])

    def predict_frame(self, x: Any, *, level: float | None = None) -> Any:
        """Predictions as a DataFrame, a row for each sample.

        Args:
            x: as for `predict`. Of a DataFrame the index is kept, and the columns that the model
                does not read, before the predictions.
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

        columns = self.columns(self._raw(x), self.level(level))
        if not hasattr(x, "columns"):
            return pd.DataFrame(columns)
        own = {column.name for column in self.table}
        kept = x[[name for name in x.columns if str(name).strip() not in own]]
        self.refuse_taken(kept.columns, columns, "the table")
        return pd.concat([kept, pd.DataFrame(columns, index=x.index)], axis=1)

    def _raw(self, x: Any) -> list[Tensor]:
        """What each member takes of samples; warns of values that training rows did not have."""
        if not len(x):
            raise DataError("there are no samples to predict")
        raw, odd = self.encode(x)
        for one in odd:
            warn(one.told())
        return raw

    def encode(self, x: Any, where: str = "the table") -> tuple[list[Tensor], list[Unknown]]:
        """What each member takes of samples, and what training rows did not have.

        Args:
            x: as for `predict`.
            where: what it is, for messages.

        Raises:
            DataError: the samples are not such as the model was trained on; of a table it names
                column and row.
        """
        if not hasattr(x, "columns"):
            return [member.preprocessing.raw(x) for member in self.members], []
        raw: list[Tensor] = []
        odd: dict[tuple[str, bool], Unknown] = {}
        for member in self.members:
            known = without(x, member.reading.na_values if member.reading else ())
            rows, unknown = member.preprocessing.encode(known, where)
            raw.append(member.preprocessing.raw(rows))
            odd |= {(one.column.name, one.empty): one for one in unknown}
        return raw, list(odd.values())

    def columns(self, raw: Sequence[Tensor], level: float | None, start: int = 0) -> Answers:
        """Only the predictions, by column.

        Args:
            raw: samples, as `encode` gives them.
            level: as `level` gives it.
            start: samples before these, where they are some of many.
        """
        found = []
        for draws in self._draws(raw):
            found.append(
                answers(self.likelihood, draws, level, self.conformal, start, self.temperature)
            )
            if self.hazards is not None and self.times:
                survival = self.hazards.survival(found[-1]["risk"], self.times)
                names = (f"survival_{_shortest(time)}" for time in self.times)
                found[-1] |= dict(zip(names, survival.T, strict=True))
            if self.threshold is not None:
                names = self.target.names
                above = found[-1][f"p_{names[1]}"] >= self.threshold
                chosen = np.where(above, names[1], names[0]).astype(object)
                told = found[-1]["predicted"] != ""
                found[-1]["predicted"] = np.where(told, chosen, "")
            start += draws.shape[1]
        return {name: np.concatenate([one[name] for one in found]) for name in found[0]}

    @torch.no_grad()
    def _draws(self, raw: Sequence[Tensor]) -> Iterator[Tensor]:
        """Outputs of all members together, [draws, n, width], some samples at a time."""
        for batch in zip(*(torch.split(part, PREDICTED) for part in raw), strict=True):
            yield joined([m.draw(part) for m, part in zip(self.members, batch, strict=True)])

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
                    f"{self.source} is calibrated for the level {self.conformal.level:g}, not for "
                    f"{asked:g}. Run fedbayes calibrate RUN --method conformal --level {asked:g}, "
                    "or ignore the calibration with --no-conformal (conformal=False)"
                )
            if None in self.conformal.threshold:
                level = f"{100 * self.conformal.level:g}%"
                self._note(
                    f"{_why_endless(self.conformal)} for a level of {level}: sets contain all "
                    "classes and intervals are infinite"
                )
            return self.conformal.level
        if isinstance(likelihood, Numeric) and not self.means:
            if asked is not None:
                return asked
            there = likelihood.interval_levels
            if LEVEL in there:
                return LEVEL
            self._note(
                f"its quantiles give no interval of level {LEVEL:.0%}"
                + (f"; low and high use {there[-1]:.0%}" if there else ", so there is none")
            )
            return there[-1] if there else None
        if asked is not None:
            what = (
                "it gives only means, without a distribution. Predict with its run or its weights"
                if self.means
                else f"intervals need numbers, and it predicts {describe(self.target)}. For sets "
                "of classes run fedbayes calibrate RUN --method conformal"
            )
            raise ConfigError(f"{self.source} has no intervals: {what}")
        if self.means:
            self._note("it gives only means, so there are no intervals")
        return None

    @property
    def target(self) -> Any:
        """What is predicted."""
        return self.preprocessing.target

    def _note(self, text: str) -> None:
        warn(f"{self.source}: {text}")

    def refuse_taken(self, kept: Sequence[str], added: Sequence[str] | Answers, where: str) -> None:
        """See that no column that is kept has the name of an added one, or raise a DataError."""
        taken = [name for name in kept if name in added]
        if taken:
            raise DataError(
                f"{where} already has a column '{taken[0]}', which is the name of a prediction. "
                "Rename it, or leave it out"
            )


def _shortest(time: float) -> str:
    """A time in few digits, and in as many as tell it from all others."""
    return f"{time:g}" if float(f"{time:g}") == time else repr(time).removesuffix(".0")


def _why_endless(conformal: Conformal) -> str:
    if conformal.too_few:
        return f"{conformal.rows:,} rows are too few"
    return "the model was too inaccurate on the counted rows"


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
                f"{first.source} predicts {describe(one)}, and {other.source} {describe(two)}. "
                "Models of an ensemble need the same target, in the same order"
            )
    likelihood = first.likelihood
    members = tuple(member for model in models for member in model.members)
    if any(model.likelihood != likelihood for model in models):
        if not all(isinstance(model.likelihood, Classes) for model in models):
            raise ModelError(
                f"{first.source} and the other models differ in likelihood or in the unit of the "
                "target, so they cannot form an ensemble. Predict with each alone"
            )
        likelihood = Categorical(target=first.target)
        members = tuple(
            member._replace(draw=_normalized(member.draw, model.likelihood))
            for model in models
            for member in model.members
        )
    source = f"{first.source} and {len(models) - 1} more"
    return TrainedModel(members, likelihood, source, any(model.means for model in models))


def _normalized(draw: Sampler, likelihood: Likelihood) -> Sampler:
    """Log-probabilities of classes, which are logits too."""
    assert isinstance(likelihood, Classes)
    return lambda x: likelihood.normalized(draw(x))


def joined(draws: Sequence[Tensor]) -> Tensor:
    """The draws of several models, each [draws, n, width], as those of one, each model with the
    same weight.
    """
    count = lcm(*map(len, draws))
    return torch.cat([one.repeat(count // len(one), 1, 1) for one in draws])
