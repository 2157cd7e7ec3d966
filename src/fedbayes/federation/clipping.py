"""Vectors of bounded norm, in float64."""

import math

from fedbayes.tensors import Tensors


def norm(tensors: Tensors) -> float:
    """L2 norm over all entries of finite float64 tensors; infinite beyond all numbers."""
    largest, ratio = _measured(tensors)
    return largest * ratio


def shortened(tensors: Tensors, bound: float) -> Tensors:
    """The tensors, shortened together until their L2 norm is at most `bound`.

    Args:
        tensors: float64, finite.
        bound: above 0.
    """
    largest, ratio = _measured(tensors)
    if largest * ratio <= bound:
        return tensors
    return {name: t / largest * (bound / ratio) for name, t in tensors.items()}


def _measured(tensors: Tensors) -> tuple[float, float]:
    """The largest magnitude, and the norm in units of it: squares can be beyond all numbers."""
    largest = max((float(t.abs().max()) for t in tensors.values() if t.numel()), default=0.0)
    if not largest:
        return 0.0, 1.0
    squares = (float((t / largest).square().sum()) for t in tensors.values())
    return largest, math.sqrt(sum(squares))
