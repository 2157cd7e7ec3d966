"""The corrected drift against dense matrices, the paper's recursion, and exact posteriors."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedbayes.inference.shrinkage import drift


def drawn(count, seed=0, scale=1.0):
    """Samples of two tensors, d = 11, and weights."""
    rng = torch.Generator().manual_seed(seed)
    shapes = {"a": (3, 3), "b": (2,)}
    samples = {n: scale * torch.randn(count, *s, generator=rng).double() for n, s in shapes.items()}
    weights = {n: torch.randn(*s, generator=rng).double() for n, s in shapes.items()}
    return samples, weights


def flat(tensors):
    return np.concatenate([t.reshape(t.shape[0], -1).numpy() for t in tensors.values()], axis=1)


def vector(tensors):
    return np.concatenate([t.numpy().ravel() for t in tensors.values()])


def dense(samples, weights, shrinkage):
    """By the inverse of the d x d covariance."""
    x = flat(samples)
    level = 1 / (1 + (len(x) - 1) * shrinkage)
    spread = np.atleast_2d(np.cov(x.T)) if len(x) > 1 else np.zeros((x.shape[1],) * 2)
    covariance = level * np.eye(x.shape[1]) + (1 - level) * spread
    return np.linalg.solve(covariance, vector(weights) - x.mean(0))


def recursion(samples, weights, shrinkage):
    """The paper's dynamic programming: rank-one updates by Sherman and Morrison, one a sample."""
    x, theta = flat(samples), vector(weights)
    mean, change = x[0], theta - x[0]
    directions = []
    for count, sample in enumerate(x[1:], 2):
        u = sample - mean
        v = u.copy()
        for gamma, past, seen in directions:
            v -= gamma * past * (past @ u) / (1 + gamma * (past @ seen))
        gamma = shrinkage * (count - 1) / count
        share = 1 + gamma * (count * (u @ change) - u @ v) / (1 + gamma * (u @ v))
        change = change - share * v / count
        mean = mean + u / count
        directions.append((gamma, v, u))
    return change * (1 + (len(x) - 1) * shrinkage)


@given(st.integers(1, 20), st.sampled_from([0.0, 1e-3, 0.1, 1.0, 30.0]), st.integers(0, 5))
def test_it_is_that_of_dense_matrices_and_of_the_papers_recursion(count, shrinkage, seed):
    samples, weights = drawn(count, seed)
    found = vector(drift(samples, weights, shrinkage))
    np.testing.assert_allclose(found, dense(samples, weights, shrinkage), rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(found, recursion(samples, weights, shrinkage), rtol=1e-7, atol=1e-9)


def test_shapes_are_kept_and_samples_left_alone():
    samples, weights = drawn(4)
    before = {n: t.clone() for n, t in samples.items()}
    found = drift(samples, weights, 0.1)
    assert {n: t.shape for n, t in found.items()} == {n: t.shape for n, t in weights.items()}
    assert all(torch.equal(t, before[n]) for n, t in samples.items())


def test_samples_that_are_one_have_no_covariance():
    weights = {"a": torch.tensor([1.0, 2.0])}
    samples = {"a": torch.tensor([0.5, 0.0]).expand(7, 2)}
    expected = (1 + 6 * 0.1) * torch.tensor([0.5, 2.0], dtype=torch.float64)
    torch.testing.assert_close(drift(samples, weights, 0.1)["a"], expected)


def posteriors(clients=3, rows=30, d=3, seed=0):
    """Linear regressions with noise of deviation 1: each client's precision, mean and samples."""
    rng = np.random.default_rng(seed)
    found = []
    for client in range(clients):
        x = rng.normal(size=(rows, d)) @ np.diag([1.0, 0.3 + client, 2.0 / (1 + client)])
        y = x @ (np.array([1.0, -1.0, 0.5]) + client) + rng.normal(size=rows)
        precision = x.T @ x
        found.append((precision, np.linalg.solve(precision, x.T @ y)))
    return found, rng


def test_exact_samples_lead_to_the_pooled_mean_where_averaging_does_not():
    """Where the drifts of all clients, which are affine in the weights, add up to zero."""
    count = 1500
    clients, rng = posteriors()
    total = sum(p for p, _ in clients)
    pooled = np.linalg.solve(total, sum(p @ m for p, m in clients))
    average = np.mean([m for _, m in clients], axis=0)
    samples = [
        {"w": torch.from_numpy(rng.multivariate_normal(m, np.linalg.inv(p), size=count))}
        for p, m in clients
    ]

    def total_drift(w):
        return sum(drift(s, {"w": torch.from_numpy(w)}, 1.0 * count)["w"].numpy() for s in samples)

    level = total_drift(np.zeros(3))
    slopes = np.stack([total_drift(row) - level for row in np.eye(3)], axis=1)
    found = np.linalg.solve(slopes, -level)
    assert np.linalg.norm(average - pooled) > 0.3
    assert np.linalg.norm(found - pooled) < 0.05
