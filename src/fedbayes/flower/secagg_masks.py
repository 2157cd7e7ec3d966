"""Flower's secure aggregation, SecAgg+: masks from a stream cipher.

Flower draws a mask from a Mersenne Twister that it seeds with 32 bits of the key, however long the
key is (`pseudo_rand_gen`). The protocol wants a generator that tells nothing of its seed, and seeds
too many to search through. Ours is ChaCha20 under a key of 256 bits. It takes that function's place
in copies of Flower's two modules that nobody but us has: one at the nodes, one at the server.
"""

import math
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from inspect import signature
from types import FunctionType, ModuleType

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from fedbayes.errors import EngineError

KIND = "chacha20"
"""How masks are drawn. Nodes and server must agree; those of another version may do otherwise."""
_DRAW = "pseudo_rand_gen"
_ARGUMENTS = ["seed", "num_range", "dimensions_list"]
_NONCE = bytes(16)
"""A key is for one mask alone, so its stream may begin at the beginning."""


def draw(
    seed: bytes, num_range: int, dimensions_list: list[tuple[int, ...]]
) -> list[NDArray[np.int64]]:
    """A mask: numbers that are uniform in [0, num_range), for arrays of these shapes.

    Args:
        seed: 32 bytes of entropy or more, in any form: 256 bits of it become the cipher's key.
        num_range: 2**32, the modulus of our sums.
        dimensions_list: shapes of the arrays.

    Raises:
        EngineError: another modulus is asked for.
    """
    if num_range != 2**32:
        raise EngineError(f"masks are for sums modulo 2**32, not {num_range}")
    key = HKDF(SHA256(), length=32, salt=None, info=b"fedbayes SecAgg+ mask").derive(seed)
    stream = Cipher(ChaCha20(key, _NONCE), mode=None).encryptor()
    return [
        np.frombuffer(stream.update(bytes(4 * math.prod(shape))), "<u4")
        .astype(np.int64)
        .reshape(shape)
        for shape in dimensions_list
    ]


def with_masks(name: str) -> ModuleType:
    """A copy of a module of Flower's that masks, with these masks; Flower's own stays as it is.

    Raises:
        EngineError: the module of the installed Flower masks in another way.
    """
    import_module(name)  # where its classes look themselves up
    spec = find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    copy = module_from_spec(spec)
    spec.loader.exec_module(copy)
    theirs = getattr(copy, _DRAW, None)
    if not (
        isinstance(theirs, FunctionType)
        and list(signature(theirs).parameters) == _ARGUMENTS
        and any(_DRAW in names for names in _used(copy))
    ):
        raise EngineError(
            f"{name} of the installed Flower version creates masks differently from 1.41 and "
            "1.42. Install one of these for secure aggregation: pip install 'flwr>=1.41,<1.43'"
        )
    setattr(copy, _DRAW, draw)
    return copy


def _used(module: ModuleType) -> list[tuple[str, ...]]:
    """The names that each function and method of a module uses."""
    own = [
        item for item in vars(module).values() if getattr(item, "__module__", "") == module.__name__
    ]
    inner = [vars(item).values() if isinstance(item, type) else [item] for item in own]
    return [f.__code__.co_names for items in inner for f in items if isinstance(f, FunctionType)]
