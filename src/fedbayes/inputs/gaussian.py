"""Rows of a table: Gaussian, or of a Gaussian copula where features are categories.

A category is a step function g of a latent Gaussian, whose steps lie where its frequencies say.
Means, deviations and frequencies are those of the clients' sums, and the latent correlations are
those by which the rows' correlations are theirs too: with the Hermite coefficients
c_k = E[g(z) h_k(z)] of two features, cov(g_i, g_j) = Σ_k c_ik c_jk ρ^k (Mehler's formula), solved
for ρ.
"""

from collections.abc import Mapping

import numpy as np
import torch
from scipy.stats import norm
from torch import Tensor

from fedbayes.core.wording import listed
from fedbayes.data.dataset import Array
from fedbayes.data.tables.sums import Sums, Vector
from fedbayes.errors import DataError
from fedbayes.inputs.prior import InputPrior

TERMS = 200
"""Of Mehler's series."""
STEPS = 50
"""Halvings of the interval in which a latent correlation lies."""


class GaussianInputs(InputPrior):
    """Rows of a table: standard normal, or from the clients' sums.

    Without categories the rows are N(mean, covariance); with categories they follow a Gaussian
    copula. If no Gaussian has the latent correlations together, the prior takes those of the
    nearest matrix whose negative eigenvalues are 0, and a note says so.

    Args:
        shape: of one row, (D,).
        sums: of the clients' rows; None: standard normal.

    Raises:
        DataError: inputs are no rows, or the sums are of another number of features.
    """

    name = "gaussian"

    def __init__(self, shape: tuple[int, ...], sums: Sums | None = None) -> None:
        super().__init__(shape)
        self._root: Vector | None = None
        if sums is None:
            if len(shape) != 1:
                raise DataError(
                    f"rows of a table have one axis, but an input has the shape {shape}"
                )
            self.assumes = "independent features, normal with mean 0 and deviation 1"
            self.standard = True
            return
        if shape != (len(sums.features),):
            raise DataError(
                f"the sums have {len(sums.features)} features ({listed(sums.features)}), but an "
                f"input has the shape {shape}"
            )
        self.assumes = f"jointly normal features, from sums of {sums.count:,} rows"
        if sums.categories:
            names = listed(sums.features[index] for index in sums.categories)
            self.assumes = (
                f"a Gaussian copula, from sums of {sums.count:,} rows; categories: {names}"
            )
        self._mean, self._std = sums.mean, sums.std
        self._steps = {index: _Steps(counts) for index, counts in sums.categories.items()}
        correlation = latent_correlation(sums, self._steps)
        self._root, moved = _square_root(correlation)
        if moved > 0.01:
            self.notes = (
                "no Gaussian has exactly the latent correlations of the sums; the nearest one "
                f"differs by up to {moved:.2f}",
            )

    def draw(self, count: int, rng: np.random.Generator) -> Tensor:
        """As `InputPrior.draw`."""
        normal = rng.standard_normal((count, *self.shape))
        if self._root is None:
            return torch.from_numpy(normal.astype(np.float32))
        latent = normal @ self._root.T
        x = self._mean + self._std * latent
        for index, steps in self._steps.items():
            x[:, index] = steps(latent[:, index])
        return torch.from_numpy(x.astype(np.float32))


class _Steps:
    """The step function from a standard normal variable to categories of given frequencies."""

    def __init__(self, counts: Mapping[float, int]) -> None:
        there = sorted((value, count) for value, count in counts.items() if count > 0)
        self.values = np.array([value for value, _ in there])
        shares = np.array([count for _, count in there], np.float64)
        self.thresholds = norm.ppf((np.cumsum(shares) / shares.sum())[:-1])

    def __call__(self, latent: Array) -> Array:
        return np.asarray(self.values[np.searchsorted(self.thresholds, latent)])

    def coefficients(self) -> Vector:
        """E[g(z) h_k(z)] with the normalized Hermite polynomials, k from 1 to TERMS."""
        # By parts: of a step at τ it is φ(τ) h_{k-1}(τ) / √k.
        before, here = np.zeros_like(self.thresholds), norm.pdf(self.thresholds)
        jumps = np.diff(self.values)
        found = np.empty(TERMS)
        for k in range(1, TERMS + 1):
            found[k - 1] = (jumps * here).sum() / np.sqrt(k)
            following = (self.thresholds * here - np.sqrt(k - 1) * before) / np.sqrt(k)
            before, here = here, following
        return found


def latent_correlation(sums: Sums, steps: Mapping[int, _Steps]) -> Vector:
    """Correlations [D, D] of the latent Gaussian, by which rows have the sums' covariances.

    Those of a constant feature are 0; those beyond what a copula can have are ±1, ±0.999 between
    categories.
    """
    first = sums.std.copy()
    coefficients = np.array([step.coefficients() for step in steps.values()]).reshape(-1, TERMS)
    categories = list(steps)
    first[categories] = coefficients[:, 0]
    # Where one of two is no step but the latent variable itself, the series has one term.
    scale = np.outer(first, first)
    varies = scale > 0
    found = np.clip(np.divide(sums.covariance, scale, where=varies, out=scale * 0), -1.0, 1.0)
    block = np.ix_(categories, categories)
    found[block] = np.where(varies[block], _solved(coefficients, sums.covariance[block]), 0.0)
    np.fill_diagonal(found, 1.0)
    return np.asarray((found + found.T) / 2)


def _solved(coefficients: Vector, covariance: Vector) -> Vector:
    """Correlations of latent variables by which categories have these covariances."""
    low, high = np.full(covariance.shape, -0.999), np.full(covariance.shape, 0.999)
    for _ in range(STEPS):
        middle = (low + high) / 2
        less = _covariances(coefficients, middle) < covariance
        low, high = np.where(less, middle, low), np.where(less, high, middle)
    return np.asarray((low + high) / 2)


def _covariances(coefficients: Vector, correlation: Vector) -> Vector:
    """Mehler's series for all pairs of features, by Horner's rule."""
    total = np.zeros_like(correlation)
    for k in reversed(range(TERMS)):
        total = correlation * (np.outer(coefficients[:, k], coefficients[:, k]) + total)
    return total


def _square_root(correlation: Vector) -> tuple[Vector, float]:
    """A root R of the nearest correlation matrix R Rᵀ, and how far an entry had to move."""
    values, vectors = np.linalg.eigh(correlation)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    root /= np.linalg.norm(root, axis=1, keepdims=True)
    return root, float(np.abs(root @ root.T - correlation).max())
