"""A picture of who holds which classes, or what targets."""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbayes.core.files import write_beside
from fedbayes.data.dataset import Array, Rows
from fedbayes.data.federated import FederatedData
from fedbayes.errors import RunError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

PICTURES = (".png", ".svg", ".pdf")
"""Suffixes of files that a picture is drawn to; each says the format."""
MOST_BARS = 40
"""Clients that are drawn as bars; more are drawn as a heat map."""


def plot_partition(counts: FederatedData | Rows, path: Path, title: str) -> None:
    """Draw what each client's training samples are into a PNG, SVG or PDF file.

    Of classes, their shares: up to 40 clients are stacked bars, labelled with their sizes; more
    are a heat map. Of other targets, the distribution of each column: up to 40 clients are box
    plots (the middle half of the samples, whiskers from the 5th to the 95th percentile); more are
    bands of the same percentiles. Of labels, the share of samples that have each, as a heat map.

    Args:
        counts: The federated data, or class counts [S, K].
        path: File to write; its suffix is the format.
        title: Title of the figure.

    Raises:
        RunError: the suffix is of no format that there is.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 7.0), layout="constrained")
    FigureCanvasAgg(figure)
    if isinstance(counts, FederatedData) and not counts.classes:
        figure.suptitle(title)
        (_shares_of_labels if counts.target.kind == "labels" else _distributions)(figure, counts)
        save_figure(figure, path)
        return
    if isinstance(counts, FederatedData):
        classes, names = counts.classes, counts.partition.names
        counts = counts.counts()
    else:
        classes = tuple(str(label) for label in range(counts.shape[1]))
        names = tuple(str(client) for client in range(counts.shape[0]))
    few = len(counts) <= MOST_BARS and len(classes) <= MOST_BARS
    if few:
        figure.set_figheight(_height(len(counts)))
    axes = figure.add_subplot()
    axes.set_title(title)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    if few:
        _bars(axes, shares, counts.sum(1), classes, names)
    else:
        _heat(axes, shares, "class", classes)
    save_figure(figure, path)


def _height(clients: int) -> float:
    """Inches that so many clients take, one below another."""
    return max(3.0, 0.25 * clients + 1.5)


def _heat(axes: "Axes", shares: Array, what: str, names: tuple[str, ...]) -> None:
    """Shares of the clients' training samples [S, K] as colours."""
    image = axes.imshow(
        shares, aspect="auto", interpolation="nearest", cmap="cividis", vmin=0.0, vmax=1.0
    )
    axes.figure.colorbar(image, ax=axes, label="share of the client's training samples")
    axes.set_xlabel(what)
    axes.set_ylabel("client")
    if len(names) <= MOST_BARS:
        axes.set_xticks(range(len(names)), names, rotation=90)


def _clients(data: FederatedData) -> list[str]:
    """Names of the clients, with their numbers of training samples."""
    sizes = data.train_sizes()
    return [f"{name} ({size})" for name, size in zip(data.partition.names, sizes, strict=True)]


def _shares_of_labels(figure: "Figure", data: FederatedData) -> None:
    axes = figure.add_subplot()
    y = [data.dataset.y[data.partition.train_rows(client)] for client in range(len(data.owners))]
    _heat(axes, np.stack([rows.mean(0) for rows in y]), "label", data.target.names)
    if len(data.owners) <= MOST_BARS:
        figure.set_figheight(_height(len(data.owners)))
        axes.set_yticks(range(len(data.owners)), _clients(data))
        axes.set_ylabel("client (training samples)")


def _distributions(figure: "Figure", data: FederatedData) -> None:
    """The percentiles of each column of the target among each client's training samples."""
    few = len(data.owners) <= MOST_BARS
    columns = data.target.names
    figure.set_figwidth(max(8.0, 4.0 * len(columns) + 1.0))
    if few:
        figure.set_figheight(_height(len(data.owners)))
    y = [data.dataset.y[data.partition.train_rows(client)] for client in range(len(data.owners))]
    points = np.stack([np.percentile(rows, (5, 25, 50, 75, 95), axis=0) for rows in y], axis=1)
    panels = figure.subplots(1, len(columns), sharey=few, squeeze=False)[0]
    for axes, column, percentiles in zip(panels, columns, np.moveaxis(points, 2, 0), strict=True):
        (_boxes if few else _bands)(axes, column, percentiles)
    if few:
        panels[0].set_yticks(range(len(data.owners)), _clients(data))
        panels[0].set_ylabel("client (training samples)")
        panels[0].invert_yaxis()
    else:
        panels[-1].legend(fontsize="small")


def _boxes(axes: "Axes", column: str, percentiles: Array) -> None:
    """A box plot for each client, of percentiles [5, S]."""
    names = ("whislo", "q1", "med", "q3", "whishi")
    axes.bxp(
        [dict(zip(names, values, strict=True)) for values in percentiles.T],
        positions=range(percentiles.shape[1]),
        orientation="horizontal",
        manage_ticks=False,
        showfliers=False,
        medianprops={"color": "black"},
    )
    axes.set_xlabel(column)
    axes.grid(axis="x", alpha=0.3)


def _bands(axes: "Axes", column: str, percentiles: Array) -> None:
    """Bands over the clients, of percentiles [5, S]."""
    low, lower, middle, upper, high = percentiles
    clients = np.arange(len(middle))
    band: dict[str, Any] = {"step": "mid", "color": "C0", "linewidth": 0.0}
    axes.fill_between(clients, low, high, alpha=0.25, label="5th to 95th percentile", **band)
    axes.fill_between(clients, lower, upper, alpha=0.5, label="25th to 75th", **band)
    axes.step(clients, middle, where="mid", color="black", linewidth=1.0, label="median")
    axes.set_xlabel("client")
    axes.set_ylabel(column)


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a figure in the format of the file's suffix, completely or not at all.

    Raises:
        RunError: the suffix is of no format that there is.
    """
    form = path.suffix.lower()
    if form not in PICTURES:
        raise RunError(
            f"the picture {path}: unknown format. Use a file name that ends in "
            f"{', '.join(PICTURES[:-1])} or {PICTURES[-1]}"
        )
    write_beside(path, drawn(figure, form[1:]))


def drawn(figure: "Figure", form: str) -> bytes:
    """A figure as the content of a file of a format: png, svg or pdf."""
    file = io.BytesIO()
    literally(figure)
    figure.savefig(file, format=form, dpi=150)
    return file.getvalue()


def plain_numbers(axis: "Axis") -> None:
    """Mark a logarithmic axis by numbers as people write them, and so that there are several: in
    even steps where it spans less than a decade or so, else at 1, 2 and 5 of each, or 1 alone.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    low, high = sorted(axis.get_view_interval())
    locator: Any = LogLocator()
    if high < 5 * low:
        locator = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10])
    elif high < 300 * low:
        locator = LogLocator(subs=(1, 2, 5))
    axis.set_major_locator(locator)
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{float(f'{value:.6g}'):,.10g}"))


def literally(figure: "Figure") -> None:
    """Write names in a figure literally: two $ in one are not a formula."""
    from matplotlib.text import Text

    axes = [axis for panel in figure.axes for axis in (panel.xaxis, panel.yaxis)]
    powers = [
        label
        for axis in axes
        if axis.get_scale() != "linear"
        for label in axis.get_ticklabels(which="both")
    ]
    for text in figure.findobj(Text):
        text.set_parse_math(False)
    for text in powers:  # of ten, which Matplotlib writes as formulas
        text.set_parse_math(True)


def in_legend(name: str) -> str:
    """A name for a legend, which would leave out those that begin with _."""
    return f" {name}" if name.startswith("_") else name


def _bars(
    axes: "Axes", shares: Rows, sizes: Rows, classes: tuple[str, ...], names: tuple[str, ...]
) -> None:
    from matplotlib import colormaps

    # Cividis rises in lightness alone, and every second bar is hatched, so that neighbours
    # can be told apart without seeing colour.
    colours = colormaps["cividis"](np.linspace(0.0, 1.0, len(classes)))
    left = np.zeros(len(shares))
    positions = np.arange(len(shares))
    for index, label in enumerate(classes):
        axes.barh(
            positions,
            shares[:, index],
            left=left,
            color=colours[index],
            edgecolor="white",
            linewidth=0.5,
            hatch="//" if index % 2 else None,
            label=in_legend(label),
        )
        left += shares[:, index]
    labels = [f"{name} ({size})" for name, size in zip(names, sizes, strict=True)]
    axes.set_yticks(positions, labels)
    axes.invert_yaxis()
    axes.set_xlim(0.0, 1.0)
    axes.set_xlabel("share of the client's training samples")
    axes.set_ylabel("client (training samples)")
    axes.legend(title="class", loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")
