"""FedEP: federated expectation propagation."""

from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedbayes.contracts import (
    About,
    ClientNote,
    Federation,
    Info,
    Known,
    Problem,
    RoundContext,
    Solved,
    sgd,
)
from fedbayes.contracts.moments import MomentMatching
from fedbayes.contracts.needs import langevin, where
from fedbayes.core.fields import Only
from fedbayes.core.tensors import Samples, Tensors
from fedbayes.errors import ConfigError
from fedbayes.fusion.curvature import fisher_matrix, summed_diagonal
from fedbayes.fusion.posterior_settings import CurvatureSettings
from fedbayes.inference.sampling import Pulled, sampled

_FEWEST = 4
"""Samples for an estimate of a precision."""
_LEAST = 1e-12
"""Variance that samples have at least."""


class FedEP(MomentMatching):
    """Expectation propagation: factors whose product has the moments of each tilted posterior.

    A client infers mean and variance of every weight under the tilted posterior (Guo et al. 2023,
    Algorithms 1 and 2), by Laplace's approximation or by samples of stochastic gradient Langevin
    dynamics, divides the cavity out and sends the change of its factor. Clients keep their factors.

    Of M samples with variance s², (M − 3)/(M − 1)/s² is the estimate of a precision without bias,
    if samples are independent. A factor never has less precision than its share of the prior:
    where samples are wider than the cavity, data are taken to say nothing.
    """

    name = "fedep"
    about = About(
        "expectation propagation by Laplace or samples",
        "Guo et al. 2023",
        needs=(
            where("inference", "laplace", need=fisher_matrix),
            where("inference", "sgld", need=langevin),
        ),
    )

    inference: Literal["laplace", "sgld"] = Field(
        "laplace",
        description="inference of mean and variance at a client: at the mode with the Fisher "
        "diagonal, or from samples of Langevin dynamics",
    )
    fisher_draws: Annotated[int | None, Only("inference", "laplace")] = Field(
        None,
        ge=1,
        description="number of targets sampled per sample for the Fisher diagonal; each needs a "
        "backward pass. Default: all classes if there are at most 20 (laplace)",
    )
    burn_in: Annotated[float, Only("inference", "sgld")] = Field(
        0.5, ge=0, lt=1, description="share of a round's steps before the first sample (sgld)"
    )
    thinning: Annotated[int, Only("inference", "sgld")] = Field(
        1, ge=1, description="steps between samples (sgld)"
    )

    def recommended(self, known: Known) -> dict[str, Any]:
        """Langevin dynamics has plain steps."""
        chosen = super().recommended(known)
        return {**chosen, **sgd(known)} if self.inference == "sgld" else chosen

    def note(self, samples: int, run: Federation) -> ClientNote:
        """A client with too few steps for a precision of its samples cannot answer."""
        if self.inference != "sgld" or self._schedule(samples, run)[2] >= _FEWEST:
            return ClientNote()
        why = (
            f"take too few steps in a round for {_FEWEST} samples of their weights, which stops "
            "the run (over a network, they are lost for the round). Set training.steps, such as "
            "100, or a smaller method.thinning"
        )
        return ClientNote(falls_short=why)

    def _schedule(self, samples: int, run: Federation) -> tuple[int, int, int]:
        """Of a round of these samples: steps, those of burn-in, and draws of the weights."""
        steps = run.training.step_count(samples)
        burn_in = int(self.burn_in * steps)
        return steps, burn_in, (steps - burn_in) // self.thinning

    def moments(
        self, problem: Problem, samples: Samples, at: RoundContext
    ) -> tuple[Solved, Tensors, Tensors, Info]:
        """Mean and precision by Laplace or by samples."""
        if self.inference == "sgld":
            return self._sampled(problem, samples, at)
        solved = at.solve(problem, self.loss(at.run), samples, validation=self.validation(at.run))
        settings = CurvatureSettings(draws=self.fisher_draws)
        found = summed_diagonal(solved.parameters, samples, settings, at)
        share: Tensors = problem.given["share"]
        precision = {n: p + found[n].to(p) / self.kl_weight for n, p in share.items()}
        return solved, solved.parameters, precision, {}

    def _sampled(
        self, problem: Problem, samples: Samples, at: RoundContext
    ) -> tuple[Solved, Tensors, Tensors, Info]:
        """Mean and precision of Langevin samples, and the share of entries that are floored."""
        run, count = at.run, len(samples.y)
        steps, burn_in, found = self._schedule(count, run)
        if found < _FEWEST:
            raise ConfigError(
                f"client {at.client} takes {steps} steps in a round, which give {found} samples "
                f"of its weights, but {_FEWEST} are needed. Set training.steps, such as 100, or a "
                "smaller method.thinning"
            )
        given = problem.given
        solved, kept = sampled(
            replace(problem, project=None),
            lambda stated: at.solve(stated, self.loss(run), samples),
            [*problem.start],
            burn_in=burn_in,
            every=self.thinning,
            langevin=Pulled(
                at.rng("langevin"), count, self.kl_weight, given["centre"], given["pull"]
            ),
        )
        means, precision = dict[str, Tensor](), dict[str, Tensor]()
        floored = entries = 0
        for name, drawn in kept.items():
            variance, means[name] = torch.var_mean(drawn.double(), dim=0)
            tilted = (found - 3) / (found - 1) / variance.clamp_min(_LEAST)
            own, share = tilted - given["cavity"]["precision"][name], given["share"][name]
            precision[name] = torch.maximum(own, share)
            floored, entries = floored + int((own < share).sum()), entries + own.numel()
        return solved, means, precision, {"wider_than_cavity": floored / entries}
