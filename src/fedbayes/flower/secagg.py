"""Flower's secure aggregation, SecAgg+, for the reports of a round: both ends.

Keys, shares, masks and rounding are Flower's: `SecAggPlusWorkflow` at the server and
`secaggplus_mod` at the clients. They were made for Flower's strategies, so a round is put to them
as one: a strategy that hands out our tasks (`_Tasks`), and a grid that keeps our time, counts our
bytes and lets nothing through that is no proper answer (`_Line`).

The workflow gives the mean of the reports, of all the clients whose masked reports came. The mean
stands in for each of them, so a round goes on as ever: the sum is the same.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import TypeVar, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.common import (
    Code,
    FitIns,
    FitRes,
    Parameters,
    Scalar,
    Status,
    bytes_to_ndarray,
    ndarray_to_bytes,
    parameters_to_ndarrays,
)
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.compat.common.recorddict_compat import (
    fitres_to_recorddict,
    recorddict_to_fitins,
    recorddict_to_fitres,
)
from flwr.server import LegacyContext
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.server.strategy import FedAvg
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as WorkflowKey
from flwr.serverapp import Grid
from flwr.supercore.primitives.asymmetric import bytes_to_public_key

from fedbayes import seeds
from fedbayes.errors import EngineError, FedbayesError, MessageError
from fedbayes.federation.checks import decode_report, encode_report
from fedbayes.federation.client_runtime import ClientRuntime, NoReport, Outcome, Task
from fedbayes.federation.secure import MODULUS, Plan
from fedbayes.flower.engine import (
    GRACE,
    Flower,
    LinkError,
    Node,
    _Letter,
    _line,
    _said,
    complaint,
    link_size,
)
from fedbayes.messages import decode, dense

_WAITS = {
    Stage.SETUP: 0.25,
    Stage.SHARE_KEYS: 0.25,
    Stage.COLLECT_MASKED_VECTORS: 0.8,
    Stage.UNMASK: 1.0,
}
"""Share of what is left of a round's time that a step of the protocol may take."""
_GATHER = 0.25
"""Share of a round's time that clients have to connect."""


# ---- the client's end


def secure_answer(node: Callable[[Context], Node]) -> Callable[[Message, Context], Message]:
    """The function of a ClientApp that takes part in the protocol, for messages of type `train`.

    Args:
        node: finds the client from its context.
    """

    def train(message: Message, context: Context) -> Message:
        """The client's part between the steps of the protocol: its work, as Flower's mod takes it.

        The mod masks the parameters and sends nothing else of them.
        """
        fit = recorddict_to_fitins(message.content, keep_input=True)
        task, plan = _read_task(fit)
        client = node(context)
        runtime = client.runtime()
        outcome = client.work(task, runtime)
        broadcast = decode(task.message)
        vector = plan.write(decode_report(outcome.report, broadcast), broadcast)
        seed = seeds.integer(runtime.run.seed, "rounding", round=task.round, client=task.client)
        np.random.seed(seed % 2**32)  # noqa: NPY002 - Flower's rounding draws from this stream
        reply = FitRes(
            status=Status(Code.OK, ""),
            parameters=Parameters([ndarray_to_bytes(vector)], "numpy.ndarray"),
            num_examples=1,  # weights are in the vector: here the server would read them
            metrics={"ticket": outcome.state},
        )
        return Message(fitres_to_recorddict(reply, keep_input=True), reply_to=message)

    def answer(message: Message, context: Context) -> Message:
        before = np.random.get_state()  # noqa: NPY002
        try:
            return secaggplus_mod(message, context, train)
        except FedbayesError as error:
            return complaint(error, message)
        finally:
            np.random.set_state(before)  # noqa: NPY002

    return answer


def _write_task(task: Task, plan: Plan) -> FitIns:
    about: dict[str, Scalar] = {
        "client": task.client,
        "round": task.round,
        "ticket": task.state or b"",
        "constants": task.constants,
        **asdict(plan),
    }
    return FitIns(Parameters([task.message], "fedbayes"), about)


def _read_task(fit: FitIns) -> tuple[Task, Plan]:
    about = dict(fit.config)
    names = ("client", "round", "ticket", "constants")
    client, number, ticket, constants = (about.pop(name) for name in names)
    state = cast(bytes, ticket) or None
    task = Task(int(client), int(number), fit.parameters.tensors[0], state, str(constants))
    return task, Plan(**about)  # type: ignore[arg-type]


# ---- the server's end


class SecureFlower(Flower):
    """Clients behind a Flower grid, of whose reports the server sees the sum.

    Who is not there for the keys is lost for the round, and so is who drops out before its
    masked report came. The sum opens if `plan.threshold` clients stay; if they do not, no report
    of the round counts. A link that breaks ends the run with an error; it can be resumed.

    Args:
        plan: the settings.
        connect, runtime, clients, timeout, poll, closing: as for `Flower`.
    """

    def __init__(
        self,
        plan: Plan,
        connect: Callable[[], Grid],
        runtime: ClientRuntime,
        *,
        clients: int,
        timeout: float,
        poll: float = 0.5,
        closing: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(
            connect, runtime, clients=clients, timeout=timeout, poll=poll, closing=closing
        )
        self._plan = plan

    def train(self, tasks: Iterable[Task]) -> Iterator[Outcome | NoReport]:
        """Run the protocol; each task's report, in their order, is the mean of all."""
        letters = {task.client: _Letter(task) for task in tasks}
        self._pulls = {m: pull for m, pull in self._pulls.items() if m in self._asked}
        line = _Line(self, time.monotonic() + self._timeout)
        try:
            present = self._gather(letters)
            reports, why = self._sum(letters, present, line)
        except LinkError as error:
            self._start_over(letters, str(error))
            raise EngineError(f"the SuperLink was lost: {error}") from None
        mean = b""
        if reports:
            try:
                mean = self._mean(reports, next(iter(letters.values())).task)
            except MessageError as error:
                why = str(error)
        for client in letters:
            node = present.get(client)
            if node is None:
                yield NoReport(f"it was not there for the keys of the round{self._strangers()}")
                continue
            down, up = line.down.get(node, 0), line.up.get(node, 0)
            if node in reports and mean:
                ticket = cast(bytes, reports[node].metrics["ticket"])
                size = line.masked[node]
                yield Outcome(mean, ticket, {}, {}, link_down=down, link_up=up, sent=size)
            elif node in reports or node not in line.lost:
                reason = f"secure aggregation came to nothing: {why}"
                yield NoReport(reason, down, up, in_vain=True)
            else:
                refused = isinstance(line.lost[node], MessageError)
                yield NoReport(str(line.lost[node]), down, up, refused)

    def _gather(self, letters: dict[int, _Letter]) -> dict[int, int]:
        """Wait for the cohort to connect: the clients that are there, and their nodes."""
        until = time.monotonic() + _GATHER * self._timeout
        self._ask_again()
        while True:
            self._call_roll(letters)
            here = {c: self._clients[c] for c in letters if c in self._clients}
            if len(here) == len(letters) or time.monotonic() >= until:
                return here
            time.sleep(self._poll)

    def _strangers(self) -> str:
        """What is said by nodes that could not be placed."""
        return "".join(f"; node {node} says: {why}" for node, why in self._odd.items())

    def _sum(
        self, letters: dict[int, _Letter], present: dict[int, int], line: "_Line"
    ) -> tuple[dict[int, FitRes], str]:
        """What came of the protocol, by node, with the mean in place of each; or none, and why."""
        tasks = {node: letters[client].task for client, node in present.items()}
        needed = f"{self._plan.threshold} are needed"
        while True:
            left = {node: task for node, task in tasks.items() if node not in line.lost}
            if len(left) < self._plan.threshold:
                return {}, f"there were {len(left)} clients for it, {needed}"
            try:
                reports = _aggregate(left, self._plan, line)
            except _WithoutThem:
                continue  # no report was asked for yet: begin again with those that are left
            except FedbayesError:
                raise
            except Exception as error:  # whatever the workflow raises on a stranger's shares
                return {}, f"the masks cannot be taken off: {_line(error)}"
            return reports, "" if reports else f"too few clients stayed to the end, {needed}"

    def _mean(self, reports: dict[int, FitRes], task: Task) -> bytes:
        """The mean of the reports, encoded as one."""
        (mean,) = parameters_to_ndarrays(next(iter(reports.values())).parameters)
        return encode_report(self._plan.read(mean, decode(task.message)))


def _aggregate(tasks: dict[int, Task], plan: Plan, line: "_Line") -> dict[int, FitRes]:
    """Flower's workflow on these tasks, by node: the mean in place of each report, if it opens."""
    strategy = _Tasks({node: _write_task(task, plan) for node, task in tasks.items()})
    first = next(iter(tasks.values()))
    line.entries = 1 + sum(t.numel() for t in dense(decode(first.message)).values())
    state = RecordDict()
    state[MAIN_CONFIGS_RECORD] = ConfigRecord({WorkflowKey.CURRENT_ROUND: first.round})
    state[MAIN_PARAMS_RECORD] = ArrayRecord()
    context = Context(0, 0, {}, state, {})
    workflow = SecAggPlusWorkflow(
        plan.shares if plan.shares < len(tasks) else 1.0,  # 1.0: all
        plan.threshold,
        max_weight=1.0,
        clipping_range=plan.range,
        quantization_range=plan.levels,
        modulus_range=MODULUS,
    )
    workflow(cast(Grid, line), LegacyContext(context, strategy=strategy))
    return strategy.results


class _Tasks(FedAvg):
    """The strategy that Flower's workflow asks for tasks, and tells the mean."""

    def __init__(self, fits: dict[int, FitIns]) -> None:
        super().__init__()
        self._fits = fits
        self.results: dict[int, FitRes] = {}

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """The tasks, by node."""
        nobody = cast(Grid, None)  # the workflow asks a proxy for its number alone
        return [(GridClientProxy(node, nobody, 0), fit) for node, fit in self._fits.items()]

    def aggregate_fit(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, FitRes]],
        failures: list[tuple[ClientProxy, FitRes] | BaseException],
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """Note the results. They need no aggregation: all hold the mean."""
        self.results = {proxy.node_id: result for proxy, result in results}
        return None, {}


class _WithoutThem(Exception):
    """Nodes went away before all keys were shared: the workflow cannot go on.

    It can take off the masks of nodes that go away later; of these nobody holds shares.
    """


@dataclass
class _Line:
    """What the workflow has for a grid: one step of the protocol at a time.

    It keeps the round's time, counts bytes, and lets no answer through that would trip the
    workflow.
    """

    flower: Flower
    """The way to the nodes."""
    deadline: float
    """When the round ends, by `time.monotonic`."""
    entries: int = 0
    """Length of a report's vector."""
    down: Counter[int] = field(default_factory=Counter)
    """Bytes that the link carried to a node."""
    up: Counter[int] = field(default_factory=Counter)
    """Bytes that the link carried from a node."""
    masked: dict[int, int] = field(default_factory=dict)
    """Bytes of a node's masked report."""
    lost: dict[int, FedbayesError] = field(default_factory=dict)
    """Nodes that dropped out, and why."""

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Send one step's messages; the proper answers that come in its time."""
        asked = list(messages)
        stage = str(_record(asked[0])[Key.STAGE])
        now = time.monotonic()
        until = now + _WAITS[stage] * max(0.0, self.deadline - now)
        waiting = {number: m for m in asked if (number := self._push(m))}
        answers: list[Message] = []
        while waiting:
            self.flower._look(waiting)
            for number in list(waiting):
                if (answer := self.flower._reply(number)) is not None:
                    answers += self._take(answer, waiting.pop(number), stage)
            if not waiting or time.monotonic() >= until:
                break
            time.sleep(self.flower._poll)
        for node in {m.metadata.dst_node_id for m in asked} - {
            answer.metadata.src_node_id for answer in answers
        }:
            late = EngineError(f"it has not sent its {_STEPS[stage]} in time")
            self.lost.setdefault(node, late)
        if stage in (Stage.SETUP, Stage.SHARE_KEYS) and len(answers) < len(asked):
            raise _WithoutThem
        return answers

    def _push(self, message: Message) -> str:
        """Send a copy that nobody works on after the round; its number, or nothing."""
        records = dict(message.content)
        records[RECORD_KEY_CONFIGS] = ConfigRecord(dict(_record(message)))
        about = message.metadata
        ttl = max(0.0, self.deadline - time.monotonic()) + GRACE
        copy = Message(
            RecordDict(records),
            about.dst_node_id,
            about.message_type,
            ttl=ttl,
            group_id=about.group_id,
        )
        with self.flower._reach() as grid:
            number = next(iter(filter(None, grid.push_messages([copy]))), "")
        if number:
            self.down[about.dst_node_id] += link_size(copy)
        return number

    def _take(self, answer: Message | MessageError, asked: Message, stage: str) -> list[Message]:
        """The answer, if it is a proper one."""
        node = asked.metadata.dst_node_id
        try:
            if isinstance(answer, MessageError):
                raise answer
            if answer.has_error():
                reason = answer.error.reason or "no reason given"
                raise EngineError(f"its node failed: {_line(reason)}")
            self.up[node] += link_size(answer)
            if "error" in answer.content.config_records:
                raise EngineError(f"its node says: {_said(answer.content)}")
            try:
                if answer.metadata.src_node_id != node:
                    raise ValueError("it is in the name of another node")
                _CHECKS[stage](answer, asked, self.entries)
            except Exception as error:  # whatever Flower's readers raise on a stranger's bytes
                raise MessageError(f"it has no proper {_STEPS[stage]}: {_line(error)}") from None
        except FedbayesError as error:
            self.lost[node] = error
            return []
        if stage == Stage.COLLECT_MASKED_VECTORS:
            self.masked[node] = sum(map(len, _many(answer, Key.MASKED_PARAMETERS, bytes)))
        return [answer]


def _record(message: Message) -> ConfigRecord:
    return message.content.config_records[RECORD_KEY_CONFIGS]


T = TypeVar("T")


def _many(message: Message, key: str, kind: type[T]) -> list[T]:
    """A list of an answer."""
    found = _record(message)[key]
    if not isinstance(found, list) or not all(type(item) is kind for item in found):
        raise ValueError(f"{key} is no list of {kind.__name__}")
    return cast(list[T], found)


def _check_keys(answer: Message, asked: Message, entries: int) -> None:
    for key in (Key.PUBLIC_KEY_1, Key.PUBLIC_KEY_2):
        bytes_to_public_key(cast(bytes, _record(answer)[key]))


def _check_shares(answer: Message, asked: Message, entries: int) -> None:
    others = {int(k) for k in _record(asked) if k != Key.STAGE} - {asked.metadata.dst_node_id}
    if sorted(_many(answer, Key.DESTINATION_LIST, int)) != sorted(others):
        raise ValueError("they are not for those that they should be for")
    if len(_many(answer, Key.CIPHERTEXT_LIST, bytes)) != len(others):
        raise ValueError("some are missing")


def _check_masked(answer: Message, asked: Message, entries: int) -> None:
    arrays = _many(answer, Key.MASKED_PARAMETERS, bytes)
    if sum(map(len, arrays)) > 8 * (1 + entries) + 1024:
        raise ValueError("it is too long")
    for data, length in zip(arrays, (1, entries), strict=True):
        numbers = bytes_to_ndarray(data)
        if numbers.shape != (length,) or numbers.dtype != np.int64:
            raise ValueError(f"shape {numbers.shape} and type {numbers.dtype}")
        if numbers.min() < 0 or numbers.max() >= MODULUS:
            raise ValueError("numbers out of range")
    ticket = recorddict_to_fitres(answer.content, keep_input=True).metrics["ticket"]
    if not isinstance(ticket, bytes) or len(ticket) > 200:
        raise ValueError("its ticket is none")


def _check_opened(answer: Message, asked: Message, entries: int) -> None:
    wanted = [
        n
        for key in (Key.ACTIVE_NODE_ID_LIST, Key.DEAD_NODE_ID_LIST)
        for n in _many(asked, key, int)
    ]
    if sorted(_many(answer, Key.NODE_ID_LIST, int)) != sorted(wanted):
        raise ValueError("they are not those that were asked for")
    shares = _many(answer, Key.SHARE_LIST, bytes)
    if len(shares) != len(wanted) or not all(len(s) > 4 and len(s) % 16 == 4 for s in shares):
        raise ValueError("some are none")


_CHECKS = {
    Stage.SETUP: _check_keys,
    Stage.SHARE_KEYS: _check_shares,
    Stage.COLLECT_MASKED_VECTORS: _check_masked,
    Stage.UNMASK: _check_opened,
}
_STEPS = {
    Stage.SETUP: "keys",
    Stage.SHARE_KEYS: "key shares",
    Stage.COLLECT_MASKED_VECTORS: "masked report",
    Stage.UNMASK: "shares that open the sum",
}
"""What a node is asked for in each step of the protocol."""
