"""End to end: a network learns the teacher's outputs on synthetic inputs, from a close start."""

import copy
import math
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedbayes.core import seeds
from fedbayes.core.devices import arithmetic, in_half
from fedbayes.core.files import digest, read_bytes, write_beside
from fedbayes.core.messages import decode_file, encode
from fedbayes.core.seals import check_seal, sealed
from fedbayes.core.tensors import Tensors, pack, unpack
from fedbayes.errors import MessageError, ModelError, RunError, told_as
from fedbayes.fusion.draws import CHUNK, Augmented, CachedInputs, Draws
from fedbayes.fusion.frozen import ChannelsLast, set_training
from fedbayes.fusion.settings import DistillationSettings
from fedbayes.fusion.teacher import Teacher, divergence
from fedbayes.fusion.temperature import temperature
from fedbayes.likelihoods import Classes, Likelihood
from fedbayes.models.others import TextNetwork

LR, LR_NORMALIZED = 5e-4, 2e-3
"""Highest learning rates: weights before normalization bear larger steps. Chosen on images that no
client has (cases zipit and resnet20-small of `benchmarks/fusion.py --validation`)."""
STATISTICS = 4096
"""Draws that running statistics of batch normalization are recomputed on."""
DRAWING = 0.2
"""Share of a time limit that new draws may take; then those that there are come again."""
LESSONS = 1000
"""Batches that come before one comes again, at most. Those that come again soon are learnt by
heart: in case fedfisher-0.05 of `benchmarks/fusion.py --validation 40000` a network is .105 nats
from the teacher with 32 batches and .091 with 1000, on real images.
"""
_LATE = "time limit reached"
_TRUSTED = 5
"""Steps after which their time is taken for that of the others."""


@dataclass(frozen=True)
class DistillationProgress:
    """How far a distillation is."""

    step: int
    share: float
    """Of the learning rate's cycle that is done, from 0 to 1."""
    divergence: float
    """Held out, at the last check, in nats."""
    seconds: float
    """That it took so far."""
    left: float
    """Seconds that it will take, at the pace so far; NaN before there is one."""


class Check(NamedTuple):
    """A look at the held-out draws."""

    step: int
    divergence: float
    """KL(teacher ‖ network), in nats."""
    seconds: float


@dataclass(frozen=True)
class Distilled:
    """What came of a distillation."""

    module: nn.Module
    """The network as it was at its best on held-out draws, in evaluation mode."""
    step: int
    """Steps that led to it; 0 for the start, if nothing was better."""
    divergence: float
    """KL(teacher ‖ network) on held-out draws, in nats."""
    temperature: float
    """What its logits are to be divided by (see `temperature`); 1 of other outputs than logits."""
    ended: str
    """Why it ended, in words."""
    checks: tuple[Check, ...]
    """The first is of the start."""

    @property
    def diverged(self) -> bool:
        """Whether it ended because outputs were no longer finite."""
        return not math.isfinite(self.checks[-1].divergence)


def distill(
    student: nn.Module,
    teacher: Teacher,
    draws: Draws,
    settings: DistillationSettings | None = None,
    *,
    state: Path | None = None,
    watch: Callable[[DistillationProgress], object] | None = None,
) -> Distilled:
    """Train a network to predict as the teacher does: min E_{x ~ draws} D(teacher(x) ‖ student(x)).

    D is the squared error of centred logits over the teacher's variance, or the divergence of
    predictions. Every pass over the draws augments the inputs again and evaluates the teacher on
    them. Its outputs are used in `repeats` steps, up to `LESSONS` batches apart, since evaluating
    all clients costs more than a step. The learning rate of Adam rises and falls once.

    Args:
        student: where to start from; not changed.
        teacher: the ensemble prediction of the clients.
        draws: inputs, as networks see them.
        settings: of the distillation.
        state: a file to resume from if it is there, and to write at each check. Without `minutes`
            an interrupted distillation ends with the same bits as an uninterrupted one.
        watch: called with every step.

    Raises:
        ModelError: the student's outputs do not fit the teacher's, or are not finite.
        RunError: the file is damaged, or of another distillation.
    """
    run = _DistillationRun(student, teacher, draws, settings or DistillationSettings())
    if state is not None and state.exists():
        run.resume(state)
    if not run.at.checks.numel():
        run.check()
    while not run.ended:
        run.step()
        if run.due:
            run.check()
            if state is not None:
                run.store(state)
        if watch is not None:
            watch(run.progress)
    return run.result()


@dataclass
class _At:
    """Where a distillation is: all that the rest of it depends on."""

    student: Tensors
    best: Tensors
    moments: Tensors
    """Of Adam, as `quantity:parameter`."""
    said: Tensor
    """What the teacher says of some held-out draws."""
    checks: Tensor
    """Step, divergence and seconds of each check, float64 [checks, 3]."""
    step: int = 0
    share: float = 0.0
    lowest: float = math.inf
    best_step: int = 0
    seconds: float = 0.0
    ended: str = ""
    asked: str = ""
    """The settings that what follows depends on, and the digest of the start."""


class _DistillationRun:
    """A distillation under way."""

    def __init__(
        self, student: nn.Module, teacher: Teacher, draws: Draws, settings: DistillationSettings
    ) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of what programs are made of
            self.module = copy.deepcopy(student)
        self.teacher, self.settings = teacher, settings
        self.draws = draws if isinstance(draws, CachedInputs) else CachedInputs(draws)
        # As they are learnt from: what is held out, and running statistics, are of such.
        self.learnt = Augmented(self.draws) if settings.augment else self.draws
        self.network = ChannelsLast(self.module)
        self.device = next((p.device for p in student.parameters()), torch.device("cpu"))
        self.batch = min(settings.batch_size, settings.draws)
        self.chunk = min(max(CHUNK, self.batch), settings.draws)
        trained = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        if not trained:
            raise ModelError(
                "the network has no trainable weights. Set requires_grad = True for some"
            )
        self.names = list(trained)
        norms = nn.modules.batchnorm._BatchNorm, nn.GroupNorm
        normalized = any(isinstance(layer, norms) for layer in self.module.modules())
        self.lr = settings.lr or (LR_NORMALIZED if normalized else LR)
        self.optimizer = torch.optim.Adam(trained.values(), lr=self.lr, fused=True)
        self.held_out = self._held_out()
        self.half = self._half()
        empty = torch.empty(0, 3, dtype=torch.float64)
        self.at = _At({}, {}, {}, self.held_out[0][1][:64], empty)
        start = digest(encode(_copies(student.state_dict())))
        self.at.asked = f"{settings.model_dump_json(exclude={'minutes'})} from {start}"
        self.began = time.monotonic()
        self.paced = 0, self.began
        self.told: dict[int, Tensor] = {}
        self.drawn: list[int] = []
        self.drawing = 0.0

    def _held_out(self) -> list[tuple[Tensor, Tensor]]:
        """Held-out draws and what the teacher says of them, in pieces."""
        pieces = []
        for number in range(math.ceil(self.settings.held_out / CHUNK)):
            count = min(CHUNK, self.settings.held_out - number * CHUNK)
            x = self.learnt.batch(-1 - number, count).to(self.device)
            with torch.no_grad():
                pieces.append((x, self.teacher(x)))
        with torch.no_grad():
            set_training(self.module, False)
            outputs, said = self.network(pieces[0][0]), pieces[0][1]
        if outputs.shape != said.shape:
            raise ModelError(
                f"the network to train returns {tuple(outputs.shape)} and the teacher "
                f"{tuple(said.shape)}. They need the same number of outputs"
            )
        return pieces

    def _half(self) -> bool:
        """Whether to compute in bfloat16."""
        images = self.held_out[0][0].ndim == 4
        large = images or self.device.type == "cuda" or isinstance(self.module, TextNetwork)
        return in_half(self.settings.precision, self.device, large)

    @cached_property
    def kind(self) -> Likelihood:
        """What outputs mean."""
        return self.teacher.likelihood(self.held_out[0][1].shape[-1])

    @cached_property
    def by_divergence(self) -> bool:
        """Whether to minimize the divergence of predictions."""
        if self.settings.loss == "auto":
            shares = self.teacher.shares
            return not isinstance(self.kind, Classes) or shares is None or shares.ndim == 1
        return self.settings.loss == "kl" or not isinstance(self.kind, Classes)

    @cached_property
    def variance(self) -> Tensor:
        """Of the teacher's centred logits on held-out draws."""
        return torch.cat([_centred(self.kind, said) for _, said in self.held_out]).square().mean()

    def precision(self) -> AbstractContextManager[None]:
        """The arithmetic of a step."""
        return arithmetic(self.half, self.device)

    def inputs(self, step: int) -> Tensor:
        """The batch of a step: rows of one chunk, chunks and rows in an order of their own."""
        seed, chunks = self.draws.seed, math.ceil(self.settings.draws / self.chunk)
        pieces = self.chunk // self.batch
        turn, piece = divmod(step, pieces)
        epoch, place = divmod(turn, chunks)
        number = seeds.numpy_rng(seed, "chunks", round=epoch).permutation(chunks)[place]
        rows = seeds.numpy_rng(seed, "rows", round=turn).permutation(self.chunk)
        rows = rows[piece * self.batch : (piece + 1) * self.batch]
        x = self.draw(int(number))[torch.from_numpy(rows)]
        if self.settings.augment:
            x = self.draws.augmented(x, seeds.torch_rng(seed, "augmentation", round=step))
        return x.to(self.device)

    def draw(self, number: int) -> Tensor:
        """A chunk of draws; where they took too much of limited time, one of those before."""
        limit = math.inf if self.settings.minutes is None else 60 * self.settings.minutes
        if number in self.drawn:
            pass
        elif self.drawn and self.drawing > DRAWING * limit:
            number = self.drawn[number % len(self.drawn)]
        else:
            self.drawn.append(number)
        begin = time.monotonic()
        x = self.draws.batch(number, self.chunk)
        self.drawing += time.monotonic() - begin
        return x

    def lesson(self, step: int) -> tuple[Tensor, Tensor]:
        """The batch of a step and what the teacher says: batches come, then all of them again, in
        each view of the teacher, which has one prediction for all.
        """
        views, many = self.teacher.views, self.lessons
        block, place = divmod(step, many * self.uses)
        number = block * many + place % many
        x = self.inputs(number)
        if number not in self.told:
            with torch.no_grad():
                self.told[number] = self.teacher(x)
        last = place >= many * (self.uses - 1)
        said = self.told.pop(number) if last else self.told[number]
        return views[place // many % len(views)](x), said

    @property
    def uses(self) -> int:
        """Of a batch."""
        return self.settings.repeats * len(self.teacher.views)

    @property
    def lessons(self) -> int:
        """Batches that come before one comes again.

        In limited time, which may end before any comes again, each draw comes once.
        """
        settings = self.settings
        most = LESSONS if settings.minutes is None else settings.draws // self.batch
        return max(1, min(LESSONS, most, settings.steps // self.uses))

    def loss(self, outputs: Tensor, said: Tensor) -> Tensor:
        """What is minimized."""
        if self.by_divergence:
            return divergence(outputs, said, self.kind)
        error = _centred(self.kind, outputs) - _centred(self.kind, said)
        return error.square().mean() / self.variance

    def step(self) -> None:
        """One step of Adam."""
        at, settings = self.at, self.settings
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * cycle(at.share, settings.warmup)
        set_training(self.module, True)
        with seeds.global_rng(self.draws.seed, "layers", round=at.step, device=self.device):
            with self.precision():
                x, said = self.lesson(at.step)
                outputs = self.network(x)
            self.optimizer.zero_grad()
            torch.autograd.backward(self.loss(outputs.float(), said))
        self.optimizer.step()
        at.step += 1
        at.share = min(1.0, at.share + (1 - at.share) / self.remaining())

    def remaining(self) -> float:
        """Steps from before the last one to the end, as far as is known."""
        at, settings = self.at, self.settings
        steps = settings.steps - at.step + 1
        taken = at.step - self.paced[0]
        if settings.minutes is None or taken < _TRUSTED:
            return max(1, steps)
        fits = (60 * settings.minutes - self.seconds) / self.pace
        return max(1.0, min(steps, fits + 1))

    @property
    def pace(self) -> float:
        """Seconds for a step, checks and all, since the start or the resumption."""
        return (time.monotonic() - self.paced[1]) / max(1, self.at.step - self.paced[0])

    @property
    def seconds(self) -> float:
        """That it took, resumed or not."""
        return self.at.seconds + time.monotonic() - self.began

    @property
    def due(self) -> bool:
        """Whether it is time for a check."""
        done = int(self.at.share * self.settings.checks + 1e-9)
        return done >= len(self.at.checks) or self.out_of_time or self.at.share >= 1

    @property
    def out_of_time(self) -> bool:
        """Whether the minutes are over."""
        limit = self.settings.minutes
        return limit is not None and self.seconds >= 60 * limit

    @property
    def ended(self) -> str:
        """Why it is over; empty while it is not."""
        return self.at.ended

    @property
    def progress(self) -> DistillationProgress:
        """As it is told."""
        at = self.at
        left = (self.remaining() - 1) * self.pace if at.step > self.paced[0] else math.nan
        if self.settings.minutes is not None:
            left = min(left, max(0.0, 60 * self.settings.minutes - self.seconds))
        last = float(at.checks[-1, 1])
        return DistillationProgress(
            at.step, at.share, last, self.seconds, 0.0 if at.ended else left
        )

    def check(self) -> None:
        """Look at the held-out draws, keep the best network, and see whether to end."""
        at, patience = self.at, self.settings.patience
        found = self.divergence()
        row = torch.tensor([[at.step, found, self.seconds]], dtype=torch.float64)
        at.checks = torch.cat([at.checks, row])
        if not at.step and not math.isfinite(found):
            raise ModelError("the network to start from has outputs that are not finite")
        if found < at.lowest:
            at.lowest, at.best_step = found, at.step
            at.best = _copies(self.module.state_dict())
        since = at.checks[at.checks[:, 0] > 0, 1]
        if not math.isfinite(found):
            at.ended = "outputs were no longer finite. Try a lower learning rate"
        elif at.share >= 1:
            at.ended = "all steps done"
        elif at.step and self.out_of_time:
            at.ended = _LATE
        elif patience and len(since) and len(since) - int(since.argmin()) > patience:
            at.ended = f"no improvement in {patience} checks"

    @torch.no_grad()
    def divergence(self) -> float:
        """Held out, in nats."""
        set_training(self.module, False)
        each = [
            self.kind.divergence(said, self.network(x).float()).double()
            for x, said in self.held_out
        ]
        return float(torch.cat(each).mean())

    def store(self, path: Path) -> None:
        """Write where it is."""
        at = self.at
        at.student = _copies(self.module.state_dict())
        found = self.optimizer.state_dict()["state"]
        at.moments = {
            f"{quantity}:{self.names[place]}": tensor
            for place, quantities in found.items()
            for quantity, tensor in quantities.items()
        }
        at.seconds, self.began = self.seconds, time.monotonic()
        write_beside(path, sealed(pack(at), {}))

    def resume(self, path: Path) -> None:
        """Go on from a file. Raises a RunError if it is damaged, or of another distillation."""
        unread, after = f"the state {path} cannot be read", ". Remove it to start again"
        with told_as(RunError, unread, OSError, MessageError, after=after):
            data = read_bytes(path)
            check_seal(data)
            at = unpack(_At, decode_file(data, plain=True))
        own = self.module.state_dict()
        if (
            at.asked != self.at.asked
            or {n: t.shape for n, t in at.student.items()} != {n: t.shape for n, t in own.items()}
            or at.said.shape != self.at.said.shape
            or not torch.allclose(at.said, self.at.said.cpu(), rtol=1e-2, atol=1e-2)
        ):
            raise RunError(
                f"the state {path} belongs to another distillation: settings, network, clients or "
                "inputs differ. Give another file, or remove it to start again"
            )
        self.at, self.began = at, time.monotonic()
        if at.ended == _LATE and not self.out_of_time:
            at.ended = ""
        self.module.load_state_dict(at.student)
        moments: dict[int, dict[str, Tensor]] = {}
        for key, tensor in at.moments.items():
            quantity, _, name = key.partition(":")
            moments.setdefault(self.names.index(name), {})[quantity] = tensor
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": moments})
        self.paced = at.step, self.began

    def result(self) -> Distilled:
        """The best network, with statistics of its own."""
        at = self.at
        self.module.load_state_dict(at.best)
        found = at.lowest
        if at.best_step:
            recompute(self.network, self.learnt, self.device)
            found = self.divergence()
            if not found <= at.lowest:
                self.module.load_state_dict(at.best)
                found = at.lowest
        set_training(self.module, False)
        scale = 1.0
        if isinstance(self.kind, Classes):
            with torch.no_grad():
                outputs = torch.cat([self.network(x).float() for x, _ in self.held_out])
            said = torch.cat([said for _, said in self.held_out])
            scale = temperature(outputs, said, self.kind)
        checks = tuple(Check(int(s), d, t) for s, d, t in at.checks.tolist())
        return Distilled(self.module, at.best_step, found, scale, at.ended, checks)


def cycle(share: float, warmup: float) -> float:
    """The learning rate over its highest: a cosine up from 1/25 to 1, and one down to 0.

    Args:
        share: of the cycle that is done.
        warmup: share of it in which the rate rises.
    """
    if share < warmup:
        return 1 / 25 + (1 - 1 / 25) * (1 - math.cos(math.pi * share / warmup)) / 2
    return (1 + math.cos(math.pi * (share - warmup) / (1 - warmup))) / 2


@torch.no_grad()
def recompute(network: ChannelsLast, draws: Draws, device: torch.device) -> None:
    """Recompute running statistics of batch normalization as means over draws, in place."""
    layers = [
        layer
        for layer in network.module.modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.track_running_stats
    ]
    if not layers:
        return
    momenta = [layer.momentum for layer in layers]
    set_training(network.module, False)
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None
        layer.train()
    for number in range(STATISTICS // CHUNK):
        network.at_once(draws.batch(number, CHUNK).to(device))
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
        layer.eval()


def _centred(kind: Classes | Likelihood, outputs: Tensor) -> Tensor:
    """Logits less their mean over the classes, [n, classes]."""
    assert isinstance(kind, Classes)
    scores = kind.normalized(outputs)
    return scores - scores.mean(-1, keepdim=True)


def _copies(tensors: Tensors) -> Tensors:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
