"""Noise that later rounds partly take back: DP-FTRL by matrix factorization, without sampling.

What is released are prefix sums A x of the rounds' sums x, A a lower triangle of ones. With
A = B C, B (C x + z·Z) is as private as the Gaussian mechanism on C x, and is A (x + z·C⁻¹Z): round
t has the noise z·(C⁻¹Z)_t instead of z·Z_t. With C = √A, the noise of a prefix sum grows like
log t instead of √t (Denisov et al. 2022; Henzinger et al. 2022; for bands Kalinin and Lampert
2024).

C is a lower triangular Toeplitz matrix with coefficients c ≥ 0, the same for any number of rounds:
Σ_k c_k x^k = (1 − x)^(−1/2), cut off after `bands` of them.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import toeplitz

Vector = NDArray[np.float64]


def coefficients(rounds: int, bands: int = 0) -> Vector:
    """The first column of C, [rounds].

    Args:
        rounds: how many rounds there are.
        bands: how many entries are not zero; 0: all.
    """
    steps = np.arange(1, rounds)
    column = np.cumprod(np.concatenate([[1.0], (2 * steps - 1) / (2 * steps)]))[:rounds]
    if bands:
        column[bands:] = 0.0
    return column


def strategy(rounds: int, bands: int = 0) -> Vector:
    """C, [rounds, rounds]."""
    return np.tril(toeplitz(coefficients(rounds, bands)))


def weights(number: int, bands: int = 0) -> Vector:
    """What round `number` of a sequence, from 1, takes of the draws of its rounds up to it, the
    newest last: the last row of C⁻¹, [number].
    """
    column = coefficients(number, bands)
    inverse = np.zeros(number)  # of the power series: Σ_j c_j inverse_{k−j} = [k = 0]
    inverse[0] = 1.0
    for k in range(1, number):
        inverse[k] = -column[1 : k + 1] @ inverse[k - 1 :: -1][:k]
    return inverse[::-1].copy()
