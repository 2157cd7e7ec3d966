"""One self-contained HTML page of a fusion in function space: what was fused, and what came out."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedbayes.data.plot import drawn
from fedbayes.reports.charts import ChartCurve, Lines, filled, widely_spread
from fedbayes.reports.marks import heat_key
from fedbayes.reports.palette import heat_css, looks
from fedbayes.reports.template import brief
from fedbayes.reports.template import filled as filled_page
from fedbayes.storage.formatting import words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_KNOWN = {"name", "width", "parameters", "multiplications", "divergence", "agreement"}


def render(content: Mapping[str, Any], pictures: "Mapping[str, Figure]") -> str:
    """The page of a fusion.

    Args:
        content: what `fedbayes fuse --report` writes as JSON (`tools.fusion_report.report`); the
            page holds it too.
        pictures: `inputs`, where there is a picture of them.
    """
    frontier = content["frontier"]
    metrics = [key for mark in frontier[:1] for key in mark if key not in _KNOWN]
    others = [mark["name"] for mark in frontier if mark["width"] is None]
    classes = content["clients"] and bool(content["with_each_client"][0]["draws_by_class"])
    charts = [chart for chart in _charts(frontier, others, metrics) if filled(chart)]
    sizes = {(model["parameters"], model["multiplications"]) for model in content["models"]}
    return filled_page(
        "fusion.html",
        ["fused, by width", *others],
        looks(["function", *map(kind, others)]),
        charts,
        data=content,
        of=content,
        classes=classes,
        alike=len(sizes) == 1,
        metrics=[(key, words(key)) for key in metrics],
        tested=_tested(content, metrics),
        inputs=f"data:image/png;base64,{b64encode(drawn(pictures['inputs'], 'png')).decode()}"
        if "inputs" in pictures
        else "",
        brief=brief,
        heat_css=heat_css,
        heat_key=heat_key,
    )


def kind(name: str) -> str:
    """By what a network has its colour, in the figure of sizes too."""
    return "member" if " member (" in name else name


def _tested(content: Mapping[str, Any], metrics: Sequence[str]) -> tuple[str, str, str] | None:
    """The first metric on test samples: of the fused network, its name, and that of others."""
    own = [mark for mark in content["frontier"] if mark["width"] == content["width"]]
    if not metrics or not own:
        return None
    rest = [
        f"{mark['name']} {brief(mark[metrics[0]])}"
        for mark in content["frontier"]
        if mark["width"] is None
    ]
    return brief(own[0][metrics[0]]), words(metrics[0]), ", ".join(rest)


def _charts(
    frontier: Sequence[Mapping[str, Any]], others: Sequence[str], metrics: Sequence[str]
) -> list[Lines]:
    """What networks are worth against their size."""
    wanted = [(metrics[0], f"{words(metrics[0])} on test samples")] if metrics else []
    wanted += [("divergence", "KL divergence to the ensemble, nats")]
    charts = []
    for key, label in wanted:
        points = [
            (
                0 if mark["width"] is not None else 1 + others.index(mark["name"]),
                float(mark["parameters"]),
                float(mark[key]),
            )
            for mark in frontier
            if mark[key] is not None
        ]
        by_size = sorted(points)
        curves = [
            ChartCurve(
                run, [x for r, x, _ in by_size if r == run], [y for r, _, y in by_size if r == run]
            )
            for run in range(1 + len(others))
        ]
        sizes, values = [x for _, x, _ in points], [y for _, _, y in points]
        charts.append(
            Lines(
                key,
                f"{label[:1].upper()}{label[1:]}, by size",
                "parameters",
                label,
                curves,
                log=widely_spread(values),
                log_x=bool(sizes) and max(sizes) > 2 * min(sizes),
            )
        )
    return charts
