"""Dead leaves: shapes that hide each other, as objects do in photographs.

Alvarez, Gousseau and Morel (1999) and Lee, Mumford and Huang (2001): opaque shapes, their sizes by
a power law, leave images with the edges, occlusions and spectra of natural ones. Networks learn
from them much of what they learn from photographs (Baradad et al. 2021).
"""

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from fedbayes.data.dataset import Array
from fedbayes.inputs.augmentation import recoloured, turned
from fedbayes.inputs.noise import power_law_noise
from fedbayes.inputs.prior import InputPrior

CHUNK = 256
"""Images that are drawn at a time."""
FINER = 2
"""How much finer an image is drawn than it is given: pixels are averaged two by two."""
CORNERS = 16
"""Of the polygon that an ellipse becomes."""

SMALLEST, LARGEST = 0.05, 0.7
"""Mean radius of a shape, in the image's shorter side."""
POWER = 2.0, 3.0
"""Of the law of sizes, by image: the density falls as the radius to one of these."""
STRETCH = 0.6
"""Deviation of the logarithm of by how much a shape is longer, and narrower, than its radius."""
DISORDER = 0.5
"""Large shapes are drawn first, but for this deviation of the logarithm of their radii."""
EXTENT = 0.3, 1.0
"""Part of an image's sides over which the centres of its shapes lie."""
SHAPES = 5, 90
"""Fewest and most shapes in an image, as often of any order of magnitude."""
BRIGHTNESS, CONTRAST = (0.3, 0.7), (0.1, 0.4)
"""Mean of an image, and deviation of its shapes' brightness."""
CAST, HUE = 0.06, 0.15
"""Deviation of an image's colour, and most of its palette's colours, from grey."""
SHADE = 0.2
"""Deviation of how much a shape's brightness changes from the middle of an image to its side."""
ROUGH = 0.01, 0.1
"""Least and most 1/f texture of a shape, as its deviation."""
SPREAD = 0.3
"""Most that a pixel gives to each neighbour in a row, and in a column: a lens out of focus."""


class Leaves(InputPrior):
    """Photographs: ellipses, boxes and triangles drawn over each other, of any number of channels.

    Every image has a mean, a contrast and a palette of its own, every shape a shade that changes
    linearly over it and a share of the image's 1/f texture.

    Args:
        shape: channels, height and width.
    """

    name = "leaves"
    bounded = True
    mirrors = movable = True
    assumes = "photographs as random shapes that hide each other (dead leaves)"

    def draw(self, count: int, rng: np.random.Generator) -> Tensor:
        """As `InputPrior.draw`; all values in [0, 1]."""
        drawn = torch.empty(count, *self.shape)
        for begin in range(0, count, CHUNK):
            part = drawn[begin : begin + CHUNK]
            part.copy_(torch.from_numpy(self._images(len(part), rng)))
        return drawn

    def augmented(self, x: Tensor, rng: torch.Generator) -> Tensor:
        """Turns, mirror images and permuted colours."""
        return recoloured(turned(x, rng), rng)

    def _images(self, count: int, rng: np.random.Generator) -> Array:
        channels, height, width = self.shape
        shapes = SHAPES[1]
        labels = _occlusions(count, height * FINER, width * FINER, rng)
        colours = _colours(count, shapes + 1, channels, rng)
        slopes = rng.normal(0.0, SHADE, (count, 2, shapes + 1)).astype(np.float32)
        roughness = ROUGH[0] + np.ptp(ROUGH) * rng.random((count, shapes + 1)) ** 2
        roughness = roughness.astype(np.float32)
        x = np.empty((count, channels, height, width), np.float32)
        shade = _shades(labels, slopes)
        for channel in range(channels):
            x[:, channel] = _averaged(_looked_up(colours[:, channel], labels) + shade)
        rough = _averaged(_looked_up(roughness, labels))
        exponent = rng.uniform(0.5, 2.0, count)
        texture = power_law_noise(x.shape, exponent, rng, common=0.8)
        x += rough[:, None] * texture
        x = _blurred(x, rng.uniform(0.0, SPREAD, count).astype(np.float32))
        return np.clip(x, 0.0, 1.0, out=x)


def _occlusions(count: int, height: int, width: int, rng: np.random.Generator) -> Array:
    """Which shape each pixel shows, uint8 [count, height, width]; 0 is the ground."""
    counts = (SHAPES[0] * (SHAPES[1] / SHAPES[0]) ** rng.random(count)).astype(int).tolist()
    kinds = rng.integers(3, size=(count, SHAPES[1]))
    polygons = _polygons(kinds, height, width, rng)
    corners = np.array([CORNERS, 4, 3])[kinds].tolist()
    labels = np.empty((count, height, width), np.uint8)
    for index, many in enumerate(counts):
        picture = Image.new("L", (width, height))
        pen = ImageDraw.Draw(picture)
        outlines = polygons[index].tolist()
        for number in range(many):
            outline = outlines[number][: 2 * corners[index][number]]
            pen.polygon(outline, fill=number + 1)
        labels[index] = np.asarray(picture)
    return labels


def _polygons(kinds: Array, height: int, width: int, rng: np.random.Generator) -> Array:
    """Corners of ellipses, boxes and triangles [count, shapes, 2 CORNERS], x and y in turn."""
    size = (*kinds.shape, 1)
    radius = _radii(size, rng) * min(height, width)
    order = np.argsort(-radius * np.exp(rng.normal(0.0, DISORDER, size)), axis=1)
    radius = np.take_along_axis(radius, order, 1)
    stretch = np.exp(rng.normal(0.0, STRETCH, size))
    turn = rng.uniform(0.0, 2 * np.pi, size)
    corner = np.arange(CORNERS) / np.array([CORNERS, 4, 3])[kinds][..., None]
    angle = 2 * np.pi * corner
    along, across = radius * stretch * np.cos(angle), radius / stretch * np.sin(angle)
    right, down = _centres(size, rng)
    x = right * width + along * np.cos(turn) - across * np.sin(turn)
    y = down * height + along * np.sin(turn) + across * np.cos(turn)
    return np.stack([x, y], -1).reshape(*kinds.shape, 2 * CORNERS)


def _radii(size: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Radii by a power law from SMALLEST to LARGEST, by its inverse distribution."""
    power = 1 - rng.uniform(*POWER, (size[0], *(1 for _ in size[1:])))
    low, high = SMALLEST**power, LARGEST**power
    return np.asarray((low - rng.random(size) * (low - high)) ** (1 / power))


def _centres(size: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Across and down [2, count, shapes, 1], in an image's sides, spread over a part of it."""
    several = (2, size[0], 1, 1)
    extent = rng.uniform(*EXTENT, (1, *several[1:]))
    middle = 0.5 + (1 - extent) * rng.uniform(-0.5, 0.5, several)
    return np.asarray(middle + extent * rng.uniform(-0.6, 0.6, (2, *size)))


def _colours(count: int, shapes: int, channels: int, rng: np.random.Generator) -> Array:
    """Colours of shapes, float32 [count, channels, shapes]: brightness, and a palette's hues."""
    mean = rng.uniform(*BRIGHTNESS, (count, 1, 1))
    contrast = rng.uniform(*CONTRAST, (count, 1, 1))
    cast = rng.normal(0.0, CAST, (count, channels, 1))
    palette = rng.normal(0.0, 1.0, (count, channels, 4)) * rng.uniform(0.0, HUE, (count, 1, 1))
    pick = rng.integers(4, size=(count, 1, shapes))
    hue = np.take_along_axis(palette, np.broadcast_to(pick, (count, channels, shapes)), 2)
    brightness = contrast * rng.normal(0.0, 1.0, (count, 1, shapes))
    return np.asarray(mean + cast + brightness + hue, np.float32)


def _shades(labels: Array, slopes: Array) -> Array:
    """What each pixel gains as its shape's shade changes from side to side."""
    height, width = labels.shape[1:]
    down = np.linspace(-1.0, 1.0, height, dtype=np.float32)[:, None]
    right = np.linspace(-1.0, 1.0, width, dtype=np.float32)
    return _looked_up(slopes[:, 0], labels) * down + _looked_up(slopes[:, 1], labels) * right


def _looked_up(table: Array, labels: Array) -> Array:
    """Of every pixel its shape's entry of a table [count, shapes]."""
    offset = np.arange(len(table), dtype=np.int32)[:, None, None] * table.shape[1]
    return np.asarray(table.reshape(-1)[labels + offset])


def _averaged(x: Array) -> Array:
    """Images [count, height, width] at their own resolution."""
    rows = x[:, ::FINER] + x[:, 1::FINER]
    return np.asarray((rows[:, :, ::FINER] + rows[:, :, 1::FINER]) / 4)


def _blurred(x: Array, spread: Array) -> Array:
    """Images, of which each pixel gives a part of it, by image, to its neighbours."""
    part = spread[:, None, None, None]
    for axis in (2, 3):
        ends = [(0, 0)] * 4
        ends[axis] = (1, 1)
        wide = np.pad(x, ends, mode="edge")
        length = x.shape[axis]
        before, after = (np.take(wide, range(i, i + length), axis) for i in (0, 2))
        x = x + part * (before + after - 2 * x)
    return x
