"""Networks that are unlike the others of a round, where reports are not averaged.

Methods that match neurons or combine whole networks have no mean that a robust rule could take the
place of. What can be told without knowing which neuron is which is the size of each tensor.
"""

import math
import statistics

DEVIATIONS = 6.0
"""Robust standard deviations from the median beyond which a norm is outlying."""
RATIO = 2.0
"""And the ratio to the median beyond which it is: honest clients may be very alike."""
FEWEST = 3
"""Reports of which one can be told apart."""


def outliers(norms: dict[int, dict[str, float]]) -> dict[int, str]:
    """The clients whose networks are outlying, each with the reason.

    Of every tensor the logarithms of the clients' norms have a median, and a median absolute
    deviation; 1.4826 times that is a standard deviation if most are normal. A client is outlying if
    one of its tensors is more than `DEVIATIONS` of these from the median, and more than `RATIO`
    times longer or shorter. Norms are the same in whatever order neurons are.

    Args:
        norms: of each client, the L2 norm of every tensor by name.
    """
    if len(norms) < FEWEST:
        return {}
    strange: dict[int, str] = {}
    for name in sorted({name for each in norms.values() for name in each}):
        logs = {c: math.log(max(each[name], _TINY)) for c, each in norms.items() if name in each}
        middle = statistics.median(logs.values())
        spread = 1.4826 * statistics.median(abs(x - middle) for x in logs.values())
        limit = max(DEVIATIONS * spread, math.log(RATIO))
        for client, x in logs.items():
            if abs(x - middle) > limit:
                strange.setdefault(
                    client,
                    f"{name!r} has norm {norms[client][name]:.3g}; the median of the round is "
                    f"{math.exp(middle):.3g}",
                )
    return dict(sorted(strange.items()))


_TINY = 1e-30
"""In place of a norm of zero, which has no logarithm."""
