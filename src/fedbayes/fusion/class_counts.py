"""Bayes' rule for clients whose classes differ in frequency: formulas by their counts."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from fedbayes.errors import ModelError
from fedbayes.matching import network as matched

RESTART = 1e-4
"""Weight ε of the classes' frequencies in the stationary distribution."""
CONNECTS = 0.2
"""Least frequency of a class among a client's samples, relative to that among all, with which the
client connects it to others. From a few stray samples a network hardly learns a class. Chosen on
shards of digits under seeds 10 to 13."""
PROBIT = math.pi / 8
"""λ of E σ(f) ≈ σ(f̄ / (1 + λ v)^½) for a logit f of variance v (MacKay 1992)."""
CORRELATED = 50
"""Samples of a client with which the errors of two clients' logits correlate by a half: networks
that learn from few samples err alike. With 0, twenty linear classifiers of 40 digits are together
.05 too confident (`tests/fusion/test_teacher.py`). More suits networks trained for long, 0 those
trained for short. Chosen on 56 federations by training images and digits that no client had."""
_SHARED = 0.05
"""Least 1 − 1/N of a class in the variance between clients: with one client there is none."""


def class_offsets(counts: npt.ArrayLike | Tensor, clients: int | None = None) -> Tensor:
    """How much more frequent classes are among all samples than where they come from, [K].

    log p_k − Σ_s share_sk log p_s(k), with frequencies as if each client had one more sample of
    every class.

    Args:
        counts: samples of each client and class, [S, K].
        clients: how many there are.

    Raises:
        ModelError: as `class_shares`.
    """
    shares = class_shares(counts, clients).double()
    more = torch.as_tensor(counts, dtype=torch.float64) + 1
    shares = shares.to(more.device)
    own = (more / more.sum(1, keepdim=True)).log()
    of_all = (more.sum(0) / more.sum()).log()
    return (of_all - (shares * own).sum(0)).float()


def class_shares(counts: npt.ArrayLike | Tensor, clients: int | None = None) -> Tensor:
    """Each client's share of every class, [S, K], from its samples.

    Of a class that nobody has, all clients have an equal share: they agree that it is rare. A
    client without samples has no share in the others.

    Args:
        counts: samples of each client and class, [S, K].
        clients: how many there are.

    Raises:
        ModelError: counts are not finite, negative, all zero or of another number of clients.
    """
    table = torch.as_tensor(counts, dtype=torch.float64)
    if table.ndim != 2 or not table.numel():
        raise ModelError(f"counts have shape {tuple(table.shape)}. Give one row for each client")
    if clients is not None and len(table) != clients:
        raise ModelError(f"counts have {len(table)} clients; there are {clients}")
    if not torch.isfinite(table).all() or (table < 0).any() or not table.any():
        raise ModelError("counts of samples must be at least 0, and not all of them 0")
    return torch.from_numpy(matched.class_shares(table.numpy(), *table.shape)).float()


def stationary(scores: Tensor, counts: Tensor, restart: float = RESTART) -> Tensor:
    """The stationary distribution q = (1 − ε) M q + ε θ over the classes, [n, K]; see `Teacher`.

    M is a product of the clients' predictions [K, S] and their shares [S, K], so that a linear
    system of S unknowns a = shares · q for each input is solved, and none of K. Frequencies θ are
    those with one more sample of every class at every client, so that no class has none.

    Args:
        scores: logits of the clients, [S, n, K].
        counts: samples of each client and class, [S, K].
        restart: ε, above 0 where the clients' classes may not connect.

    Returns:
        Probabilities, of the type of the scores.
    """
    table = counts.double()
    had, sizes = table.sum(0), table.sum(1)
    # A class that nobody has is left by way of all clients, by their samples.
    shares = torch.where(had > 0, table / had.clamp_min(1e-300), sizes[:, None] / sizes.sum())
    theta = frequencies(table)
    unseen = (table == 0) & (sizes > 0)[:, None]
    p = scores.double().masked_fill(unseen[:, None], -torch.inf).softmax(-1)
    flow = torch.einsum("sk,tnk->nst", shares, p)
    system = torch.eye(len(p), dtype=p.dtype, device=p.device) - (1 - restart) * flow
    start = (restart * shares @ theta).expand(len(flow), -1)
    mass = torch.linalg.solve(system, start)
    found = (1 - restart) * torch.einsum("nt,tnk->nk", mass, p) + restart * theta
    return found.to(scores.dtype)


def groups(counts: Tensor) -> list[Tensor]:
    """Classes that no client connects to others, as a mask [K] of each group.

    A client connects those of its classes that are at least `CONNECTS` times as frequent among its
    samples as among all.

    Args:
        counts: samples of each client and class, [S, K]. Classes that nobody has are in no group.
    """
    table = counts.double().cpu().numpy()
    of_all = table.sum(0) / table.sum()
    known = (table > 0) & (table >= CONNECTS * of_all * table.sum(1, keepdims=True))
    _, label = connected_components(known.T.astype(int) @ known)
    return [torch.from_numpy(label == own) for own in np.unique(label[of_all > 0])]


def of_groups(log: Tensor, of_each: Tensor, each: Sequence[Tensor]) -> Tensor:
    """Logits `log` [n, K] with these probabilities of groups of classes.

    Args:
        log: of which the ratios within each group stay, and classes that are in no group.
        of_each: log-probabilities of the groups, [n, G].
        each: masks of the groups, [K]; of a single one all stays as it is.

    Examples:
        >>> import torch
        >>> from fedbayes.fusion.class_counts import groups, of_groups
        >>> masks = groups(torch.tensor([[9, 9, 0], [0, 0, 9]]))
        >>> even, sure = torch.tensor([[3.0, 1.0, 4.0]]), torch.tensor([[2.0, 1.0]])
        >>> of_groups(even.log(), sure.log(), masks).softmax(-1)
        tensor([[0.5000, 0.1667, 0.3333]])
    """
    if len(each) < 2:
        return log
    found = log.log_softmax(-1)
    inside = torch.stack(list(each)).any(0).to(log.device)
    wanted = of_each.log_softmax(-1) + torch.logsumexp(found[:, inside], -1, keepdim=True)
    for number, own in enumerate(each):
        shift = wanted[:, number] - torch.logsumexp(found[:, own], -1)
        found = torch.where(own.to(log.device), found + shift[:, None], found)
    return found


def in_groups(log: Tensor, each: Sequence[Tensor]) -> Tensor:
    """Logits of groups of classes, [n, G], from those of classes [n, K]."""
    return torch.stack([torch.logsumexp(log[:, own.to(log.device)], -1) for own in each], -1)


def frequencies(counts: Tensor) -> Tensor:
    """Of the classes over all clients, with one more sample of every class at every client [K]."""
    had = counts.double().sum(0) + len(counts)
    return had / had.sum()


def sharpness(
    scores: Tensor,
    shares: Tensor,
    log: Tensor,
    temperatures: Sequence[float | None],
    samples: float = math.inf,
) -> tuple[Tensor, Tensor]:
    """The factors a of logits and b of probabilities that `Teacher.pooled` describes, [n, 1].

    Args:
        scores: logits of calibrated clients, [S, n, K].
        shares: of each client in each class, [S, K].
        log: of what they say together, [n, K]; of any scale.
        temperatures: by which the clients' logits were divided, [S]; None: by none. Below 1 they
            tell of no variance.
        samples: of a client, on average.

    Examples:
        >>> import torch
        >>> from fedbayes.fusion.class_counts import sharpness
        >>> scores = torch.tensor([[[1.0, -1.0]], [[3.0, -3.0]]])
        >>> shares, log = torch.full((2, 2), 0.5), torch.tensor([[2.0, -2.0]])
        >>> a, b = sharpness(scores, shares, log, [2.0, 2.0])
        >>> round(float(a), 3), round(float(b), 3)  # w = 16, v = 4, N = 2
        (1.326, 1.336)
    """
    f, pi = scores.double(), shares.double()[:, None]
    f = f - f.mean(-1, keepdim=True)
    several = pi.square().sum(0)  # 1 / N by class, [1, K]

    def variance(logits: Tensor) -> Tensor:
        """Of the clients' logits, times λ, [n, 1]."""
        spread = (pi * (logits - (pi * logits).sum(0)).square()).sum(0)
        return 2 * PROBIT * (spread / (1 - several).clamp_min(_SHARED)).mean(-1, keepdim=True)

    undivided = f.new_tensor([max(1.0, t or 1.0) for t in temperatures])[:, None, None]
    alike = CORRELATED / (CORRELATED + samples)
    v, w = variance(f), variance(f * undivided) / (1 - alike)  # clients differ by the rest
    n = (log.double().softmax(-1) / several).sum(-1, keepdim=True)
    a = ((1 + w) / (1 + w * (alike + (1 - alike) / n))).sqrt()
    b = (1 + v * (1 - 1 / n)).sqrt()
    return a.to(scores.dtype), b.to(scores.dtype)
