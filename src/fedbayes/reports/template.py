"""Pages from templates: their charts, their style, and numbers as they show them."""

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fedbayes.reports import marks, svg
from fedbayes.reports.charts import Chart, table
from fedbayes.reports.palette import Look, theme_css
from fedbayes.storage.formatting import number
from fedbayes.version import __version__


def filled(
    template: str,
    names: Sequence[str],
    own: Sequence[Look],
    charts: Sequence[Chart],
    *,
    data: Any,
    made: datetime | None = None,
    paper: str = "landscape",
    **content: Any,
) -> str:
    """A page: a template with its charts, in the style of all of them.

    Args:
        template: its file.
        names: of the runs, or methods, that the charts distinguish.
        own: their looks.
        charts: what is drawn; the template places them.
        data: the numbers, which the page holds as JSON.
        made: the time that the page names as its own; now if None.
        paper: `landscape` or `portrait`, where it is printed.
        content: what else the template takes.
    """
    tables = [
        {"kind": type(chart).__name__, "title": chart.title, "rows": [list(heads), *rows]}
        for chart, (heads, rows) in ((chart, table(chart, names)) for chart in charts)
    ]
    return (
        environment()
        .get_template(template)
        .render(
            names=names,
            keys=[marks.key(look) for look in own],
            charts=charts,
            drawings=[svg.draw(chart, names, own) for chart in charts],
            # JSON has no NaN; invalid numbers were left out of the charts.
            data=_plain(data),
            tables=_plain(tables),
            defs=marks.defs(),
            theme=Markup(theme_css()),
            paper=paper,
            made=stamp(made),
            version=__version__,
            **content,
        )
    )


def _plain(data: Any) -> Any:
    """Data as JSON has them: numbers that are not finite are none."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, Mapping):
        return {str(key): _plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_plain(value) for value in data]
    return data if data is None or isinstance(data, str | int) else float(data)


def brief(value: float | None) -> str:
    """A metric in as many digits as a reader compares; `number` has more."""
    if value is None or math.isnan(value):
        return number(value)
    size = abs(value)
    if size == 0 or 5e-3 <= size < 10:
        return f"{value:.3f}"
    return f"{value:.{2 if size < 100 else 1}f}" if 10 <= size < 1e4 else number(value)


TIME = "%Y-%m-%d %H:%M"
"""How pages write a time."""


def environment() -> Environment:
    """Where templates are, and how they are filled: all text is escaped."""
    return Environment(
        loader=PackageLoader("fedbayes.reports", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def stamp(made: datetime | None = None) -> str:
    """A time as pages show it; now by default."""
    return f"{made or datetime.now().astimezone():{TIME}}"
