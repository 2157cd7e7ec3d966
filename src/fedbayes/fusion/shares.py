"""How much of what the fused network is to say is whose."""

from typing import NamedTuple

from torch import Tensor


class Shares(NamedTuple):
    """Shares of donors in outputs."""

    table: Tensor
    """Of each donor in each output, [donors, K], columns that add to 1."""
    classes: bool
    """Whether outputs are scores of classes: these mean the same with a number added to all."""

    def part(self, donor: int, values: Tensor, axis: int = -1) -> Tensor:
        """A donor's part of outputs, or of weights that make them: centred over several classes.

        Args:
            donor: whose.
            values: with outputs, or the first of them, along an axis.
            axis: that axis.
        """
        if self.classes and self.table.shape[1] > 1:
            values = values - values.mean(axis, keepdim=True)
        shape = [1] * values.ndim
        shape[axis] = -1
        return values * self.table[donor][: values.shape[axis]].reshape(shape)

    def mean(self, donor: int) -> Tensor:
        """A donor's share of what is of no single output, []."""
        return self.table[donor].mean()
