"""Noise whose spectrum falls by a power law, as that of images and of many signals does."""

import numpy as np
import torch
from scipy import fft
from torch import Tensor

from fedbayes.data.dataset import Array
from fedbayes.inputs.augmentation import recoloured, turned
from fedbayes.inputs.prior import InputPrior

EXPONENTS = 0.5, 3.5
"""Of the power spectra: power falls as frequency to one of these."""
CHUNK = 1024
"""Inputs that are drawn at a time."""


class NoiseInputs(InputPrior):
    """1/f^a noise with an exponent, mean, contrast and mixture of channels of each input's own.

    Args:
        shape: channels, height and width; or channels and length; or length.
    """

    name = "noise"
    bounded = True
    movable = True
    assumes = "signals or textures as noise whose power falls with frequency as 1/f^a"

    def draw(self, count: int, rng: np.random.Generator) -> Tensor:
        """As `InputPrior.draw`; all values in [0, 1]."""
        drawn = torch.empty(count, *self.shape)
        for begin in range(0, count, CHUNK):
            part = drawn[begin : begin + CHUNK]
            part.copy_(torch.from_numpy(self._inputs(len(part), rng)))
        return drawn

    def augmented(self, x: Tensor, rng: torch.Generator) -> Tensor:
        """Of images turns, mirror images and permuted colours."""
        return recoloured(turned(x, rng), rng) if x.ndim == 4 else x

    def _inputs(self, count: int, rng: np.random.Generator) -> Array:
        several = (count, *(1 for _ in self.shape))
        mean, contrast = rng.uniform(0.25, 0.75, several), rng.uniform(0.05, 0.3, several)
        exponent = rng.uniform(*EXPONENTS, count)
        shape = (count, *self.shape) if len(self.shape) > 1 else (count, 1, *self.shape)
        x = power_law_noise(shape, exponent, rng, common=rng.uniform(0.0, 1.0, count))
        return np.clip(mean + contrast * x.reshape(count, *self.shape), 0.0, 1.0)


def power_law_noise(
    shape: tuple[int, ...],
    exponent: Array,
    rng: np.random.Generator,
    *,
    common: Array | float = 0.0,
) -> Array:
    """Gaussian noise whose power falls as frequency to a power, of mean 0 and deviation 1 each.

    Args:
        shape: inputs, channels, and one or two axes along which it is noise.
        exponent: of each input's power spectrum [n].
        rng: of what is drawn.
        common: the share of variance that an input's channels have in common, one or [n].

    Returns:
        float32 of this shape.
    """
    axes = tuple(range(2, len(shape)))
    frequency = _frequencies(shape[2:])
    rate = exponent.reshape(-1, 1, *(1 for _ in axes)).astype(np.float32)
    gain = np.exp(-0.5 * rate * np.log(frequency))
    gain[(..., *(0 for _ in axes))] = 0.0
    share = np.asarray(common, np.float32).reshape(-1, *(1 for _ in shape[1:]))
    white = np.sqrt(1 - share) * rng.standard_normal(shape, np.float32)
    white += np.sqrt(share) * rng.standard_normal((shape[0], 1, *shape[2:]), np.float32)
    x = fft.irfftn(fft.rfftn(white, axes=axes) * gain, shape[2:], axes=axes)
    power = np.sqrt(np.mean(x**2, axis=axes, keepdims=True))
    return np.asarray(x / np.maximum(power, 1e-12), np.float32)


def _frequencies(lengths: tuple[int, ...]) -> Array:
    """Of each frequency of a real Fourier transform its length, in cycles a pixel; 1 for 0."""
    last = fft.rfftfreq(lengths[-1]).astype(np.float32)
    if len(lengths) == 1:
        frequency = last
    else:
        first = fft.fftfreq(lengths[0]).astype(np.float32)
        frequency = np.hypot(first[:, None], last)
    frequency.flat[0] = 1.0
    return np.asarray(frequency)
