"""What a report must be before the server looks at it."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from fedbayes.contracts import AnyMethod, Info, Report, Reports
from fedbayes.contracts.changes import part_of
from fedbayes.contracts.reports import ReportRow, ReportRows
from fedbayes.core.messages import (
    LONGEST_HEADER,
    Masked,
    Message,
    decode,
    decode_stacked,
    dtype_of,
    encode,
    encode_each,
    shape_of,
)
from fedbayes.core.plausible import LARGEST
from fedbayes.core.tensors import all_finite
from fedbayes.core.wording import listed
from fedbayes.errors import MessageError, quoted
from fedbayes.likelihoods import Likelihood, Scores, score_names
from fedbayes.likelihoods.base import ROUNDING
from fedbayes.likelihoods.measures import SCORE, measure_of, split
from fedbayes.models import Network

_WEIGHT = "/weight"
"""Name of a report's weight among its tensors; no tensor of a network is called so."""
MOST_FIGURES = 64
"""Metrics, or scores, that a client may send with a report."""
LONGEST_NAME = 100
"""Characters of the name of a metric or score."""
HEAVIEST = 2.0**53
"""Largest weight of a report: sums of such weights times values stay finite."""
LIGHTEST = 2.0**-53
"""Smallest weight of a report: what is divided by it stays finite, what it multiplies above 0."""


def encode_report(report: Report) -> bytes:
    """A report as bytes: its tensors, and its weight unless that is 1 and goes unsaid."""
    if report.weight == 1.0:
        return encode(report.tensors)
    return encode({**report.tensors, _WEIGHT: torch.tensor(report.weight, dtype=torch.float64)})


def encode_reports(reports: Sequence[Report]) -> list[bytes]:
    """As `encode_report` of each, in fewer operations where they are alike."""
    weights = torch.tensor([report.weight for report in reports], dtype=torch.float64).unbind()
    return encode_each(
        [
            report.tensors if report.weight == 1.0 else {**report.tensors, _WEIGHT: weight}
            for report, weight in zip(reports, weights, strict=True)
        ]
    )


def decode_reports(data: Sequence[bytes], expected: Message) -> list[ReportRow]:
    """The reports that were encoded together, in fewer operations than by `decode_report`.

    Returns:
        They; none unless all are alike and proper. `decode_report` of each then says why.
    """
    forms = forms_of(expected)
    header, most = _limits(forms)
    if len(data[0]) > most:
        return []
    try:
        stacked = decode_stacked(data, longest_header=header)
    except MessageError:
        return []
    said = stacked.pop(_WEIGHT, torch.ones(len(data), dtype=torch.float64))
    weights = said.tolist()
    if (
        said.shape != (len(data),)
        or said.dtype != torch.float64
        or not all(LIGHTEST <= weight <= HEAVIEST for weight in weights)
        or not stacked
        or stacked.keys() != expected.keys()
        or tuple((name, stacked[name].shape[1:], stacked[name].dtype) for name in expected) != forms
        or not all(map(all_finite, stacked.values()))
    ):
        return []
    rows = ReportRows.of({name: stacked[name] for name in expected})
    return [ReportRow.of(rows, place, weight) for place, weight in enumerate(weights)]


def decode_report(
    data: bytes, expected: Message, expand: Callable[[Message], Message] = lambda sent: sent
) -> Report:
    """The report that these bytes hold, if it is what the server expects.

    Args:
        data: bytes from a client; nothing is taken on trust.
        expected: names, shapes and types of a proper report (`Method.expected`).
        expand: makes a report's tensors of those that were sent, where these are others. It raises
            MessageError where it cannot.

    Raises:
        MessageError: the bytes are no message or too many, or names, shapes, types or weight
            are wrong, or a value is NaN or infinite. The text says which.
    """
    forms = forms_of(expected)
    header, most = _limits(forms)
    if len(data) > most:
        raise MessageError(f"it has {len(data):,} bytes; the limit is {most:,}")
    report = read_report(data, longest_header=header)
    tensors, weight = report.tensors, report.weight
    if not LIGHTEST <= weight <= HEAVIEST:  # nor is NaN
        raise MessageError(f"its weight is {weight}; it must be between 2**-53 and 2**53")
    tensors = expand(tensors)
    if tensors.keys() != expected.keys():
        missing = listed(map(quoted, sorted(expected.keys() - tensors.keys())), 3) or "none"
        surplus = listed(map(quoted, sorted(tensors.keys() - expected.keys())), 3) or "none"
        raise MessageError(f"its tensors are not as expected: missing {missing}; extra {surplus}")
    tensors = {name: tensors[name] for name in expected}
    if forms_of(tensors) != forms:
        for name, shape, dtype in forms:
            check_form(name, tensors[name], shape, dtype)
    for name, item in tensors.items():
        if not all_finite(item.values if isinstance(item, Masked) else item):
            raise MessageError(f"{name!r} contains NaN or infinite values")
    return Report(tensors, weight)


Forms = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
"""Names, dense shapes and types of the tensors of a message."""


def forms_of(message: Message) -> Forms:
    """The forms of a message, whose reports have limits (`longest_report`)."""
    return tuple((name, shape_of(item), dtype_of(item)) for name, item in message.items())


def check_form(
    name: str, item: Tensor | Masked, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """See that a tensor has this shape and type, or raise a MessageError."""
    if shape_of(item) != shape:
        raise MessageError(f"{name!r} has shape {shape_of(item)}, {shape} is expected")
    if dtype_of(item) != dtype:
        raise MessageError(f"{name!r} has type {dtype_of(item)}, {dtype} is expected")


def read_report(data: bytes, *, longest_header: int = LONGEST_HEADER) -> Report:
    """The inverse of `encode_report`; whether the report is a proper one is not looked at.

    Raises:
        MessageError: the bytes are no message, or the weight is no number.
    """
    tensors, weight = decode(data, longest_header=longest_header), 1.0
    if _WEIGHT in tensors:
        item = tensors.pop(_WEIGHT)
        if isinstance(item, Masked) or item.shape != () or item.dtype != torch.float64:
            raise MessageError("its weight is not a float64 scalar")
        weight = float(item)
    return Report(tensors, weight)


def check_entries(report: Report, expected: Message, method: AnyMethod, network: Network) -> None:
    """See that a report leaves out the entries that the server left out of its message, or such as
    its method lets clients choose: of what is left out there is nothing to compare or to bound.

    Args:
        report: of a client.
        expected: the pattern of a proper report.
        method: that says what of its parts may be missing (`Part.mask`).
        network: of the run.

    Raises:
        MessageError: it leaves out others. The text says of which tensor.
        ConfigError: the method does not declare a part of its reports.
    """
    declared = Reports.of(method)
    for name, item in report.tensors.items():
        pattern, part = expected[name], part_of(name, dtype_of(item), network)
        mask = declared.part(part).mask
        if isinstance(item, Tensor) and isinstance(pattern, Tensor):
            continue
        if mask == "sent" and not _same_masks(item, pattern):
            raise MessageError(f"it contains other entries of {name!r} than the server sent")
        if mask == "none" and isinstance(item, Masked):
            raise MessageError(
                f"it leaves out entries of {name!r}, which must be complete: {method.name} "
                f"declares no missing entries in the part {part!r}"
            )


def _same_masks(item: Tensor | Masked, pattern: Tensor | Masked) -> bool:
    """Whether two tensors leave out the same entries."""
    masks = item.masks if isinstance(item, Masked) else {}
    wanted = pattern.masks if isinstance(pattern, Masked) else {}
    return masks.keys() == wanted.keys() and all(
        torch.equal(mask, wanted[axes].cpu()) for axes, mask in masks.items()
    )


def figures(said: Mapping[str, object], what: str) -> dict[str, float]:
    """The metrics or scores that a client says, whatever engine brought them.

    Raises:
        MessageError: they are too many or no numbers, or names are long or cannot be printed.
    """
    if len(said) > MOST_FIGURES:
        raise MessageError(f"it has too many {what}: {len(said):,}, at most {MOST_FIGURES}")
    found: dict[str, float] = {}
    for name, value in said.items():
        if not isinstance(value, int | float):
            raise MessageError(f"invalid {what}: {quoted(name)} is not a number")
        if not (name.isprintable() and 0 < len(name) <= LONGEST_NAME):
            raise MessageError(f"invalid {what}: {quoted(name)} is not a name")
        try:
            found[name] = float(value)
        except OverflowError:
            raise MessageError(f"invalid {what}: {quoted(name)} is not a 64-bit number") from None
    return found


def means(infos: Collection[Info]) -> Info:
    """The mean of each figure over the clients that gave a finite one: of `MOST_FIGURES` figures at
    most, those that most clients gave.
    """
    values: dict[str, list[float]] = {}
    for info in infos:
        for name, value in info.items():
            if math.isfinite(value):
                values.setdefault(name, []).append(value)
    if len(values) > MOST_FIGURES:
        kept = sorted(values, key=lambda name: (-len(values[name]), name))[:MOST_FIGURES]
        values = {name: each for name, each in values.items() if name in kept}
    return {name: _mean(each) for name, each in values.items()}


def _mean(values: list[float]) -> float:
    total = sum(values)
    if math.isfinite(total):
        return total / len(values)
    return sum(value / len(values) for value in values)


def check_scores(scores: Scores, likelihood: Likelihood, measures: Collection[str] = ()) -> None:
    """See that scores from a client are sums of the likelihood's terms over some samples.

    A client can lie about them, but not so that the mean over clients is spoilt: they must give
    metrics, shares of samples must be such, and no term is larger than the square of a float32. An
    error may be infinite, as that of a model that diverged. No scores at all are those of a client
    without test samples.

    Args:
        scores: by name; nothing is taken on trust.
        likelihood: of the targets.
        measures: names of the metrics that clients are asked for in addition to the likelihood's.
            They may be NaN, where they are undefined.

    Raises:
        MessageError: names are missing or surplus, or values are those of no samples. The text
            says which.
    """
    if not scores:
        return
    asked = {f"{SCORE}{name}": name for name in measures}
    names = score_names(likelihood) | asked.keys()
    if scores.keys() != names:
        missing = listed(sorted(names - scores.keys()), 3) or "none"
        surplus = listed((repr(name[:40]) for name in sorted(scores.keys() - names)), 3) or "none"
        raise MessageError(f"its scores are not as expected: missing {missing}; extra {surplus}")
    count = scores["count"]
    if not (0 < count < 2**31 and count.is_integer()):
        raise MessageError(f"its scores have {count} samples, which is impossible")
    for name, metric in asked.items():
        low, high = measure_of(split(metric)[0]).possible
        if scores[name] < low - ROUNDING or scores[name] > high + ROUNDING:
            raise MessageError(f"its {metric} is {scores[name]:g}, which is impossible")
    scores = {name: value for name, value in scores.items() if name not in asked}
    for name, value in scores.items():
        if math.isnan(value) or value == -math.inf:
            raise MessageError(f"its score {name!r} is {value}, which is impossible")
        if math.isfinite(value) and abs(value) > count * LARGEST**2:
            raise MessageError(f"its score {name!r} is {value:g}, beyond float32")
    for name in likelihood.shares:
        if not 0 <= scores[name] <= count * (1 + ROUNDING):
            raise MessageError(f"its score {name!r} is {scores[name]:g} for {count:g} samples")
    for name, value in scores.items():
        if name.partition("/")[0] in likelihood.nonnegative and value < -count * ROUNDING:
            raise MessageError(f"its score {name!r} is {value:g}; it cannot be negative")
    if scores["nll"] < count * likelihood.least_nll:
        raise MessageError(f"its score 'nll' is {scores['nll']:g} for {count:g} samples")
    try:
        likelihood.metrics(scores)
    except (ArithmeticError, ValueError):  # of negative squares, or beyond all numbers
        raise MessageError("its scores are impossible: they give no metrics") from None


def longest_report(expected: Message) -> int:
    """Bytes that no proper report exceeds."""
    return _limits(forms_of(expected))[1]


@lru_cache(maxsize=16)
def _limits(forms: Forms) -> tuple[int, int]:
    """Bytes that names and shapes of no proper report exceed, deflated or not; and bytes that the
    whole does not exceed, with every value and a mask for every entry.
    """
    header, values = 1024, 0
    for name, shape, dtype in forms:
        axes, entries = len(shape), math.prod(shape)
        parts = 3 + axes  # the tensor, its shape, its masks
        header += parts * (160 + 2 * len(name) + 24 * axes)
        values += entries * dtype.itemsize + entries // 8 + 8 * (3 + axes)
    return header, header + values
