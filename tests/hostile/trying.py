"""Try the parts piece by piece, in processes side by side, and keep account."""

import multiprocessing
import time
import traceback
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from importlib import import_module

import torch


@dataclass(frozen=True)
class Part:
    """Something that is tried many times."""

    name: str
    place: str
    """`module:function`."""
    count: int
    """How many are tried in full."""
    few: int
    """How many are tried if it must be quick."""
    at_once: int
    """How many one process tries before it tells."""


@dataclass
class Account:
    """What has come of a part."""

    tried: int = 0
    survived: int = 0
    failures: list[str] = field(default_factory=list)
    worst: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, tried, survived, failures, worst=None, *, seconds=0.0):
        """Enter what a process tells."""
        self.tried, self.survived = self.tried + tried, self.survived + survived
        self.failures += failures
        for unit, figure in (worst or {}).items():
            self.worst[unit] = max(self.worst.get(unit, 0.0), figure)
        self.seconds += seconds


def work(place, count, seed):
    """One piece of a part, in a process of its own."""
    module, _, function = place.partition(":")
    start = time.monotonic()
    try:
        found = getattr(import_module(module), function)(count, seed)
    except Exception as error:
        words = traceback.format_exception(error)[-3:]
        found = (count, 0, [f"the part itself failed: {' '.join(''.join(words).split())}"])
    return found, time.monotonic() - start


def run(parts, *, jobs, seed, minutes, tell):
    """Try the parts, pieces side by side.

    Args:
        parts: part to how many.
        jobs: processes.
        seed: of the first of each part; each next one has the next seed.
        minutes: after which no piece is begun.
        tell: called with the accounts whenever a piece has ended.

    Returns:
        An `Account` for each part.
    """
    end = time.monotonic() + 60 * minutes
    accounts = {part.name: Account() for part in parts}
    pieces = [
        (begun / count, part, begun, min(part.at_once, count - begun))
        for part, count in parts.items()
        for begun in range(0, count, part.at_once)
    ]
    pieces.sort(key=lambda piece: piece[0])  # of all parts the same share at any time
    waiting = iter(pieces)
    under_way = {}
    with ProcessPoolExecutor(
        jobs, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)
    ) as pool:
        while True:
            while len(under_way) < jobs and time.monotonic() < end:
                if (piece := next(waiting, None)) is None:
                    break
                _, part, begun, count = piece
                under_way[pool.submit(work, part.place, count, seed + begun)] = part
            if not under_way:
                return accounts
            for done in wait(under_way, return_when=FIRST_COMPLETED).done:
                found, seconds = done.result()
                accounts[under_way.pop(done).name].add(*found, seconds=seconds)
                tell(accounts)
