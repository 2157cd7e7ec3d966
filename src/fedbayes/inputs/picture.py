"""A picture of what a prior draws."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedbayes.core import seeds
from fedbayes.core.wording import size
from fedbayes.data.dataset import Array
from fedbayes.data.plot import save_figure
from fedbayes.errors import ConfigError
from fedbayes.inputs.prior import InputPrior

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 12
"""Images in a row."""
IMAGES = 96
ROWS = 2000
"""Of a table, in its histograms."""
MOST_FEATURES = 24
"""Features of a table that are drawn."""
SIGNALS = 8


def plot_inputs(prior: InputPrior, path: Path, *, seed: int = 0) -> None:
    """Write the picture of `draw_inputs` into a PNG, SVG or PDF file.

    Raises:
        RunError: the suffix is of no format that there is.
        ConfigError: inputs have more than three axes.

    Examples:
        >>> from pathlib import Path
        >>> from fedbayes.inputs import build_prior
        >>> from fedbayes.inputs import plot_inputs
        >>> plot_inputs(build_prior("strokes", (1, 28, 28)), Path("strokes.png"))
        >>> Path("strokes.png").exists()
        True
    """
    save_figure(draw_inputs(prior, seed=seed), path)


def draw_inputs(prior: InputPrior, *, seed: int = 0) -> "Figure":
    """Some inputs of a prior.

    Images are a grid, in colour where they have three channels and else their first one in grey;
    signals are lines; of rows of a table there is a histogram of every feature, of the first 24.

    Raises:
        ConfigError: inputs have more than three axes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    require_picture(prior.shape)
    rng = seeds.numpy_rng(seed, "picture of inputs")
    count, plot = {1: (ROWS, _histograms), 2: (SIGNALS, _lines), 3: (IMAGES, _grid)}[
        len(prior.shape)
    ]
    figure = Figure(figsize=(8.0, 6.0), layout="constrained")
    FigureCanvasAgg(figure)
    title = f"{prior.name}: {prior.assumes}"  # may name a file, or columns
    figure.suptitle(title, fontsize="medium", wrap=True, parse_math=False)
    plot(figure, prior.draw(count, rng).numpy())
    return figure


def require_picture(shape: Sequence[int]) -> None:
    """See that there is a picture of inputs of this shape, or raise a ConfigError."""
    if len(shape) > 3:
        raise ConfigError(f"inputs of {size(shape)} cannot be drawn as a picture")


def _grid(figure: "Figure", x: Array) -> None:
    count, channels, height, width = x.shape
    rows = count // COLUMNS
    figure.set_figheight(0.5 + 8.0 * rows * height / (COLUMNS * width))
    shown = x if channels == 3 else x[:, :1]
    framed = np.pad(shown, ((0, 0), (0, 0), (0, 1), (0, 1)), constant_values=1.0)
    tiles = framed.reshape(rows, COLUMNS, *framed.shape[1:]).transpose(0, 3, 1, 4, 2)
    picture = tiles.reshape(rows * (height + 1), COLUMNS * (width + 1), -1)
    axes = figure.add_subplot()
    shades = picture if channels == 3 else picture[:, :, 0]
    axes.imshow(shades, cmap="gray", vmin=0.0, vmax=1.0, interpolation="nearest")
    axes.set_axis_off()


def _lines(figure: "Figure", x: Array) -> None:
    for index, axes in enumerate(figure.subplots(len(x), sharex=True)):
        axes.plot(x[index].T, linewidth=0.8)


def _histograms(figure: "Figure", x: Array) -> None:
    shown = min(x.shape[1], MOST_FEATURES)
    columns = min(shown, 6)
    grid = figure.subplots(-(-shown // columns), columns, squeeze=False)
    for feature, axes in enumerate(grid.flat):
        axes.set_yticks([])
        if feature < shown:
            axes.hist(x[:, feature], bins=40, color="tab:blue")
            axes.set_title(f"feature {feature}", fontsize="small")
        else:
            axes.set_axis_off()
