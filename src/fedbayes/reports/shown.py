"""Figures that a notebook shows, whether or not its user has imported `matplotlib.pyplot`."""

import io

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


class Shown(Figure):
    """A Matplotlib figure that belongs to no window, and that notebooks draw."""

    def __init__(self, figsize: tuple[float, float], layout: str = "constrained") -> None:
        super().__init__(figsize=figsize, layout=layout)  # type: ignore[arg-type]
        FigureCanvasAgg(self)

    def _repr_png_(self) -> bytes:
        """What a notebook asks for."""
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=100)
        return file.getvalue()
