"""What a likelihood is: the bridge between outputs of a network and a target."""

import math
from abc import abstractmethod
from collections.abc import Mapping
from functools import lru_cache
from typing import ClassVar, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator
from torch import Tensor, nn

from fedbayes.core.metrics import Uncertainty, uncertainty
from fedbayes.core.targets import Target
from fedbayes.core.tensors import Tensors
from fedbayes.errors import ConfigError

MOST_LOG_DENSITY = 1000.0
"""Nats that no logarithm of a density of one column exceeds: that of a deviation of 1e-308 is 708,
and the logarithm of a column's scale comes on top."""
ROUNDING = 1e-5
"""What a probability in float32 may be above 1 at most, and its logarithm above 0."""


class Likelihood(BaseModel):
    """p(y | f) of a target y given the outputs f of a network. Functions are pure.

    Fields are the settings of the likelihood, which `model_dump` gives, and the target. A
    network may be one of several draws from a posterior; predictions then are of the mixture of
    them, p(y) = mean_d p(y | f_d).

    Examples:
        >>> from fedbayes.core.targets import Target
        >>> from fedbayes.likelihoods import Likelihood
        >>> from fedbayes.likelihoods import build_likelihood
        >>> isinstance(build_likelihood("poisson", Target("count", ("visits",))), Likelihood)
        True
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: ClassVar[str]
    """The name in a config."""
    summary: ClassVar[str]
    """One line for a list of likelihoods."""
    kinds: ClassVar[tuple[str, ...]]
    """Kinds of targets that it takes."""
    metric: ClassVar[str]
    """The headline among its metrics: "accuracy", "rmse"."""
    higher_is_better: ClassVar[bool]
    """Whether a higher value of the headline is a better one."""
    possible: ClassVar[tuple[float, float]] = (0.0, math.inf)
    """The least and greatest value of the headline."""
    shares: ClassVar[tuple[str, ...]] = ()
    """Those of its scores to which a sample adds at least 0 and at most 1."""
    nonnegative: ClassVar[tuple[str, ...]] = ()
    """Those to which a sample adds at least 0; of several columns the name before the slash."""

    coupled: ClassVar[bool] = False
    """Whether samples are not independent given f: then `log_prob` and `terms` of each depend on
    those that it is given with, which are to be one client's, and are evaluated all at once."""

    target: Target = Field(exclude=True, description="the target")

    @field_validator("target")
    @classmethod
    def _taken(cls, target: Target) -> Target:
        """See that the likelihood takes such a target."""
        if target.kind not in cls.kinds:
            raise ConfigError(
                f"the likelihood {cls.name} works with {' or '.join(cls.kinds)} targets, but this "
                f"target is of kind {target.kind}"
            )
        if target.kind == "real" and not (target.center and target.scale):
            raise ConfigError(
                f"the likelihood {cls.name} needs center and scale of the target columns "
                f"{', '.join(target.names)}"
            )
        return target

    @property
    @abstractmethod
    def outputs(self) -> int:
        """Width of the network's last layer."""

    @property
    def least_nll(self) -> float:
        """An approximate lower bound of the mean of −log p(y), from the precision of numbers."""
        if "nll" in self.nonnegative:
            return -ROUNDING
        return -MOST_LOG_DENSITY * max(1, self.target.columns)

    def head(self) -> nn.Module | None:
        """A fresh module to append behind the network, [n, outputs] to [n, width]; None for none.

        Its parameters are the likelihood's own: noise that is learnt.
        """
        return None

    @abstractmethod
    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Log-density of targets given outputs, in nats and the unit of the target.

        Pure, differentiable in f, and such that `torch.vmap` maps it.

        Args:
            f: outputs, behind the head if there is any, [..., n, width].
            y: targets as in `Samples.y`: [n] or [n, columns].

        Returns:
            [..., n].
        """

    def nll(self, f: Tensor, y: Tensor) -> Tensor:
        """What training minimizes: the mean of −log p(y | f) over samples, a scalar."""
        return -self.log_prob(f, y).mean()

    @torch.no_grad()
    def terms(self, draws: Tensor, y: Tensor) -> Tensors:
        """What each sample adds to the scores.

        Args:
            draws: outputs under draws from a posterior, [draws, n, width].
            y: targets, [n] or [n, columns].

        Returns:
            By name, float64 [n]. Sums over samples are the scores that `metrics` reads; those of
            several sets of samples add. Among them are "count", ones, and "nll", −log p(y) of
            the mixture; inf where an output is not finite.
        """
        log_density = self.log_predictive(draws, y)
        nll = torch.where(finite(draws) & ~log_density.isnan(), -log_density, torch.inf)
        return {"count": torch.ones_like(nll), "nll": nll}

    def log_predictive(self, draws: Tensor, y: Tensor) -> Tensor:
        """Log p(y) of the mixture of draws [draws, n, width] for targets y, float64 [n]."""
        each = self.log_prob(draws.double(), y.double() if y.is_floating_point() else y)
        return torch.logsumexp(each, dim=0) - math.log(len(draws))

    def metrics(self, scores: Mapping[str, float]) -> dict[str, float]:
        """Metrics from the sums of `terms`; NaN without samples."""
        return {"nll": mean_of(scores, "nll")}

    def pooled(self, draws: Tensor, weights: Tensor) -> Tensor:
        """The outputs whose p(y | f) is nearest to a mixture: the least Σ_s w_s KL(p_s ‖ p_f).

        For exponential families that is the mixture's mean of the sufficient statistics.

        Args:
            draws: outputs of several networks, behind their heads, [S, n, width].
            weights: of the networks, which add to 1, [S].

        Returns:
            [n, width]; [n, outputs] where the likelihood needs no more.

        Raises:
            ConfigError: the likelihood does not say; those of one's own need not.
        """
        raise ConfigError(
            f"the likelihood {self.name} cannot combine predictions of several networks. Define "
            "`pooled` in its class"
        )

    def divergence(self, f: Tensor, g: Tensor) -> Tensor:
        """KL(p(y | f) ‖ p(y | g)) in nats, summed over columns, [..., n]; differentiable.

        Args:
            f: outputs [..., n, width].
            g: outputs [..., n, width].

        Raises:
            ConfigError: the likelihood does not say; those of one's own need not.
        """
        raise ConfigError(
            f"the likelihood {self.name} has no divergence of predictions. Define `divergence` in "
            "its class"
        )

    def log_power(self, f: Tensor, power: float) -> Tensor:
        """Log ∫ p(y | f)^power dy, over all targets in their own unit, [..., n]; differentiable.

        Args:
            f: outputs [..., n, width].
            power: above 0.

        Raises:
            ConfigError: the likelihood does not say; those of one's own need not.
        """
        raise ConfigError(
            f"the likelihood {self.name} has no integral of a power of its density. Define "
            "`log_power` in its class"
        )

    @abstractmethod
    def mean(self, draws: Tensor) -> Tensor:
        """Classes and labels: probabilities [n, names]. Else the predictive mean [n, columns].

        Args:
            draws: outputs under draws from a posterior, [draws, n, width].
        """


class Classes(Likelihood):
    """Likelihoods of one class out of several: every class has a probability.

    Examples:
        >>> from fedbayes.core.targets import Target
        >>> from fedbayes.likelihoods import Classes
        >>> from fedbayes.likelihoods import build_likelihood
        >>> isinstance(build_likelihood("categorical", Target("class", ("a", "b", "c"))), Classes)
        True
    """

    kinds = ("class",)
    metric = "accuracy"
    higher_is_better = True
    possible = (0.0, 1.0)
    shares = ("correct", "confidence")
    nonnegative = ("nll",)

    _weights: tuple[float, ...] = PrivateAttr(())
    _focal: float = PrivateAttr(0.0)

    def reweighted(self, weights: tuple[float, ...], focal: float) -> Self:
        """The same likelihood, with another loss of training.

        Args:
            weights: what the loss of a sample of each class is multiplied by; empty: 1.
            focal: γ: it is multiplied by (1 − p(y))^γ too.
        """
        other = self.model_copy()
        other._weights, other._focal = weights, focal
        return other

    def nll(self, f: Tensor, y: Tensor) -> Tensor:
        """The training loss: the mean of −log p(y | f), or that of `reweighted`."""
        log_prob = self.log_prob(f, y)
        loss = -log_prob
        if self._focal:
            loss = loss * (-torch.expm1(log_prob)).clamp_min(1e-6).pow(self._focal)
        if self._weights:
            loss = loss * log_prob.new_tensor(self._weights)[y]
        return loss.mean()

    @abstractmethod
    def normalized(self, f: Tensor) -> Tensor:
        """Log-probabilities [..., n, classes] under single outputs [..., n, width]."""

    def outputs_of(self, scores: Tensor) -> Tensor:
        """Outputs [..., n, width] whose log-probabilities are these, up to a constant by sample.

        Args:
            scores: of the classes, [..., n, classes].

        Raises:
            ConfigError: the likelihood does not say; those of one's own need not.
        """
        raise ConfigError(
            f"the likelihood {self.name} has no outputs for given probabilities. Define "
            "`outputs_of` in its class"
        )

    def pooled(self, draws: Tensor, weights: Tensor) -> Tensor:
        """Outputs of the weighted mean of the networks' probabilities, [n, width]."""
        logs = self.normalized(draws) + weights.to(draws).log()[:, None, None]
        return self.outputs_of(torch.logsumexp(logs, dim=0))

    def divergence(self, f: Tensor, g: Tensor) -> Tensor:
        """Σ_k p_k(f) (log p_k(f) − log p_k(g)), [..., n]."""
        one, other = self.normalized(f), self.normalized(g)
        return (one.exp() * (one - other)).sum(dim=-1)

    def log_power(self, f: Tensor, power: float) -> Tensor:
        """Log Σ_k p_k^power, [..., n]."""
        return torch.logsumexp(power * self.normalized(f), dim=-1)

    def log_probabilities(self, draws: Tensor) -> Tensor:
        """Logarithms of the mean probabilities of the classes, [n, classes].

        Args:
            draws: outputs under draws from a posterior, [draws, n, width].
        """
        return torch.logsumexp(self.normalized(draws), dim=0) - math.log(len(draws))

    def mean(self, draws: Tensor) -> Tensor:
        """Mean probabilities of the classes, [n, classes]."""
        return self.log_probabilities(draws).exp()

    def told(self, draws: Tensor) -> Tensor:
        """Samples of whose class every draw predicts something, bool [n].

        An output of −inf among finite ones rules a class out, and is a prediction; NaN, +inf, or
        nothing finite at all is none.

        Args:
            draws: outputs under draws from a posterior, [draws, n, width].
        """
        possible = (draws < torch.inf).all(dim=-1) & torch.isfinite(draws).any(dim=-1)
        return possible.all(dim=0)

    def uncertainty(self, draws: Tensor) -> Uncertainty:
        """What is unknown of the class, and which part of it is between the draws."""
        return uncertainty(self.normalized(draws))

    @torch.no_grad()
    def terms(self, draws: Tensor, y: Tensor) -> Tensors:
        """Counts, "nll", "correct": 1 where the most probable class is the true one, and
        "confidence", the probability of that class; 0 where nothing is predicted.
        """
        log_probabilities = self.log_probabilities(draws)
        told = self.told(draws)
        true = log_probabilities.gather(1, y[:, None])[:, 0].double()
        correct = (log_probabilities.argmax(dim=-1) == y) & told
        nll = torch.where(told, -true, torch.inf)
        confidence = torch.where(told, log_probabilities.amax(dim=-1).exp(), 0.0)
        return {
            "count": torch.ones_like(nll),
            "correct": correct.double(),
            "nll": nll,
            "confidence": confidence.double(),
        }

    def metrics(self, scores: Mapping[str, float]) -> dict[str, float]:
        """The accuracy, and the mean negative log-likelihood in nats."""
        return {"accuracy": mean_of(scores, "correct"), **super().metrics(scores)}


@lru_cache(maxsize=8)
def example_scores(likelihood: Likelihood) -> Mapping[str, float]:
    """The scores of a single sample of zeros."""
    head, target = likelihood.head(), likelihood.target
    f = torch.zeros(1, likelihood.outputs)
    shape = (1,) if target.classes else (1, target.columns)
    y = torch.zeros(shape, dtype=torch.int64 if target.classes else torch.float32)
    terms = likelihood.terms((f if head is None else head(f))[None], y)
    return {name: float(values.sum()) for name, values in terms.items()}


def finite(draws: Tensor) -> Tensor:
    """Samples all of whose outputs [draws, n, width] are finite, bool [n]."""
    return torch.isfinite(draws).all(dim=-1).all(dim=0)


def mean_of(scores: Mapping[str, float], name: str) -> float:
    """The mean over samples of a score; NaN where there are none."""
    return scores[name] / scores["count"] if scores["count"] else math.nan


def constants(values: tuple[float, ...], like: Tensor) -> Tensor:
    """Numbers as a tensor of the type and on the device of another."""
    return torch.tensor(values, dtype=like.dtype, device=like.device)
