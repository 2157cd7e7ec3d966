"""What is shown of runs: the charts of each figure, from what was read of their folders.

Every chart of the page and every figure for a paper is made here; `page` and `draw` only differ
in what they draw with.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from fedbayes.data.dataset import Rows
from fedbayes.errors import RunError, did_you_mean
from fedbayes.federation.privacy.accounting import ADD_REMOVE, REPLACE
from fedbayes.reports.charts import (
    Chart,
    ChartCurve,
    ChartGroup,
    Heat,
    Lines,
    Points,
    Spread,
    coverage_curve,
    diagram,
    filled,
    widely_spread,
)
from fedbayes.reports.gather import Record, notes_on
from fedbayes.storage.client_spread import BETWEEN
from fedbayes.storage.formatting import words
from fedbayes.storage.metrics_file import Metrics

MOST_POINTS = 1000
"""Samples whose predictions are shown; of more, as many evenly spaced ones."""
MOST_TARGETS = 4
"""Target columns that have a chart of predictions."""
MOST_COLUMNS = 200
"""Clients that a heat map shows; of more, as many evenly spaced ones."""


@dataclass(frozen=True)
class _Group:
    """Runs whose headline metrics can be compared: of the same metric, in the same unit."""

    metric: str
    runs: list[int]
    of: str = ""
    """The numbers whose unit it is, where another group has the same metric of others."""
    note: str = ""
    """Where a lower value is a better one."""


def _groups(records: Sequence[Record]) -> list[_Group]:
    """The runs by metric and unit."""
    found: dict[tuple[str, str], list[int]] = {}
    for run, record in enumerate(records):
        found.setdefault((record.metric, record.unit), []).append(run)
    metrics = [metric for metric, _ in found]
    return [
        _Group(
            metric,
            runs,
            f" of {unit}" if unit and metrics.count(metric) > 1 else "",
            "" if records[runs[0]].higher_is_better else "Lower is better.",
        )
        for (metric, unit), runs in found.items()
    ]


def headline(records: Sequence[Record]) -> list[Chart]:
    """The headline metric of global models over rounds; a chart for each metric and unit."""
    return [_global(records, group, "headline") for group in _groups(records)]


def others(records: Sequence[Record]) -> list[Chart]:
    """The other metrics of global models over rounds, those that have no chart of their own."""
    charts: list[Chart] = []
    for group in _groups(records):
        known = {"global_nll", "global_ece", f"global_{group.metric}"}
        own = [records[run] for run in group.runs]
        for name in round_metrics(own):
            if name.startswith("global_") and not name.startswith(_BETWEEN) and name not in known:
                if "/" in name or not any(_in_rounds(record, name) for record in own):
                    continue
                metric = name.removeprefix("global_")
                note = f"The global model{_before(own)}." if metric == "brier" else ""
                charts.append(_global(records, replace(group, metric=metric, note=note), "metrics"))
    return charts


_BETWEEN = tuple(f"global_{kind}_" for kind in BETWEEN)


def _before(records: Sequence[Record]) -> str:
    """That curves of probabilities are without the temperature of the end, where there is one."""
    return ", before calibration" if any(record.final for record in records) else ""


def _in_rounds(record: Record, name: str) -> bool:
    """Whether a metric is told as often as the headline: others are of the last round alone."""
    told = sum(line.get(name) is not None for line in record.metrics)
    return told > 0 and told >= sum(
        line.get(f"global_{record.metric}") is not None for line in record.metrics
    )


def _global(records: Sequence[Record], group: _Group, key: str) -> Lines:
    """A metric of the global model over rounds."""
    name = words(group.metric)
    return Lines(
        key,
        f"Global {name} over rounds{group.of}",
        "round",
        f"global {name}",
        _of(group, _curves(records, f"global_{group.metric}")),
        group.note,
    )


def tried(records: Sequence[Record], *, all_of_them: bool = False) -> str:
    """Whose samples models are tried on; predictions are made of those that the server has."""
    if not any(record.reference for record in records):
        return "all clients' test samples"
    if not all_of_them:
        return "the server's reference table, not of a client"
    at_clients = [record.tried_at_clients for record in records]
    if all(at_clients):
        return "all clients' test samples, as they report"
    return "test samples; with a server's reference table, of that table"


def _of(group: _Group, curves: Sequence[ChartCurve]) -> list[ChartCurve]:
    """The curves of the runs of a group."""
    return [curve for curve in curves if curve.run in group.runs]


def over_bytes(records: Sequence[Record]) -> list[Chart]:
    """The headline metric over the bytes sent until then, to clients and back."""
    unit, factor = _unit(
        max((_sent(record)[-1] for record in records if record.metrics), default=0)
    )
    spent = [
        {line["round"]: sent for line, sent in zip(record.metrics, _sent(record), strict=True)}
        for record in records
    ]
    return _over(records, "bytes", "bytes", f"sent to clients and back, {unit}", spent, factor)


def over_clock(records: Sequence[Record]) -> list[Chart]:
    """The headline metric over simulated time, of runs that have a clock."""
    spent = [
        {line["round"]: line["clock_seconds"] for line in r.metrics if _ticks(line)}
        for r in records
    ]
    most = max((time for times in spent for time in times.values()), default=0.0)
    unit, factor = next(
        ((unit, factor) for unit, factor in _UNITS_OF_TIME if most >= 3 * factor), ("seconds", 1.0)
    )
    return _over(records, "clock", "simulated time", f"{unit} of the clock", spent, factor)


_UNITS_OF_TIME = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0))


def _ticks(line: Metrics) -> bool:
    """Whether a line tells simulated time, as a number."""
    time = line.get("clock_seconds")
    return isinstance(time, int | float) and math.isfinite(time)


def _over(
    records: Sequence[Record],
    key: str,
    what: str,
    label: str,
    spent: Sequence[Mapping[int, float]],
    factor: float,
) -> list[Chart]:
    """The headline metric over something that rounds spend."""
    charts: list[Chart] = []
    for group in _groups(records):
        chart, curves = _global(records, group, key), []
        for curve in chart.curves:
            known = spent[curve.run]
            points = [
                (float(known[int(number)]) / factor, y)
                for number, y in zip(curve.x, curve.y, strict=True)
                if int(number) in known
            ]
            curves.append(ChartCurve(curve.run, [x for x, _ in points], [y for _, y in points]))
        title = f"Global {words(group.metric)} over {what}{group.of}"
        charts.append(replace(chart, title=title, x_label=label, curves=curves))
    return charts


def local(records: Sequence[Record]) -> list[Chart]:
    """The headline metric of clients' own models over rounds, next to the global one."""
    charts: list[Chart] = []
    for group in _groups(records):
        whole = _of(group, _curves(records, f"global_{group.metric}"))
        own = _of(group, _curves(records, f"local_{group.metric}"))
        charts.append(
            Lines(
                "local",
                f"Local against global{group.of}",
                "round",
                words(group.metric),
                [*own, *(replace(curve, dashed=True) for curve in whole)],
                "Solid: clients' own models on their own test samples, mean over clients. Dashed: "
                "the global model on all of them.",
                styles="solid: local, dashed: global",
                dashed="global",
            )
        )
    return charts


def nll(records: Sequence[Record]) -> list[Chart]:
    """Negative log-likelihood of the test samples under the global model, over rounds."""
    curves = _curves(records, "global_nll")
    return [
        Lines(
            "nll",
            "Negative log-likelihood over rounds",
            "round",
            "negative log-likelihood",
            curves,
            f"In nats, mean over samples{_before(records)}; lower is better.",
            _log(curves),
        )
    ]


def loss(records: Sequence[Record]) -> list[Chart]:
    """What clients minimize, over rounds."""
    curves = _curves(records, "loss")
    return [
        Lines(
            "loss",
            "Clients' training loss over rounds",
            "round",
            "loss, mean over clients",
            curves,
            "The loss that the clients of a round minimized. It differs between methods."
            if len({record.settings.get("method.name") for record in records}) > 1
            else "The loss that the clients of a round minimized.",
            _log(curves),
        )
    ]


def sparsity(records: Sequence[Record]) -> list[Chart]:
    """Share of the global model's weights that are zero, over rounds."""
    return [
        Lines(
            "sparsity",
            "Sparsity",
            "round",
            "share of weights that are zero",
            _curves(records, "sparsity"),
        )
    ]


def size(records: Sequence[Record]) -> list[Chart]:
    """Size of the global model over rounds, without its zeros."""
    curves = []
    for run, record in enumerate(records):
        lines = [line for line in record.metrics if {"sparsity", "model_parameters"} <= line.keys()]
        alive = [line["model_parameters"] * (1 - line["sparsity"]) for line in lines]
        curves.append(ChartCurve(run, [float(line["round"]) for line in lines], alive))
    return [
        Lines("size", "Size of the global model", "round", "parameters that are not zero", curves)
    ]


def seconds(records: Sequence[Record]) -> list[Chart]:
    """How long rounds took."""
    curves = _curves(records, "seconds")
    return [Lines("seconds", "Seconds of each round", "round", "seconds", curves, log=_log(curves))]


def privacy(records: Sequence[Record]) -> list[Chart]:
    """The privacy budget over rounds; empty if only the last round has it."""
    curves = []
    for run, record in enumerate(records):
        if len(record.spent) < 2:
            continue
        for kind, dashed in ((REPLACE, False), (ADD_REMOVE, True)):
            known = [
                (number, table[kind])
                for number, table in record.spent
                if math.isfinite(table[kind])
            ]
            curves.append(
                ChartCurve(run, [float(n) for n, _ in known], [e for _, e in known], dashed)
            )
    return [
        Lines(
            "privacy",
            "Privacy spent",
            "round",
            "ε of all data of one client",
            curves,
            "Solid: compared with a federation in which one client has other data. Dashed: "
            "compared with a federation without the client.",
            styles="solid: replace one, dashed: add or remove",
            dashed="add or remove",
        )
    ]


def clients(records: Sequence[Record]) -> list[Chart]:
    """The headline metric of the clients, each on its own test samples."""
    return [
        Spread(
            "clients",
            f"Clients individually{group.of}",
            words(group.metric),
            [
                ChartGroup(run, list(records[run].values), list(records[run].values.values()))
                for run in group.runs
                if records[run].values
            ],
            " ".join(
                ["The last model of each client, on its own test samples.", group.note]
            ).strip(),
        )
        for group in _groups(records)
    ]


def split(records: Sequence[Record]) -> list[Chart]:
    """Which client trains on which classes; runs with the same split share a chart."""
    charts: list[Chart] = []
    splits: list[tuple[tuple[str, ...], Rows, list[int]]] = []
    for run, record in enumerate(records):
        if record.counts is None:
            continue
        for names, counts, runs in splits:
            if names == record.classes and np.array_equal(counts, record.counts):
                runs.append(run)
                break
        else:
            splits.append((record.classes, record.counts, [run]))
    for classes, counts, runs in splits:
        record, total = records[runs[0]], len(counts)
        shown = _evenly_spaced(total, MOST_COLUMNS)
        note = "The stronger the colour, the larger the share of the client's training samples."
        if len(shown) < total:
            note += f" {len(shown)} of {total:,} clients are shown, evenly spaced."
        charts.append(
            Heat(
                "split",
                "Classes of each client",
                runs,
                "class",
                list(classes),
                "client",
                [record.clients[client] for client in shown],
                counts[shown].T.tolist(),
                "column",
                note,
            )
        )
    return charts


def confusion(records: Sequence[Record]) -> list[Chart]:
    """True and predicted classes of each global model."""
    return [
        Heat(
            "confusion",
            "Confusion matrix",
            [run],
            "true class",
            list(record.classes),
            "predicted class",
            list(record.classes),
            record.confusion.tolist(),
            "row",
            "Colours show shares of the true class.",
        )
        for run, record in enumerate(records)
        if record.confusion is not None
    ]


def predictions(records: Sequence[Record]) -> list[Chart]:
    """True numbers and what each global model predicts, a chart for each target column."""
    charts: list[Chart] = []
    for run, record in enumerate(records):
        if record.predictions is None or record.target is None:
            continue
        true, mean = record.predictions
        rows = _evenly_spaced(len(true), MOST_POINTS)
        note = "On the dashed line both are the same."
        if len(rows) < len(true):
            note += f" {len(rows):,} of {len(true):,} samples are shown, evenly spaced."
        for column, name in enumerate(record.target.names[:MOST_TARGETS]):
            x, y = true[rows, column], mean[rows, column]
            finite = np.isfinite(y)
            charts.append(
                Points(
                    "predictions",
                    f"Predicted against true: {name}",
                    [run],
                    f"true {name}",
                    f"predicted {name}",
                    x[finite].tolist(),
                    y[finite].tolist(),
                    note,
                )
            )
    return charts


def coverage(records: Sequence[Record]) -> list[Chart]:
    """Share of targets in predictive intervals, for each global model."""
    known = [(run, record.coverage) for run, record in enumerate(records) if record.coverage]
    if not known:
        return []
    curves = [curve for run, found in known for curve in coverage_curve(found, run).curves]
    chart = coverage_curve(known[0][1])
    return [replace(chart, curves=curves, styles=chart.styles if len(known) == 1 else "")]


def reliability(records: Sequence[Record]) -> list[Chart]:
    """Confidence and accuracy of each global model."""
    return [
        diagram(record.calibration, run)
        for run, record in enumerate(records)
        if record.calibration is not None
    ]


def selective(records: Sequence[Record]) -> list[Chart]:
    """Accuracy of the most confident predictions of each global model, over how many they are."""
    curves = []
    for run, record in enumerate(records):
        if record.confidences is not None:
            coverage, accuracy = record.confidences.curve
            shown = _evenly_spaced(len(coverage), MOST_COLUMNS)
            x, y = (values.numpy()[shown].tolist() for values in (coverage, accuracy))
            curves.append(ChartCurve(run, x, y))
    return [
        Lines(
            "selective",
            "Selective prediction",
            "share of samples predicted",
            "accuracy",
            curves,
            "Accuracy on the most confident samples, if the model predicts only these.",
        )
    ]


FIGURES: dict[str, Callable[[Sequence[Record]], list[Chart]]] = {
    "headline": headline,
    "metrics": others,
    "bytes": over_bytes,
    "clock": over_clock,
    "local": local,
    "nll": nll,
    "loss": loss,
    "sparsity": sparsity,
    "size": size,
    "seconds": seconds,
    "privacy": privacy,
    "clients": clients,
    "split": split,
    "confusion": confusion,
    "predictions": predictions,
    "coverage": coverage,
    "reliability": reliability,
    "selective": selective,
}
"""The charts by the name of the figure. Any metric can be named too: `rmse` of the global model, or
any metric of `metrics.jsonl`."""


def charts(figure: str, records: Sequence[Record]) -> list[Chart]:
    """The charts of a figure: one of `FIGURES`, or a metric that the rounds have, by its name.

    Raises:
        RunError: there is no such figure, or these runs have nothing to show in it.
    """
    if figure in FIGURES:
        found = FIGURES[figure](records)
    elif f"global_{figure}" in round_metrics(records):
        found = [_global(records, _Group(figure, list(range(len(records)))), figure)]
    elif figure in round_metrics(records):
        found = [Lines(figure, figure, "round", figure, _curves(records, figure))]
    else:
        known = [*FIGURES, *round_metrics(records)]
        raise RunError(
            f"unknown figure {figure!r}{did_you_mean(figure, known)}. Choose "
            f"{', '.join(FIGURES)}, or a metric of metrics.jsonl"
        )
    if not any(filled(chart) for chart in found):
        notes = "; ".join(notes_on(records))
        raise RunError(f"there is nothing to draw for {figure}" + (f" ({notes})" if notes else ""))
    return found


def round_metrics(records: Sequence[Record]) -> list[str]:
    """Names of the metrics that the rounds of any of the runs have, the methods' own included."""
    names = {
        name: None
        for record in records
        for line in record.metrics
        for name, value in line.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name != "round"
    }
    return list(names)


def _curves(records: Sequence[Record], metric: str) -> list[ChartCurve]:
    """A metric of the rounds; rounds without it, or where it is not finite, are left out."""
    curves = []
    for run, record in enumerate(records):
        points = [
            (float(line["round"]), float(line[metric]))
            for line in record.metrics
            if line.get(metric) is not None and math.isfinite(line[metric])
        ]
        curves.append(ChartCurve(run, [x for x, _ in points], [y for _, y in points]))
    return curves


def _evenly_spaced(total: int, most: int) -> Rows:
    """Indices of so many at the most, the first and the last among them."""
    return np.unique(np.linspace(0, total - 1, min(total, most)).round().astype(int))


def _log(curves: Sequence[ChartCurve]) -> bool:
    """Whether the axis of values is logarithmic."""
    return widely_spread([value for curve in curves for value in curve.y])


def _sent(record: Record) -> list[int]:
    """Bytes sent up to the end of each round."""
    return list(accumulate(line["bytes_down"] + line["bytes_up"] for line in record.metrics))


def _unit(most: float) -> tuple[str, float]:
    """A unit in which so many bytes are a handy number."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if most >= factor:
            return unit, factor
    return "bytes", 1.0
