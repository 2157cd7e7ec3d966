"""Least squares by normal equations, accumulated over batches."""

import torch
from torch import Tensor


class NormalEquations:
    """Least squares with an intercept, several problems side by side.

    Products of a batch are in the batch's own type, sums over batches in float64. The memory is
    [problems, features + 1, features + outputs + 1] numbers of 8 bytes, whatever the number of
    batches.

    Args:
        problems: how many there are.
        features: of each problem.
        outputs: of each problem.
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

    def solve(self, ridge: float, toward: Tensor, *, intercept: bool) -> tuple[Tensor, Tensor]:
        """argmin ‖X w + b − y‖² + ρ ‖w − w₀‖², with ρ = ridge × mean diagonal of XᵀX.

        Args:
            ridge: by how much the solution is drawn toward another.
            toward: w₀, [problems, features, outputs].
            intercept: whether there is a b; it is not drawn anywhere.

        Returns:
            w [problems, features, outputs] and b [problems, outputs], zeros if there is none.
        """
        gram, cross = self.gram, self.cross
        if not intercept:
            gram, cross = gram[:, :-1, :-1], cross[:, :-1]
        features = toward.shape[1]
        diagonal = gram.diagonal(dim1=1, dim2=2)[:, :features]
        pull = ridge * diagonal.mean(1, keepdim=True)
        # Features that are zero everywhere stay as they were.
        pull = torch.where(diagonal > 0, pull, torch.ones_like(pull)).clamp(min=1e-300)
        added = torch.zeros_like(gram.diagonal(dim1=1, dim2=2))
        added[:, :features] = pull
        cross = cross.clone()
        cross[:, :features] += pull[:, :, None] * toward.double()
        factor, wrong = torch.linalg.cholesky_ex(gram + torch.diag_embed(added))
        if wrong.any():
            found = torch.linalg.lstsq(gram + torch.diag_embed(added), cross, driver="gelsd").solution
        else:
            found = torch.cholesky_solve(cross, factor)
        bias = found[:, -1] if intercept else torch.zeros_like(found[:, -1])
        return found[:, :features].to(toward.dtype), bias.to(toward.dtype)
