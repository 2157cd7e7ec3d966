"""Pen strokes on a dark ground: what written digits and letters look like."""

import numpy as np
import torch
from torch import Tensor

from fedbayes.data.dataset import Array
from fedbayes.inputs.prior import InputPrior

STROKES = 1, 3
"""Fewest and most strokes."""
THICKNESS = 0.035, 0.085
"""Half the width of a pen, in the image's shorter side."""
MARGIN = 0.18
"""Of an image's sides, in which no stroke is steered."""
BUDGET = 1 << 25
"""Distances from a pixel to a point of a stroke that are held at a time."""


class Strokes(InputPrior):
    """Writing: one to three Bézier curves of one pen, light on dark, of any number of channels.

    Args:
        shape: channels, height and width; channels are the same.
    """

    name = "strokes"
    assumes = "writing: one to three pen strokes, light on a dark ground"

    def draw(self, count: int, rng: np.random.Generator) -> Tensor:
        """As `InputPrior.draw`; all values in [0, 1]."""
        channels, height, width = self.shape
        points = max(16, int(1.5 * max(height, width)))
        chunk = max(1, BUDGET // (height * width * points))
        drawn = torch.empty(count, channels, height, width)
        for begin in range(0, count, chunk):
            part = drawn[begin : begin + chunk]
            part.copy_(self._images(len(part), points, rng)[:, None])
        return drawn

    def _images(self, count: int, points: int, rng: np.random.Generator) -> Tensor:
        _, height, width = self.shape
        side = min(height, width)
        number = rng.integers(STROKES[0], STROKES[1] + 1, count)
        half = (rng.uniform(*THICKNESS, count) * side).astype(np.float32)
        edge = rng.uniform(0.5, 1.0, count).astype(np.float32)
        near = torch.full((count, height * width), torch.inf)
        for stroke in range(STROKES[1]):
            rows = np.flatnonzero(number > stroke)
            curve = torch.from_numpy(_curves(len(rows), points, height, width, rng))
            at = torch.from_numpy(rows)
            near[at] = torch.minimum(near[at], _distances(curve, height, width))
        ink = (torch.from_numpy(half)[:, None] - near) / torch.from_numpy(edge)[:, None] + 0.5
        return ink.clamp_(0.0, 1.0).reshape(count, height, width)


def _curves(count: int, points: int, height: int, width: int, rng: np.random.Generator) -> Array:
    """Points [count, points, 2] of cubic Bézier curves, rows and columns."""
    t = np.linspace(0.0, 1.0, points)[:, None]
    basis = np.hstack([(1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3])
    knots = rng.uniform(MARGIN, 1 - MARGIN, (count, 4, 2))
    middle = slice(1, 3)
    knots[:, middle] = 0.5 + 1.6 * (knots[:, middle] - 0.5)  # a curve bends less than its knots
    return np.asarray(basis @ knots * [height - 1, width - 1], np.float32)


def _distances(curve: Tensor, height: int, width: int) -> Tensor:
    """From each pixel to the nearest point of a curve [count, points, 2]: [count, pixels]."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    pixels = torch.stack([rows, columns], -1).reshape(1, -1, 2).to(curve)
    # |p - q|² = |p|² - max over q of (2 p·q - |q|²): a matrix product.
    against = torch.cat([2 * curve, -(curve**2).sum(-1, keepdim=True)], -1)
    ones = torch.ones_like(pixels[..., :1])
    most = (torch.cat([pixels, ones], -1).expand(len(curve), -1, -1) @ against.mT).amax(-1)
    return ((pixels**2).sum(-1) - most).clamp_min_(0.0).sqrt_()
