"""An input prior of the user's own: a function that draws inputs."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbayes.core.lazy import named, own_code
from fedbayes.core.wording import size
from fedbayes.errors import ConfigError, DataError
from fedbayes.inputs.prior import InputPrior


class OwnPrior(InputPrior):
    """What a function `package.module:function` draws.

    It is called as `function(count, rng, shape=shape)` with a `numpy.random.Generator`, and returns
    an array or tensor [count, *shape] of real numbers: images in [0, 1], rows in their own units.

    Args:
        place: `package.module:function`; its module is imported, so its code is run.
        shape: of one input.

    Raises:
        ConfigError: there is no such function.
    """

    def __init__(self, place: str, shape: tuple[int, ...]) -> None:
        super().__init__(shape)
        self.name = place
        function = named(place, "input prior")
        if not callable(function) or isinstance(function, type):
            raise ConfigError(
                f"the input prior {place!r} is not a function. Give a function, called as "
                "function(count, rng, shape=...)"
            )
        self._function: Callable[..., Any] = function
        self.assumes = f"as {place} returns them"

    def draw(self, count: int, rng: np.random.Generator) -> Tensor:
        """As `InputPrior.draw`."""
        with own_code(DataError, f"the input prior {self.name} failed", self.name):
            drawn = self._function(count, rng, shape=self.shape)
        return self._checked(drawn, count)

    def _checked(self, drawn: Any, count: int) -> Tensor:
        try:
            x = drawn.detach().cpu() if isinstance(drawn, Tensor) else torch.tensor(drawn)
        except (TypeError, ValueError, RuntimeError):
            raise self._wrong(f"a {type(drawn).__name__} that is not an array of numbers") from None
        if not x.is_floating_point():
            raise self._wrong(
                f"numbers of type {str(x.dtype).removeprefix('torch.')}. Return real numbers, for "
                "images divided by 255"
            )
        if tuple(x.shape) != (count, *self.shape):
            raise self._wrong(
                f"an array of {size(x.shape)}, but {size((count, *self.shape))} are needed"
            )
        x = x.float()
        if not bool(torch.isfinite(x).all()):
            raise self._wrong("values that are not finite")
        if x.ndim == 4 and count and (float(x.min()) < 0 or float(x.max()) > 1):
            raise self._wrong(
                f"images with values from {float(x.min()):g} to {float(x.max()):g}. Return values "
                "in [0, 1]"
            )
        return x

    def _wrong(self, what: str) -> DataError:
        return DataError(f"the input prior {self.name} returned {what}")
