"""Poisson sampling: a coin for every client, which only the server sees fall."""

import numpy as np

from fedbayes.federation.privacy.noise import Secret


def poisson_cohort(secret: Secret, number: int, clients: int, rate: float) -> list[int]:
    """The clients of a round, ascending: any number of them, also none.

    Args:
        secret: of the run.
        number: the round.
        clients: how many there are.
        rate: probability of each.
    """
    coins = secret.stream("cohort", number).uniform(clients)
    return np.flatnonzero(coins < rate).tolist()
