"""Federated ADMM from Bayesian duality: clients' posteriors agree by dual variables."""

from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
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
    Problem,
    Report,
    RoundContext,
    Sampler,
    Solved,
    Sum,
    Tree,
    sgd,
)
from fedbayes.contracts.drawn import expected_loss, weight_noise
from fedbayes.contracts.natural import (
    GaussianServer,
    few_rounds,
    is_unlearnt,
    mean_precision,
    norms,
    positive,
    retracting,
    sampler,
    shifted,
)
from fedbayes.core.fields import Chosen, Only
from fedbayes.core.messages import Message
from fedbayes.core.tensors import Samples, Tensors, flat, shaped
from fedbayes.errors import MessageError
from fedbayes.inference.gaussian import NaturalGaussian, dot, standard
from fedbayes.inference.ivon import UNUSED, Ivon
from fedbayes.inference.reparametrized import reparametrized

_NARROW = 0.03
"""Standard deviation of the prior where that of the weights stays so, for networks to learn."""
_NARROWEST = 0.01
"""Standard deviation of the weights of deep networks where training starts, at least."""


@dataclass(frozen=True)
class IvonServer:
    """The posterior q(θ) that all are to agree on, and the sum of the clients' dual variables."""

    posterior: NaturalGaussian
    """λ in natural parameters, float64."""
    dual: NaturalGaussian
    """Σ_k η_k, float64."""


@dataclass(frozen=True)
class IvonClient:
    """What never leaves a client: the sum of what it reported, float64, of which its dual variable
    η_k is γρ times. Empty before its first round.
    """

    reported: NaturalGaussian


def _retracted(client: IvonClient, missed: Tensors) -> IvonClient:
    """What was reported is what arrived, as in the server's sum."""
    return IvonClient(shifted(client.reported, missed, -1.0))


def _larger_penalty(method: "IvonAdmm", run: Federation) -> str:
    """What makes clients' changes smaller."""
    damped = "" if method.damping else ", or method.damping = true"
    return f"method.rho is {method.penalty(run):g}; a larger value makes changes smaller{damped}"


class IvonAdmm(GaussianServer[IvonServer, IvonClient]):
    """ADMM over Gaussians instead of points (Möllenhoff et al. 2025), solved by IVON.

    With natural parameters λ of q and expectations μ a client minimizes

        Σ_{D_k} E_{q_k}[−log p(y | θ)] + ⟨η_k, μ_k⟩ + ρ KL(q_k ‖ q),

    and sends λ_k − λ. Both ends add γρ (λ_k − λ) to the dual variable, and the server has, of the
    clients k of a round, with the prior's λ_0,

        λ ← a (λ_0 + Σ_K η_k) + (1 − a) mean_k λ_k,    a = 1/(1 + ρK).

    For any step γ the fixed point is the same. With γ = 1/(ρB), B clients in a round, the server's
    posterior is the mean of the clients', and stays the prior times their dual variables. A larger
    step counts the precision that training starts with as what γρB clients have learnt.

    Where all agree, η_k is what the client's data add to the posterior: its factor in PVI, whose
    E-step this is for ρ = 1. On quadratic losses with diagonal Hessians and ρ = 1/K one round of
    all clients is enough.

    A dual variable takes the precision off that a client's data have added. Where Hessians are not
    diagonal, it takes more off in some directions than there is, and a client's objective has no
    minimum unless ρ is large. So `damping` also regularizes a client's means toward the server's
    with that precision, ½ Σ η_k (m_k − m)², which is 0 where all agree. Then the objective is
    convex if the loss is, for any ρ. With precisions that stay the prior's (`rate = 0`) it is
    federated ADMM with penalty ρ/prior_std², of weights that are drawn with standard deviation
    `prior_std`.
    """

    name = "ivon-admm"
    about = About(
        "clients' posteriors with dual variables, as in ADMM",
        "Möllenhoff et al. 2025; Swaroop et al. 2025; Shen et al. 2024",
        published=MappingProxyType({"damping": False}),
        unused=UNUSED,
        notes=(few_rounds,),
    )
    server_state = IvonServer
    client_state = IvonClient
    reports = replace(
        retracting(
            GaussianServer.reports, _retracted, "with method.rate = 0 there is no precision"
        ),
        remedy=_larger_penalty,
    )

    samples: int = Field(1, ge=1, description="Monte-Carlo samples of a training step")
    predictions: int = Field(20, ge=1, description="Monte-Carlo samples of a prediction")
    rho: Annotated[float | None, Chosen()] = Field(
        None,
        gt=0,
        description="penalty ρ of the distance to the server's posterior. Unset: 1/K, which is "
        "exact for quadratic losses with diagonal Hessians. Smaller values are unstable. If "
        "clients have few classes, use a larger value, such as 1",
    )
    dual_step: float | None = Field(
        None,
        gt=0,
        le=1,
        description="step γ of the dual variables, as a share of ρ. Unset: 1/(ρB) for B clients in "
        "a round, at most 1; then the server's posterior is the mean of the clients'. With larger "
        "steps precisions grow, and learning rates shrink, before anything is learnt",
    )
    damping: Annotated[bool, Chosen()] = Field(
        True,
        description="whether the precision of the dual variables also regularizes clients' means "
        "toward the server's. It stabilizes sites of different sizes and correlated columns",
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of the gradients of the means")
    rate: float = Field(
        1e-3,
        ge=0,
        le=1,
        description="share of the precisions that a step updates. Large values follow the noise "
        "of single batches. 0: precisions of the prior, which are not sent",
    )
    start_std: Annotated[float, Only("rate"), Chosen()] = Field(
        0.05,
        gt=0,
        description="standard deviation of the weights where training starts. Take less for "
        "large convolutions, such as 0.01, whose initial weights are small. Its square times "
        "training.lr n / (kl_weight ρ) is the learning rate of the first steps",
    )

    def recommended(self, known: Known) -> dict[str, Any]:
        """Variational online Newton: its learning rate, for steps that grow with a client's
        samples. First steps are as long as they are by default, whatever penalty, KL weight and
        deviation are set. The penalty is by the clients of a round, where those are not all.
        In deep networks weights start no wider than those of the narrowest layer are spread.
        Else the noise of all layers hides what they learn.

        With `rate = 0` weights are drawn as wide as the prior, which is then narrow, and the KL
        weight is its variance: the means are drawn to 0 as by a prior of deviation 1.
        """
        run, start, chosen = known.run, self.start_std, dict[str, Any]()
        kl_weight = self.kl_weight
        if known.deep and not (known.real or known.pretrained) and "start_std" in self.open:
            start = min(start, max(_NARROWEST, float(f"{known.narrowest:.1g}")))
        if not self.fixed_precision:
            chosen = {"method.start_std": start}
        else:
            start = _NARROW if "prior_std" in self.open else self.prior_std
            if "kl_weight" in self.open:
                kl_weight = float(f"{min(1.0, start**2):.2g}")
            chosen = {"method.prior_std": start, "method.kl_weight": kl_weight}
        rho = self.rho * run.cohort if self.rho else 1.0
        length = kl_weight * rho * (0.05 / start) ** 2
        chosen |= sgd(known, lr=float(f"{min(0.4, 8 / known.median * length):.1g}"))
        if known.pretrained:
            chosen["training.lr"] = float(f"{min(0.4, chosen['training.lr'] * length):.1g}")
        return {**chosen, "method.rho": 1 / run.cohort if run.cohort < run.clients else None}

    @property
    def fixed_precision(self) -> bool:
        """Whether precisions stay those of the prior: then they are not sent."""
        return self.rate == 0

    def penalty(self, run: Federation) -> float:
        """ρ."""
        return self.rho or 1 / run.clients

    def step(self, run: Federation) -> float:
        """γ."""
        return self.dual_step or min(1.0, 1 / (self.penalty(run) * run.cohort))

    def remarks(self, run: Federation) -> list[str]:
        """As for all methods, and a penalty with which nothing converges."""
        notes = super().remarks(run)
        if self.penalty(run) < 1 / run.clients:
            notes.append(
                f"method.rho = {self.rho:g} is less than 1/{run.clients}, which is often "
                "unstable. Leave it unset"
            )
        return notes

    def init(self, run: Federation) -> IvonServer:
        """The prior, and no dual variables."""
        prior = standard(run.network.initial, self.prior_std)
        return IvonServer(prior, prior**0.0)

    def join(self, at: RoundContext) -> IvonClient:
        """No dual variable yet."""
        return IvonClient(NaturalGaussian({}, {}))

    def problem(
        self, message: Message, client: IvonClient, samples: Samples, at: RoundContext
    ) -> Problem:
        """Start from the server's posterior, or the initialization if there is none yet."""
        run, posterior = at.run, self.posterior_of(message)
        device, kind = run.network.device, next(iter(run.network.initial.values())).dtype
        rho = self.penalty(run)
        reported = client.reported if client.reported.precision else posterior**0.0
        dual = reported ** self.step(run)  # η_k/ρ
        mean, unlearnt = posterior.mean, is_unlearnt(posterior.mean)
        wide = posterior / dual
        initial = run.network.initial
        precision = flat(posterior.precision, initial)
        if unlearnt and not self.fixed_precision:
            precision = precision.clamp_min(self.start_std**-2)
        start = {
            "mean": flat(initial if unlearnt else mean, initial).to(device, kind),
            "log_precision": precision.log().to(device, kind),
        }
        pull = wide * self._held(posterior, dual)
        given: Tree = {
            "posterior": vars(posterior),
            "reported": vars(reported),
            "wide": flat(wide.precision, initial).to(device, kind),
            "pull": {n: flat(t, initial).to(device, kind) for n, t in vars(pull).items()},
            "constant": constant(posterior).to(device, kind),
            "count": torch.tensor(len(samples.y), device=device),
        }
        scale = len(samples.y) / (self.kl_weight * rho)
        groups = {"": partial(self._optimizer, lr=at.lr, scale=scale)}
        noise = weight_noise(run, self.samples)
        return Problem(start, given=given, noise=noise, param_groups=groups)

    def _held(self, posterior: NaturalGaussian, dual: NaturalGaussian) -> NaturalGaussian:
        """The pull of means to the server's next to the KL term, by precisions over ρ."""
        mean, own = posterior.mean, dual.precision
        held = {n: p.clamp_min(0.0) if self.damping else 0.0 * p for n, p in own.items()}
        return NaturalGaussian(held, {n: p * mean[n] for n, p in held.items()})

    def _optimizer(self, leaves: list[Tensor], lr: float, scale: float) -> Ivon:
        """IVON over means and log-precisions."""
        mean, log_precision = leaves
        own = {"momentum": self.momentum, "rate": self.rate}
        return Ivon(mean, log_precision, lr, scale=scale, **own)

    def loss(self, run: Federation) -> Loss:
        """What a client minimizes, per sample, by Monte Carlo."""
        return self._lagrangian(run, training=True)

    def validation(self, run: Federation) -> Loss:
        """Only the negative log-likelihood, without dropout."""
        return self._lagrangian(run, training=False)

    def _lagrangian(self, run: Federation, *, training: bool) -> Loss:
        factor = self.kl_weight * self.penalty(run)

        def loss(parameters: Tensors, batch: Samples, given: Tree, noise: Tree) -> Tensor:
            own = parameters["mean"], parameters["log_precision"], noise["weights"]
            pull = given["pull"]["precision"], given["pull"]["shift"]
            drawn, apart = reparametrized(run.network.initial, *own, away, given["wide"], *pull)
            nll = expected_loss(run.likelihood.nll, run, drawn, batch, training=training)
            if not training:
                return nll
            total: Tensor = nll + factor * (apart + given["constant"]) / given["count"]
            return total

        return loss

    def report(
        self, solved: Solved, problem: Problem, client: IvonClient, at: RoundContext
    ) -> tuple[Report, IvonClient, Info]:
        """Report λ_k − λ; γρ times it is added to the dual variable."""
        ended, posterior = solved.parameters, NaturalGaussian(**problem.given["posterior"])
        mean, precision = (
            shaped(t, at.run.network.initial)
            for t in (ended["mean"].double(), ended["log_precision"].double().exp())
        )
        if self.fixed_precision:  # without the rounding of its logarithm
            precision = posterior.precision
        own = NaturalGaussian(precision, {n: precision[n] * m for n, m in mean.items()})
        before = NaturalGaussian(**problem.given["reported"])
        report, after = self.reported(own / posterior, before, posterior.mean, at)
        return report, IvonClient(after), solved.info

    def learnt(self, server: IvonServer, run: Federation) -> dict[str, float]:
        """The posterior's own natural parameters, or those that a newcomer starts with. A report
        is what is added to a dual variable over γρ.
        """
        found = norms(server.posterior, self.start_std, run)
        return {part: length / min(self.penalty(run), 1.0) for part, length in found.items()}

    def accept(self, server: IvonServer, report: Report, run: Federation) -> None:
        """As for all that keep a posterior; and what a client's change depends on is named."""
        try:
            super().accept(server, report, run)
        except MessageError as error:
            raise MessageError(f"{error}; {_larger_penalty(self, run)}") from None

    def update(self, server: IvonServer, reports: Sum, at: RoundContext) -> tuple[IvonServer, Info]:
        """Update the dual variables, and combine them with the clients' posteriors."""
        before, run = server.posterior, at.run
        total = self.changed_by(reports.tensors)
        rho = self.penalty(run)
        dual = server.dual * total ** (self.step(run) * rho)
        share = 1 / (1 + rho * run.clients)
        prior = standard(before.precision, self.prior_std)
        mean = before * total ** (1 / reports.clients)
        after = positive((prior * dual) ** share * mean ** (1 - share), before, prior)
        return IvonServer(after, dual), {"mean_precision": mean_precision(after)}

    def draws(self, model: Tensors, run: Federation) -> Sampler:
        """Outputs under draws from the posterior, the same draws on every call."""
        return sampler(model, run, self.predictions)


def away(
    mean: Tensor, variance: Tensor, wide: Tensor, precision: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """E_q[log q(θ) − log r(θ)] − log s(m) up to constants of r and s, which need not be
    normalizable; as `Terms`. Of KL(q ‖ p) + ⟨η, μ⟩/ρ that is with r = p/η^(1/ρ).

    It is ½ Σ [Λ'/Λ − log(1/Λ) + P m²] − Σ h m.

    Args:
        mean: m.
        variance: 1/Λ.
        wide: Λ' of r.
        precision: P of r s.
        shift: h of r s.
    """
    slope = (precision * mean).sub_(shift)
    linear = dot(slope, mean) - dot(shift, mean)
    spread = wide * variance
    value = 0.5 * (linear + spread.sum() - variance.log_().sum())
    return value, slope, spread.sub_(1)


def constant(posterior: NaturalGaussian) -> Tensor:
    """What `away` from a posterior lacks to be KL: −½ Σ (1 + log Λ − h²/Λ), a scalar."""
    terms = [
        1 + p.log() - posterior.shift[name].square() / p for name, p in posterior.precision.items()
    ]
    return -0.5 * torch.stack([t.sum() for t in terms]).sum()
