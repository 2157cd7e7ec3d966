"""Inputs moved toward classes that a prior hardly draws."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import functional

from fedbayes.core import seeds
from fedbayes.errors import ModelError
from fedbayes.fusion.draws import Derived, Draws
from fedbayes.fusion.frozen import Function
from fedbayes.fusion.settings import SeekingSettings
from fedbayes.fusion.teacher import Teacher
from fedbayes.likelihoods import Classes


class Seeker(Derived):
    """Draws of which some are moved up the gradient of a class' probability under the teacher.

    A prior of pictures hardly draws what the teacher takes for some classes, and a fused network
    hardly hears of them. So a share of the draws goes a few steps toward classes that are drawn at
    random: x ← x + size · g / rms(g), g the gradient of log p(class | x), for images smoothed
    by a window of 3 by 3, and kept within the values that the prior draws.

    Args:
        draws: where inputs come from.
        teacher: whom to ask; of classes.
        settings: how many are moved, and how far.
    """

    def __init__(self, draws: Draws, teacher: Teacher, settings: SeekingSettings) -> None:
        super().__init__(draws)
        self.teacher = teacher
        self.settings = settings

    def batch(self, number: int, count: int) -> Tensor:
        """As `Draws.batch`: the same for the same number.

        Raises:
            ModelError: the teacher's outputs are of no classes.
        """
        x = self.draws.batch(number, count)
        purpose = "seeking" if number >= 0 else "seeking held out"
        rng = seeds.torch_rng(self.seed, purpose, round=abs(number))
        moved = torch.rand(count, generator=rng) < self.settings.share
        if not moved.any():
            return x
        kind = self._classes(x[:1])
        wanted = torch.randint(kind.target.classes, (int(moved.sum()),), generator=rng)
        x = x.clone()
        x[moved] = self.sought(x[moved], wanted.to(x.device), rng)
        return x

    def _classes(self, x: Tensor) -> Classes:
        with torch.no_grad():
            kind = self.teacher.likelihood(self.teacher(x).shape[-1])
        if not isinstance(kind, Classes):
            raise ModelError(
                f"seeking moves inputs toward classes, but the likelihood {kind.name} has none. "
                "Leave seeking out"
            )
        return kind

    def sought(self, x: Tensor, wanted: Tensor, rng: torch.Generator) -> Tensor:
        """Inputs moved toward classes.

        Args:
            x: inputs [n, *shape], at least one.
            wanted: a class for each, [n].
            rng: of the clients that are asked.
        """
        sizes = [self.settings.size] * self.settings.steps
        return moved(x, lambda at: self._slope(at, wanted, rng), sizes)

    def _slope(self, x: Tensor, wanted: Tensor, rng: torch.Generator) -> Tensor:
        """Gradient of log p(wanted | x), [n, *shape], of one client drawn for each input."""
        shares = self.teacher.shares
        if shares is None or shares.ndim == 1:
            return self._ascent(self.teacher, x, wanted)
        asked = torch.multinomial(shares.T[wanted.cpu()], 1, generator=rng)[:, 0].to(x.device)
        slope = torch.empty_like(x)
        for number in sorted(set(asked.tolist())):
            rows = asked == number
            slope[rows] = self._ascent(self.teacher.clients[number], x[rows], wanted[rows])
        return slope

    def _ascent(self, function: Function, x: Tensor, wanted: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            outputs = function(leaf)
            kind = self.teacher.likelihood(outputs.shape[-1])
            if not outputs.requires_grad:
                raise ModelError(
                    "seeking needs gradients with respect to inputs, which a network does not "
                    "have. Leave seeking out"
                )
            (slope,) = torch.autograd.grad(kind.log_prob(outputs, wanted).sum(), leaf)
        return slope


def moved(x: Tensor, slope: Callable[[Tensor], Tensor], sizes: Iterable[float]) -> Tensor:
    """Inputs moved up a slope; images within the values that they have.

    Args:
        x: inputs [n, *shape], at least one.
        slope: at inputs, of what is to grow, [n, *shape].
        sizes: of the steps, root mean square; one slope for each.
    """
    low = high = None
    if x.ndim == 4:
        low, high = (end(x, (0, 2, 3), keepdim=True) for end in (torch.amin, torch.amax))
    for size in sizes:
        x = x + size * _unit(_smooth(slope(x)))
        if low is not None:
            x = x.clamp(low, high)
    return x


def _unit(slope: Tensor) -> Tensor:
    """Each row over its root mean square; zeros stay."""
    # By its largest entry first: where a class is sure, squares of the slope underflow.
    rows = slope.flatten(1)
    rows = rows / rows.abs().amax(1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
    scale = rows.square().mean(1, keepdim=True).sqrt().clamp(min=1e-30)
    return (rows / scale).reshape(slope.shape)


def _smooth(x: Tensor) -> Tensor:
    """Images averaged over windows of 3 by 3; others as they are."""
    if x.ndim != 4:
        return x
    return functional.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)
