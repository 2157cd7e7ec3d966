"""A server that keeps a Gaussian posterior of the weights, and clients that change it.

Reports are changes of natural parameters, which add.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Protocol, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from fedbayes.contracts.changes import Changes, Chart, Clips, norm
from fedbayes.contracts.drawn import sampler_of
from fedbayes.contracts.method import About, AnyMethod, ClientState, Method, Sampler
from fedbayes.contracts.needs import weights_alone
from fedbayes.contracts.parts import Part, Reports, Retract
from fedbayes.contracts.reports import Report, Sum
from fedbayes.contracts.run import Federation, RoundContext
from fedbayes.core.fields import Chosen, Tuned
from fedbayes.core.messages import Message, dense
from fedbayes.core.tensors import Tensors, named, part
from fedbayes.errors import MessageError
from fedbayes.inference.gaussian import NaturalGaussian, standard


class HasPosterior(Protocol):
    """What a server keeps at least."""

    @property
    def posterior(self) -> NaturalGaussian:
        """Of the shared weights, in natural parameters, float64."""


PosteriorState = TypeVar("PosteriorState", bound=HasPosterior)


class GaussianServer(Method[PosteriorState, ClientState, Sum]):
    """A server that keeps a Gaussian posterior, and clients that report changes of its natural
    parameters.
    """

    about = About(needs=(weights_alone,))
    reports = Reports(
        {
            "precision": Part(
                origin="zero",
                tracked=True,
                range=65536.0,
                typical=lambda method, server, run: method.learnt(server, run)["precision"],
                unless="fixed_precision",
                uncompressed="means are divided by precisions, so a small compression error of a "
                "precision can change a mean much",
            ),
            "shift": Part(
                origin="zero",
                tracked=True,
                range=65536.0,
                typical=lambda method, server, run: method.learnt(server, run)["shift"],
            ),
        }
    )

    prior_std: Annotated[float, Chosen()] = Field(
        1.0, gt=0, description="standard deviation of the Gaussian priors p(θ) and p(φ)"
    )
    kl_weight: Annotated[float, Chosen(), Tuned(times=30)] = Field(
        1.0,
        gt=0,
        description="factor of the KL terms. 1: the free energy. A smaller value "
        "gives the data more weight",
    )

    @property
    def fixed_precision(self) -> bool:
        """Whether the posterior has the prior's precision for good, so that none is sent."""
        return False

    def learnt(self, server: PosteriorState, run: Federation) -> dict[str, float]:
        """The norms of the precisions and of the shifts that were learnt so far, or that a newcomer
        starts with: changes are measured by them where a cohort tells little.
        """
        return {
            "precision": norm(server.posterior.precision.values()),
            "shift": norm(server.posterior.shift.values()),
        }

    def message(self, server: PosteriorState, at: RoundContext) -> Message:
        """Means and precisions of the posterior."""
        message: Message = {}
        for name, mean in server.posterior.mean.items():
            message[f"mean/{name}"] = mean.float()
            if not self.fixed_precision:
                message[f"precision/{name}"] = server.posterior.precision[name].float()
        return message

    def expected(self, message: Message, run: Federation) -> Message:
        """Changes of precisions and shifts."""
        mean = part(message, "mean")
        precision = {} if self.fixed_precision else named("precision", mean)
        return precision | named("shift", mean)

    def reported(
        self, change: NaturalGaussian, own: NaturalGaussian, mean: Tensors, at: RoundContext
    ) -> tuple[Report, NaturalGaussian]:
        """A change as the server adds it, no longer than it lets it be; and the client's own with
        it.

        Args:
            change: of natural parameters.
            own: what the client keeps the sum of its changes in, float64.
            mean: of the posterior that came.
            at: client and round.
        """
        change = rounded(_shortened(change, mean, at.run.clips))
        after = own * change.to(at.run.network.device, torch.float64)
        precision = {} if self.fixed_precision else named("precision", change.precision)
        return Report({**precision, **named("shift", change.shift)}), after

    def known(self, message: Message, report: Report | None) -> NaturalGaussian:
        """The posterior that came, with the change of the client's factor where it reported."""
        posterior = self.posterior_of(message)
        if report is None:
            return posterior
        return posterior * self.changed_by(dense(report.tensors))

    def posterior_of(self, message: Message) -> NaturalGaussian:
        """The posterior of a server's message, float64."""
        tensors = dense(message)
        mean = {n: t.double() for n, t in part(tensors, "mean").items()}
        if self.fixed_precision:
            prior = standard(mean, self.prior_std).precision
            precision = {name: t.to(mean[name]) for name, t in prior.items()}
        else:
            precision = {n: t.double() for n, t in part(tensors, "precision").items()}
        return NaturalGaussian(
            precision, {n: p.to(mean[n]) * mean[n] for n, p in precision.items()}
        )

    def changed_by(self, tensors: Tensors) -> NaturalGaussian:
        """The change in a report's tensors, or in a sum of them, float64."""
        shift = {n: t.double() for n, t in part(tensors, "shift").items()}
        if self.fixed_precision:
            return NaturalGaussian({n: torch.zeros_like(h) for n, h in shift.items()}, shift)
        return NaturalGaussian(
            {n: t.double() for n, t in part(tensors, "precision").items()}, shift
        )

    def accept(self, server: PosteriorState, report: Report, run: Federation) -> None:
        """A change leaves the posterior's precisions positive."""
        changes = part(dense(report.tensors), "precision")
        for name, change in changes.items():
            if bool((server.posterior.precision[name] + change <= 0).any()):
                raise MessageError(
                    f"it removes more precision from {name!r} than the posterior has"
                )

    def chart(self, server: PosteriorState, run: Federation) -> Chart:
        """Changes of precisions, and of shifts beyond those that leave the means where they are: so
        bounds and noise on the one do not move the other.
        """
        if self.fixed_precision:
            return Chart()
        mean = {n: m.float() for n, m in server.posterior.mean.items()}  # as clients know them
        return Chart(
            lambda found: {**found, "shift": _recentred(found, mean, -1.0)},
            lambda total: replace(
                total,
                changes={**total.changes, "shift": _recentred(total.changes, mean, 1.0)},
            ),
        )

    def model(self, server: PosteriorState, run: Federation) -> Tensors:
        """Means and stds of the shared weights, float32."""
        return means_and_stds(server.posterior.to("cpu", torch.float64))

    def personal_model(
        self, message: Message, report: Report | None, client: ClientState, run: Federation
    ) -> Tensors | None:
        """The posterior after the client's update; between rounds a client has none."""
        if report is None:
            return None
        return means_and_stds(self.known(message, report).to(run.network.device, torch.float32))


KNOWN_STD = 0.03
"""Standard deviation of a weight that data of ordinary size say something of."""


SEVERAL = 5
"""Rounds that a client takes part in, before its posterior says much at the server."""


def few_rounds(method: AnyMethod, run: Federation) -> list[str]:
    """What a user should know where a client is in few of the rounds."""
    rounds = run.rounds * run.cohort / run.clients
    if run.cohort == run.clients or rounds >= SEVERAL:
        return []
    return [
        f"a client is in {rounds:.2g} of {run.rounds} rounds on average. With so few, and few "
        f"classes per client, averaging was more accurate than {method.name} in our tests"
    ]


def norms(posterior: NaturalGaussian, start_std: float, run: Federation) -> dict[str, float]:
    """Norms of a posterior's precisions and shifts, or of those that a newcomer starts with.

    Args:
        posterior: what was learnt so far.
        start_std: deviation of the weights where a newcomer's training starts, or that its data
            may leave.
        run: the run.
    """
    least, began = start_std**-2, [w.double() for w in run.network.initial.values()]
    return {
        "precision": norm(p.clamp_min(least) for p in posterior.precision.values()),
        "shift": max(norm(posterior.shift.values()), least * norm(began)),
    }


def positive(
    after: NaturalGaussian, before: NaturalGaussian, prior: NaturalGaussian
) -> NaturalGaussian:
    """A new posterior; where a precision would be negative, or none, the mean before with the
    prior's precision, or with that before if it was less.

    So what noise takes away round after round does not add up to weights of which ever less is
    known than nothing.
    """
    precision, shift = dict(after.precision), dict(after.shift)
    mean = before.mean
    for name, bound in least(before).items():
        gone = after.precision[name] < bound
        left = torch.minimum(before.precision[name], prior.precision[name])
        precision[name] = torch.where(gone, left, after.precision[name])
        shift[name] = torch.where(gone, left * mean[name], after.shift[name])
    return NaturalGaussian(precision, shift)


def retracting(reports: Reports, take_back: Retract, way_out: str = "") -> Reports:
    """The declaration of a method whose clients take back what did not arrive of a shift.

    Args:
        reports: the declaration of others of its kind.
        take_back: as in `Part.retract`.
        way_out: settings under which reports can be compressed, in words, if there are any.
    """
    precision, shift = reports.parts["precision"], reports.parts["shift"]
    why = "; ".join(filter(None, (precision.uncompressed, way_out)))
    return replace(
        reports,
        parts={
            "precision": replace(precision, uncompressed=why),
            "shift": replace(shift, retract=take_back),
        },
    )


def shifted(gaussian: NaturalGaussian, shift: Tensors, factor: float) -> NaturalGaussian:
    """A Gaussian to whose shifts a multiple of others is added."""
    moved = {n: h + factor * shift[n].to(h) if n in shift else h for n, h in gaussian.shift.items()}
    return NaturalGaussian(gaussian.precision, moved)


def mean_precision(posterior: NaturalGaussian) -> float:
    """Mean over all weights of their precision."""
    total = sum(float(p.sum()) for p in posterior.precision.values())
    return total / sum(p.numel() for p in posterior.precision.values())


def is_unlearnt(mean: Mapping[str, Tensor]) -> bool:
    """Whether a posterior is the prior still, whose means are all 0."""
    return not any(bool(m.any()) for m in mean.values())


def sampler(model: Tensors, run: Federation, count: int, *, linearized: bool = False) -> Sampler:
    """Outputs under draws from a posterior, the same draws on every call.

    Args:
        model: means and stds by name, as `means_and_stds` gives them.
        run: the run.
        count: draws.
        linearized: whether the network is taken as linear in its weights around their means, as
            Laplace's approximation with a Gauss-Newton matrix does (Immer et al. 2021).
    """
    mean, std = part(model, "mean"), part(model, "std")
    if is_unlearnt(mean):
        # Nothing is learnt yet; the prior's noise would be all there is.
        mean = run.network.initial
        std = {name: torch.zeros_like(m) for name, m in mean.items()}
    return sampler_of(mean, std, run.network, count, linearized=linearized)


def rounded(change: NaturalGaussian) -> NaturalGaussian:
    """A change in float32, so that client and server add the very same numbers.

    A fall of precision is rounded towards zero: no factor's precision can reach it.
    """
    return NaturalGaussian(
        {n: torch.where(p < 0, p * (1 - 1e-6), p).float() for n, p in change.precision.items()},
        {n: h.float() for n, h in change.shift.items()},
    )


def _shortened(change: NaturalGaussian, mean: Tensors, clips: Clips) -> NaturalGaussian:
    """A change as long as the server lets it be, which looks at `GaussianServer.chart`."""
    if not clips:
        return change
    shares = {n: m * change.precision[n] for n, m in mean.items()}
    rest = clips.shortened("shift", {n: h - shares[n] for n, h in change.shift.items()})
    precision = clips.shortened("precision", change.precision)
    return NaturalGaussian(precision, {n: h + mean[n] * precision[n] for n, h in rest.items()})


def means_and_stds(posterior: NaturalGaussian) -> Tensors:
    """Means and stds by name, float32."""
    means = {n: t.float() for n, t in posterior.mean.items()}
    stds = {n: t.float() for n, t in posterior.std.items()}
    return named("mean", means) | named("std", stds)


def _recentred(changes: Changes, mean: Tensors, sign: float) -> Tensors:
    """Changes of shifts plus or minus those of precisions times the means."""
    return {
        f"shift/{n}": changes["shift"][f"shift/{n}"]
        + sign * m.cpu().double() * changes["precision"][f"precision/{n}"]
        for n, m in mean.items()
    }


def least(posterior: NaturalGaussian) -> Tensors:
    """Precisions that rounding must not bring to zero, at least."""
    return {n: _ROUNDING * p for n, p in posterior.precision.items()}


_ROUNDING = 1e-6
"""Relative precision of the numbers in a message, on the safe side."""
