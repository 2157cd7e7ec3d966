"""Least squares by normal equations, accumulated over batches."""

import torch
from torch import Tensor

from fedbayes.errors import ModelError


class NormalEquations:
    """Least squares with an intercept, several problems side by side.

    Products of a batch are in the batch's own type, sums over batches in float64. The memory is
    [problems, features + 1, features + outputs + 1] numbers of 8 bytes, whatever the number of
    batches.
    """

    def __init__(self, problems: int, features: int, outputs: int) -> None:
        size = features + 1
        self.gram = torch.zeros(problems, size, size, dtype=torch.float64)
        self.cross = torch.zeros(problems, size, outputs, dtype=torch.float64)
        self.rows = 0

    def add(self, x: Tensor, y: Tensor) -> None:
        """Enter a batch.

        Args:
            x: features [problems, n, features].
            y: what they are to give, [problems, n, outputs].
        """
        x = torch.cat([x, x.new_ones(*x.shape[:2], 1)], dim=2)
        self.gram += x.mT @ x
        self.cross += x.mT @ y
        self.rows += x.shape[1]

    def solve(self, ridge: float, *, intercept: bool) -> tuple[Tensor, Tensor]:
        """The w and b of least ‖X w + b − y‖² + ρ ‖w‖², with ρ = ridge × mean diagonal of XᵀX.

        Args:
            ridge: by how much the solution is drawn to zero.
            intercept: whether there is a b; it is not drawn anywhere.

        Returns:
            w [problems, features, outputs] and b [problems, outputs], zeros if there is none;
            float32.

        Raises:
            ModelError: what was entered is not finite.
        """
        if not (self.gram.isfinite().all() and self.cross.isfinite().all()):
            raise ModelError(
                "activations are not finite. Check that the clients' networks and the inputs are "
                "finite"
            )
        gram, cross = self.gram, self.cross
        features = gram.shape[1] - 1
        if not intercept:
            gram, cross = gram[:, :-1, :-1], cross[:, :-1]
        diagonal = gram.diagonal(dim1=1, dim2=2)[:, :features]
        pull = (ridge * diagonal.mean(1, keepdim=True)).expand_as(diagonal)
        # Features that are zero everywhere get no weight.
        pull = torch.where(diagonal > 0, pull, 1.0)
        added = torch.zeros_like(gram.diagonal(dim1=1, dim2=2))
        added[:, :features] = pull
        whole = gram + torch.diag_embed(added)
        factor, failed = torch.linalg.cholesky_ex(whole)
        if failed.any():
            found = torch.linalg.lstsq(whole, cross, driver="gelsd").solution
        else:
            found = torch.cholesky_solve(cross, factor)
        bias = found[:, -1] if intercept else torch.zeros_like(found[:, -1])
        return found[:, :features].float(), bias.float()
