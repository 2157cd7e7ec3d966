"""Whether a network that names no classes has them in another order than it is taken to have."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedbayes.core.targets import Target
from fedbayes.errors import warn

GAIN = 0.3
"""Least gain of another order, as a share of all samples, for a warning."""
LEAST = 0.25
"""Least frequency of each class, relative to equally frequent classes."""
_NAMED = 12
"""Classes that a warning lists."""


@dataclass(frozen=True)
class OtherOrder:
    """An order of outputs that fits samples far better than the one that was assumed."""

    classes: tuple[int, ...]
    """The class of each output."""
    assumed: float
    """Share of samples that fit if output k is of class k."""
    found: float
    """Share of samples that fit in this order."""

    def named(self, names: Sequence[str]) -> str:
        """The classes in this order, as a setting has them."""
        if len(names) > _NAMED:
            return "the classes in the order of its outputs"
        return ",".join(names[k] for k in self.classes)


def other_order(outputs: Tensor, classes: Tensor, count: int) -> OtherOrder | None:
    """The order that fits best, if the assumed one fits far worse; else None.

    Nothing is found where a class is rare among either: a network that has seen few classes may
    be wrong in the order that it was trained in.

    Args:
        outputs: the output that is largest for each sample, int64 [n].
        classes: the classes that the samples are of, or that another network says, int64 [n].
        count: of classes.
    """
    from scipy.optimize import linear_sum_assignment

    rows = len(classes)
    pairs = torch.bincount(outputs * count + classes, minlength=count**2)
    table = pairs.reshape(count, count).numpy()
    if rows == 0 or min(table.sum(0).min(), table.sum(1).min()) < LEAST * rows / count:
        return None
    order = linear_sum_assignment(table, maximize=True)[1]
    assumed, found = np.trace(table) / rows, table[np.arange(count), order].sum() / rows
    if found - assumed < GAIN:
        return None
    return OtherOrder(tuple(order.tolist()), float(assumed), float(found))


def warn_of_order(file: object, outputs: Tensor, classes: Tensor, target: Target) -> None:
    """Warn if a file that names no classes seems to have them in another order than the target.

    Args:
        file: its name.
        outputs: the output that is largest for each sample, int64 [n].
        classes: the classes of the samples, int64 [n].
        target: what the samples' classes are called.
    """
    if (order := other_order(outputs, classes, target.classes)) is not None:
        warn(
            f"{file} does not name its classes: its accuracy is {order.assumed:.3f} in this order, "
            f"and {order.found:.3f} in another. If it was trained so, set data.classes="
            f"{order.named(target.names)}"
        )
