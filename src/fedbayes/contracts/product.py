"""The posterior of methods in which it is a product of Gaussian factors, one for each client.

The server keeps s(θ) = Π_i s_i(θ) in natural parameters, which a product adds; each factor has its
share of the prior, and starts as p(θ)^(1/K). A client takes its own out (the cavity s/s_i), infers
s_new = s_i,new · s/s_i from its data, the cavity and its share of the prior, and sends by how much
its factor's natural parameters changed. How it infers is another file's.
"""

from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from pydantic import Field

from fedbayes.contracts.method import About, Info
from fedbayes.contracts.natural import GaussianServer, least, mean_precision, positive
from fedbayes.contracts.needs import own_prior
from fedbayes.contracts.reports import Report, Sum
from fedbayes.contracts.run import Federation, RoundContext
from fedbayes.core.messages import Message
from fedbayes.core.tensors import Tensors
from fedbayes.inference.gaussian import NaturalGaussian, standard


@dataclass(frozen=True)
class PosteriorServer:
    """The server's state: the posterior s(θ) of the shared weights."""

    posterior: NaturalGaussian
    """In natural parameters, float64."""


class HasFactor(Protocol):
    """What a client keeps at least."""

    @property
    def factor(self) -> NaturalGaussian:
        """s_i, float64; without tensors before the client's first refinement."""


FactorState = TypeVar("FactorState", bound=HasFactor)


@dataclass(frozen=True)
class Split:
    """A posterior by factors, float64 on the network's device."""

    posterior: NaturalGaussian
    """As it came."""
    factor: NaturalGaussian
    """The client's own; p(θ)^(1/K) before its first refinement."""
    cavity: NaturalGaussian
    """The others'."""
    share: NaturalGaussian
    """p(θ)^(1/K), the client's share of the prior."""


class PartitionedPosterior(GaussianServer[PosteriorServer, FactorState]):
    """Server and clients whose Gaussian factors multiply to one posterior.

    A factor's precision is positive by construction, so is every product of factors.
    """

    about = About(needs=(own_prior,))
    server_state = PosteriorServer

    damping: float | None = Field(
        None,
        gt=0,
        le=1,
        description="share of a factor's change that a round applies. none: 1 / number of "
        "clients of the round, because each assumes that the others do not change",
    )

    def init(self, run: Federation) -> PosteriorServer:
        """The product of the factors p(θ)^{1/K}: the prior."""
        return PosteriorServer(standard(run.network.initial, self.prior_std))

    def split(self, message: Message, client: FactorState, at: RoundContext) -> Split:
        """The received posterior, split into the client's factor and the others."""
        run, posterior = at.run, self.posterior_of(message)
        prior = standard(posterior.precision, self.prior_std) ** (1 / run.clients)
        prior = prior.to(run.network.device, torch.float64)
        factor = client.factor if client.factor.precision else prior
        return Split(posterior, factor, _floored(posterior / factor, posterior), prior)

    def answered(
        self, refined: NaturalGaussian, factor: NaturalGaussian, mean: Tensors, at: RoundContext
    ) -> tuple[Report, NaturalGaussian]:
        """The change of a factor, damped, and no longer than the server lets it be, as a report;
        and the factor with that change, so that the posterior stays the product of the factors.

        Args:
            refined: the factor as the client's data would have it, float64.
            factor: as it was.
            mean: of the posterior that came.
            at: client and round.
        """
        change = (refined / factor) ** (self.damping or 1 / at.run.cohort)
        return self.reported(change, factor, mean, at)

    def update(
        self, server: PosteriorServer, reports: Sum, at: RoundContext
    ) -> tuple[PosteriorServer, Info]:
        """Multiply the changes of the factors into the posterior: add natural parameters.

        Changes that are each possible, but come to a negative precision, are noise, or no honest
        clients'; the posterior then keeps its mean, and no more precision than the prior has.
        """
        before = server.posterior
        prior = standard(before.precision, self.prior_std)
        after = positive(before * self.changed_by(reports.tensors), before, prior)
        return PosteriorServer(after), {"mean_precision": mean_precision(after)}

    def forget(
        self, server: PosteriorServer, client: FactorState, run: Federation
    ) -> PosteriorServer:
        """Divide the posterior by the client's factor, s/s_i, and give back its share of the prior.

        The others' factors and the whole prior remain: s/s_i · p(θ)^(1/K). That is the posterior
        that retraining converges to where factors do not depend on one another, as in a linear
        regression with orthogonal columns. Elsewhere a few rounds bring the factors there.
        """
        before = server.posterior
        prior = standard(before.precision, self.prior_std)
        if not client.factor.precision:  # its factor is still its share of the prior
            return server
        factor = client.factor.to("cpu", torch.float64)
        after = before.to("cpu", torch.float64) / factor * prior ** (1 / run.clients)
        return PosteriorServer(positive(after, before.to("cpu", torch.float64), prior))

    def remaining(self, client: FactorState, run: Federation, left: int) -> FactorState:
        """The factor with the share p(θ)^(1/left) of the prior instead of p(θ)^(1/K)."""
        if not client.factor.precision:
            return client
        factor = client.factor
        prior = standard(factor.precision, self.prior_std)
        prior = prior.to(next(iter(factor.precision.values())).device, torch.float64)
        moved = factor * prior ** (1 / left - 1 / run.clients)
        return replace(client, factor=moved)  # type: ignore[type-var]


def _floored(cavity: NaturalGaussian, posterior: NaturalGaussian) -> NaturalGaussian:
    """The cavity, whose precision the rounding of a message must not bring to zero."""
    floor = least(posterior)
    return NaturalGaussian(
        {n: torch.maximum(p, floor[n]) for n, p in cavity.precision.items()}, cavity.shift
    )
