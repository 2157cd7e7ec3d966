"""The client's side of a round: what runs where the data is.

The same code serves every engine. It takes bytes and gives bytes, so that nothing can pass
between server and client but what is counted.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache, partial
from typing import Any, NamedTuple, Protocol

import torch

from fedbayes.contracts import (
    AnyMethod,
    Federation,
    Info,
    Method,
    Report,
    Reports,
    RoundContext,
    Sampler,
)
from fedbayes.contracts.returned import answered
from fedbayes.core import seeds
from fedbayes.core.devices import nondeterministic, out_of_memory
from fedbayes.core.messages import SHORT_HEADER, Message, decode, decode_file, encode
from fedbayes.core.tensors import Samples, Tensors, named, pack, part, to, unpack
from fedbayes.errors import EngineError, MessageError, ModelError, told_as, warn
from fedbayes.federation.attacks.adversary import Adversary
from fedbayes.federation.resident import DeviceCache
from fedbayes.federation.settings import AS_IT_IS, Compression
from fedbayes.federation.stages.checks import encode_reports
from fedbayes.federation.stages.report_codec import Compressor
from fedbayes.federation.stages.stage import Stage, at_client
from fedbayes.inference.stacked import solve_stacked, stackable
from fedbayes.likelihoods import Scores, evaluate, scored
from fedbayes.likelihoods.imbalance import reweighted
from fedbayes.likelihoods.measures import fitting
from fedbayes.likelihoods.temperature import sampled_at, sums_of
from fedbayes.models import Network

_HEADER = 8192
"""Bytes of a broadcast's header for each tensor of the network."""


@dataclass(frozen=True)
class Task:
    """One client's work in one round."""

    client: int
    round: int
    message: bytes
    """The broadcast, as `messages.encode` wrote it."""
    state: bytes | None
    """The client's private state at the end of its last round; None before the first."""
    constants: str = ""
    """Digest of the frozen weights of the server's network (`Network.constants_digest`), which are
    not sent."""
    most: int = 0
    """Bytes of the longest proper report, which a server asks for at most; not sent."""
    card: str = ""
    """Of the last global model, where that is the message: a copy to keep, and no work."""
    evaluate: tuple[str, ...] | None = None
    """Where the message is a global model to be tried on the client's test samples, and no work:
    the metrics that are asked for in addition to sums."""
    temperature: float | None = None
    """At which the global model is tried; None: as it is."""
    calibrate: bool = False
    """Where a global model is tried: whether sums for its temperature are wanted instead, of the
    samples that the client holds out for them."""


@dataclass(frozen=True)
class ClientResult:
    """What came of a task."""

    report: bytes
    """The report, as `messages.encode` wrote it."""
    state: bytes
    """The client's private state, which stays with the client."""
    info: Info
    """Metrics of the method."""
    scores: Scores
    """Scores of the client's own model on its test samples; empty if it has none."""
    link_down: int = 0
    """Bytes that a network carried for it to the client, 0 where there is none."""
    link_up: int = 0
    """Bytes that a network carried for it from the client."""
    trouble: str = ""
    """What went wrong before it came after all; empty if nothing did."""
    sent: int = 0
    """Encoded bytes of what the client sent, where it sent something instead of the report."""
    exact: bool = False
    """Whether real numbers of the report are float64, whatever the server's are: a mean that is not
    rounded yet."""
    group: tuple[bytes, ...] = ()
    """Reports of clients that were trained at once, this one among them, which can be read at
    once."""


@dataclass(frozen=True)
class ClientFailure:
    """A task that no report came of: the client counts as if it had not taken part."""

    reason: str
    """Why, in words for the user: `client 3 lost: REASON`."""
    link_down: int = 0
    """Bytes that a network carried to the client; 0: the task never got there."""
    link_up: int = 0
    """Bytes that a network carried from the client."""
    refused: bool = False
    """Whether something came that is no report, as opposed to nothing."""
    blocked_by_others: bool = False
    """Whether the client was there, and others are why nothing came of it."""


@dataclass(frozen=True)
class Evaluation:
    """A global model, and the rows of the union of the clients' test sets to evaluate it on."""

    model: bytes
    start: int
    stop: int
    measures: tuple[str, ...] = ()
    """Metrics that need predictions, in addition to the sums that clients always send."""
    temperature: float | None = None
    """Of the model's probabilities; None: as they are."""


class Data(Protocol):
    """The data of the clients, as `fedbayes.data.FederatedData` has them."""

    def number(self, client: int) -> int:
        """The number that splits of a client's samples depend on."""

    def train(self, client: int) -> Samples:
        """Training samples of a client."""

    def train_each(self, clients: Sequence[int]) -> list[Samples]:
        """Training samples of each of some clients."""

    def test(self, client: int) -> Samples:
        """Test samples of a client, possibly none."""

    def all_train(self) -> Samples:
        """Training samples of all clients."""

    def test_union(self, start: int, stop: int) -> Samples:
        """Rows of the union of all clients' test samples."""


def due(number: int, every: int, rounds: int) -> bool:
    """Whether models are evaluated in a round: every so many, and in the last; 0: in the last."""
    return number >= rounds or (every > 0 and number % every == 0)


@dataclass(frozen=True)
class ClientRuntime:
    """The clients of a federation as far as they live in this process."""

    run: Federation
    method: AnyMethod
    own_network: Callable[[int], Network]
    """Builds the network of a client with an initialization of its own."""
    data: Data
    adversary: Adversary | None = None
    """Who trains on poisoned data, and what for; None in an honest run."""
    figures: bool = True
    """Whether clients send metrics, scores and numbers of samples in addition to their updates."""
    evaluate_every: int = 1
    """Rounds between evaluations of clients' own models, as `due` has it."""
    compression: Compression = AS_IT_IS
    """In how many bytes numbers are sent."""
    stages: tuple[Stage, ...] = ()
    """What else is done with a report before it is sent."""
    data_cache: int = 0
    """Bytes of clients' samples that stay on the device between rounds."""
    held_out: float = 0.0
    """Share of a client's training samples that it does not train on, at most `MOST_HELD_OUT` of
    them: the temperature of the global model, or of the client's own, is fitted on them
    (`calibrating`)."""
    validates: bool = False
    """Whether test samples of clients are validation rows (`data.validation`)."""

    evaluating: dict[str, float] = field(default_factory=lambda: {"seconds": 0.0}, compare=False)
    """`seconds` that went into evaluating clients' own models so far."""

    @cached_property
    def resident(self) -> DeviceCache:
        """The samples that are on the device."""
        return DeviceCache(self.run.network.device, self.data_cache)

    def train(self, task: Task, received: Message | None = None) -> ClientResult:
        """Decode, run the E-step, evaluate the personal model, encode.

        Where the device has no memory left, samples that are kept there are let go, and the work is
        done once more: it depends on the task alone.

        Args:
            task: what to do.
            received: the message of the task (`received`), where the caller lets go of its bytes,
                which may be gigabytes; None: it is decoded here.

        Raises:
            EngineError: frozen weights are not the server's, the private state is damaged, or the
                device has too little memory.
            ModelError: the network cannot be trained on the client's samples.
        """
        received = self.received(task) if received is None else received
        try:
            return self._train(task, received)
        except RuntimeError as error:
            if nondeterministic(error):
                raise ModelError(_varies(error)) from error
            if not out_of_memory(error):
                raise
        if self.resident.release():
            try:
                return self._train(task, received)
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
        raise EngineError(
            f"client {task.client}: {self.run.network.device} is out of memory in round "
            f"{task.round}. Use fewer processes on it (workers, devices), or set a smaller "
            "training.batch_size"
        )

    def train_stacked(self, tasks: Sequence[Task]) -> list[ClientResult]:
        """Train several clients at once where that is possible and saves time. Else they are
        trained one by one, and a warning says why.
        """
        method, run = self.method, self.run
        if not self.stacks:
            why = f"{method.name}, the network's buffers or weights of classes do not allow more"
            return self._one_by_one(tasks, why)
        said = {task.message: task for task in tasks}
        messages = {data: self._placed(self.received(task)) for data, task in said.items()}
        samples = self._samples([task.client for task in tasks])
        begun = [
            self._begun(task, messages[task.message], own)
            for task, own in zip(tasks, samples, strict=True)
        ]
        problems = []
        for task, each in zip(tasks, begun, strict=True):
            with _of_client(task.client, len(each.samples.y), "training"):
                problems.append(method.problem(*each[1:]))
        if not stackable(problems, [len(one.samples.y) for one in begun], run.training):
            why = "batches of one size are too few, or steps differ from client to client"
            return self._one_by_one(tasks, why)
        places = [(task.round, task.client) for task in tasks]
        streams = cache(partial(seeds.torch_rngs, run.seed, places=places))

        def rng(own: int, purpose: str) -> torch.Generator:
            return streams(purpose)[own]

        try:
            solved = solve_stacked(
                problems,
                method.loss(run),
                [each.samples for each in begun],
                run.training,
                lr=begun[0].at.lr,
                rngs=[partial(rng, own) for own in range(len(tasks))],
            )
        except Exception as error:  # of anyone's loss, which is pure; a real error comes again
            return self._one_by_one(tasks, str(error).partition("\n")[0])
        return self._sent(
            [
                self._ended(one, method.report(solution, problem, one.state, one.at))
                for one, problem, solution in zip(begun, problems, solved, strict=True)
            ]
        )

    def _one_by_one(self, tasks: Sequence[Task], why: str) -> list[ClientResult]:
        # A network that fails on a client's samples fails here too, and the client is named.
        outcomes = [self.train(task) for task in tasks]
        warn(f"clients are trained one by one: {why}")
        return outcomes

    @cached_property
    def stacks(self) -> bool:
        """Whether problems of several clients may be solved at once: the method states them
        (`Method.local`), and the network has neither buffers nor other losses for each client.
        """
        stated = type(self.method).local is Method.local
        return stated and not (self.run.network.buffers or self.run.training.reweights)

    @cached_property
    def draws(self) -> bool:
        """Whether training may draw from global generators, which are seeded then: code of users
        may, and layers such as dropout. What is built in draws from `RoundContext.rng`.
        """
        run, training = self.run, self.run.training
        kinds = type(self.method), type(run.likelihood)
        return (
            run.network.draws
            or not all(kind.__module__.startswith("fedbayes.") for kind in kinds)
            or ":" in training.optimizer + training.schedule
            or bool(self.stages)
            or self.adversary is not None
        )

    def _train(self, task: Task, received: Message) -> ClientResult:
        (samples,) = self._samples([task.client])
        begun = self._begun(task, self._placed(received), samples)
        run, (message, state, samples, at) = self.run, begun[1:]
        place = {"round": task.round, "client": task.client}
        device = run.network.device
        seeded = seeds.global_rng(run.seed, "layers", **place, device=device)
        with (
            _of_client(task.client, len(samples.y), "training"),
            seeded if self.draws else nullcontext(),
        ):
            given = self.method.local(message, state, samples, at)
            run.network.require_unwritten()
        return self._sent([self._ended(begun, given)])[0]

    def received(self, task: Task) -> Message:
        """The broadcast of a task.

        Raises:
            MessageError: its bytes are no message.
        """
        # A method may send sparse tensors of a network that is large, and then little but names.
        header = SHORT_HEADER + len(task.message) + _HEADER * len(self.run.network.initial)
        return self._link.received(decode(task.message, longest_header=header))

    def _placed(self, message: Message) -> Message:
        """A message on the device."""
        device = self.run.network.device
        return {name: item.to(device) for name, item in message.items()}

    @cached_property
    def _link(self) -> Compressor:
        """How numbers are written and read."""
        return Compressor(self.compression, self.method, self.run)

    def _samples(self, clients: Sequence[int]) -> Iterator[Samples]:
        """Training samples of clients on the device; those that are not there, gathered at once."""
        missing = [client for client in clients if ("train", client) not in self.resident]
        gathered: dict[int, Samples] = {}
        if len(missing) > 1 and not (self.held_out or self.method.reports.pooled):
            gathered = dict(zip(missing, self.data.train_each(missing), strict=True))

        def gather(client: int) -> Samples:
            return gathered[client] if client in gathered else self.parts(client)[0]

        for client in clients:
            yield self.resident.get(("train", client), partial(gather, client))

    def _begun(self, task: Task, message: Message, samples: Samples) -> "_Begun":
        """What a client starts from: the message, its private state and its samples."""
        run = self.run
        self._require_constants(task)
        device = run.network.device
        if self.adversary is not None:
            samples = self.adversary.poisoned(samples, run, task.client, task.round)
        samples, held_out = self._set_aside(samples, task.client)
        at = self.at(task, held_out)
        if run.training.reweights:
            training = run.training
            own = reweighted(run.likelihood, training.class_weights, training.focal, samples.y)
            at = replace(at, run=replace(run, likelihood=own))
        state, memory = self.method.join(at), Tensors()
        if task.state is None and device.type != "cpu":
            state = unpack(type(state), to(pack(state), device))
        if task.state is not None:
            state, memory = self._state(task, device)
        return _Begun((task, memory), message, state, samples, at)

    def _ended(self, begun: "_Begun", given: object) -> "_Ended":
        """Evaluate the client's own model."""
        run, (task, memory), message, at = self.run, begun.place, begun.message, begun.at
        report, state, info = answered(self.method, given)
        scores: Scores = {}
        if not self.figures:
            report, info = replace(report, weight=1.0), {}
        elif not self.method.reports.pooled and due(task.round, self.evaluate_every, run.rounds):
            model = self.method.personal_model(message, report, state, run)
            test = self._test(task.client)
            began = time.perf_counter()
            if model is not None and len(test.y):
                draw = self.method.draws(model, run)
                scores = self._scored(task, draw, test, run.measures)
            self.evaluating["seconds"] += time.perf_counter() - began
        report = at_client(self.stages, report, message, at)
        return _Ended(begun, report, state, memory, info, scores)

    def _sent(self, ended: Sequence["_Ended"]) -> list[ClientResult]:
        """Encode what clients send and keep."""
        if self._link.code is None:
            told = encode_reports([one.report for one in ended])
            group = tuple(told) if len(told) > 1 else ()
            return [
                ClientResult(
                    report=data,
                    state=write_state(one.state, one.memory),
                    info=one.info,
                    scores=one.scores,
                    group=group,
                )
                for one, data in zip(ended, told, strict=True)
            ]
        results = []
        for one in ended:
            codec = self._link.codec(one.begun.message, one.begun.at)
            written, state = codec.write(one.report, one.memory), one.state
            if written.missed:
                state = Reports.of(self.method).retracted(state, written.missed)
            kept = write_state(state, written.memory)
            results.append(
                ClientResult(report=written.data, state=kept, info=one.info, scores=one.scores)
            )
        return results

    def evaluate(self, evaluation: Evaluation) -> Tensors:
        """Evaluate a global model on some rows of the union of the test sets.

        Returns:
            Terms of its scores; its predictions, as far as metrics need them; and terms of the
            success of an attack that aims at some of the rows.
        """
        device = self.run.network.device
        model = to(decode_file(evaluation.model), device)
        rows = evaluation.start, evaluation.stop
        samples = self.resident.get(("union", *rows), lambda: self.data.test_union(*rows))
        draw = self._draws(model, evaluation.temperature)
        with seeds.global_rng(self.run.seed, "evaluation", client=evaluation.start, device=device):
            terms = evaluate(self.run.likelihood, draw, samples, measures=evaluation.measures)
        if self.adversary is not None:
            terms |= self.adversary.success(model, samples, self.method, self.run)
        return terms

    def tried(self, task: Task) -> ClientResult:
        """Scores of the global model in a task on the client's own test samples; none if it has
        none. Or, where these are wanted, sums for its temperature.

        Raises:
            EngineError: clients of this federation send no figures, or no sums; or frozen weights
                differ.
            ConfigError: there is no such metric of these targets.
        """
        if not self.figures:
            raise EngineError("clients of this federation send no metrics")
        self._require_constants(task)
        device = self.run.network.device
        model = to(decode_file(task.message), device)
        if task.calibrate:
            if not self.held_out:
                raise EngineError("clients of this federation hold out no samples for calibration")
            held_out = self.parts(task.client)[1].to(device)
            sums = sums_of(self.run.likelihood, self._draws(model, None), held_out)
            return ClientResult(encode(sums.tensors()), task.state or b"", {}, {})
        test = self._test(task.client)
        scores: Scores = {}
        if len(test.y):
            draw = self._draws(model, task.temperature)
            measures = fitting(task.evaluate or (), self.run.likelihood)
            scores = self._scored(task, draw, test, measures)
        return ClientResult(b"tried", task.state or b"", {}, scores)

    def _draws(self, model: Tensors, temperature: float | None) -> Sampler:
        """A global model as a function from inputs to outputs, at a temperature if any."""
        return sampled_at(self.run.likelihood, self.method.draws(model, self.run), temperature)

    def parts(self, client: int) -> tuple[Samples, Samples]:
        """The training samples of a client: those that it trains on, and those that it holds out
        for the temperature.
        """
        every = self.data.all_train() if self.method.reports.pooled else self.data.train(client)
        share = self.held_out if client in calibrating(self.run) else 0.0
        count = held_out_of(len(every.y), share)
        return _divided(every, count, self.run.seed, "temperature", self.data.number(client))

    def _scored(
        self, task: Task, draw: Sampler, test: Samples, measures: tuple[str, ...]
    ) -> Scores:
        """Scores of a model on test samples of a task's client, with the same draws anywhere."""
        run = self.run
        with (
            _of_client(task.client, len(test.y), "test"),
            seeds.global_rng(run.seed, "evaluation", client=task.client, device=run.network.device),
        ):
            return scored(run.likelihood, draw, test, measures)

    def _test(self, client: int) -> Samples:
        """Test samples of a client, on the device."""
        return self.resident.get(("test", client), lambda: self.data.test(client))

    def _require_constants(self, task: Task) -> None:
        """See that frozen weights are the server's."""
        if task.constants != self.run.network.constants_digest:
            raise EngineError(
                "frozen weights of the network differ from the server's. Both must use the same "
                "model settings, files and version of its code"
            )

    def at(self, task: Task, held_out: Samples | None = None) -> RoundContext:
        """The place of a task in the run."""
        return RoundContext(
            self.run,
            round=task.round,
            client=task.client,
            own_network=lambda: self.own_network(task.client),
            held_out=held_out,
            calibration=lambda: self._calibration(task.client),
        )

    def _calibration(self, client: int) -> Samples | None:
        """Samples for a temperature of the client's own model: held out, or validation rows."""
        if self.held_out:
            found = self.parts(client)[1].to(self.run.network.device)
        elif self.validates:
            found = self._test(client)
        else:
            return None
        return found if len(found.y) else None

    def _state(self, task: Task, device: torch.device) -> tuple[Any, Tensors]:
        """The client's private state, and what it could not say."""
        damaged = f"the private state of client {task.client} is damaged"
        with told_as(EngineError, damaged, MessageError):
            return read_state(task.state or b"", self.method, device)

    def _set_aside(self, samples: Samples, client: int) -> tuple[Samples, Samples | None]:
        """What a client trains on, and what its early stopping watches: the same every round."""
        if not (count := set_aside(len(samples.y), self.run.training.validation)):
            return samples, None
        return _divided(samples, count, self.run.seed, "validation", self.data.number(client))


class _Begun(NamedTuple):
    """A client's work, of which all but the first goes to the method."""

    place: tuple[Task, Tensors]
    """The task, and what the client could not say so far."""
    message: Message
    state: Any
    samples: Samples
    at: RoundContext


class _Ended(NamedTuple):
    """A client's work when it is done."""

    begun: _Begun
    report: Report
    state: Any
    memory: Tensors
    """What the client could not say so far."""
    info: Info
    scores: Scores


MOST_HELD_OUT = 200
"""Samples that a client holds out for a temperature, at most: one number needs no more."""


def held_out_of(count: int, share: float) -> int:
    """Number of training samples of `count` that a client holds out for the temperature."""
    return min(round(share * count), MOST_HELD_OUT)


MOST_CALIBRATING = 1000
"""Clients that hold out samples for a temperature, at most: of more they are drawn."""


@lru_cache(maxsize=8)
def _calibrating(seed: int, clients: int) -> frozenset[int]:
    rng = seeds.numpy_rng(seed, "temperature")
    return frozenset(rng.choice(clients, MOST_CALIBRATING, replace=False, shuffle=False).tolist())


def calibrating(run: Federation) -> Collection[int]:
    """The clients of whose samples a temperature is, where it is fitted: all, or some drawn by the
    seed.
    """
    if run.clients <= MOST_CALIBRATING:
        return range(run.clients)
    return _calibrating(run.seed, run.clients)


def _divided(
    samples: Samples, count: int, seed: int, purpose: str, client: int
) -> tuple[Samples, Samples]:
    """Samples without so many of them, which the seed draws, and these."""
    if not count:
        return samples, Samples(samples.x[:0], samples.y[:0])
    rng = seeds.torch_rng(seed, purpose, client=client)
    order = torch.randperm(len(samples.y), generator=rng).to(samples.y.device)
    drawn, kept = order[:count], order[count:].sort().values
    return (
        Samples(samples.x[kept], samples.y[kept]),
        Samples(samples.x[drawn], samples.y[drawn]),
    )


@contextmanager
def _of_client(client: int, count: int, kind: str) -> Iterator[None]:
    """Name the client, its samples and what they are for in errors of networks."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"client {client}, with {count:,} {kind} samples: {error}") from error


def set_aside(count: int, share: float) -> int:
    """How many of so many training samples early stopping watches, at this share."""
    if not share or count < 2:
        return 0
    return min(max(1, round(share * count)), count - 1)


def _varies(error: RuntimeError) -> str:
    """What to say of an operation whose numbers are other ones on every run."""
    operation = str(error).split(" does not have", maxsplit=1)[0]
    return (
        f"{operation} is not deterministic on this device. Set deterministic = false to use it, "
        "or choose another network"
    )


_UNSAID = "unsaid"
"""Before the names of tensors in a private state that the client could not say; no field of a
method's state is called so."""


def write_state(state: object, memory: Tensors) -> bytes:
    """A client's private state as bytes, a file of safetensors.

    Args:
        state: the method's.
        memory: what the client could not say so far, by name.
    """
    return encode({**pack(state), **named(_UNSAID, memory)}, plain=True)


def read_state(data: bytes, method: AnyMethod, device: torch.device) -> tuple[Any, Tensors]:
    """The inverse of `write_state`; what the client could not say stays on the CPU.

    Raises:
        MessageError: it is damaged.
    """
    flat = decode_file(data)
    memory = part(flat, _UNSAID)
    own = {n: t for n, t in flat.items() if not n.startswith(f"{_UNSAID}/")}
    return unpack(method.client_state, to(own, device)), memory
