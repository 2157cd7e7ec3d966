"""Metrics of a fused network by its size, compared with the ensemble of the clients' networks."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedbayes.core.metrics import calibrate
from fedbayes.core.tensors import Samples
from fedbayes.data.plot import plain_numbers, save_figure
from fedbayes.errors import ModelError
from fedbayes.fusion.combining import combine
from fedbayes.fusion.frozen import Function, frozen
from fedbayes.fusion.function import FunctionFusion, HeldOut, Likeness
from fedbayes.likelihoods import Classes, Likelihood, evaluate, total
from fedbayes.models.resize import with_weights
from fedbayes.models.steps import module_size
from fedbayes.reports.fusion import kind
from fedbayes.reports.palette import looks
from fedbayes.storage.formatting import words

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class FrontierPoint:
    """A network, or several that predict together."""

    name: str
    parameters: int
    multiplications: int
    """For one input."""
    likeness: Likeness
    metrics: dict[str, float] = field(default_factory=dict)
    """On test samples, where there are any; the headline first."""
    width: float | None = None
    """Of a fused network, in that of one client's; None of the clients."""

    def record(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "name": self.name,
            "width": self.width,
            "parameters": self.parameters,
            "multiplications": self.multiplications,
            "divergence": finite(self.likeness.divergence),
            "agreement": finite(self.likeness.agreement),
            **{name: finite(value) for name, value in self.metrics.items()},
        }


def finite(value: float) -> float | None:
    """A number for JSON, which has no others."""
    return value if math.isfinite(value) else None


class SizeTradeoff:
    """Measures networks against what the clients' say together.

    Args:
        held_out: what they say on synthetic inputs.
        test: samples to score networks on, as they see them.
    """

    def __init__(self, held_out: HeldOut, test: Samples | None) -> None:
        self.held_out, self.test = held_out, test
        self.example = held_out.inputs[0][:1]

    def fused(
        self, fusion: FunctionFusion, width: float, answering: nn.Module | None = None
    ) -> FrontierPoint:
        """Return the point of a fused network.

        Args:
            fusion: the fused network.
            width: its width.
            answering: the network that is written instead, such as one with a temperature; metrics
                are of its predictions.
        """
        mark = self._mark(f"fused, width {width:g}", fusion.module, fusion.likeness, width)
        if answering is None:
            return mark
        return replace(mark, metrics=self.metrics(frozen(answering, mark.name)))

    def clients(
        self, networks: Mapping[str, nn.Module], sizes: Sequence[float] | None = None
    ) -> list[FrontierPoint]:
        """Of the clients: the best member on the test samples, or without these the nearest to
        what all say; the average where there is one, and the ensemble.

        Args:
            networks: theirs, by name.
            sizes: numbers of samples, in their order, by which the average is weighted; equal if
                None.
        """
        held_out = self.held_out
        marks = [
            self._mark(name, network, held_out.likeness(outputs))
            for (name, network), outputs in zip(networks.items(), held_out.clients, strict=True)
        ]
        nearest = min(marks, key=lambda mark: mark.likeness.divergence)
        found = [replace(nearest, name=f"nearest member ({nearest.name})")]
        if self.test is not None:
            sign = -1 if self._likelihood().higher_is_better else 1
            best = min(marks, key=lambda mark: sign * next(iter(mark.metrics.values())))
            found = [replace(best, name=f"best member ({best.name})")]
        if (mean := average(list(networks.values()), sizes)) is not None:
            found.append(self._mark("average", mean, held_out.likeness(held_out.outputs(mean))))
        return [
            *found,
            FrontierPoint(
                "ensemble",
                sum(mark.parameters for mark in marks),
                sum(mark.multiplications for mark in marks) * len(held_out.teacher.views),
                Likeness(0.0, 1.0 if not math.isnan(nearest.likeness.agreement) else math.nan),
                self.metrics(held_out.teacher),
            ),
        ]

    def _mark(
        self, name: str, network: nn.Module, found: Likeness, width: float | None = None
    ) -> FrontierPoint:
        return FrontierPoint(
            name,
            module_size(network),
            multiplications(network, self.example),
            found,
            self.metrics(frozen(network, name)),
            width,
        )

    def _likelihood(self) -> Likelihood:
        """Of the clients' outputs."""
        teacher = self.held_out.teacher
        with torch.no_grad():
            return teacher.likelihood(teacher(self.example).shape[-1])

    def metrics(self, function: Function) -> dict[str, float]:
        """On test samples, the headline first, of classes with the calibration error; empty
        without samples.
        """
        if self.test is None:
            return {}

        def draw(x: Tensor) -> Tensor:
            return function(x)[None]

        kind = self._likelihood()
        with torch.no_grad():
            terms = evaluate(kind, draw, self.test)
            found = kind.metrics(total(terms))
            if isinstance(kind, Classes):
                found["ece"] = calibrate(terms["confidence"], terms["correct"].bool()).error
            return found


def average(
    networks: Sequence[nn.Module], sizes: Sequence[float] | None = None
) -> nn.Module | None:
    """The mean of networks weight by weight; None where they have other tensors.

    Args:
        networks: of clients.
        sizes: numbers of samples, by which it is weighted; equal if None.
    """
    states = [dict(network.state_dict()) for network in networks]
    sizes = [1.0] * len(states) if sizes is None else sizes
    try:
        mean = combine(states, [size / sum(sizes) for size in sizes])
    except ModelError:
        return None
    return with_weights(networks[0], mean)


def multiplications(network: nn.Module, x: Tensor) -> int:
    """Of a forward pass of one input [1, ...]: matrix products and convolutions."""
    counter = FlopCounterMode(display=False)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # fused kernels are not counted
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "TF32")  # of flags that are not meant
            with counter, torch.no_grad(), torch.backends.mkldnn.flags(enabled=False):
                network(x)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return int(counter.get_total_flops()) // 2


def plot_frontier(marks: Sequence[FrontierPoint], path: Path) -> None:
    """Write the picture of `draw_frontier` into a PNG, SVG or PDF file."""
    save_figure(draw_frontier(marks), path)


def draw_frontier(marks: Sequence[FrontierPoint]) -> "Figure":
    """Divergence, and the headline metric on test samples, against size and multiplications.

    Args:
        marks: fused networks of several widths, and the clients'.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    metric = next(iter(marks[0].metrics), None)
    rows = ["KL divergence to the ensemble (nats)", *([words(metric)] if metric else [])]
    figure = Figure(figsize=(10.0, 3.6 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(rows), 2, squeeze=False, sharey="row", sharex="col")
    for row, label in enumerate(rows):
        for column, size in enumerate(("parameters", "multiplications")):
            axes = grid[row, column]
            values = [m.metrics.get(metric or "") if row else m.likeness.divergence for m in marks]
            points = [(getattr(m, size), v, m) for m, v in zip(marks, values, strict=True)]
            fused = sorted(
                ((x, y) for x, y, m in points if m.width is not None), key=lambda point: point[0]
            )
            others = [point for point in points if point[2].width is None]
            own, *rest = looks(["function", *(kind(m.name) for *_, m in others)])
            axes.plot(
                *zip(*fused, strict=True),
                color=own.colour(),
                marker=own.marker,
                label="fused, by width",
            )
            for look, (x, y, m) in zip(rest, others, strict=True):
                axes.plot([x], [y], look.marker, color=look.colour(), label=m.name)
            axes.set_xscale("log")
            plain_numbers(axes.xaxis)
            axes.grid(alpha=0.3)
            if row == len(rows) - 1:
                axes.set_xlabel(size)
            if not column:
                axes.set_ylabel(label)
    legend = figure.legend(
        *grid[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4
    )
    for text in legend.get_texts():  # names of files may have dollar signs
        text.set_parse_math(False)
    return figure
