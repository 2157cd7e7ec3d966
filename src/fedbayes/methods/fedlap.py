"""FedLap: federated Laplace with a dual term for each client."""

from typing import Literal

from pydantic import Field

from fedbayes.contracts import At, Info, Problem, Run, Solved
from fedbayes.contracts.moments import Moments
from fedbayes.fusion.curvature import require_curvature, summed_diagonal
from fedbayes.tensors import Samples, Tensors


class FedLap(Moments):
    """Laplace's approximation at every client, and duals that make the fixed point the pool's.

    A client's factor is exp(v_iᵀθ − ½ θᵀV_iθ) with the dual v_i. It minimizes its summed loss and
    the quadratic of the others' factors and the prior (Swaroop et al. 2025, FedLap-Cov),

        w_i = argmin ℓ_i(w) + ½ wᵀ(S − V_i) w − (S w_g − v_i)ᵀ w,

    sets V_i to the diagonal of its Fisher matrix at w_i (which is the Gauss-Newton matrix under
    classes and Gaussian noise) and v_i ← S_i w_i − (S w_g − v_i), S_i = S − V_i + the new V_i.
    At convergence v_i = V_i w_g − ∇ℓ_i(w_g), so that w_g is stationary in the pooled loss.

    Without covariances (FedLap) the precision stays that of the prior, δ, and
    v_i ← v_i + δ (w_i − w_g).
    """

    name = "fedlap"
    summary = "Laplace at every client, with a dual for each"
    paper = "Swaroop, Khan and Doshi 2025"

    covariance: Literal["none", "diagonal"] = Field(
        "diagonal",
        description="what is known beside the mean: nothing (FedLap; the posterior is a point), or "
        "a precision for each weight (FedLap-Cov)",
    )

    @property
    def fixed_precision(self) -> bool:
        """Without covariances."""
        return self.covariance == "none"

    def check(self, run: Run) -> None:
        """Weights alone are inferred, and covariances need a Fisher matrix.

        Raises:
            ModelError: the network has buffers, such as running means.
            ConfigError: the precision is another, or the likelihood has no Fisher matrix.
        """
        super().check(run)
        if self.covariance != "none":
            require_curvature(run.likelihood)

    def moments(
        self, problem: Problem, samples: Samples, at: At
    ) -> tuple[Solved, Tensors, Tensors, Info]:
        """The mode, and the Fisher diagonal there beside the share of the prior."""
        solved = at.solve(problem, self.loss(at.run), samples, validation=self.validation(at.run))
        precision: Tensors = dict(problem.given["share"])
        if self.covariance == "diagonal":
            found = summed_diagonal(at.run.network, at.run.likelihood, solved.parameters, samples)
            precision = {n: p + found[n].to(p) / self.kl_weight for n, p in precision.items()}
        return solved, solved.parameters, precision, {}
