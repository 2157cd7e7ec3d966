"""What mattered in a search: the metric of every run over each setting."""

from pathlib import Path
from typing import TYPE_CHECKING

from fedbayes.data.plot import save_figure
from fedbayes.reports.palette import LIGHT
from fedbayes.storage.formatting import words

if TYPE_CHECKING:
    from fedbayes.workflows.experiments.tuning import Tuning


def plot_tuning(found: "Tuning", path: Path) -> None:
    """Draw a row of plots for each method, and a plot for each setting that was searched.

    Args:
        found: the search.
        path: PNG, SVG or PDF file.
    """
    from matplotlib.figure import Figure

    columns = max(len(one.ranges) for one in found.methods)
    size = (3.4 * columns, 2.6 * len(found.methods))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(found.methods), columns, squeeze=False)
    for row, one in zip(axes, found.methods, strict=True):
        importance = one.importance
        told = [trial for trial in one.trials if trial.validation is not None]
        for place, (key, span) in zip(row, one.ranges.items(), strict=False):
            values = [trial.settings[key] for trial in told]
            x = list(map(str, values)) if span.choices else values
            place.plot(x, [t.validation for t in told], "o", color=LIGHT.hues[0], alpha=0.7)
            best = str(one.best.settings[key]) if span.choices else one.best.settings[key]
            place.plot([best], [one.best.validation], "*", color=LIGHT.hues[1], markersize=13)
            if span.logarithmic:
                place.set_xscale("log")
            share = importance[key]
            title = key if share is None else f"{key}  (explains {share:.0%})"
            place.set_title(title, fontsize=9)
        for place in row[len(one.ranges) :]:
            place.set_visible(False)
        row[0].set_ylabel(f"{one.label}\n{words(one.metric)}", fontsize=9)
    save_figure(figure, path)
