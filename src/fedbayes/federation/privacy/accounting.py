"""What rounds spend of privacy, added up.

A round releases x + z·N(0, I). Here x is the sum of the clients' changes in units of their bounds,
so that a client moves it by at most 1, and z is the noise multiplier. Two federations are
neighbours by

- *add or remove*: one has a client that the other lacks. A client that is not there adds nothing to
  any sum, like one whose every report is lost or rejected.
- *replace one*: all the data of one client are replaced by any other; that moves a sum by up to 2.

Who is in a round is either known to whoever sees the models (a schedule that follows from the
seed), or drawn by a secret coin for every client (Poisson sampling). Of a schedule, a client pays
for the rounds that it was in, and ε is that of the client who pays most. Its rounds are one
Gaussian mechanism, whatever their multipliers: μ² = Σ_t (s / z_t)², exactly. Sampled rounds are
added up by dp-accounting as distributions of the privacy loss.

Correlated noise (`fedbayes.federation.privacy.matrix`) releases C x + z·N(0, I) with a matrix C ≥ 0
over rounds. A client that is in the rounds π with multipliers z_t moves C x by at most
‖C diag(1/z) 1_π‖: no entry of CᵀC is negative, so changes that point the same way add the most.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf, isinf, sqrt

import numpy as np
from numpy.typing import NDArray

from fedbayes.errors import ConfigError, require_extra
from fedbayes.federation.privacy.matrix import strategy

REPLACE, ADD_REMOVE = "replace-one", "add-or-remove"
"""Which federations are neighbours."""
_SHIFT = {REPLACE: 2.0, ADD_REMOVE: 1.0}
"""What a client moves the sum by, in units of its bound."""
_LEAST = 0.25
"""Of less noise, sampling is not counted: it takes minutes to add up what is no privacy."""


@dataclass(frozen=True)
class Spent:
    """What one round spent."""

    noise: float
    """Multiplier of the noise on the sum of changes, over all parts; 0: there was none."""
    count_noise: float = inf
    """Multiplier of the noise on the counts that bounds follow; infinite where there are none."""
    rate: float = 0.0
    """Probability that a client was drawn by; 0 where it is known who was."""
    members: tuple[int, ...] = ()
    """The clients of the round; none where that is a secret."""
    correlated: bool = False
    """Whether the noise goes on from that of the round before, or begins a sequence."""
    begins: bool = False
    """Whether a sequence of correlated noise begins here."""
    bands: int = 0
    """Bands of the factor of correlated noise; 0: all."""


PACKAGES = ("dp_accounting", "cryptography")
"""What differential privacy needs."""


def epsilons(rounds: Sequence[Spent], delta: float) -> dict[str, float]:
    """ε of all the data of a client after these rounds, by which federations are neighbours.

    Raises:
        ConfigError: dp-accounting is not installed.
    """
    require_extra("privacy", "privacy.noise", ConfigError, *PACKAGES)
    if any(not each.noise for each in rounds):
        return dict.fromkeys(_SHIFT, inf)
    drawn = Counter((s.rate, _joint(s)) for s in rounds if 0 < s.rate < 1)
    known = sqrt(_known([s for s in rounds if not 0 < s.rate < 1]))
    sampled = tuple(sorted(drawn.items()))
    return {kind: _epsilon(kind, known, sampled, delta) for kind in _SHIFT}


def _joint(spent: Spent) -> float:
    """The one multiplier that a round's sums and counts have together."""
    return 1 / sqrt(spent.noise**-2 + spent.count_noise**-2)


def _known(rounds: Iterable[Spent]) -> float:
    """μ² of the client that pays most for rounds with known cohorts, in its bounds."""
    paid: dict[int, float] = {}
    everybody = 0.0  # a rate of 1: whoever there is
    sequence: list[Spent] = []
    sequences = [sequence]
    for spent in rounds:
        cost = spent.count_noise**-2
        if spent.correlated:
            if spent.begins:
                sequence = []
                sequences.append(sequence)
            sequence.append(spent)
        else:
            cost += spent.noise**-2
        if spent.rate:
            everybody += cost
        for client in spent.members:
            paid[client] = paid.get(client, 0.0) + cost
    for each in filter(None, sequences):
        for client, cost in _correlated(each).items():
            paid[client] = paid.get(client, 0.0) + cost
    return everybody + max(paid.values(), default=0.0)


def _correlated(rounds: Sequence[Spent]) -> dict[int, float]:
    """What each client pays for a sequence of correlated noise: ‖C diag(1/z) 1_π‖²."""
    clients = sorted({client for spent in rounds for client in spent.members})
    place = {client: row for row, client in enumerate(clients)}
    shares = np.zeros((len(clients), len(rounds)))
    for column, spent in enumerate(rounds):
        for client in spent.members:
            shares[place[client], column] = 1 / spent.noise
    patterns, which = np.unique(shares, axis=0, return_inverse=True)
    columns = strategy(len(rounds), rounds[0].bands)
    costs: NDArray[np.float64] = np.square(patterns @ columns.T).sum(1)
    return dict(zip(clients, costs[which.reshape(-1)].tolist(), strict=True))


@lru_cache(maxsize=64)
def _epsilon(
    kind: str, known: float, sampled: tuple[tuple[tuple[float, float], int], ...], delta: float
) -> float:
    """ε of a Gaussian mechanism of the μ `known`, and of sampled rounds."""
    from dp_accounting import (
        GaussianDpEvent,
        NeighboringRelation,
        PoissonSampledDpEvent,
        get_epsilon_gaussian,
    )
    from dp_accounting.pld import PLDAccountant

    whole = sqrt(known**2 + sum(count / noise**2 for (_, noise), count in sampled))
    if not whole:
        return 0.0
    # Sampling never makes it more.
    without = float(get_epsilon_gaussian(1 / (_SHIFT[kind] * whole), delta))
    if not sampled or min(noise for (_, noise), _ in sampled) < _LEAST or isinf(without):
        return without
    relation = {
        REPLACE: NeighboringRelation.REPLACE_ONE,
        ADD_REMOVE: NeighboringRelation.ADD_OR_REMOVE_ONE,
    }[kind]
    accountant = PLDAccountant(relation)
    if known:
        accountant.compose(GaussianDpEvent(1 / known))
    for (rate, noise), count in sampled:
        accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), count)
    return min(without, float(accountant.get_epsilon(delta)))
