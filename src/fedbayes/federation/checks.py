"""What a report must be before the server looks at it."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fedbayes.contracts import Report
from fedbayes.data.wording import listed
from fedbayes.errors import MessageError, quoted
from fedbayes.likelihoods import Likelihood, Scores, score_names
from fedbayes.messages import Masked, Message, decode, dtype_of, encode, shape_of

_WEIGHT = "/weight"
"""Name of a report's weight among its tensors; no tensor of a network is called so."""
_ROUNDING = 1e-5
"""What a probability in float32 may be above 1 at most, and its logarithm above 0."""
MOST_FIGURES = 64
"""Metrics, or scores, that a client may send with a report."""
LONGEST_NAME = 100
"""Characters of the name of a metric or score."""
HEAVIEST = 2.0**53
"""Largest weight of a report: sums of such weights times values stay finite."""


def encode_report(report: Report) -> bytes:
    """A report as bytes: its tensors, and its weight unless that is 1 and goes unsaid."""
    if report.weight == 1.0:
        return encode(report.tensors)
    return encode({**report.tensors, _WEIGHT: torch.tensor(report.weight, dtype=torch.float64)})


def decode_report(data: bytes, expected: Message) -> Report:
    """The report that these bytes hold, if it is what the server expects.

    Args:
        data: bytes from a client; nothing is taken on trust.
        expected: names, shapes and types of a proper report (`Method.expected`).

    Raises:
        MessageError: the bytes are no message or too many, or names, shapes, types or weight
            are wrong, or a value is NaN or infinite. The text says which.
    """
    header = longest_header(expected)
    most = longest_report(expected)
    if len(data) > most:
        raise MessageError(f"it has {len(data):,} bytes; at most {most:,} make sense")
    tensors = decode(data, longest_header=header)
    weight = 1.0
    if _WEIGHT in tensors:
        item = tensors.pop(_WEIGHT)
        if isinstance(item, Masked) or item.shape != () or item.dtype != torch.float64:
            raise MessageError("its weight is not a float64 scalar")
        weight = float(item)
    if not 0 < weight <= HEAVIEST:  # nor is NaN
        raise MessageError(f"its weight is {weight}; it must be positive and at most 2**53")
    if tensors.keys() != expected.keys():
        missing = listed(map(quoted, sorted(expected.keys() - tensors.keys())), 3) or "none"
        surplus = listed(map(quoted, sorted(tensors.keys() - expected.keys())), 3) or "none"
        raise MessageError(f"its tensors are not those expected: missing {missing}; more {surplus}")
    for name, pattern in expected.items():
        item = tensors[name]
        if shape_of(item) != shape_of(pattern):
            raise MessageError(
                f"{name!r} has shape {shape_of(item)}, {shape_of(pattern)} is expected"
            )
        if dtype_of(item) != dtype_of(pattern):
            raise MessageError(
                f"{name!r} has type {dtype_of(item)}, {dtype_of(pattern)} is expected"
            )
        values = item.values if isinstance(item, Masked) else item
        if not all_finite(values):
            raise MessageError(f"{name!r} holds NaN or infinite values")
    return Report({name: tensors[name] for name in expected}, weight)


def figures(said: Mapping[str, object], what: str) -> dict[str, float]:
    """The metrics or scores that a client says, whatever engine brought them.

    Args:
        said: by name; nothing is taken on trust.
        what: what they are, for the error.

    Raises:
        MessageError: they are too many or no numbers, or names are long or cannot be printed.
    """
    if len(said) > MOST_FIGURES:
        raise MessageError(f"its {what} are too many: {len(said):,}, at most {MOST_FIGURES}")
    found: dict[str, float] = {}
    for name, value in said.items():
        if not isinstance(value, int | float):
            raise MessageError(f"invalid {what}: {quoted(name)} is no number")
        if len(name) > LONGEST_NAME or not name.isprintable():
            raise MessageError(f"invalid {what}: {quoted(name)} is no name")
        try:
            found[name] = float(value)
        except OverflowError:
            raise MessageError(f"invalid {what}: {quoted(name)} is no number of 64 bits") from None
    return found


def check_scores(scores: Scores, likelihood: Likelihood) -> None:
    """See that scores from a client are sums of the likelihood's terms over some samples.

    A client can lie about them, but not so that the mean over clients is spoilt: they must give
    metrics, and shares of samples must be such. An error may be infinite, as that of a model that
    diverged. No scores at all are those of a client without test samples.

    Args:
        scores: by name; nothing is taken on trust.
        likelihood: of the targets.

    Raises:
        MessageError: names are missing or surplus, or values are those of no samples. The text
            says which.
    """
    if not scores:
        return
    names = score_names(likelihood)
    if scores.keys() != names:
        missing = listed(sorted(names - scores.keys()), 3) or "none"
        surplus = listed((repr(name[:40]) for name in sorted(scores.keys() - names)), 3) or "none"
        raise MessageError(f"its scores are not those expected: missing {missing}; more {surplus}")
    count = scores["count"]
    if not (0 < count < 2**31 and count.is_integer()):
        raise MessageError(f"its scores are of {count} samples, which cannot be")
    for name, value in scores.items():
        if math.isnan(value) or value == -math.inf:
            raise MessageError(f"its score {name!r} is {value}, which cannot be")
    for name in likelihood.shares:
        if not 0 <= scores[name] <= count * (1 + _ROUNDING):
            raise MessageError(f"its score {name!r} is {scores[name]:g} of {count:g} samples")
    for name, value in scores.items():
        if name.partition("/")[0] in likelihood.nonnegative and value < -count * _ROUNDING:
            raise MessageError(f"its score {name!r} is {value:g}; it cannot be negative")
    try:
        likelihood.metrics(scores)
    except (ArithmeticError, ValueError):  # of negative squares, or beyond all numbers
        raise MessageError("its scores cannot be of any samples: they give no metrics") from None


def longest_report(expected: Message) -> int:
    """Bytes that no proper report exceeds."""
    return longest_header(expected) + most_values(expected)


def longest_header(expected: Message) -> int:
    """Bytes that names and shapes of no proper report exceed, deflated or not."""
    total = 1024
    for name, pattern in expected.items():
        axes = len(shape_of(pattern))
        parts = 3 + axes  # the tensor, its shape, its masks
        total += parts * (160 + 2 * len(name) + 24 * axes)
    return total


def most_values(expected: Message) -> int:
    """Bytes that the rest of no proper report exceeds: every value, a mask for every entry."""
    total = 0
    for pattern in expected.values():
        shape = shape_of(pattern)
        entries = math.prod(shape)
        total += entries * dtype_of(pattern).itemsize + entries // 8 + 8 * (3 + len(shape))
    return total


def all_finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite; in one pass where, as almost always, all are."""
    # A NaN or an infinity makes the sum non-finite. So may an overflow, hence the second look.
    return bool(torch.isfinite(values.sum(dtype=torch.float64))) or bool(
        torch.isfinite(values).all()
    )
