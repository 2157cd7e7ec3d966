"""Meta-analysis: estimates of sites that each fitted their own rows, put together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import stats

from fedbayes.biostatistics.columns import explained
from fedbayes.biostatistics.exchange import Array
from fedbayes.core.brief import Brief
from fedbayes.errors import DataError

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, repr=False)
class Pooled(Brief):
    """One coefficient over k sites, with a fixed and with random effects.

    Examples:
        >>> from fedbayes.biostatistics import Pooled
        >>> from fedbayes.biostatistics import pool
        >>> found = pool(["north", "south"], [1.0, 2.0], [0.5, 0.5])
        >>> found.fixed_weights
        array([4., 4.])
    """

    sites: tuple[str, ...]
    estimates: Array
    """Of each site [k]."""
    std_errors: Array
    """Of each site [k]."""
    tau2: float
    """Variance between sites after DerSimonian and Laird."""

    @property
    def fixed_weights(self) -> Array:
        """1 / SE² [k]."""
        return np.asarray(self.std_errors**-2.0)

    @property
    def random_weights(self) -> Array:
        """1 / (SE² + τ²) [k]."""
        return np.asarray(1 / (self.std_errors**2 + self.tau2))

    @property
    def q(self) -> float:
        """Cochran's Q = Σ w (b − b̄)² with the weights of the fixed effect."""
        return _q(self.estimates, self.fixed_weights)

    @property
    def q_p(self) -> float:
        """p-value of Q under no heterogeneity."""
        return float(stats.chi2.sf(self.q, len(self.sites) - 1))

    @property
    def i2(self) -> float:
        """Share of the variation between sites that is not chance, max(0, (Q − k + 1) / Q)."""
        return max(0.0, (self.q - len(self.sites) + 1) / self.q) if self.q > 0 else 0.0

    def effect(self, random: bool, level: float = 0.95) -> tuple[float, float, float, float, float]:
        """Estimate, standard error, low, high and p."""
        weights = self.random_weights if random else self.fixed_weights
        estimate = float(weights @ self.estimates / weights.sum())
        error = float(weights.sum() ** -0.5)
        half = float(stats.norm.ppf((1 + level) / 2)) * error
        p = float(2 * stats.norm.sf(abs(estimate / error)))
        return estimate, error, estimate - half, estimate + half, p


@dataclass(frozen=True, repr=False)
class MetaAnalysis(Brief):
    """A meta-analysis of every coefficient.

    Examples:
        >>> import pandas as pd
        >>> from fedbayes import meta_analysis
        >>> from fedbayes.biostatistics import MetaAnalysis
        >>> sites = {
        ...     "north": pd.DataFrame({"dose": [1.0, 2.0, 3.0, 4.0], "y": [1.1, 1.9, 3.2, 3.8]}),
        ...     "south": pd.DataFrame({"dose": [2.0, 4.0, 6.0, 8.0], "y": [2.2, 3.9, 6.1, 8.1]}),
        ... }
        >>> found = meta_analysis(sites, "y", ["dose"])
        >>> dict(found.rows)
        {'north': 4, 'south': 4}
    """

    model: str
    ratio: str
    """Name of exp(coefficient); empty where it means nothing."""
    coefficients: Mapping[str, Pooled]
    left_out: Mapping[str, str]
    """Sites without a fit of their own, and why."""
    rows: Mapping[str, int]
    """Rows of each site that counts."""
    outcome: str
    """What is explained."""
    happened: str
    """Its value that means that it happened; empty for numbers."""

    def frame(self, level: float = 0.95) -> "pd.DataFrame":
        """A DataFrame with two rows for each coefficient, fixed and random effects.

        Args:
            level: of the confidence intervals.

        Returns:
            Columns term, effects, sites, coefficient, std_error, low, high, p, q, q_p, i2, tau2.
        """
        import pandas as pd

        rows = []
        for term, pooled in self.coefficients.items():
            for effects in ("fixed", "random"):
                estimate, error, low, high, p = pooled.effect(effects == "random", level)
                rows.append(
                    {
                        "term": term,
                        "effects": effects,
                        "sites": len(pooled.sites),
                        "coefficient": estimate,
                        "std_error": error,
                        "low": low,
                        "high": high,
                        "p": p,
                        "q": pooled.q,
                        "q_p": pooled.q_p,
                        "i2": pooled.i2,
                        "tau2": pooled.tau2,
                    }
                )
        return pd.DataFrame(rows)

    def heading(self) -> str:
        """A heading of one line for the fit."""
        sites = ", ".join(f"{name} ({count:,} rows)" for name, count in self.rows.items())
        return f"fits of {explained(self.outcome, self.happened)} by {sites}, put together"

    def to_dict(self, level: float = 0.95) -> dict[str, Any]:
        """All of it as JSON has it."""
        found: dict[str, Any] = {}
        for term, pooled in self.coefficients.items():
            found[term] = {
                "sites": {
                    site: {"coefficient": estimate, "std_error": error}
                    for site, estimate, error in zip(
                        pooled.sites,
                        pooled.estimates.tolist(),
                        pooled.std_errors.tolist(),
                        strict=True,
                    )
                },
                "q": pooled.q,
                "q_p": pooled.q_p,
                "i2": pooled.i2,
                "tau2": pooled.tau2,
            }
            for effects in ("fixed", "random"):
                names = ("coefficient", "std_error", "low", "high", "p")
                values = pooled.effect(effects == "random", level)
                found[term][effects] = dict(zip(names, values, strict=True))
        return {
            "model": self.model,
            "outcome": self.outcome,
            "happened": self.happened or None,
            "confidence_level": level,
            "meta": found,
            "left_out": dict(self.left_out),
            "rows": dict(self.rows),
        }

    def summary(self) -> str:
        """The pooled coefficients as text."""
        table = self.frame().to_string(index=False, float_format=lambda x: f"{x:.5g}")
        return f"{self.heading()}\n\n{table}"


def _q(estimates: Array, weights: Array) -> float:
    mean = weights @ estimates / weights.sum()
    return float(weights @ (estimates - mean) ** 2)


def pool(sites: Sequence[str], estimates: Sequence[float], std_errors: Sequence[float]) -> Pooled:
    """Put estimates of one coefficient together.

    The variance between sites is the moment estimate of DerSimonian and Laird (1986),
    τ² = max(0, (Q − k + 1) / (Σ w − Σ w² / Σ w)).

    Args:
        sites: names of k sites.
        estimates: one of each [k].
        std_errors: their standard errors [k].

    Raises:
        DataError: there are fewer than two, or a standard error is not above 0.

    Examples:
        >>> from fedbayes.biostatistics import pool
        >>> pool(["north", "south"], [1.0, 2.0], [0.5, 0.5]).tau2
        0.25
    """
    b, errors = np.asarray(estimates, np.float64), np.asarray(std_errors, np.float64)
    if not len(sites) == len(b) == len(errors):
        raise DataError("a meta-analysis needs an estimate and a standard error of each site")
    if len(b) < 2:
        raise DataError(f"a meta-analysis needs at least two sites with a fit; there is {len(b)}")
    if not (np.isfinite(b).all() and np.isfinite(errors).all() and (errors > 0).all()):
        raise DataError("estimates must be finite, and their standard errors above 0")
    weights = errors**-2.0
    excess = _q(b, weights) - (len(b) - 1)
    tau2 = max(0.0, excess / float(weights.sum() - (weights**2).sum() / weights.sum()))
    return Pooled(tuple(sites), b, errors, tau2)
