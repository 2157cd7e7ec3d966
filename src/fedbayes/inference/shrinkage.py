"""Precisions of samples of weights, of which there are far fewer than weights."""

import torch
from torch import Tensor

from fedbayes.core.tensors import Tensors


def drift(samples: Tensors, weights: Tensors, shrinkage: float) -> Tensors:
    """Σ̂⁻¹ (θ − μ̂), of samples with mean μ̂ and the covariance S shrunk towards the identity,

        Σ̂ = ρ_l I + (1 − ρ_l) S,   ρ_l = 1 / (1 + (l − 1) ρ),

    as in Al-Shedivat et al. 2021, Theorem 3. With the centred samples A [l, d] that is
    ρ_l (I + ρ Aᵀ A), whose inverse needs a system of l equations alone,

        Σ̂⁻¹ r = (r − ρ Aᵀ (I + ρ A Aᵀ)⁻¹ A r) / ρ_l:

    in O(l² d), as the paper's dynamic programming, and in matrix products; no matrix is d × d.

    Args:
        samples: of the weights, [l, ...] by name; the covariance is of all tensors together.
        weights: θ, by name.
        shrinkage: ρ, at least 0; with 0, or a single sample, Σ̂ is the identity.

    Returns:
        By name, float64; NaN of samples that are not finite, or too far apart for the equations.
    """
    centred, gaps = Tensors(), Tensors()
    for name, drawn in samples.items():
        values = drawn.double().flatten(1)
        mean = values.mean(0)
        centred[name], gaps[name] = values - mean, weights[name].double().flatten() - mean
    count = len(next(iter(samples.values())))
    gram = torch.stack([a @ a.T for a in centred.values()]).sum(0)
    along = torch.stack([a @ gaps[name] for name, a in centred.items()]).sum(0)
    system = torch.eye(count, dtype=gram.dtype, device=gram.device) + shrinkage * gram
    factors = shrinkage * _solved(system, along)
    level = 1 + (count - 1) * shrinkage
    return {
        name: (level * (gaps[name] - a.T @ factors)).reshape(weights[name].shape)
        for name, a in centred.items()
    }


def _solved(system: Tensor, right: Tensor) -> Tensor:
    """The solution of positive definite equations, [l]; NaN if they are none."""
    root, failed = torch.linalg.cholesky_ex(system)
    found = torch.cholesky_solve(right[:, None], root)[:, 0]
    return found.masked_fill(failed > 0, torch.nan)
