"""Networks into one in function space: least squares layer by layer, then end to end.

The fused network f learns the ensemble prediction t of the clients on inputs from a prior p(x):

    min over f of E_{x ~ p} D(t(x) ‖ f(x)).

This needs no data, and no permutation of units has to be found.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from time import perf_counter

import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedbayes.core.brief import Brief
from fedbayes.core.wording import listed
from fedbayes.data.progress import progress as shown
from fedbayes.errors import ConfigError, ModelError
from fedbayes.fusion.calibration import NAMES, FusedCalibration, calibrate, check_calibration
from fedbayes.fusion.distillation import DistillationProgress, Distilled, distill
from fedbayes.fusion.draws import CHUNK, Augmented, Batches, CachedInputs, Draws
from fedbayes.fusion.frozen import Function, frozen
from fedbayes.fusion.kronecker import AllLayers
from fedbayes.fusion.norm_matching import norm_matched, norm_notes
from fedbayes.fusion.regression import regress
from fedbayes.fusion.reweighting import Balanced
from fedbayes.fusion.seeking import Seeker
from fedbayes.fusion.settings import FunctionSettings
from fedbayes.fusion.teacher import Teacher, Temperatures, divergence
from fedbayes.fusion.temperature import temperature
from fedbayes.fusion.widths import Widths
from fedbayes.likelihoods import Classes, Likelihood
from fedbayes.models.steps import module_size
from fedbayes.models.units import require_functions, require_gradients

SLACK = 0.01
"""Of the balance of classes (`fedbayes.fusion.reweighting.entropy_balance`): a class that is hardly
ever drawn is not to be one draw many times over."""
HELD_OUT = 2048
"""Inputs that networks are compared on with the teacher."""
PIECE = 128
"""Of them that a network is asked about at once; progress is shown after each."""
Say = Callable[[str], object]
"""Told what is being done."""


@dataclass(frozen=True, repr=False)
class Likeness(Brief):
    """Agreement of a network with the teacher, on held-out inputs."""

    divergence: float
    """KL(teacher ‖ network) in nats, the mean."""
    agreement: float
    """Share of the draws that both give the same class; NaN without classes."""


@dataclass(frozen=True, repr=False)
class TeacherAgreement(Brief):
    """Agreement of a network with each of the S clients, and in the last row with the teacher."""

    divergence: Tensor
    """KL(client ‖ network) in nats, the mean over held-out draws [S + 1]."""
    by_class: Tensor
    """Of the draws that a client gives class k, the share that the network gives it too
    [S + 1, K]; NaN where there are none; [S + 1, 0] without classes."""
    draws: Tensor
    """How many draws these are, int64 [S + 1, K]."""
    correlation: Tensor
    """Without classes, of the predictive means of each column [S + 1, columns]; NaN where one is
    constant; [S + 1, 0] of classes."""


@dataclass(frozen=True, repr=False)
class FunctionFusion(Brief):
    """A fused network and how it came about."""

    module: nn.Module
    """The network, in evaluation mode."""
    solved: Likeness
    """After least squares."""
    likeness: Likeness
    """In the end."""
    distilled: Distilled | None
    """What came of training end to end; None without."""
    temperature: float
    """What logits are to be divided by for probabilities as the teacher's, pooled if clients have
    temperatures (`Teacher.pooled`); 1 without classes."""
    clients: dict[str, Likeness]
    """Of each client's own network."""
    agreement: TeacherAgreement
    """Of the fused network with each client, and with the teacher."""
    ensemble: TeacherAgreement
    """Of the teacher with each client, and with itself."""
    calibration: FusedCalibration | None
    """What a posterior of its weights does, where one was asked for."""
    seconds: dict[str, float]
    """Time of `least squares`, `distillation` and `posterior`."""
    notes: tuple[str, ...] = field(default=())
    """What a user should know."""

    @property
    def parameters(self) -> int:
        """Scalars of the fused network, without buffers."""
        return module_size(self.module)


def fuse_functions(
    clients: Mapping[str, nn.Module],
    like: nn.Module,
    draws: Draws,
    *,
    counts: npt.ArrayLike | None = None,
    temperatures: Temperatures | None = None,
    likelihood: Likelihood | None = None,
    widths: Widths = 1.0,
    settings: FunctionSettings | None = None,
    held_out: "HeldOut | None" = None,
    state: Path | None = None,
    watch: Say | None = None,
    progress: Callable[[DistillationProgress], object] | None = None,
) -> FunctionFusion:
    """Fuse separately trained networks into one that predicts like their ensemble.

    Args:
        clients: their networks, by name. Those with the graph of `like` give units; of others only
            what they say counts.
        like: the network whose graph the fused one has; its weights do not count.
        draws: inputs, as networks see them (`fedbayes.inputs.Inputs`).
        counts: training samples of each client and class [S, K], in the order of the clients; or
            of each client [S].
        temperatures: of each client's predictions [S]; see `fedbayes.fusion.teacher.Temperatures`.
        likelihood: what outputs mean; a class for each by default.
        widths: see `fedbayes.fusion.regression.regress`.
        settings: how.
        held_out: predictions of these clients, if they are known already, the teacher, and the
            draws that are used then.
        state: a file for distillation to go on from, and to be kept in.
        watch: told of each step in words.
        progress: told how far distillation is.

    Raises:
        ModelError: networks cannot be fused, or counts do not fit them.
        ConfigError: widths are of no group.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from fedbayes.fusion import fuse_functions
        >>> from fedbayes.fusion.settings import FunctionSettings
        >>> from fedbayes.inputs import Inputs, build_prior
        >>> def network():
        ...     return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> clients = {"north": network(), "south": network()}
        >>> inputs = Inputs(build_prior("gaussian", (3,)), torch.zeros(3), torch.ones(3))
        >>> settings = FunctionSettings(draws=256, distillation={"steps": 10})
        >>> fused = fuse_functions(clients, clients["north"], inputs, settings=settings)
        >>> fused.module(torch.zeros(5, 3)).shape
        torch.Size([5, 2])
    """
    settings, say = settings or FunctionSettings(), watch or (lambda text: None)
    known = CachedInputs(draws) if held_out is None else held_out.draws
    few = known.batch(-1, CHUNK)[:2]
    networks = {**clients, "the wanted network": like}
    require_functions(networks, few)
    require_gradients(networks, few)
    plain = known if held_out is None else None
    teacher, samples = teacher_of(
        clients, counts, likelihood, temperatures, plain, settings.mirrored
    )
    if held_out is None:
        held_out = HeldOut(teacher, norm_matched(teacher, known, samples, settings))
    teacher, kept = held_out.teacher, held_out.draws
    if settings.posterior is not None:
        check_calibration(like, teacher, samples, few, settings.posterior)
    sought, solved_on = _inputs(teacher, kept, settings, counts)
    notes = list(norm_notes(kept))
    begin = perf_counter()
    batches = math.ceil(settings.draws / CHUNK)
    module = regress(
        list(clients.values()),
        like,
        teacher,
        lambda number: solved_on.batch(number, CHUNK),
        batches,
        widths=widths,
        samples=samples,
        units=settings.units,
        ridge=settings.ridge,
        watch=notes.append,
        progress=say,
    )
    seconds = {"least squares": perf_counter() - begin}
    outputs = held_out.outputs(module)
    solved = held_out.likeness(outputs)
    distilled = None
    if settings.distillation is not None:
        begin = perf_counter()
        say("training end to end")
        distilled = distill(
            module, teacher, sought, settings.distillation, state=state, watch=progress
        )
        seconds["distillation"] = perf_counter() - begin
        module = distilled.module
        outputs = held_out.outputs(module)
    calibration = None
    if settings.posterior is not None and samples is not None:
        begin = perf_counter()
        say("calibrating its uncertainty")
        many = round(sum(samples))
        sure = teacher.pooled()
        far = HeldOut(sure, kept).divergence
        calibration = calibrate(module, sure, sought, batches, many, far, settings.posterior)
        seconds["posterior"] = perf_counter() - begin
    notes += _notes(distilled, calibration, settings)
    return FunctionFusion(
        module.eval(),
        solved,
        held_out.likeness(outputs),
        distilled,
        held_out.temperature(outputs, distilled.temperature if distilled else 1.0),
        dict(zip(clients, map(held_out.likeness, held_out.clients), strict=True)),
        held_out.agreement(outputs),
        held_out.agreement(held_out.taught),
        calibration,
        seconds,
        tuple(notes),
    )


def _notes(
    distilled: Distilled | None, calibration: FusedCalibration | None, settings: FunctionSettings
) -> Iterator[str]:
    """What to say of training end to end and of a posterior."""
    if distilled is not None and distilled.diverged:
        yield (
            f"training end to end stopped early, with the network of step {distilled.step}: "
            f"{distilled.ended}"
        )
    if calibration is None or settings.posterior is None:
        return
    gaussian = calibration.gaussian
    if isinstance(gaussian, AllLayers) and gaussian.fixed:
        yield (
            "the posterior covers dense layers and convolutions with Kronecker factors; fixed "
            f"are {listed(gaussian.fixed, 3)}"
        )
    if calibration.idle:
        yield (f"{NAMES[settings.posterior]} gives no better confidence than a temperature")


def teacher_of(
    clients: Mapping[str, nn.Module | Function],
    counts: npt.ArrayLike | None,
    likelihood: Likelihood | None,
    temperatures: Temperatures | None = None,
    draws: Batches | None = None,
    mirrored: bool = False,
) -> tuple[Teacher, list[float] | None]:
    """The clients' networks together, and the samples of each.

    Every ensemble of clients takes its teacher from here.

    Args:
        clients: their networks, or functions, by name.
        counts: samples of each client and class [S, K], or of each client [S].
        likelihood: what outputs mean; a class for each by default.
        temperatures: of each client, [S]; see `Teacher`.
        draws: inputs, as clients take them, to compare them on; needed if none has two classes.
        mirrored: whether images and mirror images may have one prediction; `Teacher.mirrored`.

    Raises:
        ModelError: counts do not fit the clients, or a weight is not finite.
    """
    networks, names = list(clients.values()), list(clients)
    if not networks:
        raise ModelError("there are no models to fuse")
    samples = None
    if counts is None:
        teacher = Teacher(networks, None, likelihood, names, None, temperatures)
    else:
        table = torch.as_tensor(counts, dtype=torch.float64)
        samples = table.reshape(len(table), -1).sum(1)
        if len(samples) != len(networks) or not samples.sum() > 0:
            raise ModelError(f"the counts have {len(samples)} models; there are {len(networks)}")
        of_classes = likelihood is None or isinstance(likelihood, Classes)
        if table.ndim == 2 and table.shape[1] > 1 and of_classes:
            teacher = Teacher(networks, None, likelihood, names, table, temperatures)
            teacher = teacher if draws is None else teacher.compared(draws)
        else:
            shares = (samples / samples.sum()).float()
            teacher = Teacher(networks, shares, likelihood, names, None, temperatures)
    if mirrored and draws is not None:
        teacher = teacher.mirrored(draws)
    return teacher, None if samples is None else samples.tolist()


def _inputs(
    teacher: Teacher, draws: Draws, settings: FunctionSettings, counts: npt.ArrayLike | None
) -> tuple[Draws, Draws]:
    """Draws to train end to end on, and those that layers are solved on."""
    sought = _seeking(teacher, draws, settings)
    solved_on: Draws = Augmented(sought) if settings.augment else sought
    if settings.balance:
        sought = solved_on = CachedInputs(_balanced(teacher, solved_on, counts))
    return sought, solved_on


def _seeking(teacher: Teacher, draws: Draws, settings: FunctionSettings) -> Draws:
    """Draws moved toward rare classes, where there are classes."""
    if not settings.seeking.share:
        return draws
    with torch.no_grad():
        outputs = teacher(draws.batch(-1, CHUNK)[:2])
    if not isinstance(teacher.likelihood(outputs.shape[-1]), Classes):
        return draws
    return CachedInputs(Seeker(draws, teacher, settings.seeking))


def _balanced(teacher: Teacher, draws: Draws, counts: npt.ArrayLike | None) -> Balanced:
    """Draws of which the teacher gives each class about its share of the counts."""
    table = torch.as_tensor(0 if counts is None else counts, dtype=torch.float64)
    if table.ndim != 2 or table.shape[1] < 2:
        raise ConfigError(
            "balance needs counts of classes, and there are none. Give the samples of each "
            "client and class, or leave it out"
        )
    classes = table.shape[1]

    def probabilities(x: Tensor) -> Tensor:
        outputs = teacher(x)
        return teacher.likelihood(outputs.shape[-1]).mean(outputs[None])

    names = [f"class {number}" for number in range(classes)]
    return Balanced(draws, probabilities, table.sum(0) / table.sum(), names, SLACK)


class HeldOut:
    """Predictions of the clients and the teacher on held-out inputs.

    Args:
        teacher: what the clients predict together.
        draws: inputs, as networks see them.
    """

    def __init__(self, teacher: Teacher, draws: CachedInputs) -> None:
        self.teacher, self.draws = teacher, draws
        chunks = [draws.batch(-1 - number, CHUNK) for number in range(HELD_OUT // CHUNK)]
        self.inputs = [x for chunk in chunks for x in torch.split(chunk, PIECE)]

    @cached_property
    def clients(self) -> list[Tensor]:
        """Outputs of each client, [n, K]."""
        return self._views[0]

    @cached_property
    def _views(self) -> list[list[Tensor]]:
        """The same in each view of the teacher. Large networks take minutes, so it is done once."""
        every, views = self.teacher.clients, self.teacher.views
        steps = len(self.inputs) * len(every) * len(views)
        with torch.no_grad(), shown("asking the clients", steps) as advance:
            return [
                [torch.cat([_asked(one, view(x), advance) for x in self.inputs]) for one in every]
                for view in views
            ]

    @cached_property
    def taught(self) -> Tensor:
        """Outputs of the teacher, [n, K]."""
        return self._said(self.teacher)

    @torch.no_grad()
    def _said(self, teacher: Teacher) -> Tensor:
        # By chunks: memory grows with inputs times clients squared.
        pieces = [[torch.split(outputs, CHUNK) for outputs in view] for view in self._views]
        return torch.cat(
            [
                teacher.joined([teacher.of([client[i] for client in view]) for view in pieces])
                for i in range(len(pieces[0][0]))
            ]
        )

    @cached_property
    def likelihood(self) -> Likelihood:
        """What outputs mean."""
        return self.teacher.likelihood(self.taught.shape[-1])

    @torch.no_grad()
    def outputs(self, network: nn.Module) -> Tensor:
        """Of another network, [n, K]."""
        function = frozen(network)
        return torch.cat([function(x) for x in self.inputs])

    def divergence(self, network: nn.Module) -> float:
        """KL(teacher ‖ network) in nats."""
        return self.likeness(self.outputs(network)).divergence

    def temperature(self, outputs: Tensor, otherwise: float) -> float:
        """Of a network with these outputs, by the pooled teacher.

        Args:
            outputs: of the network, [n, K].
            otherwise: what to return without classes, or where no client has a temperature.
        """
        if not isinstance(self.likelihood, Classes) or not any(self.teacher.temperatures):
            return otherwise
        return temperature(outputs, self._said(self.teacher.pooled()), self.likelihood)

    def likeness(self, outputs: Tensor) -> Likeness:
        """Agreement of a network with these outputs with the teacher."""
        far = float(divergence(outputs, self.taught, self.likelihood).clamp_min(0))  # rounding
        if not isinstance(self.likelihood, Classes):
            return Likeness(far, math.nan)
        same = _class(self.likelihood, outputs) == _class(self.likelihood, self.taught)
        return Likeness(far, float(same.float().mean()))

    def agreement(self, outputs: Tensor) -> TeacherAgreement:
        """Agreement of a network with these outputs with each client, and with the teacher."""
        each, kind = [*self.clients, self.taught], self.likelihood
        far = torch.stack([divergence(outputs, own, kind) for own in each])
        none = far.new_zeros(len(each), 0)
        if not isinstance(kind, Classes):
            return TeacherAgreement(far, none, none.long(), self._correlation(outputs, each))
        given, classes = _class(kind, outputs), kind.normalized(outputs[:1]).shape[-1]
        own = [_class(kind, said) for said in each]
        draws = torch.stack([torch.bincount(k, minlength=classes) for k in own])
        same = torch.stack([torch.bincount(k[k == given], minlength=classes) for k in own])
        return TeacherAgreement(far, same / torch.where(draws > 0, draws, torch.nan), draws, none)

    def _correlation(self, outputs: Tensor, each: Sequence[Tensor]) -> Tensor:
        """Of predictive means, [S + 1, columns]."""
        means = torch.stack([self.likelihood.mean(f[None]) for f in (outputs, *each)]).double()
        centred = means - means.mean(1, keepdim=True)
        length = centred.norm(dim=1, keepdim=True)
        varies = length > 1e-6 * means.norm(dim=1, keepdim=True)
        unit = centred / torch.where(varies, length, torch.nan)
        return (unit[:1] * unit[1:]).sum(1).float()


def _asked(client: Function, x: Tensor, advance: Callable[[int], object]) -> Tensor:
    """What a client says, [n, K]; one step of what is shown."""
    said = client(x)
    advance(1)
    return said


def _class(kind: Classes, outputs: Tensor) -> Tensor:
    """The most probable class [n] by outputs [n, width]."""
    return kind.normalized(outputs).argmax(-1)
