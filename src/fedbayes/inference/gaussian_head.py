"""Gaussian classes of features, by sums: discriminant analysis with its posterior.

Features h [D] of class k are N(μ_k, Σ), with one Σ for all classes (linear discriminant analysis)
or one for each (quadratic). Under the conjugate prior

    Σ ~ IW(n₀ Ψ, n₀ + D − 1),    μ_k | Σ ~ N(m₀, Σ / κ₀),

with Ψ and m₀ of all rows together, the posterior follows from sums over rows, which add over
clients (Murphy 2007, Conjugate Bayesian analysis of the Gaussian distribution, sections 8 and 9).
With N rows of a group that share a Σ, n_k of class k of mean x̄_k, and S = Σ_i (h_i − x̄)(h_i − x̄)ᵀ
around the means of classes,

    m_k = (κ₀ m₀ + n_k x̄_k) / κ_k,   κ_k = κ₀ + n_k,
    Σ̂ = (n₀ Ψ + S + Σ_k κ₀ n_k / κ_k (x̄_k − m₀)(x̄_k − m₀)ᵀ) / (n₀ + N),

and the posterior predictive of class k is a Student t of n₀ + N degrees of freedom around m_k with
the scale Σ̂ (κ_k + 1) / κ_k. For one Σ, Ψ is a multiple of I of the mean variance, so that
n₀ / (n₀ + N) is the shrinkage of scikit-learn's `LinearDiscriminantAnalysis`. For one of each class
Ψ is the Σ̂ of that.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbayes.core.brief import Brief

GRID = torch.logspace(-2, 6, 81, dtype=torch.float64)
"""Values of n₀ of which the most probable is taken."""
ROUNDING = 1e-9
"""Part of its sums by which a client may contradict itself."""
_LEAST = 1e-12
"""Least mean variance of features."""


@dataclass(frozen=True, repr=False)
class Moments(Brief):
    """Sums over rows of features, float64, which add over clients."""

    counts: Tensor
    """Rows of each class, [K]."""
    sums: Tensor
    """Σ h of each class, [K, D]."""
    products: Tensor
    """Σ h hᵀ, of all classes [1, D, D] or of each [K, D, D]."""

    @classmethod
    def of(cls, features: Tensor, y: Tensor, classes: int, *, each: bool = False) -> "Moments":
        """Those of some rows.

        Args:
            features: [n, D].
            y: classes, int64 [n].
            classes: K.
            each: whether products are of each class.
        """
        h = features.double()
        own = torch.nn.functional.one_hot(y, classes).to(h)
        groups = own.T if each else torch.ones(1, len(h)).to(h)
        products = torch.stack([(h * weight[:, None]).T @ h for weight in groups])
        return cls(own.sum(0), own.T @ h, products)

    @classmethod
    def added(cls, clients: Sequence["Moments"]) -> "Moments":
        """Those of all rows of several clients, at least one."""
        parts = zip(*((one.counts, one.sums, one.products) for one in clients), strict=True)
        return cls(*(torch.stack(own).sum(0) for own in parts))

    def times(self, factor: float) -> "Moments":
        """With every row counted several times."""
        return Moments(self.counts * factor, self.sums * factor, self.products * factor)

    def trouble(self, rows: float) -> str:
        """Why no rows of this number have these sums; empty if some may."""
        counts, sums, products = self.counts, self.sums, self.products
        wide = (*sums.shape[1:], *sums.shape[1:])
        shapes = ((1, *wide), (len(counts), *wide)) if counts.ndim == 1 else ()
        if sums.ndim != 2 or len(sums) != len(counts) or products.shape not in shapes:
            return "their shapes do not fit"
        if any(t.dtype != torch.float64 or not t.isfinite().all() for t in vars(self).values()):
            return "they are not finite 64-bit numbers"
        if bool((counts < 0).any()) or abs(float(counts.sum()) - rows) > ROUNDING * rows:
            return f"counts of classes are negative, or do not add to {rows:g}"
        squares = products.diagonal(dim1=1, dim2=2)
        least = sums.square() / counts.clamp_min(1e-300)[:, None]
        least = least if len(products) > 1 else least.sum(0, keepdim=True)
        room = ROUNDING * float(squares.abs().max())
        if bool((squares < least - room).any()):
            return "squares are less than those of the means"
        if not torch.allclose(products, products.mT, rtol=0, atol=room):
            return "products are not symmetric"
        return ""

    @property
    def shared(self) -> "Moments":
        """With products of all classes together."""
        return Moments(self.counts, self.sums, self.products.sum(0, keepdim=True))

    @property
    def means(self) -> Tensor:
        """x̄ [K, D]; 0 of classes without rows."""
        return self.sums / self.counts.clamp_min(_LEAST)[:, None]


@dataclass(frozen=True, repr=False)
class GaussianHead(Brief):
    """Classes of features, and what their predictions need.

    Examples:
        >>> import torch
        >>> from fedbayes.inference.gaussian_head import GaussianHead, Moments
        >>> features, y = torch.randn(40, 3), torch.arange(40) % 2
        >>> one, other = Moments.of(features[:20], y[:20], 2), Moments.of(features[20:], y[20:], 2)
        >>> head = GaussianHead.fit([one, other])
        >>> head.scores(features).shape, head.linear()[0].shape
        (torch.Size([40, 2]), torch.Size([2, 3]))
    """

    prior: Tensor
    """log p(k) [K], as if each class had one more row."""
    means: Tensor
    """m_k [K, D]."""
    roots: Tensor
    """A with AᵀA = Σ̂⁻¹: of all classes [1, D, D], or of each [K, D, D]."""
    strength: Tensor
    """κ_k [K]."""
    freedom: Tensor
    """Degrees of freedom, n₀ + N [1], or n₀ + n_k [K]."""
    prior_rows: float
    """n₀."""

    @classmethod
    def fit(
        cls,
        clients: Sequence[Moments],
        prior_rows: float | None = None,
        mean_rows: float = 0.01,
    ) -> "GaussianHead":
        """The posterior given the sums of all clients.

        Args:
            clients: their sums; products of each class make quadratic discriminants.
            prior_rows: n₀; the most probable given the sums by default.
            mean_rows: κ₀.
        """
        found = Moments.added(clients)
        found = Moments(found.counts.clamp_min(0), found.sums, found.products)
        pooled = cls._of(found.shared, _scaled_identity(found.shared), prior_rows, mean_rows)
        if len(found.products) == 1:
            return pooled
        return cls._of(found, torch.linalg.inv(pooled.roots[0]), prior_rows, mean_rows)

    @classmethod
    def _of(
        cls, found: Moments, root: Tensor, prior_rows: float | None, mean_rows: float
    ) -> "GaussianHead":
        """With Ψ = root rootᵀ."""
        counts, means, each = found.counts, found.means, len(found.products) > 1
        rows = counts if each else counts.sum()[None]
        overall = found.sums.sum(0) / counts.sum().clamp_min(_LEAST)
        strength = mean_rows + counts
        apart = means - overall
        share = mean_rows * counts / strength
        # Around the means: Σ h hᵀ − Σ_k n_k x̄_k x̄_kᵀ, and what the prior of the means adds.
        terms = share[:, None, None] * apart[:, :, None] * apart[:, None] - (
            counts[:, None, None] * means[:, :, None] * means[:, None]
        )
        scatter = found.products + (terms if each else terms.sum(0, keepdim=True))
        inverse = torch.linalg.inv(root)
        whitened = inverse @ scatter @ inverse.T
        values, vectors = torch.linalg.eigh((whitened + whitened.mT) / 2)
        values = values.clamp_min(0)  # rounding, or noise on the sums
        if prior_rows is None:
            evidence = _evidence(values, rows)
            prior_rows = float(GRID[int(evidence.argmax())])
        freedom = prior_rows + rows
        scale = ((prior_rows + values) / freedom[:, None]).rsqrt()
        return cls(
            ((counts + 1) / (counts.sum() + len(counts))).log(),
            (mean_rows * overall + found.sums) / strength[:, None],
            scale[..., None] * vectors.mT @ inverse,
            strength,
            freedom,
            prior_rows,
        )

    def scores(self, features: Tensor) -> Tensor:
        """Log p(k) + log p(h | k) under the posterior predictive, [n, K], of features [n, D]."""
        h = features.double()
        columns, prior, means = h.shape[1], self.prior.to(h.device), self.means.to(h)
        roots, freedom = self.roots.to(h), self.freedom.to(h)
        determinants = -2 * torch.linalg.slogdet(roots)[1]
        wider = (self.strength + 1) / self.strength
        found = []
        for k, mean in enumerate(means):
            group = k if len(roots) > 1 else 0
            root, free = roots[group], freedom[group]
            distance = ((h - mean) @ root.T).square().sum(1) / wider[k]
            log_det = determinants[group] + columns * wider[k].log()
            constant = torch.lgamma((free + columns) / 2) - torch.lgamma(free / 2)
            constant = constant - (columns * (math.pi * free).log() + log_det) / 2
            fall = (free + columns) / 2 * torch.log1p(distance / free)
            found.append(prior[k] + constant - fall)
        return torch.stack(found, dim=1)

    def linear(self) -> tuple[Tensor, Tensor]:
        """Weights [K, D] and biases [K] of linear discriminants, of one Σ̂ without its uncertainty.

        w_k = Σ̂⁻¹ m_k, b_k = −½ m_kᵀ Σ̂⁻¹ m_k + log p(k).
        """
        (root,) = self.roots
        turned = self.means @ root.T
        return turned @ root, self.prior - turned.square().sum(1) / 2


def _scaled_identity(found: Moments) -> Tensor:
    """σ I, with σ² the mean variance of the features within classes."""
    columns = found.sums.shape[1]
    within = (
        found.products.diagonal(dim1=1, dim2=2).sum()
        - (found.counts[:, None] * found.means.square()).sum()
    )
    variance = (within / (columns * found.counts.sum().clamp_min(1))).clamp_min(_LEAST)
    return variance.sqrt() * torch.eye(columns, dtype=torch.float64)


def _evidence(values: Tensor, rows: Tensor) -> Tensor:
    """Log p(rows | n₀) of scatters' eigenvalues at each point of `GRID`, up to a constant."""
    columns = values.shape[1]
    before = GRID + columns - 1
    total = torch.zeros_like(GRID)
    for own, count in zip(values, rows, strict=True):
        after = before + count
        total += torch.special.multigammaln(after / 2, columns)
        total -= torch.special.multigammaln(before / 2, columns)
        total += before * columns * GRID.log() / 2
        total -= after * (GRID[:, None] + own).log().sum(1) / 2
    return total
