"""Entropy balancing: weights on draws, such that their means are those that clients report.

Hainmueller (2012) takes, of all weights w with Σ_i w_i g(x_i) = m, those with the least KL(w ‖ q)
from base weights q. They are w_i ∝ q_i exp(λ·g(x_i)), and λ minimizes the convex dual
log Σ_i q_i exp(λ·(g(x_i) − m)).
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from fedbayes.core import seeds
from fedbayes.core.wording import listed
from fedbayes.errors import DataError
from fedbayes.fusion.draws import Derived, Draws

CANDIDATES = 4
"""Inputs that are drawn for each that is taken."""


def entropy_balance(
    features: Tensor,
    wanted: Tensor,
    base: Tensor | None = None,
    *,
    names: Sequence[str] = (),
    slack: float = 0.0,
    tolerance: float = 1e-3,
) -> Tensor:
    """Weights nearest to the base weights under which the means of features are as wanted.

    Args:
        features: g(x_i), [n, d].
        wanted: their means m, [d].
        base: weights q, at least 0, [n]; equal ones by default.
        names: of the features, for errors.
        slack: above 0, means may be missed: the weights are those of the least
            KL(w ‖ q) + Σ_j ((E_w g_j − m_j) / std_j)² / (2 slack), which there always are.
        tolerance: without slack, how far a mean may be from m, in standard deviations.

    Returns:
        float64 [n]; they add to 1.

    Raises:
        DataError: shapes differ, a number is not finite, or no weights meet the means.
    """
    g, m = features.detach().double().cpu().numpy(), wanted.detach().double().cpu().numpy()
    q = np.ones(len(g)) if base is None else base.detach().double().cpu().numpy()
    if g.ndim != 2 or m.shape != g.shape[1:] or q.shape != g.shape[:1] or not len(g):
        raise DataError(
            f"features have shape {g.shape}, target means {m.shape} and base weights {q.shape}. "
            "Give [n, d], [d] and [n]"
        )
    if not (np.isfinite(g).all() and np.isfinite(m).all() and np.isfinite(q).all()):
        raise DataError("features, target means and base weights must be finite")
    if (q < 0).any() or not q.any():
        raise DataError("base weights must be at least 0, and not all of them 0")
    taken = q > 0
    spread = g[taken].std(0)
    scale = np.where(spread > 1e-12 * (1 + np.abs(m)), spread, 1.0)
    z = (g[taken] - m) / scale
    weights = np.zeros(len(g))
    weights[taken] = _tilted(z, np.log(q[taken]), slack)
    missed = np.abs(weights[taken] @ z)
    if not slack and not (missed <= tolerance).all():
        raise DataError(_unmet(g[taken], m, missed > tolerance, weights @ g, names))
    return torch.from_numpy(weights)


def _tilted(z: np.ndarray, log_q: np.ndarray, slack: float) -> np.ndarray:
    """The weights of the least dual log Σ_i q_i exp(λ·z_i) + slack |λ|² / 2."""

    def weights(tilt: np.ndarray) -> tuple[float, np.ndarray]:
        logs = log_q + z @ tilt
        top = logs.max()
        w = np.exp(logs - top)
        return float(top + np.log(w.sum())), w / w.sum()

    def value(tilt: np.ndarray) -> tuple[float, np.ndarray]:
        dual, w = weights(tilt)
        return dual + slack * float(tilt @ tilt) / 2, w @ z + slack * tilt

    def curvature(tilt: np.ndarray) -> np.ndarray:
        w = weights(tilt)[1]
        centred = z - w @ z
        found: np.ndarray = (w[:, None] * centred).T @ centred
        return found + slack * np.eye(len(tilt))

    found = minimize(
        value, np.zeros(z.shape[1]), jac=True, hess=curvature, method="trust-exact",
        options={"gtol": 1e-8, "maxiter": 200, "max_trust_radius": 100.0},
    )  # fmt: skip
    return weights(found.x)[1]


def _unmet(
    g: np.ndarray, m: np.ndarray, missed: np.ndarray, reached: np.ndarray, names: Sequence[str]
) -> str:
    names = tuple(names) or tuple(f"feature {place}" for place in range(len(m)))
    beyond = (m < g.min(0)) | (m > g.max(0))
    if beyond.any():
        told = [
            f"the mean of {names[i]} must be {m[i]:.4g}, but samples are between "
            f"{g[:, i].min():.4g} and {g[:, i].max():.4g}"
            for i in np.flatnonzero(beyond)[:5]
        ]
        return (
            f"no weights of the samples give the means: {listed(told)}. Use more or other samples"
        )
    told = [f"{names[i]} {m[i]:.4g} (nearest {reached[i]:.4g})" for i in np.flatnonzero(missed)[:5]]
    return (
        f"no weights of the samples give all means together: {listed(told)}. Use more or other "
        "samples"
    )


class Balanced(Derived):
    """Draws that are taken from several times as many such that means of features are as wanted.

    Args:
        draws: where inputs come from.
        features: of inputs, [n, ...] to [n, d]: a teacher's probabilities of the classes, say.
        wanted: their means, [d].
        names: of the features, for errors.
        slack: as `entropy_balance` has it.
    """

    def __init__(
        self,
        draws: Draws,
        features: Callable[[Tensor], Tensor],
        wanted: Tensor,
        names: Sequence[str] = (),
        slack: float = 0.0,
    ) -> None:
        super().__init__(draws)
        self.features, self.wanted = features, wanted
        self.names, self.slack = names, slack

    def batch(self, number: int, count: int) -> Tensor:
        """As `Draws.batch`: the same for the same number; some inputs may come twice.

        Raises:
            DataError: no weights of the draws meet the means.
        """
        x = self.draws.batch(number, CANDIDATES * count)
        with torch.no_grad():
            features = self.features(x)
        weights = entropy_balance(features, self.wanted, names=self.names, slack=self.slack)
        purpose = "balance" if number >= 0 else "balance held out"
        rng = seeds.numpy_rng(self.seed, purpose, round=abs(number))
        # Systematic resampling: each input as often as its weight says, but for less than one.
        ends = np.cumsum(weights.numpy())
        rows = np.searchsorted(ends / ends[-1], (rng.random() + np.arange(count)) / count)
        return x[torch.from_numpy(rng.permutation(rows.clip(max=len(x) - 1)))]
