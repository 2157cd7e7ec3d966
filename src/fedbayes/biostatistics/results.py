"""What a regression found: coefficients in the units of the columns, and how confident they are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from scipy import stats

from fedbayes.biostatistics.columns import explained
from fedbayes.biostatistics.exchange import Array
from fedbayes.core.brief import Brief

if TYPE_CHECKING:
    import pandas as pd

RATIOS = {"odds_ratio": "odds ratio", "rate_ratio": "rate ratio", "hazard_ratio": "hazard ratio"}
"""What exp(coefficient) is called."""


@dataclass(frozen=True, repr=False)
class Regression(Brief):
    """A fitted regression with p coefficients.

    Examples:
        >>> import pandas as pd
        >>> from fedbayes import glm
        >>> from fedbayes.biostatistics import Regression
        >>> sites = {
        ...     "north": pd.DataFrame({"dose": [1.0, 2.0, 3.0, 4.0], "y": [1.1, 1.9, 3.2, 3.8]}),
        ...     "south": pd.DataFrame({"dose": [2.0, 4.0, 6.0, 8.0], "y": [2.2, 3.9, 6.1, 8.1]}),
        ... }
        >>> found = glm(sites, "y", ["dose"])
        >>> found.std_errors.shape
        (2,)
    """

    model: str
    """gaussian, binomial, poisson or cox."""
    outcome: str
    """The column that is explained; of a Cox model the event."""
    happened: str
    """Value of the outcome that means that it happened; empty for numbers."""
    names: tuple[str, ...]
    """Of the coefficients: `intercept`, a column, or `column=category`."""
    references: tuple[tuple[str, str], ...]
    """Columns of categories, and the category that the others are compared with."""
    estimates: Array
    """The coefficients [p]."""
    covariance: Array
    """Of the coefficients [p, p]."""
    statistic: Literal["z", "t"]
    freedom: float
    """Rows less coefficients; the degrees of freedom of t."""
    ratio: str
    """Name of exp(coefficient); empty where it means nothing."""
    loglik: float
    null_loglik: float
    """Of the model without features."""
    deviance: float | None
    null_deviance: float | None
    dispersion: float
    """Residual variance of a linear model; 1 for others."""
    total: float
    """Rows, by weight."""
    events: float | None
    rows: Mapping[str, int]
    """Rows by client."""
    dropped: Mapping[str, int]
    """Rows left out for a missing value, by client."""
    rounds: int
    floats: int
    """Numbers that the client which sent most has sent."""
    robust: bool = False
    """Whether standard errors are of the sandwich estimator, which hold whatever weights are."""
    condition: tuple[float, Sequence[str]] = (1.0, ())
    """Condition number of the columns, each scaled, and those that have most to do with it."""
    ties: str = ""
    baseline: "pd.DataFrame | None" = field(default=None, repr=False)
    """Of a Cox model: a DataFrame of event times, cumulative hazard and survival of one whose
    features are at their means; with strata by column also the stratum."""

    @property
    def std_errors(self) -> Array:
        """Standard errors [p]."""
        return np.asarray(np.sqrt(np.diag(self.covariance)))

    @property
    def p_values(self) -> Array:
        """Two-sided, of the hypothesis that a coefficient is 0 [p]."""
        return np.asarray(2 * self._distribution.sf(np.abs(self.estimates / self.std_errors)))

    @property
    def aic(self) -> float:
        """Akaike's criterion 2 p − 2 log L; p counts coefficients, not the residual variance."""
        return 2 * len(self.names) - 2 * self.loglik

    @property
    def bic(self) -> float:
        """P log n − 2 log L; of a Cox model n is the number of events."""
        count = self.events if self.model == "cox" and self.events else self.total
        return len(self.names) * float(np.log(count)) - 2 * self.loglik

    @property
    def ratio_test(self) -> tuple[float, int, float]:
        """Likelihood-ratio test against the model without features: χ², degrees, p."""
        chi2 = 2 * (self.loglik - self.null_loglik)
        degrees = len(self.names) - ("intercept" in self.names)
        return chi2, degrees, float(stats.chi2.sf(chi2, degrees)) if degrees else 1.0

    @property
    def _distribution(self) -> Any:
        return stats.t(self.freedom) if self.statistic == "t" else stats.norm()

    def intervals(self, level: float = 0.95) -> Array:
        """Confidence intervals of the coefficients [p, 2]."""
        half = self._distribution.ppf((1 + level) / 2) * self.std_errors
        return np.stack([self.estimates - half, self.estimates + half], axis=1)

    def frame(self, level: float = 0.95) -> "pd.DataFrame":
        """A DataFrame with a row for each coefficient.

        Args:
            level: of the confidence intervals.

        Returns:
            Columns coefficient, std_error, z or t, p, low and high; and the exponential of
            coefficient, low and high where it is an odds, rate or hazard ratio.
        """
        import pandas as pd

        low, high = self.intervals(level).T
        columns = {
            "coefficient": self.estimates,
            "std_error": self.std_errors,
            self.statistic: self.estimates / self.std_errors,
            "p": self.p_values,
            "low": low,
            "high": high,
        }
        if self.ratio:
            shown = {self.ratio: self.estimates, "ratio_low": low, "ratio_high": high}
            with np.errstate(over="ignore"):
                columns |= {name: np.exp(values) for name, values in shown.items()}
        return pd.DataFrame(columns, index=pd.Index(self.names, name="term"))

    def summary(self) -> str:
        """The coefficients and how well they fit, as text."""
        chi2, degrees, p = self.ratio_test
        lines = [
            self.heading(),
            "",
            self.frame().to_string(float_format=lambda number: f"{number:.6g}"),
            "",
            f"log-likelihood {self.loglik:.6f} (without features {self.null_loglik:.6f}), "
            f"AIC {self.aic:.4f}, BIC {self.bic:.4f}",
            f"likelihood-ratio test: chi2 {chi2:.4f}, {degrees} degrees of freedom, p {p:.4g}",
        ]
        return "\n".join(lines)

    def heading(self) -> str:
        """A heading of one line for the fit."""
        kind = {"gaussian": "linear", "binomial": "logistic", "poisson": "Poisson"}
        name = "Cox" + (f" ({self.ties} ties)" if self.ties else "")
        name = kind.get(self.model, name)
        events = "" if self.events is None else f", {self.events:,.0f} events"
        what = explained(self.outcome, self.happened)
        return (
            f"{name} regression of {what}: {sum(self.rows.values()):,} rows of "
            f"{len(self.rows)} clients{events}, {self.rounds} rounds"
        )

    def to_dict(self, level: float = 0.95) -> dict[str, Any]:
        """All of it as JSON has it."""
        chi2, degrees, p = self.ratio_test

        def by_name(values: Array) -> dict[str, float]:
            return dict(zip(self.names, values.tolist(), strict=True))

        found: dict[str, Any] = {
            "model": self.model,
            "outcome": self.outcome,
            "coefficients": by_name(self.estimates),
            "std_errors": by_name(self.std_errors),
            self.statistic: by_name(self.estimates / self.std_errors),
            "p_values": by_name(self.p_values),
            "confidence_level": level,
            "confidence_intervals": {
                name: list(pair)
                for name, pair in zip(self.names, self.intervals(level).tolist(), strict=True)
            },
            "covariance": self.covariance.tolist(),
            "references": dict(self.references),
            "loglik": self.loglik,
            "null_loglik": self.null_loglik,
            "aic": self.aic,
            "bic": self.bic,
            "likelihood_ratio": {"chi2": chi2, "degrees": degrees, "p": p},
            "rows": dict(self.rows),
            "dropped": dict(self.dropped),
            "rounds": self.rounds,
            "floats_sent": self.floats,
        }
        optional = {
            "robust": self.robust or None,
            "condition_number": self.condition[0],
            "happened": self.happened or None,
            "events": self.events,
            "deviance": self.deviance,
            "null_deviance": self.null_deviance,
            "residual_freedom": None if self.model == "cox" else self.freedom,
            "dispersion": self.dispersion if self.model == "gaussian" else None,
            "r_squared": 1 - self.deviance / self.null_deviance
            if self.model == "gaussian" and self.deviance is not None and self.null_deviance
            else None,
            "ties": self.ties or None,
        }
        return found | {key: value for key, value in optional.items() if value is not None}
