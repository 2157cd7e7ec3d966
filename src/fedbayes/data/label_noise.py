"""Training labels that are wrong on purpose."""

from dataclasses import replace

import numpy as np

from fedbayes.core import seeds
from fedbayes.core.wording import describe
from fedbayes.data.dataset import Dataset, Rows
from fedbayes.errors import ConfigError


def with_label_noise(
    dataset: Dataset, rows: Rows, share: float, seed: int, *, kind: str = "uniform", owner: int = 0
) -> tuple[Dataset, int]:
    """A data set with a share of the labels of some rows replaced by others.

    A label is replaced with this probability. What becomes of a row depends only on its number in
    the pool and on the seed, and not on the partition. A larger share replaces the labels of a
    smaller one too, by the same classes.

    Args:
        dataset: the pool.
        rows: training rows of all clients [n]; no other row changes.
        share: probability that a label is replaced, from 0 to 1.
        seed: of the run.
        kind: `uniform`: by one of the other classes, all as probable; `next`: by the class after
            it, and the last by the first.
        owner: the client whose pool it is, where clients bring their own.

    Returns:
        The data set, and how many labels differ.

    Raises:
        ConfigError: its target has no classes.
    """
    if not share:
        return dataset, 0
    if not dataset.classes:
        raise ConfigError(
            f"data.label_noise = {share:g} replaces classes, but the target of {dataset.name} is "
            f"{describe(dataset.target)}. Leave it out"
        )
    rng = seeds.numpy_rng(seed, "label noise", client=owner)
    chosen = rng.random(dataset.samples)[rows] < share
    further = rng.integers(1, len(dataset.classes) if kind == "uniform" else 2, dataset.samples)
    wrong = rows[chosen]
    y = np.array(dataset.y)
    y[wrong] = (y[wrong] + further[wrong]) % len(dataset.classes)
    return replace(dataset, y=y), len(wrong)
