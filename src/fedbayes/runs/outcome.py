"""The result of a run, or of runs under several seeds: `summary.json` as tables for people."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from fedbayes.core.wording import listed
from fedbayes.likelihoods.measures import MEASURES, Measure
from fedbayes.storage.best_tracker import flat
from fedbayes.storage.client_spread import BALANCED, balanced_leads, one_class, rows
from fedbayes.storage.formatting import clock, number, words

if TYPE_CHECKING:
    from fedbayes.storage.client_spread import SpreadRow
    from fedbayes.storage.metrics_file import Metrics


def outcome(summary: "Metrics") -> Group:
    """The summary as a table, with the spread of metrics over clients if it has one."""
    own = summary["headline"].partition("_")[0]
    shown = sorted(("global", "local"), key=own.__ne__)
    between = [table for whose in shown if (table := between_clients(summary, whose))]
    return Group(_outcome(summary), *(part for table in between for part in ("", table)))


def between_clients(summary: "Metrics", whose: str = "global") -> Table | None:
    """How metrics of a model differ between clients; None if that is not told, or is of another
    model than the method is judged by and of no metric that was asked for.
    """
    found = rows(summary, whose)
    headline = summary.get("headline", whose).startswith(whose)
    if not found or not (headline or any(MEASURES.get(_base(r.metric), _OWN).value for r in found)):
        return None
    first = [] if whose == "local" else ["all rows"]
    title = "global model" if whose == "global" else "clients' own models"
    table = Table(title, *first, "mean of clients", "spread", "worst client", box=None)
    table.pad_edge = False
    for row in found:
        worst = f"{number(row.worst)} ({row.client})" if row.client else number(row.worst)
        whole = [number(row.whole)] if first else []
        cells = [*whole, number(row.mean), number(row.spread), worst]
        table.add_row(f"[bold]{escape(words(row.metric))}", *map(escape, cells))
    notes = notes_of(summary, found)
    if notes:
        table.caption, table.caption_justify = "\n".join(map(escape, notes)), "left"
    return table


def notes_of(summary: "Metrics", found: Sequence["SpreadRow"]) -> list[str]:
    """Which class is the positive one, and at which clients metrics are undefined."""
    names = {_base(row.metric) for row in found}
    ranked = any(name in MEASURES and MEASURES[name].two_classes for name in names) or (
        "auroc" in names
    )
    notes = []
    if one_class(summary["metrics"].get("global", {})):
        notes.append(
            "the global model predicts one class for all test rows: see "
            "training.class_weights=balanced, training.focal and predict --threshold"
        )
    if ranked and "positive_class" in summary:
        notes.append(f"positive: {summary['positive_class']}")
    lacking: dict[tuple[str, ...], list[str]] = {}
    for row in found:
        if row.undefined:
            lacking.setdefault(row.undefined, []).append(words(row.metric))
    for clients, metrics in lacking.items():
        notes.append(
            f"{listed(metrics, 8)} undefined, and excluded from means: {listed(clients, 5)} (test "
            "rows of only one class, or too few)"
        )
    return notes


_OWN = Measure("", (), None)


def _base(name: str) -> str:
    """A metric without its threshold."""
    return name.partition("@")[0]


def _outcome(summary: "Metrics") -> Table:
    """The summary as a table."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in outcome_rows(summary).items():
        table.add_row(f"[bold]{name}", escape(value))
    return table


def _compressed(summary: "Metrics") -> str:
    """What compression left of the bytes, in brackets; empty where there is none."""
    if (shares := summary.get("compressed")) is None:
        return ""
    return f" ({shares['down']:.1%} / {shares['up']:.1%} of the uncompressed)"


def outcome_rows(summary: "Metrics") -> dict[str, str]:
    """The result of a run, by name, for people."""
    metrics, headline = flat(summary), summary["headline"]
    metric = headline.partition("_")[2]
    names = sorted((f"global_{metric}", f"local_{metric}"), key=headline.__ne__)
    found = summary["metrics"].get("global", {})
    first = {"global balanced accuracy": found[BALANCED]} if balanced_leads(found) else {}
    rows = {
        **{name: number(value) for name, value in first.items()},
        **{words(name): number(metrics.get(name)) for name in names},
        "calibration": _calibration(summary, metrics),
        **_tried_on(summary),
        "bytes down / up": f"{decimal(summary['bytes_down'])} / {decimal(summary['bytes_up'])}"
        f"{_compressed(summary)}",
        "on the link": f"{decimal(summary['link_down'])} / {decimal(summary['link_up'])}",
        "parameters": f"{summary['model_parameters']:,} ({summary['sparsity']:.1%} zero)",
        "seconds a round": f"{summary['seconds_per_round']:.3f} (median; "
        f"{summary['seconds']:.1f} in all)",
        "simulated time": _simulated(summary),
        "refused reports": f"{summary['refused_reports']} ({summary['skipped_rounds']} rounds "
        f"without an update{_noise_rounds(summary)}){_of_whom(summary)}",
        "lost reports": str(summary["lost_reports"]),
        "stopped": f"{summary['stopped_reason']} after {summary['rounds']} "
        + ("round" if summary["rounds"] == 1 else "rounds"),
        "folder": summary["folder"],
    }
    if "best_round" in summary:
        best = number(flat({"metrics": summary["best_metrics"]})[headline])
        rows["best round"] = (
            f"{summary['best_round']} ({words(headline)} {best}); the checkpoint is kept"
            + (", and model.safetensors is its model" if "model_round" in summary else "")
        )
    if "label_noise" in summary:
        noise = summary["label_noise"]
        rows["label noise"] = f"{noise['labels']:,} of {noise['of']:,} training labels are wrong"
    if "attack" in summary:
        attack = summary["attack"]
        rows["attack"] = (
            f"{attack['kind']} by client{'s' * (len(attack['clients']) > 1)} "
            f"{', '.join(map(str, attack['clients']))} from round {attack['start']} on"
        )
    if "attack_success" in summary:
        rows["attack success"] = f"{summary['attack_success']:.1%} of the targeted test samples"
    if "privacy" in summary:
        rows["privacy"] = _privacy(summary)
    if "warning" in summary:
        rows["warning"] = summary["warning"]
    if not rows["calibration"]:
        del rows["calibration"]
    if "clock_seconds" not in summary:
        del rows["simulated time"]
    if not summary["link_down"]:
        del rows["on the link"], rows["lost reports"]
    return rows


def _calibration(summary: "Metrics", metrics: "Metrics") -> str:
    """The temperature of the saved model and what it changed, or why there is none."""
    told = summary.get("calibration", {})
    found = summary.get("best_temperature", summary.get("temperature"))
    if found is None:
        return f"none: {told['reason']}" if "reason" in told else ""
    if "best_temperature" in summary:
        metrics = flat({"metrics": summary["best_metrics"]})
    parts = [f"temperature {number(found)}, by {told['rows']:,} held-out rows"]
    for name in ("nll", "ece"):
        after, before = (metrics.get(f"global_{key}{name}") for key in ("", "uncalibrated_"))
        if after is not None and before is not None:
            parts.append(f"{words(name)} {number(after)}, before calibration {number(before)}")
    return "; ".join(parts)


def _tried_on(summary: "Metrics") -> dict[str, str]:
    """Whose rows the metrics of the global model are of, in a federation over a network."""
    if "reference_rows" in summary:
        rows = f"{summary['reference_rows']:,} rows of the server's reference table, not of clients"
    elif "client_rows" in summary:
        rows = f"{summary['client_rows']:,} test rows of the clients, as they report them"
    else:
        return {}
    return {"global metrics on": rows}


def _simulated(summary: "Metrics") -> str:
    """Seconds of the clock, and how stale reports were, where that is told."""
    told = summary.get("asynchronous")
    stale = ""
    if told:
        late = f", {told['too_stale']} too stale" if told["too_stale"] else ""
        stale = (
            f" (staleness {told['staleness_mean']:.1f} on average, {told['staleness_max']} at "
            f"most{late})"
        )
    return f"{clock(summary.get('clock_seconds', 0.0))}{stale}"


def _privacy(summary: "Metrics") -> str:
    """ε and δ, and what else is to be known of them."""
    told = [
        f"{value:.3g} ({kind})"
        for kind, value in summary["privacy"]["epsilon"].items()
        if value is not None
    ]
    sentences = [f"ε = {', '.join(told)} at δ = {summary['delta']:g}"] if told else []
    if summary["privacy"]["client_metrics"] == "off":
        sentences.append("clients send no metrics")
    return "; ".join([*sentences, *summary["privacy"]["notes"]])


def _noise_rounds(summary: "Metrics") -> str:
    """How many rounds were noise alone, if any."""
    rounds = summary.get("noise_rounds")
    return f", {rounds} with only noise" if rounds else ""


def _of_whom(summary: "Metrics") -> str:
    """Whose reports were rejected, the most first."""
    counts = sorted(summary.get("refused_clients", {}).items(), key=lambda item: -item[1])
    if not counts:
        return ""
    shown = [f"{client} {times} times" if times > 1 else client for client, times in counts[:3]]
    more = [f"{len(counts) - 3} more"] if len(counts) > 3 else []
    return f": {', '.join(shown + more)}"


def outcome_of_seeds(summary: "Metrics") -> Table:
    """Mean and standard deviation of several seeds' metrics as a table."""
    seeds = summary["seeds"]
    table = Table(
        f"{len(seeds)} seeds" if len(seeds) > 1 else "1 seed",
        "mean",
        "standard deviation",
        box=None,
        pad_edge=False,
    )
    for name, metric in summary["metrics"].items():
        if name.startswith(_BESIDE):
            continue
        values = (metric["mean"], metric["std"])
        table.add_row(
            f"[bold]{escape(words(name))}",
            *("–" if value is None else _written(name, value) for value in values),
        )
    return table


_BESIDE = ("global_mean_", "global_spread_", "local_spread_")
"""Beginnings of metrics of several seeds that are in the file alone."""


def _written(name: str, value: float) -> str:
    """A number of a summary for people."""
    if name.startswith("bytes"):
        return decimal(round(value))
    return f"{value:.1f}" if name in ("rounds", "seconds") else number(value)
