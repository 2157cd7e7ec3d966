"""DSVGD: particles of a posterior that clients move by Stein variational gradients."""

import math
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from fedbayes.contracts import (
    About,
    Federation,
    Info,
    Known,
    Loss,
    Method,
    Part,
    Problem,
    Report,
    Reports,
    RoundContext,
    Sampler,
    Solved,
    Sum,
    Tree,
    adam,
    nll,
)
from fedbayes.contracts.changes import norm
from fedbayes.contracts.drawn import own_prior, sampler_over, weights_alone
from fedbayes.contracts.natural import KNOWN_STD
from fedbayes.contracts.personal import PersonalTensors
from fedbayes.core import seeds
from fedbayes.core.fields import Chosen
from fedbayes.core.messages import Message, dense
from fedbayes.core.tensors import Samples, Tensors, added, named, part
from fedbayes.errors import MessageError
from fedbayes.fusion.curvature import require_curvature, summed_diagonal
from fedbayes.fusion.posterior_settings import CurvatureSettings


@dataclass(frozen=True)
class DsvgdServer:
    """Particles of the posterior, and the Gaussian whose mean and covariance they have."""

    particles: Tensors
    """Stacked [particles, ...] by name."""
    precision: Tensor
    """Λ of all d weights, float64 [d, d]; its diagonal [d] where there are d particles or fewer."""
    shift: Tensor
    """Λ times mean, float64 [d]."""
    learnt: bool = False
    """Whether there was a report: until then particles start training, and tell no density."""


def _typical(method: "Dsvgd", server: DsvgdServer, run: Federation) -> float:
    """The norm of what is learnt, or that a newcomer's data may well say."""
    least, began = KNOWN_STD**-2, [w.double() for w in run.network.initial.values()]
    shift = max(norm([server.shift]), least * norm(began))
    return math.hypot(norm([_diagonal(server.precision).clamp_min(least)]), shift)


class Dsvgd(Method[DsvgdServer, PersonalTensors, Sum]):
    """Distributed Stein variational gradient descent (Kassab and Simeone 2022), by Gaussians.

    The posterior is q(w) ∝ N(0, s²) Π t_k(w). Client k keeps its factor t_k, 1 at first. It takes
    the server's particles by Stein variational gradients (Liu and Wang 2016) toward

        q_k(w) ∝ q(w)/t_k(w) exp(−n_k ℓ_k(w)/T),

    and multiplies its factor by (q_k/q)^ρ. Kernels are exp(−‖w − v‖²/h), h the median of squared
    distances over log N.

    The paper estimates log q and log t_k by kernels at particles. Errors of such a ratio feed back:
    on linear regression with 20 or 100 particles, our means were over 150 posterior standard
    deviations off after three rounds of each client. Here densities are Gaussians. Particles have
    the mean and the covariance of q, where the server puts them. At rest few particles are too
    narrow, so the precision of q_k is not theirs. It is Λ_c + Λ_k, with that of q/t_k, N(c, Λ_c⁻¹),
    and the data's E[∇²n_k ℓ_k/T]. With more particles than weights that is

        Λ_k = Cov(w, w)⁻¹ Cov(w, g),   g = ∇n_k ℓ_k(w)/T,

    over particles (Stein's lemma), and the mean of q_k solves Λ_c (m − c) + Λ_k (m − w̄) + ḡ = 0.
    Both are exact where the loss is quadratic. With fewer particles, Λ is diagonal, Λ_k is the mean
    of the particles' Fisher diagonals, and m = w̄.
    """

    name = "dsvgd"
    about = About(
        "particles moved by Stein gradients, Gaussian densities",
        "Kassab and Simeone 2022",
    )
    server_state = DsvgdServer
    client_state = PersonalTensors
    reports = Reports(
        {
            "particle": Part(),
            "factor": Part(origin="zero", tracked=True, range=65536.0, typical=_typical),
        }
    )

    particles: int = Field(10, ge=2, description="N, networks that the server keeps")
    temperature: Annotated[float, Chosen()] = Field(
        1.0, gt=0, description="T of the posterior; 1 is Bayes' rule, less trusts data more"
    )
    prior_std: float = Field(1.0, gt=0, description="s, standard deviation of the prior")
    damping: float | None = Field(
        None,
        gt=0,
        le=1,
        description="ρ, share of a factor's change that is made in a round; none: 1 by the number "
        "of clients in it",
    )

    def recommended(self, known: Known) -> dict[str, Any]:
        """Adam, and a temperature that leaves the data their say."""
        return {**adam(known), "method.temperature": known.tempered(0.2)}

    def check(self, run: Federation) -> None:
        """Weights are all that changes, and precisions of many need a Fisher matrix.

        Raises:
            ConfigError: there is weight decay, the network is to compute in bf16, or the likelihood
                has no Fisher matrix.
            ModelError: the network has buffers, such as running means.
        """
        weights_alone(self.name, run)
        own_prior(self.name, run)
        if self.particles <= _count(run):
            require_curvature(run.likelihood)

    def init(self, run: Federation) -> DsvgdServer:
        """The prior, and particles around the network's initialization."""
        rng = seeds.torch_rng(run.seed, "particles")
        particles = {
            n: w + KNOWN_STD * torch.randn(self.particles, *w.shape, generator=rng).to(w)
            for n, w in run.network.initial.items()
        }
        precision = self._prior(run)
        return DsvgdServer(particles, precision, torch.zeros_like(_diagonal(precision)))

    def _prior(self, run: Federation) -> Tensor:
        """Its precision, float64: a matrix, or a diagonal where particles are few."""
        precision = torch.full((_count(run),), self.prior_std**-2, dtype=torch.float64)
        return torch.diag(precision) if self.particles > len(precision) else precision

    def message(self, server: DsvgdServer, at: RoundContext) -> Message:
        """All particles, and whether they tell a density; the same to all."""
        learnt = torch.tensor(float(server.learnt))
        return {**named("particle", server.particles), "learnt": learnt}

    def expected(self, message: Message, run: Federation) -> Message:
        """Particles, and a change of natural parameters."""
        found, precision = named("particle", part(dense(message), "particle")), self._prior(run)
        factor = {"precision": precision, "shift": _diagonal(precision)}
        return {**found, **{f"factor/{n}": t.float() for n, t in factor.items()}}

    def problem(
        self, message: Message, client: PersonalTensors, samples: Samples, at: RoundContext
    ) -> Problem:
        """Move the server's particles toward the tilted posterior."""
        run, sent = at.run, dense(message)
        start = run.network.prepare(part(sent, "particle"))
        places = _flat(start, run)
        factor = {n: t.to(places) for n, t in client.tensors.items()}
        precision, mean = self._prior(run).to(places), torch.zeros_like(places[0])
        if bool(sent["learnt"]):
            precision, mean = _inverse(_covariance(places)), places.mean(dim=0)
        shift = _times(precision, mean)
        if factor:
            precision, shift = precision - factor["precision"], shift - factor["shift"]
        precision = _floored(precision, self.prior_std**-2)  # it has all of the prior
        kind = next(iter(start.values()))
        return Problem(
            named("particle", start),
            given={
                "count": torch.tensor(float(len(samples.y)), device=run.network.device),
                "pull": precision.to(kind),
                "centre": _times(_inverse(precision), shift).to(kind),
                "cavity": {"precision": precision, "shift": shift},
            },
        )

    def loss(self, run: Federation) -> Loss:
        """The energy per row at particles, times T, whose gradient is the Stein gradient."""
        likelihood = nll(run)

        def loss(parameters: Tensors, batch: Samples, given: Tree, noise: Tree) -> Tensor:
            moved, crowding = _stein(part(parameters, "particle"))
            fits = torch.func.vmap(
                lambda one: likelihood(one, batch, given, noise), randomness="different"
            )(moved)
            apart = torch.cat([moved[n].flatten(1) for n in run.network.initial], 1)
            apart = apart - given["centre"]
            pull = given["pull"]
            pulled = apart @ pull if pull.ndim == 2 else apart * pull
            energy = (pulled * apart).sum() / 2 + crowding
            total: Tensor = fits.sum() + self.temperature / given["count"] * energy
            return total

        return loss

    def validation(self, run: Federation) -> Loss:
        """The mean negative log-likelihood of the particles, without dropout."""
        likelihood = nll(run, training=False)

        def loss(parameters: Tensors, batch: Samples, given: Tree, noise: Tree) -> Tensor:
            fits = torch.func.vmap(lambda one: likelihood(one, batch, given, noise))
            return fits(part(parameters, "particle")).mean()

        return loss

    def local(
        self, message: Message, client: PersonalTensors, samples: Samples, at: RoundContext
    ) -> tuple[Report, PersonalTensors, Info]:
        """Move particles, and infer the Gaussian of the tilted posterior there."""
        problem, run = self.problem(message, client, samples, at), at.run
        solved = at.solve(problem, self.loss(run), samples, validation=self.validation(run))
        particles = part(solved.parameters, "particle")
        places, cavity = _flat(particles, run), problem.given["cavity"]
        mean = places.mean(dim=0)
        if self.particles > places.shape[1]:
            slopes = self._slopes(particles, samples, at)
            steep, apart = slopes - slopes.mean(dim=0), places - mean
            own = torch.linalg.lstsq(apart, steep).solution
            own = _floored((own + own.T) / 2, 0.0)
            whole = _inverse(cavity["precision"] + own)
            mean = whole @ (cavity["shift"] + own @ mean - slopes.mean(dim=0))
        else:
            found = [
                summed_diagonal(
                    {n: t[j] for n, t in particles.items()}, samples, CurvatureSettings(), at
                )
                for j in range(self.particles)
            ]
            every = {n: torch.stack([one[n] for one in found]) for n in particles}
            own = _flat(every, run).mean(dim=0).to(mean) / self.temperature
        shift = _times(cavity["precision"] + own, mean) - cavity["shift"]
        tensors = {**solved.parameters, "factor/precision": own, "factor/shift": shift}
        solved = Solved(tensors, solved.steps, solved.loss, solved.count)
        return self.report(solved, problem, client, at)

    def _slopes(self, particles: Tensors, samples: Samples, at: RoundContext) -> Tensor:
        """Gradients of the summed loss over T at particles, float64 [N, d]."""
        loss = nll(at.run, training=False)
        slope = torch.func.vmap(
            torch.func.grad(lambda one, batch: loss(one, batch, {}, {})), in_dims=(0, None)
        )
        return added(
            [
                len(batch.y) / self.temperature * _flat(slope(particles, batch), at.run)
                for batch in samples.batches(at.run.training.batch_size)
            ]
        )

    def report(
        self, solved: Solved, problem: Problem, client: PersonalTensors, at: RoundContext
    ) -> tuple[Report, PersonalTensors, Info]:
        """Report particles, and the change of the factor; keep the factor with that change.

        Args:
            solved: its parameters are `particle/…`, and the factor that the data would have.
            problem: as it was stated.
            client: the private state.
            at: client and round.
        """
        rho = self.damping or 1 / at.run.cohort
        refined = part(solved.parameters, "factor")
        empty = {n: torch.zeros_like(t) for n, t in refined.items()}
        before = {n: t.to(refined[n]) for n, t in (client.tensors or empty).items()}
        change = {f"factor/{n}": (rho * (t - before[n])).float() for n, t in refined.items()}
        change = at.run.clips.shortened("factor", change)
        after = {n: before[n] + change[f"factor/{n}"].double() for n in refined}
        particles = named("particle", part(solved.parameters, "particle"))
        return Report({**particles, **change}), PersonalTensors(after), solved.info

    def accept(self, server: DsvgdServer, report: Report, run: Federation) -> None:
        """A change leaves the posterior's precision positive.

        Raises:
            MessageError: it does not.
        """
        change = dense(report.tensors)["factor/precision"].double().cpu()
        if float(_least(server.precision + change)) <= 0:
            raise MessageError("it takes more precision off than the posterior has")

    def update(
        self, server: DsvgdServer, reports: Sum, at: RoundContext
    ) -> tuple[DsvgdServer, Info]:
        """Multiply the factors' changes into q, and give the particles' mean its moments."""
        precision = server.precision + reports.tensors["factor/precision"]
        precision = _floored(precision, self.prior_std**-2)
        shift = server.shift + reports.tensors["factor/shift"]
        came, before = (
            _flat(p, at.run).cpu() for p in (part(reports.mean(), "particle"), server.particles)
        )
        came, before = came - came.mean(dim=0), before - before.mean(dim=0)
        gone = came.var(dim=0) <= _GONE * before.var(dim=0)
        found = _around(torch.where(gone, before, came), precision, shift, at.run)
        return found, {"mean_std": float(_diagonal(_inverse(precision)).sqrt().mean())}

    def forget(self, server: DsvgdServer, client: PersonalTensors, run: Federation) -> DsvgdServer:
        """Divide q by the client's factor; particles get the mean and covariance that remain.

        Without all factors they are where they were before the first round.
        """
        if not client.tensors:
            return server
        own = {n: t.to("cpu", torch.float64) for n, t in client.tensors.items()}
        precision = _floored(server.precision - own["precision"], self.prior_std**-2)
        shift, start = server.shift - own["shift"], self.init(run)
        left = (precision - start.precision).abs().max(), shift.abs().max()
        if max(map(float, left)) <= _ROUNDING * float(server.precision.abs().max()):
            return start
        places = _flat(server.particles, run).cpu()
        return _around(places - places.mean(dim=0), precision, shift, run)

    def model(self, server: DsvgdServer, run: Federation) -> Tensors:
        """All particles."""
        return named("particle", server.particles)

    def personal_model(
        self, message: Message, report: Report | None, client: PersonalTensors, run: Federation
    ) -> Tensors | None:
        """Particles of the tilted posterior."""
        return named("particle", part(dense(report.tensors), "particle")) if report else None

    def draws(self, model: Tensors, run: Federation) -> Sampler:
        """Outputs of all particles."""
        return sampler_over(part(model, "particle"), run.network)


def _around(apart: Tensor, precision: Tensor, shift: Tensor, run: Federation) -> DsvgdServer:
    """The state of a Gaussian: rows [N, d] of mean 0 give the particles' places around its mean."""
    covariance, spread = _inverse(precision), _covariance(apart)
    if precision.ndim == 2:
        roots = torch.linalg.cholesky(spread)
        unit = torch.linalg.solve_triangular(roots, apart.T, upper=False)
        apart = (torch.linalg.cholesky(covariance) @ unit).T
    else:
        apart = apart * (covariance / spread).sqrt()
    places = _times(covariance, shift) + apart
    particles, start = {}, 0
    for name, w in run.network.initial.items():
        end = start + w.numel()
        particles[name] = places[:, start:end].reshape(-1, *w.shape).to(w.dtype)
        start = end
    return DsvgdServer(particles, precision, shift, learnt=True)


def _stein(particles: Tensors) -> tuple[Tensors, Tensor]:
    """Particles as functions whose gradients are Stein's.

    Returns:
        The particles themselves, such that the gradient of Σ_j E(w_j) by w_i is
        Σ_j k(w_i, w_j) ∇E(w_j); and a scalar of gradient −Σ_j ∇_j k(w_i, w_j).
    """
    still = {n: t.detach() for n, t in particles.items()}
    apart = _squares(still, still)
    count = len(apart)
    one, other = torch.triu_indices(count, count, offset=1, device=apart.device)
    median = torch.quantile(apart[one, other], 0.5)
    width = (median / math.log(count)).clamp_min(_NARROW)
    kernel = torch.exp(-_squares(particles, still) / width)
    fixed = kernel.detach()
    moved = {
        n: t + torch.einsum("ij,i...->j...", fixed, particles[n] - t) for n, t in still.items()
    }
    return moved, kernel.sum()


def _squares(one: Tensors, other: Tensors) -> Tensor:
    """Squared distances of two sets of particles, [N, N]."""
    found = []
    for name, t in one.items():
        a, b = t.flatten(1), other[name].flatten(1)
        centre = b.mean(dim=0)
        a, b = a - centre, b - centre
        found.append(a.square().sum(1)[:, None] + b.square().sum(1)[None] - 2 * a @ b.T)
    return added(found).clamp_min(0)


def _count(run: Federation) -> int:
    """Weights of the network, d."""
    return sum(w.numel() for w in run.network.initial.values())


def _flat(particles: Tensors, run: Federation) -> Tensor:
    """Particles as rows, float64 [N, d], in the order of the network's weights."""
    return torch.cat([particles[n].flatten(1) for n in run.network.initial], 1).double()


def _covariance(places: Tensor) -> Tensor:
    """Of rows [N, d], where N > d; else their variances [d]."""
    if len(places) <= places.shape[1]:
        return places.var(dim=0)
    apart = places - places.mean(dim=0)
    return apart.T @ apart / (len(places) - 1)


def _diagonal(matrix: Tensor) -> Tensor:
    """The diagonal of a matrix, or of what is one."""
    return matrix.diagonal() if matrix.ndim == 2 else matrix


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    """A matrix, or a diagonal, times a vector."""
    return matrix @ vector if matrix.ndim == 2 else matrix * vector


def _inverse(matrix: Tensor) -> Tensor:
    """The inverse of a positive matrix, or diagonal."""
    return torch.linalg.inv(matrix) if matrix.ndim == 2 else 1 / matrix


def _least(matrix: Tensor) -> Tensor:
    """The least eigenvalue of a symmetric matrix, or diagonal."""
    return torch.linalg.eigvalsh(matrix)[0] if matrix.ndim == 2 else matrix.min()


def _floored(matrix: Tensor, least: float) -> Tensor:
    """A symmetric matrix, or diagonal, whose eigenvalues are at least so large."""
    if matrix.ndim == 1:
        return matrix.clamp_min(least)
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    found: Tensor = (vectors * values.clamp_min(least)) @ vectors.T
    return found


_ROUNDING = 1e-9
"""Share of the largest precision that sums of factors may be off by."""
_NARROW = 1e-8
"""Smallest width of a kernel."""
_GONE = 1e-8
"""Share of their variance below which particles count as one; the server's then give directions."""
