"""Differential privacy of sums: what noise buys."""

import warnings

from fedbayes.errors import ConfigError


def epsilon(noise_multiplier: float, rate: float, steps: int, delta: float) -> float:
    """ε of (ε, δ)-differential privacy after so many noisy sums, by Rényi accounting (Opacus).

    Args:
        noise_multiplier: deviation of the Gaussian noise, in units of the sum's sensitivity.
        rate: probability that a client takes part in a sum.
        steps: number of sums.
        delta: δ.

    Raises:
        ConfigError: Opacus is not installed.
    """
    if not steps:
        return 0.0
    try:
        from opacus.accountants import RDPAccountant
    except ImportError:
        raise ConfigError(
            "privacy is accounted for by Opacus, which is not installed: "
            "pip install 'fedbayes[privacy]'"
        ) from None
    accountant = RDPAccountant()
    accountant.history = [(noise_multiplier, rate, steps)]
    with warnings.catch_warnings(action="ignore"):  # that finer orders might give a little less
        return float(accountant.get_epsilon(delta))
