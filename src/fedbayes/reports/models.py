"""One self-contained HTML page that compares models on the same test samples."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedbayes.likelihoods.measures import better
from fedbayes.reports.charts import ChartCurve, Lines, filled, widely_spread
from fedbayes.reports.palette import looks
from fedbayes.reports.template import brief
from fedbayes.reports.template import filled as filled_page
from fedbayes.storage.formatting import words

Row = Mapping[str, Any]
"""Of a model: `name`, `metrics`, `parameters`, `note`, and the `method` that fused it, if any."""


def render(rows: Sequence[Row], what: str, how: str) -> str:
    """The page of a comparison.

    Args:
        rows: of each model.
        what: which samples they were tried on.
        how: by whose numbers these were standardized.
    """
    names = [row["name"] for row in rows]
    metrics = list(dict.fromkeys(key for row in rows for key in row["metrics"]))
    higher = {key: better(key) for key in metrics}
    best = {
        key: (max if up else min)(r["metrics"][key] for r in rows if key in r["metrics"])
        for key, up in higher.items()
        if up is not None
    }
    charts = [_chart(key, rows) for key in metrics[:2]]
    return filled_page(
        "models.html",
        names,
        looks([row["method"] or _kind(row) for row in rows]),
        [chart for chart in charts if filled(chart)],
        data=rows,
        rows=[{**row, "kind": _kind(row)} for row in rows],
        metrics=[(key, words(key)) for key in metrics],
        best=best,
        what=what,
        how=how,
        brief=brief,
    )


def _kind(row: Row) -> str:
    """What a model is, in a few words."""
    if row["method"]:
        return f"fused by {row['method']}"
    first = str(row["name"]).partition(",")[0].partition(" ")[0]
    return first if first in ("ensemble", "average") else "model"


def _chart(key: str, rows: Sequence[Row]) -> Lines:
    """A metric of each model, against its size."""
    known = [(run, row) for run, row in enumerate(rows) if key in row["metrics"]]
    sizes, values = [r["parameters"] for _, r in known], [r["metrics"][key] for _, r in known]
    return Lines(
        key,
        f"{words(key)[:1].upper()}{words(key)[1:]}, by size",
        "parameters",
        f"{words(key)} on test samples",
        [ChartCurve(run, [float(r["parameters"])], [r["metrics"][key]]) for run, r in known],
        log=widely_spread(values),
        log_x=bool(sizes) and max(sizes) > 2 * min(sizes),
    )
