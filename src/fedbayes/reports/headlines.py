"""What came of runs, in a number or two."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from fedbayes.reports.gather import Record
from fedbayes.reports.template import brief
from fedbayes.storage.formatting import words


@dataclass(frozen=True)
class Headline:
    """The result, in one number."""

    value: str
    metric: str
    text: str
    run: int
    curve: list[float] = field(default_factory=list)
    """How it came to that, round by round."""


def count(number: int, what: str) -> str:
    """A number of things."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def dataset(record: Record) -> str:
    """Name of the data set, or of the files of one's own: of many the first and how many more."""
    name, path = (str(record.settings.get(f"data.{key}", "")) for key in ("name", "path"))
    if not path:
        return name
    files = [Path(file).name for file in (path, *record.settings.get("data.more", ()))]
    if len(files) > LISTED_FILES:
        files = [f"{files[0]} and {len(files) - 1} other files"]
    return " + ".join(files)


LISTED_FILES = 3
"""Most files that are listed by name."""


def headlines(records: Sequence[Record]) -> list[Headline]:
    """Of a run, the metric that it is judged by; of several, the best.

    Runs on other data, or judged by another metric, are not compared.
    """
    groups: dict[tuple[str, str], list[tuple[float, int]]] = {}
    for run, record in enumerate(records):
        value = record.last(record.headline)
        if value is not None and math.isfinite(value):
            groups.setdefault((dataset(record), record.headline), []).append((value, run))
    found = []
    for (data, metric), values in groups.items():
        higher = records[values[0][1]].higher_is_better
        value, run = (max if higher else min)(values, key=lambda pair: pair[0])
        record = records[run]
        name = words(metric)
        text = f"after {count(record.last_round(metric), 'round')}"
        curve = [
            told
            for line in record.metrics
            if (told := line.get(metric)) is not None and math.isfinite(told)
        ]
        if len(records) > 1:
            text = f"{record.label}, {text}"
        if len(values) > 1:
            name = f"{'highest' if higher else 'lowest'} {name} of {len(values)} runs"
        if len(records) > 1:
            name += f" on {data}"
        if len(curve) > 1:
            text += f"; {brief(curve[0])} at first"
        sizes = [] if record.test_sizes is None else list(record.test_sizes)
        known = bool(sizes) and None not in sizes and record.tried_at_clients
        if metric == "global_accuracy" and known:
            low, high = interval(value, sum(int(size or 0) for size in sizes))
            text += f"; 95 % interval {low:.3f} to {high:.3f}"
        found.append(Headline(brief(value), name, text, run, curve))
    return found


def interval(share: float, samples: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of so many independent samples."""
    z2 = 1.959964**2
    if not samples:
        return 0.0, 1.0
    middle = (share + z2 / (2 * samples)) / (1 + z2 / samples)
    half = math.sqrt(z2 * (share * (1 - share) / samples + z2 / (4 * samples**2)))
    return max(0.0, middle - half / (1 + z2 / samples)), min(
        1.0, middle + half / (1 + z2 / samples)
    )


def lowest(records: Sequence[Record]) -> list[Headline]:
    """Of a single run, how the client does that does worst."""
    if len(records) != 1 or len(records[0].values) < 2:
        return []
    (record,) = records
    pick = min if record.higher_is_better else max
    client = pick(record.values, key=record.values.__getitem__)
    name = (
        f"{'lowest' if record.higher_is_better else 'highest'} {words(record.metric)} of a client"
    )
    middle = median(record.values.values())
    text = (
        f"{client}, its own model; the median of {len(record.values):,} clients is {brief(middle)}"
    )
    return [Headline(brief(record.values[client]), name, text, 0)]
