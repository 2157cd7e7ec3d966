"""Who takes part in a round."""

import numpy as np

from fedbayes.config.config import SAMPLING, Config
from fedbayes.contracts import Federation
from fedbayes.core import seeds
from fedbayes.core.lazy import called
from fedbayes.errors import ConfigError
from fedbayes.federation.privacy.noise import Secret


def cohort_of(config: Config, run: Federation, secret: Secret | None, number: int) -> list[int]:
    """The clients of a round, by rising index.

    Args:
        config: the settings.
        run: what no round changes.
        secret: of the run, if it needs one.
        number: the round, from 1.

    Raises:
        ConfigError: a user's own function failed, or gave something else than clients.
    """
    if ":" in config.sampling and run.clients > 1:
        return _own(config, run, number)
    if secret is not None and config.sampling == "poisson":
        return poisson_cohort(secret, number, run.clients, run.cohort / run.clients)
    cyclic = config.sampling == "cyclic"
    return sample_cohort(config.seed, number, run.clients, run.cohort, cyclic=cyclic)


def sample_cohort(
    seed: int, number: int, clients: int, size: int, *, cyclic: bool = False
) -> list[int]:
    """The clients of a round: `size` of them, ascending.

    Uniformly without replacement, or in a fixed cycle: the first `size`, then the next.
    """
    if cyclic:
        return sorted((size * (number - 1) + place) % clients for place in range(size))
    rng = seeds.numpy_rng(seed, "cohort", round=number)
    return sorted(rng.choice(clients, size, replace=False, shuffle=False).tolist())


def poisson_cohort(secret: Secret, number: int, clients: int, rate: float) -> list[int]:
    """The clients of a round by a coin for each, of this rate, which only the server sees fall."""
    coins = secret.stream("cohort", number).uniform(clients)
    return np.flatnonzero(coins < rate).tolist()


def _own(config: Config, run: Federation, number: int) -> list[int]:
    """The clients of a round by a user's own function of round, clients, size and generator."""
    place, rng = config.sampling, seeds.numpy_rng(config.seed, "cohort", round=number)
    found = called(place, "sampling", SAMPLING, number, run.clients, run.cohort, rng)
    drawn = np.atleast_1d(np.asarray(found))
    wrong = ""
    if drawn.ndim != 1 or drawn.dtype.kind not in "iu":
        wrong = f"{drawn.dtype} of shape {drawn.shape}" if drawn.size else "no client"
    elif not drawn.size:
        wrong = "no client"
    elif len(np.unique(drawn)) < len(drawn):
        wrong = "a client twice"
    elif len(drawn) > run.cohort:  # methods count on no more
        wrong = f"{len(drawn)} clients, where size is {run.cohort},"
    elif drawn.min() < 0 or drawn.max() >= run.clients:
        wrong = f"client {drawn.min() if drawn.min() < 0 else drawn.max()}"
    if wrong:
        raise ConfigError(
            f"the sampling {place!r} returned {wrong} in round {number}. Return different "
            f"integers from 0 to {run.clients - 1}: at least one, and at most size"
        )
    return sorted(drawn.tolist())
