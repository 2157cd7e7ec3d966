"""Low-rank changes of one layer, made one: sums of their factors, and least squares on inputs.

A client s changed a layer's weight W by ΔW_s = scale_s B_s A_s. Every function here takes the
clients' changes of one layer and gives one of the wanted rank. `least_squares` is the one in
function space; the others need no inputs, and agree with `add_weighted_adapter` of PEFT where its
types have the same names (`ties` and `dare` with `ties_svd` and `dare_linear_svd`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from fedbayes.core import seeds
from fedbayes.errors import ModelError
from fedbayes.fusion.settings import AdapterSettings, AdapterTaskSettings
from fedbayes.fusion.task_vectors import dropped, elected

_TINY = 1e-30
OFF_DIAGONAL = 0.9
"""Factor of the entries of second moments off their diagonal, in RegMean."""


@dataclass(frozen=True)
class LowRank:
    """A change `scale` B A of a layer's weight [out, in].

    Examples:
        >>> import torch
        >>> from fedbayes.fusion.low_rank import LowRank
        >>> LowRank(torch.ones(1, 3), torch.ones(2, 1), 0.5).whole.shape
        torch.Size([2, 3])
    """

    a: Tensor
    """[rank, in]"""
    b: Tensor
    """[out, rank]"""
    scale: float = 1.0

    @property
    def rank(self) -> int:
        """Rows of A."""
        return len(self.a)

    @property
    def whole(self) -> Tensor:
        """The change itself, float64 [out, in]."""
        return self.scale * self.b.double() @ self.a.double()


@dataclass(frozen=True)
class LayerChanges:
    """What S clients made of one layer."""

    layer: str
    """Its name."""
    clients: Sequence[LowRank | None]
    """Their changes; None: this client's adapter leaves the layer as it is."""
    alpha: Sequence[float]
    """Their shares, which add to 1."""
    rank: int
    """Of the change that is wanted."""
    moments: Sequence[Tensor] = field(default=())
    """E[x xᵀ] of each client's inputs of the layer, float64 [in, in], where a method needs it."""

    @property
    def changed(self) -> list[tuple[float, LowRank, int]]:
        """Share, change and place of the clients that change the layer."""
        each = zip(self.alpha, self.clients, range(len(self.clients)), strict=True)
        return [(share, one, place) for share, one, place in each if one is not None]


def least_squares(changes: LayerChanges, settings: AdapterSettings) -> LowRank:
    """The change of the wanted rank that answers as the clients' do, each on its own inputs.

    The minimum over M of rank r of Σ_s α_s E‖(M − ΔW_s) x_s‖², with second moments C_s of x_s. With
    C = Σ_s α_s C_s = L Lᵀ and M* = Σ_s α_s ΔW_s C_s C⁻¹, the sum is ‖(M − M*) L‖² and a constant.
    So M = [M* L]_r L⁻¹, where [·]_r keeps the r largest singular values: a generalized low-rank
    approximation. `ridge` of the mean diagonal of C is added to each C_s. M* is never formed: its
    rank is that of the clients' B together.

    Examples:
        >>> import torch
        >>> from fedbayes.fusion.low_rank import LayerChanges, LowRank, least_squares
        >>> from fedbayes.fusion.settings import AdapterFunctionSettings
        >>> own = LowRank(torch.randn(2, 5), torch.randn(4, 2))
        >>> moment = torch.eye(5, dtype=torch.float64)
        >>> changes = LayerChanges("query", [own, own], [0.5, 0.5], 2, [moment, moment])
        >>> fused = least_squares(changes, AdapterFunctionSettings())
        >>> torch.testing.assert_close(fused.whole, own.whole, check_dtype=False)
    """
    b, right, total = _normal(changes, getattr(settings, "ridge", 0.0), 1.0)
    factor = torch.linalg.cholesky(total)
    inside = torch.linalg.solve_triangular(factor, right.T, upper=False).T
    return _truncated(b, inside, changes.rank, factor)


def regmean(changes: LayerChanges, settings: AdapterSettings) -> LowRank:
    """M* of `least_squares` as RegMean has it (Jin et al. 2023, eq. 2), then its nearest of the
    rank: entries of C_s off the diagonal are scaled by 0.9, and inputs do not weigh the rank.
    """
    b, right, total = _normal(changes, getattr(settings, "ridge", 0.0), OFF_DIAGONAL)
    return _truncated(b, torch.linalg.solve(total, right, left=False), changes.rank)


def _normal(changes: LayerChanges, ridge: float, off: float) -> tuple[Tensor, Tensor, Tensor]:
    """All B side by side [out, R], all α scale A C [R, in] below another, and Σ α C [in, in]."""
    scaled = [off * one + (1 - off) * one.diagonal().diag() for one in changes.moments]
    total = sum(
        (share * one for share, one in zip(changes.alpha, scaled, strict=True)),
        torch.zeros_like(scaled[0]),
    )
    more = float(ridge * total.diagonal().mean()) + _TINY
    for one in (total, *scaled):
        one.diagonal().add_(more)
    found = changes.changed
    rows = [share * one.scale * one.a.double() @ scaled[place] for share, one, place in found]
    return torch.cat([one.b.double() for _, one, _ in found], 1), torch.cat(rows), total


def _truncated(b: Tensor, right: Tensor, rank: int, factor: Tensor | None = None) -> LowRank:
    """[b right]_r factor⁻¹, by factors of equal norm; zeros where its rank is less."""
    basis, small = torch.linalg.qr(b)
    left, values, rows = torch.linalg.svd(small @ right, full_matrices=False)
    found = min(rank, len(values))
    root = values[:found].sqrt()
    a = rows[:found] if factor is None else _behind(rows[:found], factor)
    a, b = root[:, None] * a, basis @ left[:, :found] * root
    # Factors of equal norm, whatever the metric was.
    balance = (b.norm(dim=0) / a.norm(dim=1).clamp_min(_TINY)).sqrt()
    balance = torch.where(balance > 0, balance, 1.0)
    return _of_rank(balance[:, None] * a, b / balance, rank)


def _behind(rows: Tensor, factor: Tensor) -> Tensor:
    """Rows · factor⁻¹."""
    found: Tensor = torch.linalg.solve_triangular(factor, rows, upper=False, left=False)
    return found


def _of_rank(a: Tensor, b: Tensor, rank: int) -> LowRank:
    """The change B A by factors of this rank, with zeros where they have less."""
    more = rank - len(a)
    a, b = functional.pad(a, (0, 0, 0, more)), functional.pad(b, (0, more))
    return LowRank(a.contiguous(), b.contiguous())


def svd(changes: LayerChanges, settings: AdapterSettings) -> LowRank:
    """The nearest of the rank to Σ_s α_s ΔW_s, whatever the inputs are."""
    b, right = _sum(changes)
    return _truncated(b, right, changes.rank)


def cat(changes: LayerChanges, settings: None = None) -> LowRank:
    """Σ_s α_s ΔW_s exactly: factors side by side, and so of the sum of the ranks."""
    b, right = _sum(changes)
    return _of_rank(right, b, changes.rank)


def _sum(changes: LayerChanges) -> tuple[Tensor, Tensor]:
    """Factors [out, R] and [R, in] of Σ_s α_s ΔW_s."""
    found = changes.changed
    rows = [share * one.scale * one.a.double() for share, one, _ in found]
    return torch.cat([one.b.double() for _, one, _ in found], 1), torch.cat(rows)


def average(changes: LayerChanges, settings: None = None) -> LowRank:
    """The means of A and of B, as one round of FedAvg has them: not the mean of B A.

    Raises:
        ModelError: ranks or scales differ, or a client has no adapter there.
    """
    found = _alike(changes, "average")
    if len({one.scale for one in found}) > 1:
        scales = ", ".join(f"{one.scale:g}" for one in found)
        raise ModelError(
            f"average: adapters of {changes.layer} are scaled by {scales} (lora_alpha, "
            "use_rslora), and B and A have no mean. Use svd or function"
        )
    a = sum(share * one.a.double() for share, one in zip(changes.alpha, found, strict=True))
    b = sum(share * one.b.double() for share, one in zip(changes.alpha, found, strict=True))
    assert isinstance(a, Tensor)
    assert isinstance(b, Tensor)
    return _of_rank(found[0].scale * a, b, changes.rank)


def linear(changes: LayerChanges, settings: None = None) -> LowRank:
    """Σ_s √(α_s scale_s) A_s and the same of B, as PEFT's `linear`: a rough sum of B A.

    Raises:
        ModelError: ranks differ, or a client has no adapter there.
    """
    found = _alike(changes, "linear")
    roots = [(share * one.scale) ** 0.5 for share, one in zip(changes.alpha, found, strict=True)]
    a = sum(root * one.a.double() for root, one in zip(roots, found, strict=True))
    b = sum(root * one.b.double() for root, one in zip(roots, found, strict=True))
    assert isinstance(a, Tensor)
    assert isinstance(b, Tensor)
    return _of_rank(a, b, changes.rank)


def _alike(changes: LayerChanges, method: str) -> list[LowRank]:
    """The clients' changes, which have one rank."""
    found = [one for one in changes.clients if one is not None]
    ranks = ", ".join("none" if one is None else str(one.rank) for one in changes.clients)
    if len(found) < len(changes.clients) or len({one.rank for one in found}) > 1:
        raise ModelError(
            f"{method}: adapters of {changes.layer} have the ranks {ranks}, and their factors "
            "cannot be added. Use svd, cat or function"
        )
    return found


def ties(changes: LayerChanges, settings: AdapterTaskSettings) -> LowRank:
    """TIES of the changes of a layer (`fedbayes.fusion.task_vectors.ties`), then its nearest of
    the rank.
    """
    alpha, vectors, shape = _vectors(changes)
    mean, _ = elected(vectors, alpha, settings.density)
    return _nearest(settings.scale * mean.reshape(shape), changes.rank)


def dare(changes: LayerChanges, settings: AdapterTaskSettings) -> LowRank:
    """DARE of the changes of a layer (`fedbayes.fusion.task_vectors.dare`), then its nearest of
    the rank.
    """
    alpha, vectors, shape = _vectors(changes)
    rng = seeds.torch_rng(settings.drop_seed, f"dropped changes of {changes.layer}")
    total = dropped(vectors, alpha, settings.density, rng)
    return _nearest(settings.scale * total.reshape(shape), changes.rank)


def _vectors(changes: LayerChanges) -> tuple[list[float], list[Tensor], torch.Size]:
    """Shares, changes as vectors and their shape, of the clients that change the layer."""
    found = changes.changed
    wholes = [one.whole for _, one, _ in found]
    return [share for share, _, _ in found], [one.flatten() for one in wholes], wholes[0].shape


def _nearest(whole: Tensor, rank: int) -> LowRank:
    """The nearest change of a rank to one of any."""
    return _truncated(torch.eye(len(whole), dtype=whole.dtype), whole, rank)


def solved(
    weights: Sequence[Tensor], moments: Sequence[Tensor], alpha: Sequence[float], ridge: float
) -> Tensor:
    """The weight that answers as the clients' do, each on its own inputs, of any rank.

    Args:
        weights: of the clients, [out, in].
        moments: of their inputs, float64 [in, in].
        alpha: their shares.
        ridge: toward the mean weight, of the mean diagonal of the moments.

    Returns:
        float64 [out, in].
    """
    pairs = list(zip(alpha, moments, weights, strict=True))
    total = sum((share * one for share, one, _ in pairs), torch.zeros_like(moments[0]))
    more = (float(ridge * total.diagonal().mean()) + _TINY) * torch.eye(len(total)).double()
    right = sum(share * w.double() @ (one + more) for share, one, w in pairs)
    found: Tensor = torch.linalg.solve(total + more, right, left=False)
    return found


def nearer(inputs: Tensor, missing: Tensor, ridge: float) -> Tensor:
    """What to add to a last layer's weight and bias for outputs that lack something.

    Args:
        inputs: of the layer, [n, in].
        missing: from its outputs, [n, K].
        ridge: toward no change, of the mean diagonal of the second moments.

    Returns:
        float64 [K, in + 1], the bias last.
    """
    x = torch.cat([inputs.double(), inputs.new_ones(len(inputs), 1).double()], 1)
    moments = x.T @ x / len(x)
    moments.diagonal().add_(float(ridge * moments.diagonal().mean()) + _TINY)
    found: Tensor = torch.linalg.solve(moments, x.T @ missing.double() / len(x)).T
    return found
