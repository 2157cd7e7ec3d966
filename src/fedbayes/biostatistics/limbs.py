"""Numbers as whole numbers that add: for secure aggregation, whose sums are modulo 2³².

A float64 x becomes the whole number nearest to x 2⁹⁶, whose digits to the base 2ᵇ are *limbs*, each
with the sign of x. Limbs of n clients add without a carry as long as n 2ᵇ⁺¹ is at most 2³¹, so the
sum of the limbs is that of the numbers: exact, but that each client's number is rounded to 2⁻⁹⁷.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedbayes.biostatistics.exchange import Array
from fedbayes.errors import MessageError

_BELOW, _ABOVE = 96, 64
"""Binary digits after the point, and before it."""
_SUM_BITS = 31
"""Of half of what a sum can hold."""
_MANTISSA = 53


@dataclass(frozen=True)
class Limbs:
    """Conversion of the numbers of `clients` clients to limbs, the same at clients and server."""

    clients: int

    @property
    def shares(self) -> int:
        """With how many clients one shares its keys: all."""
        return self.clients

    @property
    def threshold(self) -> int:
        """Clients who must stay until a sum is open: all, so that no sum is without one of them."""
        return self.clients

    @property
    def range(self) -> float:
        """What limbs are below, by their absolute value."""
        return 2.0**self.bits

    @property
    def levels(self) -> int:
        """Whole numbers from -range to range."""
        return 2 << self.bits

    @property
    def exact(self) -> bool:
        """Whether the mean is read in float64."""
        return True

    @property
    def bits(self) -> int:
        """Of a limb, b."""
        return _SUM_BITS - 1 - math.ceil(math.log2(self.clients))

    @property
    def count(self) -> int:
        """Limbs of a number."""
        return -(-(_BELOW + _ABOVE) // self.bits)

    def entries(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Length of the vector of arrays of these shapes."""
        return 1 + self.count * sum(math.prod(shape) for shape in shapes.values())

    def write(self, numbers: Mapping[str, Array]) -> Array:
        """Arrays as a vector of whole numbers between −2ᵇ and 2ᵇ, float64 [entries]: first 1 if a
        number is not finite or 2⁶⁴ or more, else 0; then the limbs, the lowest of all numbers
        first.
        """
        parts = [np.asarray(numbers[name], np.float64).ravel() for name in sorted(numbers)]
        values = np.concatenate([np.zeros(0), *parts])
        if not (np.abs(values) < 2.0**_ABOVE).all():
            return np.concatenate([[1.0], np.zeros(self.count * len(values))])
        size = np.abs(values)
        fraction, exponent = np.frexp(size)
        place = exponent.astype(np.int64) - _MANTISSA + _BELOW
        low = place < 0
        digits = np.ldexp(fraction, _MANTISSA)
        digits[low] = np.rint(np.ldexp(size[low], _BELOW))
        whole, place = digits.astype(np.uint64), np.maximum(place, 0)
        limbs = [self._limb(whole, place, k) for k in range(self.count)]
        return np.concatenate([[0.0], *(np.sign(values) * limb for limb in limbs)])

    def _limb(self, whole: "np.typing.NDArray[np.uint64]", place: Array, number: int) -> Array:
        """The limb of this number of whole · 2^place, float64."""
        shift = number * self.bits - place
        right = np.clip(shift, 0, 63).astype(np.uint64)
        left = np.clip(-shift, 0, 63).astype(np.uint64)
        found = ((whole >> right) << left) & np.uint64((1 << self.bits) - 1)
        return found.astype(np.float64)

    def read(self, sums: Array, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
        """The sums of arrays from the sum of all clients' vectors.

        Returns:
            By name, each the float64 nearest to the exact sum; NaN throughout where a client's
            numbers are not finite.

        Raises:
            MessageError: no proper vectors have this sum.
        """
        most = self.clients * 2.0**self.bits
        whole = np.rint(sums)
        if not (np.abs(sums) <= most).all() or np.abs(sums - whole).max() > 1e-3:
            raise MessageError(
                "the sum is impossible for honest answers: a client sent invalid numbers"
            )
        if not 0 <= whole[0] <= self.clients:
            raise MessageError(
                "the sum is impossible for honest answers: a client sent invalid numbers"
            )
        limbs = whole[1:].astype(np.int64).astype(object).reshape(self.count, -1)
        base = np.array([1 << (self.bits * k) for k in range(self.count)], object)
        values = np.array(base @ limbs / (1 << _BELOW), np.float64)
        if whole[0]:
            values[:] = np.nan
        found, start = {}, 0
        for name in sorted(shapes):
            stop = start + math.prod(shapes[name])
            found[name], start = values[start:stop].reshape(shapes[name]), stop
        return found
