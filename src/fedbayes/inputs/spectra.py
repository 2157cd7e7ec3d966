"""Images and signals with the mean and the spectra of the clients' samples.

Each client sums its samples and, at every frequency, the products of their channels' Fourier
transforms. These sums add over clients. Draws of another prior are filtered until they have the
clients' mean and spectra: the colours, contrast and smoothness of their samples.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat
from torch import Tensor

from fedbayes.core.brief import Brief
from fedbayes.core.files import write_beside
from fedbayes.core.plausible import MOST_ROWS, PlausibleMoments, check_moments, check_rows
from fedbayes.core.wording import size
from fedbayes.data.tables.summaries import read_as
from fedbayes.data.tables.sums import Vector
from fedbayes.errors import DataError
from fedbayes.inputs.augmentation import mirrored
from fedbayes.inputs.prior import InputPrior

FORMAT = "fedbayes-spectra-1"
MOST_NUMBERS = 4_000_000
"""Of a file; 12 channels of 10,000 values take 1.6 million."""
CHUNK = 2**22
"""Values that are transformed at once."""
COMPARED = 4096
"""Draws of 1,024 values a channel that a filter is computed from; fewer of larger ones."""
FEWEST = 256
"""Draws that it is computed from at least."""
FLOOR = 1e-8
"""Least power of a frequency, as a part of the largest of all."""
ROUNDING = 1e-6
"""Part of a sample's power by which sums may contradict themselves, rounded as they are."""

Complex = npt.NDArray[np.complex128]


@dataclass(frozen=True, repr=False)
class Spectra(Brief):
    """Sums over images or signals, which can be added for several clients.

    Examples:
        >>> import numpy as np
        >>> from fedbayes.inputs.spectra import spectra_of
        >>> found = spectra_of(np.ones((10, 1, 4, 4)))
        >>> found.count, found.shape, float(found.mean.max())
        (10, (1, 4, 4), 1.0)
    """

    count: int
    """Samples."""
    total: Vector
    """Σ x over samples [C, *space]."""
    power: Complex
    """Σ F Fᴴ over samples, F the Fourier transform of x over space: [*frequencies, C, C], half of
    the last axis as in `numpy.fft.rfft`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one sample."""
        return self.total.shape

    @property
    def mean(self) -> Vector:
        """Of the samples [C, *space]."""
        return np.asarray(self.total / self.count)

    @property
    def covariance(self) -> Complex:
        """Of the Fourier transforms over samples [*frequencies, C, C]."""
        f = _transform(self.mean[None])[..., 0]
        return np.asarray(self.power / self.count - f[..., None] * f.conj()[..., None, :])

    @property
    def squares(self) -> Vector:
        """Σ x² over samples and space, of each channel [C] (Parseval)."""
        each = np.diagonal(self.power, axis1=-2, axis2=-1).real
        last = self.shape[-1]
        twice = np.full(last // 2 + 1, 2.0)
        twice[0] = 1.0
        if last % 2 == 0:
            twice[-1] = 1.0
        each = (each * twice[:, None]).reshape(-1, self.shape[0]).sum(0)
        return np.asarray(each / math.prod(self.shape[1:]))

    @property
    def within(self) -> bool:
        """Whether the samples can have values between 0 and 1 alone: their squares are smaller."""
        total = float(self.total.sum())
        return bool(self.total.min() >= 0) and float(self.squares.sum()) <= total * (1 + ROUNDING)

    def mirrored(self) -> "Spectra":
        """Of the samples and their mirror images along the last axis, as one sample each."""
        f = self.power
        # A mirror image's transform at u, v is that at u, -v, but for a phase of all channels.
        other = f.conj()
        for axis in range(f.ndim - 3):
            other = np.roll(np.flip(other, axis), 1, axis)
        return Spectra(self.count, (self.total + self.total[..., ::-1]) / 2, (f + other) / 2)

    def __add__(self, other: "Spectra") -> "Spectra":
        """Of the samples of both."""
        return Spectra(self.count + other.count, self.total + other.total, self.power + other.power)


class _SpectraFile(BaseModel):
    """The JSON file: arrays row by row."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: str
    count: Annotated[int, Field(ge=1, le=MOST_ROWS)]
    shape: list[Annotated[int, Field(ge=1)]]
    sum: list[FiniteFloat]
    real: list[FiniteFloat]
    imaginary: list[FiniteFloat]


def spectra_of(samples: npt.ArrayLike, where: str = "the samples") -> Spectra:
    """The sums of a client's samples.

    Args:
        samples: images [N, C, H, W], values between 0 and 1, or signals [N, C, T].
        where: what the samples are, for errors.

    Raises:
        DataError: there are none, a value is missing or infinite, or they are too large.
    """
    x = np.asarray(samples)
    if x.ndim < 3 or not x.size:
        raise DataError(f"{where}: spectra need samples of channels and space, got shape {x.shape}")
    channels, *space = x.shape[1:]
    frequencies = math.prod(space[:-1]) * (space[-1] // 2 + 1)
    numbers = channels * math.prod(space) + 2 * frequencies * channels**2
    if numbers > MOST_NUMBERS:
        raise DataError(
            f"{where}: the spectra of samples of {size(x.shape[1:])} are {numbers:,} numbers, and "
            f"the limit is {MOST_NUMBERS:,}. Use smaller samples or fewer channels"
        )
    total = np.zeros(x.shape[1:])
    power = np.zeros((*space[:-1], space[-1] // 2 + 1, channels, channels), np.complex128)
    for piece in _pieces(len(x), x.shape[1:]):
        part = np.asarray(x[piece], np.float64)
        if not np.isfinite(part).all():
            raise DataError(f"{where}: a value is missing or infinite. Leave such samples out")
        total += part.sum(0)
        f = _transform(part)
        power += f @ np.moveaxis(f.conj(), -1, -2)
    return Spectra(len(x), total, power)


def _pieces(count: int, shape: tuple[int, ...]) -> list[slice]:
    """Samples of a shape that are transformed at once."""
    step = max(1, CHUNK // math.prod(shape))
    return [slice(begin, min(begin + step, count)) for begin in range(0, count, step)]


def _transform(x: npt.NDArray[np.float64]) -> Complex:
    """The Fourier transform of samples [n, C, *space]: [*frequencies, C, n]."""
    f = np.fft.rfftn(x, axes=range(2, x.ndim))
    return np.asarray(np.moveaxis(f, (0, 1), (-1, -2)))


def add_spectra(several: Sequence[Spectra], names: Sequence[str]) -> Spectra:
    """The sums of all clients' samples.

    Args:
        several: each client's.
        names: of the clients, for errors.

    Raises:
        DataError: samples have different shapes, or one client decides the sums of all.
    """
    first = several[0]
    for name, one in zip(names, several, strict=True):
        if one.shape != first.shape:
            raise DataError(
                f"the sums of {name} are of samples of {size(one.shape)}, and those of {names[0]} "
                f"of {size(first.shape)}. All clients need samples of one shape"
            )
    check_rows({name: one.count for name, one in zip(names, several, strict=True)})
    moments = {}
    for name, one in zip(names, several, strict=True):
        mean = one.mean.reshape(first.shape[0], -1).mean(1)
        values = float(one.count * math.prod(first.shape[1:]))
        spread = np.maximum(one.squares - values * mean**2, 0)
        moments[name] = PlausibleMoments(np.full(len(mean), values), mean, spread)
    check_moments(moments, [f"channel {number}" for number in range(first.shape[0])])
    return sum(several[1:], first)


def write_spectra(spectra: Spectra, path: Path) -> None:
    """Write sums as JSON, whole or not at all."""
    content = _SpectraFile(
        format=FORMAT,
        count=spectra.count,
        shape=list(spectra.shape),
        sum=_short(spectra.total),
        real=_short(spectra.power.real),
        imaginary=_short(spectra.power.imag),
    )
    write_beside(path, json.dumps(content.model_dump()).encode() + b"\n")


def _short(values: npt.NDArray[np.float64]) -> list[float]:
    """As many digits as float32 has, and two more."""
    return [float(f"{value:.9g}") for value in values.ravel().tolist()]


def read_spectra(path: Path) -> Spectra:
    """Read sums that a client sent.

    Raises:
        DataError: there is no such file, it holds no spectra, or they can be of no samples.
    """
    file = read_as(_SpectraFile, path, "does not contain sums of images or signals")
    if file.format != FORMAT:
        raise DataError(
            f"{path} does not contain sums of images or signals: its format is {file.format!r}, "
            f"not {FORMAT!r}"
        )
    if len(file.shape) < 2:
        raise DataError(f"{path}: shape is {file.shape}, but images and signals have channels")
    channels, *space = file.shape
    half = (*space[:-1], space[-1] // 2 + 1, channels, channels)
    wanted = {"sum": math.prod(file.shape), "real": math.prod(half), "imaginary": math.prod(half)}
    for name, length in wanted.items():
        if len(found := getattr(file, name)) != length:
            raise DataError(f"{path}: {name} has {len(found):,} numbers instead of {length:,}")
    power = np.array(file.real).reshape(half) + 1j * np.array(file.imaginary).reshape(half)
    spectra = Spectra(file.count, np.array(file.sum).reshape(file.shape), power)
    _check(spectra, str(path))
    return spectra


def _check(spectra: Spectra, where: str) -> None:
    """Reject sums that no samples have."""
    with np.errstate(over="ignore", invalid="ignore"):
        covariance, most = spectra.covariance, float(np.abs(spectra.power).max()) / spectra.count
    if not np.isfinite(covariance).all():
        raise DataError(f"{where}: values are too large for their squares. Rescale the samples")
    skew = covariance - np.moveaxis(covariance.conj(), -1, -2)
    if not np.abs(skew).max() <= ROUNDING * most:
        raise DataError(f"{where}: the products of channels are not Hermitian")
    if np.linalg.eigvalsh(covariance).min() < -ROUNDING * most:
        raise DataError(
            f"{where}: these sums are impossible: a frequency has a variance below 0. All must be "
            "of the same samples"
        )


class Filtered(InputPrior):
    """Draws of another prior, filtered to the mean and spectra of the clients' samples.

    At each frequency, the covariance A of the prior's channels becomes the clients' B by the linear
    map A^(-1/2) (A^(1/2) B A^(1/2))^(1/2) A^(-1/2), which changes draws least. Images are mirrored
    as often as not, and so the sums are of samples and their mirror images.

    Args:
        prior: what draws are made of.
        spectra: of all clients' samples.

    Raises:
        DataError: samples have another shape than the prior's.
    """

    distance: float
    """How unlike the prior's own spectra are: 0 if one factor makes them the clients'."""

    def __init__(self, prior: InputPrior, spectra: Spectra) -> None:
        super().__init__(prior.shape)
        if spectra.shape != prior.shape:
            raise DataError(
                f"the sums are of samples of {size(spectra.shape)}, but an input is "
                f"{size(prior.shape)}"
            )
        self.prior, self.name = prior, prior.name
        self.mirrors, self.movable = prior.mirrors, prior.movable
        self.assumes = f"{prior.assumes}, with the mean and spectra of {spectra.count:,} samples"
        self.notes = prior.notes
        wanted = spectra.mirrored() if self._pictures else spectra
        own = self._own()
        self._filter = _nearest_map(own.covariance, wanted.covariance)
        self.distance = _distance(own.covariance, wanted.covariance)
        self._shift = own.mean, wanted.mean
        self._within = spectra.within

    @property
    def _pictures(self) -> bool:
        return len(self.shape) == 3

    def _own(self) -> Spectra:
        """Of the prior's own draws."""
        count = COMPARED * 1024 // math.prod(self.shape[1:])
        count = min(max(count, FEWEST), COMPARED)
        rng = np.random.default_rng(0)
        parts = [
            spectra_of(self.prior.draw(piece.stop - piece.start, rng).numpy())
            for piece in _pieces(count, self.shape)
        ]
        whole = sum(parts[1:], parts[0])
        return whole.mirrored() if self._pictures else whole

    def draw(self, count: int, rng: np.random.Generator) -> Tensor:
        """As `InputPrior.draw`; values between 0 and 1 if the clients' are."""
        x = self.prior.draw(count, rng).numpy()
        drawn = np.empty(x.shape, np.float32)
        before, after = self._shift
        for piece in _pieces(count, self.shape):
            f = self._filter @ _transform(x[piece] - before)
            f = np.moveaxis(f, (-1, -2), (0, 1))
            axes = range(2, f.ndim)
            drawn[piece] = np.fft.irfftn(f, self.shape[1:], axes=axes) + after
        return torch.from_numpy(drawn.clip(0, 1) if self._within else drawn)

    def augmented(self, x: Tensor, rng: torch.Generator) -> Tensor:
        """Images mirrored; signals as they are."""
        return mirrored(x, rng) if self._pictures else x


def _nearest_map(before: Complex, after: Complex) -> Complex:
    """The linear map of covariances [..., C, C] that moves Gaussian variables least."""
    floor = FLOOR * max(float(np.abs(before).max()), np.finfo(float).tiny)
    root, inverse = _power(before, 0.5, floor), _power(before, -0.5, floor)
    return inverse @ _power(root @ after @ root, 0.5, 0.0) @ inverse


def _distance(before: Complex, after: Complex) -> float:
    """How far the spectra of all channels together are from one multiple of each other: the
    logarithm of the mean ratio, less the mean of its logarithm (Itakura and Saito 1968).
    """
    own, wanted = (np.trace(power, axis1=-2, axis2=-1).real for power in (before, after))
    tiny = np.finfo(float).tiny
    own = np.maximum(own, max(FLOOR * float(own.max()), tiny))
    ratio = wanted / own
    ratio = np.maximum(ratio, max(FLOOR * float(ratio.max()), tiny))
    return math.log(float(ratio.mean())) - float(np.log(ratio).mean())


def _power(matrices: Complex, exponent: float, floor: float) -> Complex:
    """Hermitian matrices to a power, with eigenvalues of at least a floor."""
    values, vectors = np.linalg.eigh(matrices)
    scaled = vectors * (np.maximum(values, floor) ** exponent)[..., None, :]
    return np.asarray(scaled @ np.moveaxis(vectors.conj(), -1, -2))
