"""Tones in noise: what short pieces of speech, music and vibrations look like."""

import numpy as np
import torch
from torch import Tensor

from fedbayes.data.dataset import Array
from fedbayes.inputs.noise import CHUNK, power_law_noise
from fedbayes.inputs.prior import InputPrior

PITCH = 1 / 512, 1 / 8
"""Lowest and highest, in cycles a value; at 16 kHz 31 Hz to 2 kHz."""
CYCLES = 2
"""Fewest of the lowest pitch, in short inputs."""
HARMONICS = 16
"""Most of a tone; those above half the sampling rate are left out."""
TILT = 0.0, 2.0
"""Amplitudes of harmonics fall as their number to one of these."""
GLIDE = 0.01
"""Standard deviation of the relative change of pitch over an input."""
EXPONENTS = 0.0, 2.0
"""Of the noise's power spectra."""


class Tones(InputPrior):
    """A harmonic tone in 1/f^a noise, from pure to inaudible, with a pitch and timbre of its own.

    Pitch is log-uniform. Channels have the same tone and noise of their own.

    Args:
        shape: length; or channels and length.
    """

    name = "tones"
    standard = True
    assumes = "signals as one harmonic tone in 1/f^a noise, each of mean 0 and standard deviation 1"

    def draw(self, count: int, rng: np.random.Generator) -> Tensor:
        """As `InputPrior.draw`; each channel of an input has mean 0 and standard deviation 1."""
        drawn = torch.empty(count, *self.shape)
        for begin in range(0, count, CHUNK):
            part = drawn[begin : begin + CHUNK]
            part.copy_(torch.from_numpy(self._inputs(len(part), rng)).reshape(part.shape))
        return drawn

    def augmented(self, x: Tensor, rng: torch.Generator) -> Tensor:
        """Signals of either sign."""
        sign = 2 * torch.randint(0, 2, (len(x),), generator=rng) - 1
        return x * sign.reshape(-1, *(1 for _ in self.shape)).to(x)

    def _inputs(self, count: int, rng: np.random.Generator) -> Array:
        length = self.shape[-1]
        channels = self.shape[0] if len(self.shape) > 1 else 1
        noise = power_law_noise((count, channels, length), rng.uniform(*EXPONENTS, count), rng)
        loud = rng.uniform(0.0, 1.0, (count, 1, 1)).astype(np.float32) ** 2
        tone = _standardized(_tones(count, length, rng))[:, None]
        return _standardized((1 - loud) * tone + loud * noise)


def _tones(count: int, length: int, rng: np.random.Generator) -> Array:
    """Sums of harmonics [count, length], float32."""
    lowest = np.clip(CYCLES / length, *PITCH)
    pitch = np.exp(rng.uniform(np.log(lowest), np.log(PITCH[1]), (count, 1)))
    time = np.arange(length) - length / 2
    cycles = pitch * time * (1 + GLIDE * rng.standard_normal((count, 1)) * time / length)
    tilt = rng.uniform(*TILT, (count, 1))
    tones = np.zeros((count, length), np.float32)
    for harmonic in range(1, HARMONICS + 1):
        strength = rng.exponential(1.0, (count, 1)) * harmonic**-tilt * (harmonic * pitch < 0.5)
        phase = harmonic * cycles + rng.uniform(0.0, 1.0, (count, 1))
        turns = (2 * np.pi * (phase - np.floor(phase))).astype(np.float32)
        tones += strength.astype(np.float32) * np.sin(turns)
    return tones


def _standardized(x: Array) -> Array:
    """Each row with mean 0 and standard deviation 1."""
    x = x - x.mean(-1, keepdims=True)
    return np.asarray(x / np.maximum(x.std(-1, keepdims=True), 1e-12), np.float32)
