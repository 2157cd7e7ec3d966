"""Any of several labels."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from fedbayes.core.tensors import Tensors
from fedbayes.likelihoods.base import Likelihood, finite, mean_of


class Multilabel(Likelihood):
    """p(y | f) = Π_l Bernoulli(y_l; 1 / (1 + exp(−f_l))): a logit for every label."""

    name = "multilabel"
    summary = "any of several labels, a logit for each"
    kinds = ("labels",)
    metric = "label_accuracy"
    higher_is_better = True
    possible = (0.0, 1.0)
    shares = ("label_accuracy", "exact_match")
    nonnegative = ("nll", "true_positives", "positives")

    @property
    def outputs(self) -> int:
        """A logit for every label."""
        return self.target.columns

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Log-probability of labels y [n, labels] of 0 and 1, summed over labels, [..., n]."""
        return -functional.binary_cross_entropy_with_logits(
            f, y.expand_as(f), reduction="none"
        ).sum(dim=-1)

    def pooled(self, draws: Tensor, weights: Tensor) -> Tensor:
        """Logits of the weighted mean of the networks' probabilities of each label, [n, labels]."""
        logs = weights.to(draws).log()[:, None, None]
        positive = torch.logsumexp(functional.logsigmoid(draws) + logs, dim=0)
        return positive - torch.logsumexp(functional.logsigmoid(-draws) + logs, dim=0)

    def divergence(self, f: Tensor, g: Tensor) -> Tensor:
        """The sum of the labels' KL(Bernoulli(f_l) ‖ Bernoulli(g_l)), [..., n]."""
        yes = functional.logsigmoid(f) - functional.logsigmoid(g)
        no = functional.logsigmoid(-f) - functional.logsigmoid(-g)
        p = torch.sigmoid(f)
        return (p * yes + (1 - p) * no).sum(dim=-1)

    def log_power(self, f: Tensor, power: float) -> Tensor:
        """Σ_l log(p_l^power + (1 − p_l)^power), [..., n]."""
        each = power * functional.logsigmoid(torch.stack([f, -f]))
        return torch.logsumexp(each, dim=0).sum(dim=-1)

    def mean(self, draws: Tensor) -> Tensor:
        """The mean probability of each label, [n, labels]."""
        return torch.sigmoid(draws).mean(dim=0)

    @torch.no_grad()
    def terms(self, draws: Tensor, y: Tensor) -> Tensors:
        """Counts, "nll", and how the labels of a sample are predicted: those whose mean probability
        is above one half.

        "label_accuracy" is the share of labels that are right, "exact_match" 1 where all are.
        """
        terms = super().terms(draws, y)
        probabilities, true = self.mean(draws.double()), y > 0.5
        predicted = probabilities > 0.5
        right = (predicted == true) & finite(draws)[:, None]
        return terms | {
            "label_accuracy": right.double().mean(dim=-1),
            "exact_match": right.all(dim=-1).double(),
            "true_positives": (right & true).double().sum(dim=-1),
            "positives": predicted.double().sum(dim=-1) + true.double().sum(dim=-1),
        }

    def metrics(self, scores: Mapping[str, float]) -> dict[str, float]:
        """The share of labels that are right, that of samples whose labels all are, the F1 score
        over all labels (micro average; NaN where no label is or is predicted to be positive), and
        the mean negative log-likelihood in nats.
        """
        positives = scores["positives"]
        return {
            "label_accuracy": mean_of(scores, "label_accuracy"),
            "exact_match": mean_of(scores, "exact_match"),
            "f1": min(2 * scores["true_positives"] / positives, 1.0) if positives > 0 else math.nan,
            **super().metrics(scores),
        }
