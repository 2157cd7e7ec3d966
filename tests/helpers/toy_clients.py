"""Functions that give the samples of one client at a time (`data.generator`)."""

import numpy as np
import torch

ASKED = []
"""Clients whose samples were asked for in this process."""


def separated(client, seed, samples=8, changed=False):
    """Two classes on either side of a plane; a sample has 4 features."""
    ASKED.append(client)
    rng = np.random.default_rng([seed, client])
    x = rng.normal(size=(samples, 4)) + changed
    y = np.arange(samples) % 2
    x[:, 0] = np.abs(x[:, 0]) * (2 * y - 1)
    return x, y


def numbers(client, seed):
    """A real target, as tensors."""
    rng = torch.Generator().manual_seed(client + 1000 * seed)
    x = torch.randn(12, 3, generator=rng)
    return x, x.sum(1) + 5


def pictures(client, seed):
    """8 x 8 grey pictures of three classes, of 8 bits."""
    rng = np.random.default_rng([seed, client])
    y = np.arange(6) % 3
    return (rng.integers(0, 60, (6, 8, 8)) + 80 * y[:, None, None]).astype(np.uint8), y


def unseeded(client, seed):
    """Other samples each time."""
    return np.random.default_rng().normal(size=(8, 4)), np.arange(8) % 2


def spoilt(client, seed, odd, how):
    """As `separated`, but for one client."""
    x, y = separated(client, seed)
    if client != odd:
        return x, y
    spoil = {
        "nothing": lambda: None,
        "NaN": lambda: (np.where(np.arange(8)[:, None] == 3, np.nan, x), y),
        "narrow": lambda: (x[:, :3], y),
        "bytes": lambda: (np.zeros((8, 4, 4), np.uint8), y),
        "outside": lambda: (x, np.where(np.arange(8) == 5, 7, y)),
        "negative": lambda: (x, np.where(np.arange(8) == 5, -1, y)),
        "huge": lambda: (x, y * 500_000),
        "fractions": lambda: (x, y + 0.5),
        "words": lambda: (x, y.astype(str)),
        "unequal": lambda: (x, y[:-1]),
        "empty": lambda: (x[:0], y[:0]),
        "single": lambda: (x[:1], y[:1]),
        "flat": lambda: (x[:, 0], y),
    }
    if how == "raises":
        raise KeyError("no such shard")
    if how == "ends":
        raise SystemExit("no shard")
    return spoil[how]()


no_function = 3


class Table:
    """A clock by a table of whole seconds, of clients that are always there."""

    def __init__(self, seconds):
        self.clients, self._seconds = len(seconds), seconds
        self.availability = self

    def here(self, client, time):
        return True

    def comes(self, client, time):
        return time

    def ends(self, client, number, start, lengths):
        return start + self._seconds[client]

    def first(self, time, clients):
        return time
