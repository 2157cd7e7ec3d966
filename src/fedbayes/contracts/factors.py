"""What methods share whose posterior is a product of Gaussian factors, one for each client.

The server keeps s(θ) = p(θ) Π_i s_i(θ) in natural parameters, which a product adds. A client takes
its factor out (the cavity s/s_i), infers s_new = s_i,new · s/s_i from its data and the cavity, and
sends by how much its factor's natural parameters changed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from fedbayes.contracts.changes import Changes, Clips, Total, norm
from fedbayes.contracts.method import Info, Method
from fedbayes.contracts.reports import Report, Sum
from fedbayes.contracts.run import At, Run
from fedbayes.errors import MessageError
from fedbayes.inference.gaussian import Gaussian, kl, standard
from fedbayes.inference.problem import Solved, Tree
from fedbayes.messages import Message, dense
from fedbayes.tensors import Samples, Tensors, named, part


@dataclass(frozen=True)
class Posterior:
    """The server's state: the posterior s(θ) of the shared weights."""

    posterior: Gaussian
    """In natural parameters, float64."""


class HasFactor(Protocol):
    """What a client keeps at least."""

    @property
    def factor(self) -> Gaussian:
        """s_i, float64; without tensors before the client's first refinement."""


FactorState = TypeVar("FactorState", bound=HasFactor)


class Factors(Method[Posterior, FactorState, Sum]):
    """Server and clients whose Gaussian factors multiply to one posterior.

    A factor's precision is positive by construction, so is every product of factors. What is
    trained are `mean/…` of the posterior and `log_precision/…` of the client's own factor.
    """

    server_state = Posterior
    repeats_changes = True

    prior_std: float = Field(
        1.0, gt=0, description="standard deviation of the Gaussian priors p(θ) and p(φ)"
    )
    start_std: float = Field(
        0.03, gt=0, description="of the weights where training starts; small, or nothing is learnt"
    )
    kl_weight: float = Field(
        1.0, gt=0, description="factor of the KL terms; 1 is the free energy, less trusts data more"
    )
    damping: float | None = Field(
        None,
        gt=0,
        le=1,
        description="share of a factor's change that is made in a round; none: 1 by the number "
        "of clients in it, since each assumes that the others stand still",
    )

    def init(self, run: Run) -> Posterior:
        """The product of the factors p(θ)^{1/K}: the prior."""
        return Posterior(standard(run.network.initial, self.prior_std))

    def message(self, server: Posterior, at: At) -> Message:
        """Means and precisions of the posterior."""
        message: Message = {}
        for name, mean in server.posterior.mean.items():
            message[f"mean/{name}"] = mean.float()
            message[f"precision/{name}"] = server.posterior.precision[name].float()
        return message

    def expected(self, message: Message, run: Run) -> Message:
        """Changes of precisions and shifts."""
        precision = part(message, "precision")
        return named("precision", precision) | named("shift", precision)

    def taken_out(
        self, message: Message, client: FactorState, samples: Samples, at: At
    ) -> tuple[Tensors, Tree]:
        """Where training starts, and what a loss is given of the others' factors and the prior.

        Returns:
            `mean` and `log_precision` of each weight by name; and in float64 `cavity`, `factor`
            and `mean` of the posterior that came, in the network's type `rest` (the cavity's
            precision) and `prior` (cavity times p(θ)^(1/K)), and `count` of the samples.
        """
        run, posterior = at.run, posterior_of(dense(message))
        device, kind = run.network.device, next(iter(run.network.initial.values())).dtype
        prior_factor = standard(posterior.precision, self.prior_std) ** (1 / run.clients)
        prior_factor = prior_factor.to(device, torch.float64)
        factor = client.factor if client.factor.precision else prior_factor
        cavity = _floored(posterior / factor, posterior)
        prior = (cavity * prior_factor).to(device, kind)
        given: Tree = {
            "cavity": vars(cavity),
            "factor": vars(factor),
            "rest": cavity.to(device, kind).precision,
            "mean": posterior.mean,
            "prior": vars(prior),
            "count": torch.tensor(len(samples.y), device=device),
        }
        return self._begun(posterior, factor, cavity, client, at), given

    def _begun(
        self,
        posterior: Gaussian,
        factor: Gaussian,
        cavity: Gaussian,
        client: FactorState,
        at: At,
    ) -> Tensors:
        """Where training starts: the posterior, or the initialization if there is none yet.

        Stds of a newcomer start small: the first accounts for all of the precision, a later
        one for its share. So do all where changes are shortened: factors then know less than they
        were trained to, and from stds that are so wide training diverges.
        """
        mean = posterior.mean
        unlearnt = is_unlearnt(mean)
        floor = self.start_std**-2
        start: Tensors = {}
        for name, m in mean.items():
            began = at.run.network.initial[name].to(m) if unlearnt else m
            precision = factor.precision[name]
            if not client.factor.precision or at.run.clips:
                precision = torch.maximum(precision, floor - cavity.precision[name])
                precision = torch.maximum(precision, posterior.precision[name] / at.run.clients)
            kind = at.run.network.initial[name].dtype
            start[f"mean/{name}"] = began.to(kind)
            start[f"log_precision/{name}"] = precision.log().to(kind)
        return start

    def refined(self, solved: Solved, given: Tree, at: At) -> tuple[Report, Gaussian]:
        """The change of the factor, damped, and no longer than the server lets it be, as a report;
        and the factor with that change, so that the posterior stays the product of the factors.
        """
        ended = solved.parameters
        cavity, factor = Gaussian(**given["cavity"]), Gaussian(**given["factor"])
        log_precision = part(ended, "log_precision")
        refined = {n: t.double().exp() for n, t in log_precision.items()}
        mean = {n: t.double() for n, t in part(ended, "mean").items()}
        shift = {n: (cavity.precision[n] + refined[n]) * mean[n] - cavity.shift[n] for n in mean}
        change = (Gaussian(refined, shift) / factor) ** (self.damping or 1 / at.run.cohort)
        change = rounded(_shortened(change, given["mean"], at.run.clips))
        after = factor * change.to(at.run.network.device, torch.float64)
        tensors = named("precision", change.precision) | named("shift", change.shift)
        return Report(dict(tensors)), after

    def known(self, message: Message, report: Report | None) -> Gaussian:
        """The posterior that came, with the change of the client's factor where it reported."""
        posterior = posterior_of(dense(message))
        if report is None:
            return posterior
        change = dense(report.tensors)
        return posterior * Gaussian(
            {n: t.double() for n, t in part(change, "precision").items()},
            {n: t.double() for n, t in part(change, "shift").items()},
        )

    def ordinary(self, server: Posterior, run: Run) -> dict[str, float]:
        """The posterior's own natural parameters, all that was learnt so far; or those that a
        newcomer starts with.
        """
        posterior, start = server.posterior, self.start_std**-2
        began = [w.double() for w in run.network.initial.values()]
        return {
            "precision": norm(p.clamp_min(start) for p in posterior.precision.values()),
            "shift": max(norm(posterior.shift.values()), start * norm(began)),
        }

    def accept(self, server: Posterior, report: Report, run: Run) -> None:
        """A change leaves the posterior's precisions positive."""
        changes = part(dense(report.tensors), "precision")
        for name, precision in server.posterior.precision.items():
            if bool((precision + changes[name] <= 0).any()):
                raise MessageError(f"it takes more precision off {name!r} than the posterior has")

    def changes(self, report: Report, server: Posterior, run: Run) -> Changes:
        """Changes of precisions, and of shifts beyond those that leave the means where they are: so
        bounds and noise on the one do not move the other.
        """
        found = super().changes(report, server, run)
        return {**found, "shift": _recentred(found, _sent_mean(server), -1.0)}

    def resummed(self, total: Total, server: Posterior, run: Run) -> Sum:
        """Changes of precisions and of shifts."""
        shift = _recentred(total.changes, _sent_mean(server), 1.0)
        return super().resummed(
            replace(total, changes={**total.changes, "shift": shift}), server, run
        )

    def update(self, server: Posterior, reports: Sum, at: At) -> tuple[Posterior, Info]:
        """Multiply the changes of the factors into the posterior: add natural parameters.

        Changes that are each possible, but come to a negative precision, are no honest clients';
        the posterior then keeps its mean, and a little of its precision.
        """
        before = server.posterior
        after = before * Gaussian(
            part(reports.tensors, "precision"), part(reports.tensors, "shift")
        )
        precision, shift = dict(after.precision), dict(after.shift)
        for name, least in _least(before).items():
            gone = after.precision[name] < least
            precision[name] = torch.where(gone, least, after.precision[name])
            shift[name] = torch.where(gone, least * before.mean[name], after.shift[name])
        mean = sum(float(p.sum()) for p in precision.values())
        count = sum(p.numel() for p in precision.values())
        return Posterior(Gaussian(precision, shift)), {"mean_precision": mean / count}

    def model(self, server: Posterior, run: Run) -> Tensors:
        """Means and stds of the shared weights, float32."""
        return means_and_stds(server.posterior.to("cpu", torch.float64))


def is_unlearnt(mean: Mapping[str, Tensor]) -> bool:
    """Whether a posterior is the prior still, whose means are all 0."""
    return not any(bool(m.any()) for m in mean.values())


def complexity(parameters: Tensors, given: Tree) -> Tensor:
    """KL(s_new ‖ s/s_i · p(θ)^(1/K)) in nats, a scalar."""
    precision = precisions(parameters, given["rest"])
    return kl(part(parameters, "mean"), precision, Gaussian(**given["prior"]))


def rounded(change: Gaussian) -> Gaussian:
    """A change in float32, so that client and server add the very same numbers.

    A fall of precision is rounded towards zero: no factor's precision can reach it.
    """
    return Gaussian(
        {n: torch.where(p < 0, p * (1 - 1e-6), p).float() for n, p in change.precision.items()},
        {n: h.float() for n, h in change.shift.items()},
    )


def _shortened(change: Gaussian, mean: Tensors, clips: Clips) -> Gaussian:
    """A change as long as the server lets it be, which looks at `Virtual.changes`."""
    if not clips:
        return change
    shares = {n: m * change.precision[n] for n, m in mean.items()}
    rest = clips.shortened("shift", {n: h - shares[n] for n, h in change.shift.items()})
    precision = clips.shortened("precision", change.precision)
    return Gaussian(precision, {n: h + mean[n] * precision[n] for n, h in rest.items()})


def precisions(parameters: Tensors, rest: Tensors) -> Tensors:
    """Precisions of the shared weights: the client's factor and the other factors."""
    log_precision = part(parameters, "log_precision")
    return {n: t.exp() + rest[n].to(t) for n, t in log_precision.items()}


def means_and_stds(posterior: Gaussian) -> Tensors:
    """Means and stds by name, float32."""
    means = {n: t.float() for n, t in posterior.mean.items()}
    stds = {n: t.float() for n, t in posterior.std.items()}
    return named("mean", means) | named("std", stds)


def posterior_of(message: Tensors) -> Gaussian:
    """The posterior of a server's message, float64."""
    precision = {n: t.double() for n, t in part(message, "precision").items()}
    mean = part(message, "mean")
    return Gaussian(precision, {n: p * mean[n].double() for n, p in precision.items()})


def _sent_mean(server: Posterior) -> Tensors:
    """The posterior's means as clients know them."""
    return {n: m.float() for n, m in server.posterior.mean.items()}


def _recentred(changes: Changes, mean: Tensors, sign: float) -> Tensors:
    """Changes of shifts plus or minus those of precisions times the means."""
    return {
        f"shift/{n}": changes["shift"][f"shift/{n}"]
        + sign * m.cpu().double() * changes["precision"][f"precision/{n}"]
        for n, m in mean.items()
    }


def _least(posterior: Gaussian) -> Tensors:
    """Precisions that rounding must not bring to zero, at least."""
    return {n: _ROUNDING * p for n, p in posterior.precision.items()}


def _floored(cavity: Gaussian, posterior: Gaussian) -> Gaussian:
    """The cavity, whose precision the rounding of a message must not bring to zero."""
    floor = _least(posterior)
    return Gaussian(
        {n: torch.maximum(p, floor[n]) for n, p in cavity.precision.items()}, cavity.shift
    )


_ROUNDING = 1e-6
"""Relative precision of the numbers in a message, on the safe side."""
