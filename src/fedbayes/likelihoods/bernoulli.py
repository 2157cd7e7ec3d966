"""One of two classes by one output."""

from typing import Self

import torch
from pydantic import model_validator
from torch import Tensor
from torch.nn import functional

from fedbayes.errors import ConfigError
from fedbayes.likelihoods.base import Classes


class Bernoulli(Classes):
    """p(y = 1 | f) = 1 / (1 + exp(−f)): one logit, that of the second class."""

    name = "bernoulli"
    summary = "one of two classes, by one logit"

    @model_validator(mode="after")
    def _two(self) -> Self:
        if self.target.classes != 2:
            raise ConfigError(
                "the likelihood bernoulli works with two classes, but the target has "
                f"{self.target.classes}. Choose categorical"
            )
        return self

    @property
    def outputs(self) -> int:
        """The logit of the second class."""
        return 1

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Log-probability of the class y [n], 0 or 1, under logits f [..., n, 1], [..., n]."""
        logits = f[..., 0]
        classes = y.to(f.dtype).expand_as(logits)
        return -functional.binary_cross_entropy_with_logits(logits, classes, reduction="none")

    def outputs_of(self, scores: Tensor) -> Tensor:
        """The second class's score less the first's."""
        return scores[..., 1:] - scores[..., :1]

    def normalized(self, f: Tensor) -> Tensor:
        """Log-probabilities of both classes, [..., n, 2]."""
        return functional.logsigmoid(torch.cat([-f, f], dim=-1))
