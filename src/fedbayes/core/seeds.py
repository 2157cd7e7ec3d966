"""Every random number generator of the package, from (seed, purpose, round, client) alone.

None depends on what ran before it, in which process, or in which order. That is what
makes engines agree bit for bit and lets a run resume where it was killed.
"""

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
from numpy.random.bit_generator import ISeedSequence

if TYPE_CHECKING:
    import torch


def sequence(seed: int, purpose: str, *, round: int = 0, client: int = 0) -> np.random.SeedSequence:
    """The entropy of one generator; `purpose` is a word such as "cohort" or "batches"."""
    entropy = [seed, crc32(purpose.encode()), round, client]
    # NumPy takes words of 32 bits as they are, in a third of the time that it takes for numbers.
    return np.random.SeedSequence(np.array(entropy, np.uint32) if seed < 2**32 else entropy)


def numpy_rng(seed: int, purpose: str, *, round: int = 0, client: int = 0) -> np.random.Generator:
    """A NumPy generator for this purpose, round and client."""
    return np.random.default_rng(sequence(seed, purpose, round=round, client=client))


def integer(seed: int, purpose: str, *, round: int = 0, client: int = 0) -> int:
    """A 63-bit seed for a library that wants a plain integer."""
    return _word(sequence(seed, purpose, round=round, client=client))


def torch_rng(
    seed: int,
    purpose: str,
    *,
    round: int = 0,
    client: int = 0,
    device: "torch.device | str" = "cpu",
) -> "torch.Generator":
    """A PyTorch generator for this purpose, round and client."""
    import torch

    rng = torch.Generator(device=device)
    _fill(rng, sequence(seed, purpose, round=round, client=client))
    return rng


def torch_rngs(
    seed: int, purpose: str, places: Sequence[tuple[int, int]]
) -> "list[torch.Generator]":
    """As `torch_rng` of each round and client on the CPU, whose entropy is hashed at once."""
    import torch

    if seed >= 2**32:
        return [torch_rng(seed, purpose, round=round, client=c) for round, c in places]
    rngs = [torch.Generator() for _ in places]
    for rng, words in zip(rngs, _hashed(seed, purpose, places), strict=True):
        _fill(rng, _Words(words))
    return rngs


@contextmanager
def global_rng(
    seed: int,
    purpose: str,
    *,
    round: int = 0,
    client: int = 0,
    device: "torch.device | str" = "cpu",
) -> Iterator[None]:
    """Seed the global generators of PyTorch, NumPy and Python inside, and put them back after.

    For code that draws from no generator of ours: dropout layers, initializations. Another thread
    that wants them waits.
    """
    import torch

    entropy = sequence(seed, purpose, round=round, client=client)
    cuda = torch.device(device).type == "cuda"
    with _TURN, torch.random.fork_rng(devices=[device] if cuda else []), _others(entropy):
        # torch.manual_seed would prepare every kind of device, which takes longer than a step.
        _fill(torch.default_generator, entropy)
        if cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(_word(entropy))
        yield


_TURN = threading.RLock()
"""Held by the thread that has the global generators, of which a process has one each."""


_free = False
"""Whether the global generators of NumPy and Python may be left as they are."""
_untouched: ExitStack | None = None
"""The stack of `kept` until generators are seeded inside; it then puts them back."""


@contextmanager
def kept() -> Iterator[None]:
    """Put the global generators of NumPy and Python back after, once for all that seeds them
    inside, if anything does: every time, it takes longer than a step of a small network. Do not
    yield inside, as the thread holds them until the end.
    """
    global _free, _untouched
    with _TURN, ExitStack() as stack:
        _free, _untouched = True, stack
        try:
            yield
        finally:
            _free, _untouched = False, None


@contextmanager
def _put_back() -> Iterator[None]:
    """Put the global generators of NumPy and Python back after."""
    numpy = np.random.get_state()  # noqa: NPY002
    python = random.getstate()
    try:
        yield
    finally:
        np.random.set_state(numpy)  # noqa: NPY002
        random.setstate(python)


@contextmanager
def _others(entropy: np.random.SeedSequence) -> Iterator[None]:
    """The global generators of NumPy and Python, seeded inside and put back after."""
    global _free, _untouched
    if _untouched is not None:
        _untouched.enter_context(_put_back())
        _untouched = None
    words = entropy.generate_state(8)
    free, _free = _free, False  # who seeds them inside puts them back
    try:
        with nullcontext() if free else _put_back():
            np.random.seed(words[:4])  # noqa: NPY002
            random.seed(words[4:].tobytes())
            yield
    finally:
        _free = free


Words = np.ndarray[Any, np.dtype[np.uint32]]


class _Words(ISeedSequence):
    """What `SeedSequence.generate_state` gives of four words of 64 bits, known before."""

    def __init__(self, words: "np.ndarray[Any, np.dtype[np.uint64]]") -> None:
        self._words = words

    def generate_state(self, n_words: int, dtype: object = np.uint64) -> Any:
        """The first of them."""
        return self._words[:n_words]


def _powers(first: int, factor: int, count: int) -> Words:
    """A column of first · factorⁱ modulo 2³²."""
    return np.array([[first * factor**i % 2**32] for i in range(count)], np.uint32)


# Those of NumPy's `SeedSequence`, whose streams NumPy has promised to keep.
_POOL, _STATE = _powers(0x43B0D7E5, 0x931E8875, 17), _powers(0x8B51F9DD, 0x58F38DED, 9)
_LEFT, _RIGHT, _HALF = np.uint32(0xCA01F9DD), np.uint32(0x4973F715), np.uint32(16)


def _hashed(
    seed: int, purpose: str, places: Sequence[tuple[int, int]]
) -> "np.ndarray[Any, np.dtype[np.uint64]]":
    """Four words of each `sequence`, [places, 4]: one client's take longer than all its draws."""

    def hashed(words: Words, by: Words) -> Words:
        words = (words ^ by[:-1]) * by[1:]
        return words ^ words >> _HALF

    word = crc32(purpose.encode())
    pool = hashed(np.array([(seed, word, *place) for place in places], np.uint32).T, _POOL[:5])
    for source in range(4):
        others = [word for word in range(4) if word != source]
        by = _POOL[4 + 3 * source :][:4]
        mixed = _LEFT * pool[others] - _RIGHT * hashed(pool[source], by)
        pool[others] = mixed ^ mixed >> _HALF
    words = hashed(np.concatenate([pool, pool]), _STATE)
    return np.ascontiguousarray(words.T).view(np.uint64)


def _word(entropy: ISeedSequence) -> int:
    """63 bits."""
    return int(entropy.generate_state(1, np.uint64)[0]) >> 1


def _fill(rng: "torch.Generator", entropy: ISeedSequence) -> None:
    """Put a generator where this entropy says."""
    # PyTorch's own seeding reaches 2^32 states of a CPU's Mersenne Twister: among 120,000 streams
    # two would be the same. So its 624 words are written here. CUDA takes 64 bits, and is seeded.
    if rng.device.type != "cpu" or not _known_layout():
        rng.manual_seed(_word(entropy))
        return
    # Of `entropy` itself, words take longer.
    scratch = _scratch()
    raw = np.random.PCG64(entropy).random_raw(312)  # type: ignore[arg-type]
    scratch.words[:] = raw.view(np.uint32)
    rng.set_state(scratch.state)


_WORDS = slice(3, 3 + 624)
"""Where in a state of PyTorch's Mersenne Twister its words are, each in eight bytes."""
_SEED = 20_001


@cache
def _seeded() -> "torch.Tensor":
    """The state of a generator that nothing was drawn from."""
    import torch

    return torch.Generator().manual_seed(_SEED).get_state()


class _Scratch(threading.local):
    """Where a thread writes the state of a generator, which copies it."""

    def __init__(self) -> None:
        self.state = _seeded().clone()
        self.words = self.state.numpy().view("<u8")[_WORDS]


@cache
def _scratch() -> _Scratch:
    """That of every thread."""
    return _Scratch()


@cache
def _known_layout() -> bool:
    """Whether words are where this version of PyTorch has them: compared with NumPy's Twister."""
    state = _seeded().numpy()
    words = np.random.RandomState(_SEED).get_state(legacy=False)["state"]["key"]
    return len(state) % 8 == 0 and np.array_equal(state.view("<u8")[_WORDS], words)
