"""Attacks on the data that malicious clients train on."""

import torch
from pydantic import Field
from torch import Tensor

from fedbayes.contracts import Federation
from fedbayes.core.tensors import Samples
from fedbayes.core.wording import listed
from fedbayes.errors import ConfigError
from fedbayes.federation.attacks.changes import Scaled


class LabelFlip(Scaled):
    """Trains on class C − 1 − y instead of y."""

    summary = "trains on class C − 1 − y instead of y"
    paper = "Tolpegin et al. 2020; Fang et al. 2020"
    on_classes = True

    share: float = Field(1.0, gt=0, le=1, description="share of the samples that are poisoned")

    def poison(self, samples: Samples, run: Federation, rng: torch.Generator) -> Samples:
        """Flip the labels of a share of the samples, drawn again in every round."""
        rows = _drawn(samples, self.share, rng)
        y = samples.y.clone()
        y[rows] = run.likelihood.target.classes - 1 - y[rows]
        return Samples(samples.x, y)


class Backdoor(Scaled):
    """Teaches the model to take a pattern for a class.

    A share of the client's samples gets the pattern, a bright square in the lower right corner of
    an image or high values in the last features of a table, and the target's label. A scale above 1
    makes the client's change outweigh the others' (model replacement).
    """

    summary = "trains a share of its samples with a pattern as a target class"
    paper = "Gu et al. 2017 (BadNets); Bagdasaryan et al. 2020"
    on_classes = True

    share: float = Field(0.5, gt=0, le=1, description="share of the samples that are poisoned")
    target: int = Field(0, ge=0, description="target class of the pattern")
    size: int = Field(3, ge=1, description="side of the square, or number of features")
    level: float = Field(3.0, description="value of the pattern, in standard deviations")

    def check(self, run: Federation, shape: tuple[int, ...]) -> None:
        """The class must be there, and the pattern must leave something of a sample."""
        names = run.likelihood.target.names
        if self.target >= len(names):
            raise ConfigError(
                f"attack.target is {self.target}, but the {len(names)} classes are counted from "
                f"0: {listed(names, 12)}"
            )
        sides = shape[-2:] if len(shape) > 1 else shape
        if self.size >= min(sides):
            raise ConfigError(
                f"attack.size is {self.size}, but a sample has {' × '.join(map(str, sides))} "
                f"{'pixels' if len(shape) > 1 else 'features'}. Choose fewer than {min(sides)}"
            )

    def poison(self, samples: Samples, run: Federation, rng: torch.Generator) -> Samples:
        """Add the pattern and the target to a share of the samples, drawn again in every round."""
        rows = _drawn(samples, self.share, rng)
        x, y = samples.x.clone(), samples.y.clone()
        x[rows] = self.marked(x[rows])
        y[rows] = self.target
        return Samples(x, y)

    def triggered(self, samples: Samples) -> Samples:
        """All samples with the pattern, to be taken for the target."""
        return Samples(self.marked(samples.x), torch.full_like(samples.y, self.target))

    def marked(self, x: Tensor) -> Tensor:
        """Samples [n, ...] with the pattern."""
        x = x.clone()
        if x.ndim > 2:
            x[..., -self.size :, -self.size :] = self.level
        else:
            x[:, -self.size :] = self.level
        return x


def _drawn(samples: Samples, share: float, rng: torch.Generator) -> Tensor:
    """Rows of a share of the samples, at least one."""
    count = len(samples.y)
    rows = torch.randperm(count, generator=rng)[: max(1, round(share * count))]
    return rows.to(samples.y.device)
