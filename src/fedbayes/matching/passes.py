"""The order in which parts of a network are matched: top down, then, if asked, up and down."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Generic, TypeVar

import numpy as np

from fedbayes.matching.settings import MatchingSettings

Watch = Callable[[str], None]
"""Called with what is being done, for a display."""
Part = TypeVar("Part")
"""The matching of a layer, or of a group of units."""


@dataclass(frozen=True)
class Found(Generic[Part]):
    """A matching of all parts."""

    layers: list[Part]
    """First to last."""
    seconds: list[float]
    """Time spent on each."""
    objective: list[float]
    """Twice the objective of the whole network, at the start and after every pass."""


class Passes(ABC, Generic[Part]):
    """A network whose `hidden` parts are matched one at a time, by the settings of the matching."""

    def __init__(self, hidden: int, settings: MatchingSettings) -> None:
        self.hidden, self.settings = hidden, settings

    @abstractmethod
    def match(
        self, depth: int, layers: Sequence[Part | None], rng: np.random.Generator, joint: bool
    ) -> Part:
        """Match one part given those that are; joint, given all others, and from where it is."""

    @abstractmethod
    def value(self, layers: Sequence[Part]) -> float:
        """Twice the objective of the whole network."""

    def improved(self, parts: Sequence[Part], seed: int, watch: Watch) -> Found[Part]:
        """The matching that passes up and down find from this one; there must be some."""
        found = Found(list(parts), [0.0] * self.hidden, [self.value(parts)])
        return self.alternate(found, np.random.default_rng([seed, 0]), watch)

    def best(self, seed: int, watch: Watch) -> Found[Part]:
        """The matching with the lowest objective of all starts."""
        best: Found[Part] | None = None
        starts = self.settings.starts if self.settings.alternations else 1
        for start in range(starts):
            say = partial(_say, watch, f"start {start + 1}/{starts}: " if starts > 1 else "")
            rng = np.random.default_rng([seed, start])
            found = self.top_down(rng, say)
            if self.settings.alternations:
                found = self.alternate(found, rng, say)
            if best is None or found.objective[-1] < best.objective[-1]:
                best = found
        assert best is not None
        return best

    def top_down(self, rng: np.random.Generator, watch: Watch) -> Found[Part]:
        """Match every part once, from the last to the first."""
        layers: list[Part | None] = [None] * self.hidden
        seconds = [0.0] * self.hidden
        for depth in reversed(range(self.hidden)):
            watch(f"layer {depth + 1} of {self.hidden}")
            begin = perf_counter()
            layers[depth] = self.match(depth, layers, rng, joint=False)
            seconds[depth] = perf_counter() - begin
        matched = [layer for layer in layers if layer is not None]
        return Found(matched, seconds, [self.value(matched)])

    def alternate(self, found: Found[Part], rng: np.random.Generator, watch: Watch) -> Found[Part]:
        """Go up and down the parts until a pass lowers the objective no more."""
        layers, seconds = list(found.layers), list(found.seconds)
        values = list(found.objective)
        for number in range(self.settings.alternations):
            watch(f"pass {number + 1}, objective {values[-1]:,.0f}")
            depths = range(self.hidden)
            for depth in depths if number % 2 == 0 else reversed(depths):
                begin = perf_counter()
                layers[depth] = self.match(depth, layers, rng, joint=True)
                seconds[depth] += perf_counter() - begin
            values.append(self.value(layers))
            if values[-1] >= values[-2] - 1e-7 * abs(values[-2]):
                break
        return Found(layers, seconds, values)


def _say(watch: Watch, label: str, what: str) -> None:
    watch(label + what)
