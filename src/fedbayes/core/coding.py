"""Real numbers in fewer bytes: two for each, one, or those of a few entries alone.

Everything works on flat float32 tensors on the CPU and draws from the generator that it is given,
so both ends of a link, and every engine, come to the same bits.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from fedbayes.errors import MessageError

STEPS = 127
"""Steps of the 8-bit code from zero to a tensor's largest magnitude."""


@dataclass(frozen=True)
class Coded:
    """Numbers as they are sent."""

    values: Tensor
    """Of all entries, or of those that are sent, [n]."""
    step: Tensor | None = None
    """Length of a step, float32 []."""
    places: Tensor | None = None
    """Which entries are sent, as `write_places` writes them."""


class Code(Protocol):
    """A way to write numbers."""

    dtype: ClassVar[torch.dtype]
    """Type of the values."""
    steps: ClassVar[bool]
    """Whether there is a length of a step."""
    whole: ClassVar[bool]
    """Whether there is a value of every entry."""
    places: ClassVar[bool]
    """Whether places are sent."""

    def sent(self, entries: int) -> int:
        """How many values are sent of so many."""

    def write(self, values: Tensor, rng: torch.Generator) -> tuple[Coded, Tensor]:
        """Numbers, float32 [n], as they are sent, and as they arrive."""

    def read(self, coded: Coded, entries: int, rng: torch.Generator) -> Tensor:
        """So many numbers as they arrive, float32 [n].

        Raises:
            MessageError: what is sent is no such numbers. Values are of the right type and number.
        """


class Bf16:
    """Numbers of 16 bits, rounded up or down at random so that each is right on average.

    One is off by less than 2⁻⁷ of its magnitude.
    """

    dtype: ClassVar = torch.bfloat16
    whole: ClassVar[bool] = True
    steps: ClassVar[bool] = False
    places: ClassVar[bool] = False

    def sent(self, entries: int) -> int:
        """All."""
        return entries

    def write(self, values: Tensor, rng: torch.Generator) -> tuple[Coded, Tensor]:
        """Round; a number that is NaN or infinite stays so."""
        bits = values.contiguous().view(torch.int32)
        # A bfloat16 leaves the lower half out: adding to it carries as often as it is large.
        drawn = torch.randint(0, 1 << 16, values.shape, generator=rng, dtype=torch.int32)
        rounded = ((bits + drawn) & ~0xFFFF).view(torch.float32)
        shortened = (bits & ~0xFFFF).view(torch.float32)  # beyond the largest bfloat16 is none
        rounded = torch.where(rounded.isfinite(), rounded, shortened)
        found = torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)
        return Coded(found), found.float()

    def read(self, coded: Coded, entries: int, rng: torch.Generator) -> Tensor:
        """As float32."""
        return coded.values.float()


class Int8:
    """Whole steps of a common length, rounded up or down at random: each is right on average.

    A step is max |x| / 127. A number is off by less than that, and its variance is step² f (1 − f)
    with f the fraction of a step that is rounded away (QSGD: Alistarh et al. 2017, in the maximum
    norm).
    """

    dtype: ClassVar = torch.int8
    whole: ClassVar[bool] = True
    steps: ClassVar[bool] = True
    places: ClassVar[bool] = False

    def sent(self, entries: int) -> int:
        """All."""
        return entries

    def write(self, values: Tensor, rng: torch.Generator) -> tuple[Coded, Tensor]:
        """Round; where a number is not finite, the step is not either."""
        longest = values.abs().max() if len(values) else torch.zeros(())
        step = longest / STEPS
        if step.double() * STEPS < longest.double():  # then there would be more than 127 steps
            step = torch.nextafter(step, torch.tensor(math.inf))
        if math.isfinite(step) and step > 0:
            drawn = torch.rand(values.shape, generator=rng)
            found = (values.double() / step.double() + drawn).floor().to(torch.int8)
        else:
            found = torch.zeros_like(values, dtype=torch.int8)
        return Coded(found, step), found * step

    def read(self, coded: Coded, entries: int, rng: torch.Generator) -> Tensor:
        """Steps times their length.

        Raises:
            MessageError: it is no length.
        """
        step = coded.step
        if step is None or not (math.isfinite(step) and step >= 0):
            raise MessageError(f"the length of its steps is {step}")
        return coded.values * step


@dataclass(frozen=True)
class TopK:
    """The numbers of largest magnitude, as they are; the others arrive as zero."""

    share: float
    """Of the entries, how many are sent."""
    dtype: ClassVar = torch.float32
    whole: ClassVar[bool] = False
    steps: ClassVar[bool] = False
    places: ClassVar[bool] = True

    def sent(self, entries: int) -> int:
        """The share, at least one."""
        return _share(entries, self.share)

    def write(self, values: Tensor, rng: torch.Generator) -> tuple[Coded, Tensor]:
        """Choose; a number that is NaN counts as the largest."""
        found = values.abs().topk(self.sent(len(values)), sorted=False).indices.sort().values
        arrived = torch.zeros_like(values)
        arrived[found] = values[found]
        return Coded(values[found], places=write_places(found, len(values))), arrived

    def read(self, coded: Coded, entries: int, rng: torch.Generator) -> Tensor:
        """Values in their places.

        Raises:
            MessageError: there are no such places.
        """
        assert coded.places is not None
        arrived = torch.zeros(entries)
        arrived[read_places(coded.places, len(coded.values), entries)] = coded.values
        return arrived


@dataclass(frozen=True)
class RandomK:
    """Numbers of entries that are drawn, which both ends know; the others arrive as zero."""

    share: float
    """Of the entries, how many are sent."""
    scaled: bool
    """Whether they arrive as large as makes them right on average: entries / sent times."""
    dtype: ClassVar = torch.float32
    whole: ClassVar[bool] = False
    steps: ClassVar[bool] = False
    places: ClassVar[bool] = False

    def sent(self, entries: int) -> int:
        """The share, at least one."""
        return _share(entries, self.share)

    def write(self, values: Tensor, rng: torch.Generator) -> tuple[Coded, Tensor]:
        """Draw."""
        found = self._drawn(len(values), rng)
        return Coded(values[found]), self._placed(values[found], found, len(values))

    def read(self, coded: Coded, entries: int, rng: torch.Generator) -> Tensor:
        """Values in the places that are drawn again."""
        return self._placed(coded.values, self._drawn(entries, rng), entries)

    def _drawn(self, entries: int, rng: torch.Generator) -> Tensor:
        return torch.randperm(entries, generator=rng)[: self.sent(entries)]

    def _placed(self, values: Tensor, places: Tensor, entries: int) -> Tensor:
        arrived = torch.zeros(entries)
        arrived[places] = values * (entries / len(values)) if self.scaled and entries else values
        return arrived


def _share(entries: int, share: float) -> int:
    """How many of so many entries a share is: at least one, if there are any."""
    return min(entries, max(1, math.ceil(round(share * entries, 6))))


def places_bytes(count: int, entries: int) -> int:
    """Bytes that `write_places` takes for `count` of so many entries; it depends on these alone."""
    return min(_coded(count, entries, _low_bits(count, entries)), -(-entries // 8))


def _low_bits(count: int, entries: int) -> int:
    """Bits of a place that are best written as they are."""
    return min(range(entries.bit_length() + 1), key=lambda low: _coded(count, entries, low))


def _coded(count: int, entries: int, low: int) -> int:
    """Bytes of lower and upper bits, the former being so many of each place."""
    return -(-count * low // 8) + -(-(count + (max(entries - 1, 0) >> low)) // 8)


def _as_bitmap(count: int, entries: int) -> bool:
    """Whether a bit for each entry is as short."""
    return places_bytes(count, entries) == -(-entries // 8)


def write_places(places: Tensor, entries: int) -> Tensor:
    """Places among so many entries as bytes, uint8 [places_bytes].

    A bitmap of all entries, or the code of Elias (1974) and Fano (1971), whichever is shorter: the
    lower bits of each place as they are, and the upper ones as the distances of the ones in a
    row of bits. Of few places that is log2(entries / places) + 2 bits for each at most.

    Args:
        places: ascending, each once, int64 [count].
        entries: of which they are places.
    """
    found = places.numpy()
    if _as_bitmap(len(found), entries):
        bitmap = np.zeros(entries, np.uint8)
        bitmap[found] = 1
        return torch.from_numpy(np.packbits(bitmap))
    low = _low_bits(len(found), entries)
    lower = (found[:, None] >> np.arange(low)) & 1
    upper = np.zeros(len(found) + ((entries - 1) >> low), np.uint8)
    upper[(found >> low) + np.arange(len(found))] = 1
    packed = (np.packbits(lower.astype(np.uint8).ravel()), np.packbits(upper))
    return torch.from_numpy(np.concatenate(packed))


def read_places(data: Tensor, count: int, entries: int) -> Tensor:
    """The places that `write_places` wrote, int64 [count], trusting nothing.

    Args:
        data: uint8 [n].
        count: places that there must be.
        entries: of which they are places.

    Raises:
        MessageError: the bytes are no such places.
    """
    wrong = MessageError(f"its places are not {count:,} of {entries:,} in ascending order")
    if data.numel() != places_bytes(count, entries):
        raise wrong
    stored = data.numpy()
    if _as_bitmap(count, entries):
        found = np.unpackbits(stored).nonzero()[0]
    else:
        low = _low_bits(count, entries)
        cut = -(-count * low // 8)
        lower, upper = np.unpackbits(stored[:cut]), np.unpackbits(stored[cut:])
        ones = upper.nonzero()[0]
        if len(ones) != count or lower[count * low :].any():
            raise wrong
        weights = lower[: count * low].reshape(count, low).astype(np.int64) << np.arange(low)
        found = ((ones - np.arange(count)) << low) + weights.sum(axis=1)
    if len(found) != count or (np.diff(found) <= 0).any() or (found >= entries).any():
        raise wrong
    return torch.from_numpy(found)
