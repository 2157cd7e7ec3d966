"""Samples of weights along the iterates of the training loop: Langevin dynamics, and averages."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

import torch

from fedbayes.core.devices import placed
from fedbayes.core.tensors import Tensors
from fedbayes.errors import ConfigError
from fedbayes.inference.problem import Problem, Solved, Tree


@dataclass(frozen=True)
class Langevin:
    """The noise of stochastic gradient Langevin dynamics (Welling and Teh 2011).

    Each step of rate η goes down the gradient of a mean loss ℓ and adds noise N(0, 2 η T / n). As η
    goes to 0, the stationary distribution of these steps is exp(−n ℓ / T).
    """

    rng: torch.Generator
    """Of the noise, on the CPU."""
    count: int
    """n, the samples that ℓ is a mean over."""
    temperature: float = 1.0
    """T; 1 is the posterior, 0 no noise."""

    def add(self, weights: Tensors, names: Collection[str], lr: float) -> None:
        """Add the noise of one step, in place."""
        std = (2 * lr * self.temperature / self.count) ** 0.5
        for name in names:
            weight = weights[name]
            drawn = torch.randn(weight.shape, generator=self.rng, dtype=weight.dtype)
            weight.add_(placed(drawn, weight.device), alpha=std)


@dataclass(frozen=True)
class Pulled(Langevin):
    """Langevin noise where a Gaussian N(c, 1/Λ) is added to the likelihood, whose steps are taken
    exactly, an Ornstein-Uhlenbeck process: for it alone, samples are right at every rate.

    With a = η T Λ/n, w ← c + e^(−a) (w − c) + N(0, (1 − e^(−2a))/Λ).
    """

    centre: Tensors = field(default_factory=dict)
    """c."""
    precision: Tensors = field(default_factory=dict)
    """Λ, of the Gaussian as it is, not tempered."""

    def add(self, weights: Tensors, names: Collection[str], lr: float) -> None:
        """Add the step along the Gaussian and the noise, in place."""
        for name in names:
            weight, centre, precision = weights[name], self.centre[name], self.precision[name]
            a = lr * self.temperature / self.count * precision
            drawn = torch.randn(weight.shape, generator=self.rng, dtype=weight.dtype)
            std = (-torch.expm1(-2 * a) / precision).sqrt()
            weight.sub_(centre).mul_((-a).exp()).add_(centre).add_(
                placed(drawn, weight.device) * std
            )


def sampled(
    problem: Problem,
    solve: Callable[[Problem], Solved],
    names: Collection[str],
    *,
    burn_in: int,
    every: int,
    averaged: bool = False,
    langevin: Langevin | None = None,
) -> tuple[Solved, Tensors]:
    """Solve a problem and keep samples of its weights on the way.

    Args:
        problem: where to start, what is given; what follows its steps goes before the samples.
        solve: solves a problem by steps, as `RoundContext.solve` with a loss and data does.
        names: of the weights that are sampled, and get the noise: trained ones.
        burn_in: steps before the first window, at least 0.
        every: steps of a window, each of which gives a sample: its last iterate.
        averaged: the mean of a window's iterates instead of the last (Al-Shedivat et al. 2021).
        langevin: noise after every step.

    Returns:
        The solution, and the samples by name, [samples, ...], on the device of the start. Steps
        after the last whole window give none.

    Raises:
        ConfigError: there are not enough steps for two samples.
    """
    windows = _Windows(names, burn_in, every, averaged)

    def follow(parameters: Tensors, given: Tree, lr: float) -> None:
        if langevin is not None:
            langevin.add(parameters, names, lr)
        if problem.project is not None:
            problem.project(parameters, given, lr)
        windows.see(parameters)

    solved = solve(replace(problem, project=follow))
    if len(windows.found) < 2:
        raise ConfigError(
            f"{solved.steps} steps, of which {burn_in} are burn-in and every {every} give a "
            f"sample, give {len(windows.found)} samples, but 2 are needed. Set more epochs or "
            "steps, or less burn-in and thinning"
        )
    samples = {name: torch.stack([one[name] for one in windows.found]) for name in names}
    return solved, samples


class _Windows:
    """What is kept of the iterates."""

    def __init__(self, names: Collection[str], burn_in: int, every: int, averaged: bool) -> None:
        self.names, self.averaged = names, averaged
        self.burn_in, self.every = burn_in, every
        self.steps = 0
        self.sums: Tensors = {}
        self.found: list[Tensors] = []

    def see(self, parameters: Tensors) -> None:
        """Take note of an iterate."""
        self.steps += 1
        since = self.steps - self.burn_in
        if since <= 0:
            return
        if self.averaged:
            for name in self.names:
                before = self.sums.get(name, 0.0)
                self.sums[name] = parameters[name].detach() / self.every + before
        if since % self.every == 0:
            now = {name: parameters[name].detach().clone() for name in self.names}
            self.found.append(self.sums if self.averaged else now)
            self.sums = {}
