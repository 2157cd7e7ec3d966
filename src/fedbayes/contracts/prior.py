"""How strongly a method's prior draws clients to the server, in one unit for all methods.

In some papers λ is relative to the mean loss of a client, in others to the summed loss. A client's
posterior is p(D_s | φ) p(φ | w), so the prior's own λ is the one relative to the summed loss.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Prior:
    """The prior p(φ_s | w) of a client's weights around the server's.

    Examples:
        >>> from fedbayes.contracts import Prior
        >>> Prior("precision", 20.0).strength
        20.0
    """

    kind: Literal["precision", "inverse scale", "precision of the slab"]
    """λ of N(w, 1/λ), of Lap(w, 1/λ), or of the slab N(w, 1/λ) of weights whose gate is open."""
    strength: float
    """λ relative to the client's summed loss; λ / N_s is relative to its mean loss."""


@dataclass(frozen=True)
class ClientNote:
    """What holds of a client by its number of training samples."""

    prior: Prior | None = None
    """The prior of its weights around the server's, as far as the method draws them there."""
    falls_short: str = ""
    """What it does instead of what the method is for, in words that follow "clients"."""


def in_words(prior: Callable[[int], Prior | None], sizes: Iterable[int]) -> str:
    """The priors of clients in a sentence; empty if there are none.

    Args:
        prior: of a client of so many training samples.
        sizes: training samples of each client.
    """
    found = [(one, size) for size in sizes if size and (one := prior(size)) is not None]
    if not found:
        return ""
    summed = _range([one.strength for one, _ in found])
    mean = _range([one.strength / size for one, size in found])
    return (
        f"prior around the server: {found[0][0].kind} {summed} relative to the summed loss of a "
        f"client, {mean} relative to its mean loss"
    )


def _range(values: list[float]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"
