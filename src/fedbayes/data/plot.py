"""A picture of who holds which classes."""

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedbayes.data.dataset import Rows
from fedbayes.data.federated import FederatedData
from fedbayes.errors import RunError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURES = (".png", ".svg", ".pdf")
"""Suffixes of files that a picture is drawn to; each says the format."""
MOST_BARS = 40
"""Clients that are drawn as bars; more are drawn as a heat map."""


def plot_partition(counts: FederatedData | Rows, path: Path, title: str) -> None:
    """Draw the class shares of each client's training samples into a PNG, SVG or PDF file.

    Up to 40 clients are stacked bars, labelled with their sizes; more are a heat map.

    Args:
        counts: The federated data, or class counts [S, K].
        path: File to write; its suffix is the format.
        title: Title of the figure.

    Raises:
        RunError: the suffix is of no format that there is.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if isinstance(counts, FederatedData):
        classes, names = counts.classes, counts.partition.names
        counts = counts.counts()
    else:
        classes = tuple(str(label) for label in range(counts.shape[1]))
        names = tuple(str(client) for client in range(counts.shape[0]))
    few = len(counts) <= MOST_BARS and len(classes) <= MOST_BARS
    height = max(3.0, 0.25 * len(counts) + 1.5) if few else 7.0
    figure = Figure(figsize=(8.0, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    if few:
        _bars(axes, shares, counts.sum(1), classes, names)
    else:
        image = axes.imshow(
            shares, aspect="auto", interpolation="nearest", cmap="cividis", vmin=0.0, vmax=1.0
        )
        figure.colorbar(image, ax=axes, label="share of the client's training samples")
        axes.set_xlabel("class")
        axes.set_ylabel("client")
        if len(classes) <= MOST_BARS:
            axes.set_xticks(range(len(classes)), classes, rotation=90)
    save_figure(figure, path)


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a figure in the format that the file's suffix says, whole or not at all.

    Raises:
        RunError: the suffix is of no format that there is.
    """
    form = path.suffix.lower()
    if form not in PICTURES:
        raise RunError(
            f"the picture {path}: the suffix says the format; name a file that ends in "
            f"{', '.join(PICTURES[:-1])} or {PICTURES[-1]}"
        )
    file = io.BytesIO()
    figure.savefig(file, format=form[1:], dpi=150)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(file.getvalue())
    beside.replace(path)


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
            label=label,
        )
        left += shares[:, index]
    labels = [f"{name} ({size})" for name, size in zip(names, sizes, strict=True)]
    axes.set_yticks(positions, labels)
    axes.invert_yaxis()
    axes.set_xlim(0.0, 1.0)
    axes.set_xlabel("share of the client's training samples")
    axes.set_ylabel("client (training samples)")
    axes.legend(title="class", loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")
