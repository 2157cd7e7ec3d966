"""Every random number generator of the package, from (seed, purpose, round, client) alone.

None depends on what ran before it, in which process, or in which order. That is what
makes engines agree bit for bit and lets a run resume where it was killed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np

if TYPE_CHECKING:
    import torch


def sequence(seed: int, purpose: str, *, round: int = 0, client: int = 0) -> np.random.SeedSequence:
    """The entropy of one generator; `purpose` is a word such as "cohort" or "batches"."""
    return np.random.SeedSequence([seed, crc32(purpose.encode()), round, client])


def numpy_rng(seed: int, purpose: str, *, round: int = 0, client: int = 0) -> np.random.Generator:
    """A NumPy generator for this purpose, round and client."""
    return np.random.default_rng(sequence(seed, purpose, round=round, client=client))


def integer(seed: int, purpose: str, *, round: int = 0, client: int = 0) -> int:
    """A 63-bit seed for a library that wants a plain integer."""
    words = sequence(seed, purpose, round=round, client=client).generate_state(1, np.uint64)
    return int(words[0]) >> 1


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
    rng.manual_seed(integer(seed, purpose, round=round, client=client))
    return rng


@contextmanager
def global_rng(seed: int, device: "torch.device | str" = "cpu") -> Iterator[None]:
    """Seed PyTorch's global generator inside, and put it back as it was after.

    For code that draws from no generator of ours: dropout layers, initializations.
    """
    import torch

    cuda = torch.device(device).type == "cuda"
    with torch.random.fork_rng(devices=[device] if cuda else []):
        # torch.manual_seed would prepare every kind of device, which takes longer than a step.
        torch.default_generator.manual_seed(seed)
        if cuda:
            torch.cuda.manual_seed(seed)
        yield
