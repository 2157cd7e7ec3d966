"""A picture of who holds which classes."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedbayes.data.dataset import Rows
from fedbayes.data.federated import FederatedData

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_BARS = 40
"""Clients that are drawn as bars; more are drawn as a heat map."""


def plot_partition(counts: FederatedData | Rows, path: Path, title: str) -> None:
    """Draw the class shares of each client's training samples into a PNG file.

    Up to 40 clients are stacked bars, labelled with their sizes; more are a heat map.

    Args:
        counts: The federated data, or class counts [S, K].
        path: File to write.
        title: Title of the figure.
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
    figure.savefig(path, format="png", dpi=150)


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
