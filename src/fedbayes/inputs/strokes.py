"""Pen strokes on a dark ground: what written digits and letters look like."""

import numpy as np
import torch
from torch import Tensor

from fedbayes.data.dataset import Array
from fedbayes.inputs.prior import InputPrior

STROKES = 1, 3
"""Fewest and most strokes."""
THICKNESS = 0.027, 0.06
"""Half the width of a pen, in the image's shorter side."""
EDGE = 0.6, 1.4
"""Pixels over which ink fades."""
SPAN = 0.55, 0.8
"""Longer side of the box around the writing, in the image's."""
BEND = 1.6
"""How far a curve's inner knots lie from the middle, in units of its outer ones."""
POINTS = 96
"""Most points of a stroke: they are nearer to each other than a pen is wide."""
BUDGET = 1 << 25
"""Distances from a pixel to a point of a stroke that are held at a time."""


class Strokes(InputPrior):
    """Writing: one to three Bézier curves of one pen, light on dark, of any number of channels.

    Args:
        shape: channels, height and width; channels are the same.
    """

    name = "strokes"
    bounded = True
    movable = True
    assumes = "writing as one to three pen strokes, light on a dark ground"

    def draw(self, count: int, rng: np.random.Generator) -> Tensor:
        """As `InputPrior.draw`; all values in [0, 1]."""
        channels, height, width = self.shape
        points = int(np.clip(2 * max(height, width), 16, POINTS))
        chunk = max(1, BUDGET // (height * width * points * STROKES[1]))
        drawn = torch.empty(count, channels, height, width)
        for begin in range(0, count, chunk):
            part = drawn[begin : begin + chunk]
            part.copy_(self._images(len(part), points, rng)[:, None])
        return drawn

    def _images(self, count: int, points: int, rng: np.random.Generator) -> Tensor:
        _, height, width = self.shape
        side = min(height, width)
        half = (rng.uniform(*THICKNESS, (count, 1)) * side).astype(np.float32)
        fade = rng.uniform(*EDGE, (count, 1)).astype(np.float32)
        curves = _placed(_curves(count, points, rng), height, width, rng)
        near = _distances(torch.from_numpy(curves), height, width)
        ink = (torch.from_numpy(half) - near) / torch.from_numpy(fade) + 0.5
        return ink.clamp_(0.0, 1.0).reshape(count, height, width)


def _curves(count: int, points: int, rng: np.random.Generator) -> Array:
    """Points [count, strokes · points, 2] of cubic Bézier curves; of absent ones, the first's."""
    t = np.linspace(0.0, 1.0, points)[:, None]
    basis = np.hstack([(1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3])
    knots = rng.uniform(-1.0, 1.0, (count, STROKES[1], 4, 2))
    knots[:, :, 1:3] *= BEND
    number = rng.integers(STROKES[0], STROKES[1] + 1, count)
    absent = np.arange(STROKES[1]) >= number[:, None]
    knots = np.where(absent[..., None, None], knots[:, :1], knots)
    return _evenly(np.asarray(basis @ knots).reshape(-1, points, 2)).reshape(count, -1, 2)


def _evenly(curves: Array) -> Array:
    """As many points of the same curves [n, points, 2], as far apart along each."""
    count, points, _ = curves.shape
    length = np.zeros((count, points))
    length[:, 1:] = np.linalg.norm(np.diff(curves, axis=1), axis=-1).cumsum(1)
    length *= (points - 1) / np.maximum(length[:, -1:], 1e-12)
    # All curves' lengths one after another are one rising sequence.
    along = length + points * np.arange(count)[:, None]
    wanted = np.arange(points) + points * np.arange(count)[:, None]
    flat = curves.reshape(-1, 2)
    parts = [np.interp(wanted.ravel(), along.ravel(), flat[:, axis]) for axis in range(2)]
    return np.stack(parts, -1).reshape(curves.shape)


def _placed(curves: Array, height: int, width: int, rng: np.random.Generator) -> Array:
    """Curves in pixels, float32: their box is in the middle, a part of the image's size."""
    low, high = curves.min(1, keepdims=True), curves.max(1, keepdims=True)
    room = np.array([height, width])
    span = rng.uniform(*SPAN, (len(curves), 1, 1))
    scale = (span * room / np.maximum(high - low, 1e-6)).min(-1, keepdims=True)
    return np.asarray((curves - (low + high) / 2) * scale + (room - 1) / 2, np.float32)


def _distances(curve: Tensor, height: int, width: int) -> Tensor:
    """From each pixel to the nearest point of a curve [count, points, 2]: [count, pixels]."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    pixels = torch.stack([rows, columns], -1).reshape(1, -1, 2).to(curve)
    # |p - q|² = |p|² - max over q of (2 p·q - |q|²): a matrix product.
    against = torch.cat([2 * curve, -(curve**2).sum(-1, keepdim=True)], -1)
    ones = torch.ones_like(pixels[..., :1])
    most = (torch.cat([pixels, ones], -1).expand(len(curve), -1, -1) @ against.mT).amax(-1)
    return ((pixels**2).sum(-1) - most).clamp_min_(0.0).sqrt_()
