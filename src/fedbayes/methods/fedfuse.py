"""Fusion in function space in each round: the server learns the clients' ensemble on synthetic
inputs.
"""

from dataclasses import replace

import torch
from pydantic import Field

from fedbayes.contracts import (
    About,
    ClassCountedMethod,
    Federation,
    Info,
    Part,
    Problem,
    Report,
    ReportList,
    RoundContext,
    Solved,
    Stateless,
    single_draw,
)
from fedbayes.contracts import Weights as Server
from fedbayes.core.messages import Message, dense
from fedbayes.core.tensors import Samples
from fedbayes.errors import MessageError, ModelError
from fedbayes.fusion.combining import combine
from fedbayes.fusion.distillation import distill
from fedbayes.fusion.draws import CachedInputs
from fedbayes.fusion.function import teacher_of
from fedbayes.fusion.rounds import drawable, draws_of_round, input_remarks, module_with, weights_in
from fedbayes.fusion.seeking import Seeker
from fedbayes.fusion.settings import DistillationSettings, SeekingSettings
from fedbayes.likelihoods import Classes
from fedbayes.likelihoods.temperature import LIMIT, has_temperature

TEMPERATURE = "temperature/own"
"""Name of the temperature of a client's network in its report, float32 []; 0: it has none."""


class FedFuse(ClassCountedMethod[Server]):
    """Average the clients' networks, train toward their ensemble, and take a point between the two.

        w ← keep w̄ + (1 − keep) argmin_w E_{x ~ prior} D(t(x) ‖ f_w(x)),   w̄ = Σ n_s φ_s / Σ n_s.

    FedDF does the same with data at the server. Here a prior draws the inputs, so the server needs
    no data. The teacher t knows how many samples of each class a client has, and the temperature
    that the client fitted to rows that it does not train on (`RoundContext.calibration`).

    The result stays near the average, or rounds make no progress: an ensemble of clients that
    started from one network predicts hardly more than that network. `keep = 1` would be FedAvg.
    """

    name = "fedfuse"
    about = About(
        "distills the clients' ensemble on synthetic inputs",
        "after FedDF, Lin et al. 2020; synthetic inputs and teacher: fusion in function space",
        needs=(drawable,),
        notes=(input_remarks,),
    )
    server_state = Server
    reports = replace(
        ClassCountedMethod.reports,
        parts={
            **ClassCountedMethod.reports.parts,
            "temperature": Part(origin="zero", exact=True),
        },
    )

    inputs: str = Field(
        "auto",
        description="synthetic inputs: auto (by their shape), leaves, strokes, noise, gaussian, "
        "package.module:function, or a folder or file of real samples at the server",
    )
    keep: float = Field(
        0.5, ge=0, lt=1, description="share of the average in the network that is sent"
    )
    steps: int = Field(1500, ge=1, description="steps of the server's training in a round")
    drawn: int = Field(4096, ge=64, description="number of different inputs in a round")
    server_lr: float = Field(5e-4, gt=0, description="highest learning rate at the server")
    seek: float = Field(
        0.7, ge=0, le=1, description="share of the inputs that are moved toward classes"
    )
    mirrored: bool = Field(
        True,
        description="whether an image and its mirror image have one prediction, the mean, where "
        "inputs are photographs. false: if left and right are different classes",
    )

    def check(self, run: Federation) -> None:
        """No weight has the name of what clients count."""
        super().check(run)
        taken = self._told(run).keys() & run.network.initial.keys()
        if taken:
            raise ModelError(
                f"{self.name} reports {taken.pop()!r} in addition to the network, which has a "
                "weight of that name. Rename the weight"
            )

    def _told(self, run: Federation) -> Message:
        """What a proper report holds in addition to the network."""
        warmth = {TEMPERATURE: torch.zeros(())} if has_temperature(run.likelihood) else {}
        return {**self.count_pattern(run), **warmth}

    def accept(self, server: Server, report: Report, run: Federation) -> None:
        """Counts are proper, and a temperature is one or 0."""
        super().accept(server, report, run)
        if (found := dense(report.tensors).get(TEMPERATURE)) is not None:
            warmth = float(found)
            if warmth and not 1 / LIMIT <= warmth <= LIMIT:
                raise MessageError(
                    f"its temperature is {warmth:g}; it must be 0, or {1 / LIMIT:g} to {LIMIT:g}"
                )

    def remarks(self, run: Federation) -> list[str]:
        """Notes on few clients, and on `seek` without classes, too."""
        notes = super().remarks(run)
        if 4 * run.cohort <= run.clients:
            notes.append(
                f"in a round the server learns the ensemble of {run.cohort} of {run.clients} "
                f"clients. If clients have few classes, {self.name} is less accurate than "
                "averaging of weights"
            )
        default = type(self).model_fields["seek"].default
        if not isinstance(run.likelihood, Classes) and self.seek not in (0, default):
            kind = run.likelihood.name
            notes.append(f"method.seek has no effect: there are no classes ({kind})")
        return notes

    def expected(self, message: Message, run: Federation) -> Message:
        """A network, counts of classes, and a temperature."""
        return {**message, **self._told(run)}

    def problem(
        self, message: Message, client: Stateless, samples: Samples, at: RoundContext
    ) -> Problem:
        """Train from the server's network."""
        start = at.run.network.prepare(dense(message))
        return Problem(start, given={**self.counted(samples, at.run)})

    def report(
        self, solved: Solved, problem: Problem, client: Stateless, at: RoundContext
    ) -> tuple[Report, Stateless, Info]:
        """Report the network, the samples of each class, and the temperature of predictions."""
        tensors: Message = {**solved.parameters, **problem.given}
        if has_temperature(at.run.likelihood):
            draw = single_draw(solved.parameters, at.run.network)
            tensors[TEMPERATURE] = torch.tensor(at.temperature(draw))
        return Report(tensors, float(solved.count)), client, solved.info

    def update(self, server: Server, reports: ReportList, at: RoundContext) -> tuple[Server, Info]:
        """Average, learn, and go back by `keep`."""
        run, names = at.run, at.run.network.initial
        found = {client: dense(report.tensors) for client, report in reports.reports.items()}
        sizes = torch.tensor([r.weight for r in reports.reports.values()], dtype=torch.float64)
        states = [{name: tensors[name] for name in names} for tensors in found.values()]
        average = combine(states, (sizes / sizes.sum()).tolist())
        counts = sizes
        if self.counts_classes(run):
            counts = torch.stack([tensors["counts"] for tensors in found.values()])
        clients = {
            f"client {client}": module_with(state, run)
            for client, state in zip(found, states, strict=True)
        }
        warmth = [float(tensors.get(TEMPERATURE, 0)) or None for tensors in found.values()]
        draws = draws_of_round(self.inputs, at)
        teacher, _ = teacher_of(clients, counts, run.likelihood, warmth, draws, self.mirrored)
        if self.seek and isinstance(run.likelihood, Classes):
            draws = CachedInputs(Seeker(draws, teacher, SeekingSettings(share=self.seek)))
        settings = DistillationSettings(
            steps=self.steps, draws=self.drawn, lr=self.server_lr, held_out=_HELD_OUT
        )
        learnt = distill(module_with(average, run), teacher, draws, settings)
        weights = combine([average, weights_in(learnt.module, run)], [self.keep, 1 - self.keep])
        info = {
            "divergence_of_average": learnt.checks[0].divergence,
            "divergence": learnt.divergence,
            "without_temperature": float(warmth.count(None)),
            "mirrored": float(len(teacher.views) > 1),
        }
        return Server(weights), info


_HELD_OUT = 512
"""Inputs that the best step is chosen by."""
