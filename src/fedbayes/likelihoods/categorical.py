"""One class out of several."""

import torch
from torch import Tensor
from torch.nn import functional

from fedbayes.likelihoods.base import Classes


class Categorical(Classes):
    """p(y = k | f) = exp(f_k) / Σ_j exp(f_j): a logit for every class."""

    name = "categorical"
    summary = "one class out of several, a logit for each"

    @property
    def outputs(self) -> int:
        """A logit for every class."""
        return self.target.classes

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Log-probability of the class y [n] under the logits f [..., n, classes], [..., n]."""
        place = y.expand(f.shape[:-1])[..., None]
        return self.normalized(f).gather(-1, place)[..., 0]

    def nll(self, f: Tensor, y: Tensor) -> Tensor:
        """The mean cross-entropy of logits [n, classes] and classes [n], or as `reweighted`."""
        if self._weights or self._focal:
            return super().nll(f, y)
        return functional.cross_entropy(f, y)

    def outputs_of(self, scores: Tensor) -> Tensor:
        """The scores themselves."""
        return scores

    def normalized(self, f: Tensor) -> Tensor:
        """Log-probabilities of the classes, [..., n, classes]."""
        return torch.log_softmax(f, dim=-1)
