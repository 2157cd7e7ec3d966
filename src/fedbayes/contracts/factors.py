"""Clients that refine their factor of the posterior by variational inference."""

from typing import Annotated, Any

import torch
from pydantic import Field

from fedbayes.contracts.natural import is_unlearnt, norms
from fedbayes.contracts.product import FactorState, PartitionedPosterior, PosteriorServer, Split
from fedbayes.contracts.recommended import Known, adam
from fedbayes.contracts.reports import Report
from fedbayes.contracts.run import Federation, RoundContext
from fedbayes.core.fields import Chosen
from fedbayes.core.messages import Message
from fedbayes.core.tensors import Samples, Tensors, part
from fedbayes.inference.gaussian import NaturalGaussian
from fedbayes.inference.problem import Tree


class VariationalFactor(PartitionedPosterior[FactorState]):
    """A factor for each client, refined by gradients of a free energy.

    What is trained are `mean/…` of the posterior and `log_precision/…` of the client's own factor.
    """

    start_std: float = Field(
        0.03,
        gt=0,
        description="standard deviation of the weights where training starts. It must be small",
    )

    damping: Annotated[float | None, Chosen()] = Field(
        None,
        gt=0,
        le=1,
        description="share of a factor's change that a round applies. none: 1 / number of "
        "clients of the round, because each assumes that the others do not change",
    )

    def recommended(self, known: Known) -> dict[str, Any]:
        """Adam, and a KL weight that lets the model fit the data.

        Where clients are in few rounds, more of a change is made in each, so that the server has
        half of a factor at the end; but no more than three times the usual share.
        """
        run = known.run
        half = 1 - 0.5 ** (run.clients / (run.rounds * run.cohort))
        larger = min(half, 3 / run.cohort)
        return {
            **adam(known, drawn=True),
            "method.kl_weight": known.tempered(0.2),
            "method.damping": float(f"{larger:.2g}") if larger > 1 / run.cohort else None,
        }

    def remarks(self, run: Federation) -> list[str]:
        """Plain gradient steps on means and log-precisions at once mostly lead nowhere; nor do few
        rounds, after which the server has little of the factors.
        """
        notes = []
        rounds = run.rounds * run.cohort / run.clients
        heard = 1 - (1 - (self.damping or 1 / run.cohort)) ** rounds
        if run.cohort < run.clients and heard < 0.6:
            notes.append(
                f"a client is in {rounds:.2g} of {run.rounds} rounds on average, which give "
                f"{heard:.0%} of its factor. Use more rounds for more of it"
            )
        if run.training.optimizer == "sgd":
            notes.append(
                f"{self.name} learns little with SGD, or diverges. Set training.optimizer = "
                "'adam' and a small training.lr, such as 0.003"
            )
        return notes

    def taken_out(
        self, message: Message, client: FactorState, samples: Samples, at: RoundContext
    ) -> tuple[Tensors, Tree]:
        """The start of training, and the terms of the other factors and the prior in the loss.

        Returns:
            `mean` and `log_precision` of each weight by name; and in float64 `cavity`, `factor`
            and `mean` of the posterior that came. In the network's type follow `rest` (the
            cavity's precision), `precision` and `mean` of the `prior` (cavity times p(θ)^(1/K)),
            and `count` of the samples.
        """
        split = self.split(message, client, at)
        cavity, device = split.cavity, at.run.network.device
        kind = next(iter(at.run.network.initial.values())).dtype
        prior = cavity * split.share
        given: Tree = {
            "cavity": vars(cavity),
            "factor": vars(split.factor),
            "rest": cavity.to(device, kind).precision,
            "mean": split.posterior.mean,
            "prior": {
                "precision": prior.to(device, kind).precision,
                "mean": {name: m.to(device, kind) for name, m in prior.mean.items()},
            },
            "count": torch.tensor(len(samples.y), device=device),
        }
        return self._begun(split, client, at), given

    def _begun(self, split: Split, client: FactorState, at: RoundContext) -> Tensors:
        """Where training starts: the posterior, or the initialization if there is none yet."""
        # Stds of a newcomer start small: the first accounts for all of the precision, a later one
        # for its share. Where changes are shortened all do: from wide stds training diverges.
        posterior, mean = split.posterior, split.posterior.mean
        unlearnt = is_unlearnt(mean)
        floor = self.start_std**-2
        start: Tensors = {}
        for name, m in mean.items():
            began = at.run.network.initial[name].to(m) if unlearnt else m
            precision = split.factor.precision[name]
            if not client.factor.precision or at.run.clips:
                precision = torch.maximum(precision, floor - split.cavity.precision[name])
                precision = torch.maximum(precision, posterior.precision[name] / at.run.clients)
            kind = at.run.network.initial[name].dtype
            start[f"mean/{name}"] = began.to(kind)
            start[f"log_precision/{name}"] = precision.log().to(kind)
        return start

    def refined(
        self, mean: Tensors, log_precision: Tensors, given: Tree, at: RoundContext
    ) -> tuple[Report, NaturalGaussian]:
        """The damped change of the factor as a report, and the factor with it; see `answered`."""
        cavity = NaturalGaussian(**given["cavity"])
        precision = {n: t.double().exp() for n, t in log_precision.items()}
        mean = {n: t.double() for n, t in mean.items()}
        shift = {n: (cavity.precision[n] + precision[n]) * mean[n] - cavity.shift[n] for n in mean}
        refined = NaturalGaussian(precision, shift)
        return self.answered(refined, NaturalGaussian(**given["factor"]), given["mean"], at)

    def learnt(self, server: PosteriorServer, run: Federation) -> dict[str, float]:
        """The posterior's own natural parameters, all that was learnt so far; or those that a
        newcomer starts with.
        """
        return norms(server.posterior, self.start_std, run)


def precisions(parameters: Tensors, rest: Tensors) -> Tensors:
    """Precisions of the shared weights: the client's factor and the other factors."""
    log_precision = part(parameters, "log_precision")
    return {n: t.exp() + rest[n].to(t) for n, t in log_precision.items()}
