"""Input priors: what inputs look like where there are no data.

A server that holds networks and no data knows what kind of inputs they take: photographs, pen
strokes, rows of a table. A prior draws such inputs, as many as are asked for. PyTorch is imported
when a prior is built.

A new prior is a file here and a row of `catalogue.py`. Draws depend on the seed alone, and those of
a prior that exists must stay as they are.
"""

from typing import TYPE_CHECKING

from fedbayes.core.lazy import attributes
from fedbayes.inputs.catalogue import PRIORS, build_prior

if TYPE_CHECKING:
    from fedbayes.data.tables.sums import Sums, add_sums, read_sums, sums_of, write_sums
    from fedbayes.inputs.picture import plot_inputs
    from fedbayes.inputs.prior import InputPrior, Inputs

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
        "fedbayes.data.tables.sums": "Sums add_sums read_sums sums_of write_sums",
        "fedbayes.inputs.picture": "plot_inputs",
        "fedbayes.inputs.prior": "InputPrior Inputs",
    },
)
