"""Noise and coins from a secret of the server's, by a stream cipher."""

import hmac
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

_PIECE = 1 << 16
"""Numbers that are drawn at a time."""


@dataclass(frozen=True)
class Secret:
    """Where all that is random for privacy comes from.

    Each purpose, round and nonce has a key of its own, HMAC-SHA256 of the secret, and ChaCha20's
    stream under it. Who has not the secret cannot tell the stream from chance.
    """

    key: bytes
    """32 bytes."""

    def stream(self, purpose: str, number: int, nonce: bytes = b"") -> "Stream":
        """The stream of a purpose, such as "noise", in the round of this number; `nonce` is of an
        attempt at it.
        """
        place = purpose.encode() + b"\0" + number.to_bytes(8, "little") + nonce
        return Stream(hmac.digest(self.key, place, sha256))

    @property
    def fingerprint(self) -> bytes:
        """What tells this secret from others and nothing else of it, 16 bytes."""
        return hmac.digest(self.key, b"fingerprint", sha256)[:16]


class Stream:
    """Random numbers from ChaCha20 under a key that is used for nothing else."""

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

        self._cipher = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()

    def words(self, count: int) -> NDArray[np.uint64]:
        """So many uniform 64-bit words."""
        return np.frombuffer(self._cipher.update(bytes(8 * count)), dtype="<u8")

    def uniform(self, count: int) -> NDArray[np.float64]:
        """So many numbers uniform on multiples of 2⁻⁵³ in [0, 1)."""
        return (self.words(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def gaussian(self, count: int) -> NDArray[np.float64]:
        """So many standard normal numbers, by the inverse of their distribution function.

        A sign, and a magnitude from 53 bits: the tails reach to 8.3, beyond which there is 1e-16.
        """
        drawn = np.empty(count)
        for start in range(0, count, _PIECE):
            words = self.words(min(_PIECE, count - start))
            lower = ndtri(((words >> np.uint64(11)) + 0.5) * 2.0**-54)
            drawn[start : start + len(words)] = np.where(words & np.uint64(1), lower, -lower)
        return drawn
