"""Input priors: what inputs look like where there are no data.

A server that holds networks and no data knows what kind of inputs they take: photographs, pen
strokes, rows of a table. A prior draws such inputs, as many as are asked for. PyTorch is imported
when a prior is built.
"""

from typing import TYPE_CHECKING

from fedbayes.inputs.catalogue import PRIORS, build_prior
from fedbayes.lazy import attributes

if TYPE_CHECKING:
    from fedbayes.inputs.picture import plot_inputs
    from fedbayes.inputs.prior import InputPrior, Inputs
    from fedbayes.inputs.sums import Sums, add_sums, read_sums, sums_of, write_sums

__all__ = [
    "PRIORS",
    "InputPrior",
    "Inputs",
    "Sums",
    "add_sums",
    "build_prior",
    "plot_inputs",
    "read_sums",
    "sums_of",
    "write_sums",
]

__getattr__, __dir__ = attributes(
    __name__,
    {
        "InputPrior": "fedbayes.inputs.prior",
        "Inputs": "fedbayes.inputs.prior",
        "Sums": "fedbayes.inputs.sums",
        "add_sums": "fedbayes.inputs.sums",
        "plot_inputs": "fedbayes.inputs.picture",
        "read_sums": "fedbayes.inputs.sums",
        "sums_of": "fedbayes.inputs.sums",
        "write_sums": "fedbayes.inputs.sums",
    },
)
