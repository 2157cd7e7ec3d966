"""Flower's secure aggregation, SecAgg+: a client's end, and the task that it gets.

Keys, shares and rounding are Flower's `secaggplus_mod`; masks are ours (`secagg_masks.py`).
"""

from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from types import ModuleType
from typing import Any, cast

import numpy as np
from flwr.app import ConfigRecord, Context, Message
from flwr.common import Code, FitIns, FitRes, Parameters, Scalar, Status, ndarray_to_bytes
from flwr.common.secure_aggregation.secaggplus_constants import (
    RECORD_KEY_CONFIGS,
    RECORD_KEY_STATE,
    Key,
    Stage,
)
from flwr.compat.common.recorddict_compat import fitres_to_recorddict, recorddict_to_fitins

from fedbayes.contracts.changes import reference
from fedbayes.core import seeds
from fedbayes.core.messages import decode
from fedbayes.errors import EngineError, FedbayesError
from fedbayes.federation.client_runtime import Task
from fedbayes.federation.stages.checks import decode_report
from fedbayes.federation.stages.secure import Plan, Vector
from fedbayes.flower.node import Node, complaint
from fedbayes.flower.secagg_masks import KIND, with_masks
from fedbayes.flower.wire import LONGEST_REQUEST, one_line


def secure_answer(node: Callable[[Context], Node]) -> Callable[[Message, Context], Message]:
    """The function of a ClientApp that takes part in the protocol, for messages of type `train`;
    `node` finds the client from its context.
    """

    def train(message: Message, context: Context) -> Message:
        """The client's part between the steps of the protocol: its work, as Flower's mod takes it.

        The mod masks the parameters and sends nothing else of them.
        """
        task, about = read_secure_task(recorddict_to_fitins(message.content, keep_input=True))
        client = node(context)
        runtime = client.runtime()
        plan = Plan(**about)
        _require_agreed(plan, client.plan(runtime.run), context)
        outcome = client.work(task, runtime)
        broadcast, method, run = decode(task.message), runtime.method, runtime.run
        report = decode_report(outcome.report, method.expected(broadcast, run))
        centre = reference(method, broadcast, run)
        vector = plan.write(report, centre, plan.ranges(method, centre, run))
        require_short(vector)
        place = {"round": task.round, "client": task.client}
        words = seeds.sequence(runtime.run.seed, "rounding", **place).generate_state(8)
        np.random.seed(words)  # noqa: NPY002 - Flower's rounding draws from this one
        return vector_reply(vector, outcome.state, message)

    return masked(train)


_AROUND = 2**16
"""Bytes of a request around a masked update."""


def require_short(vector: Vector) -> None:
    """See that a SuperLink takes an update when it is masked, or raise an EngineError."""
    length, most = vector.size * np.dtype(np.int64).itemsize, LONGEST_REQUEST - _AROUND
    if length > most:
        raise EngineError(
            f"its masked update would have {length:,} bytes; the limit is {most:,}. Use a smaller "
            "model, or train without secure aggregation (secure.enabled = false)"
        )


def vector_reply(vector: Vector, ticket: bytes, message: Message) -> Message:
    """A client's work, as Flower's mod takes it."""
    reply = FitRes(
        status=Status(Code.OK, ""),
        parameters=Parameters([ndarray_to_bytes(vector)], "numpy.ndarray"),
        num_examples=1,  # weights are in the vector: here the server would read them
        metrics={"ticket": ticket},
    )
    return Message(fitres_to_recorddict(reply, keep_input=True), reply_to=message)


def masked(
    train: Callable[[Message, Context], Message],
) -> Callable[[Message, Context], Message]:
    """The function of a ClientApp that takes part in the protocol around this work."""

    def answer(message: Message, context: Context) -> Message:
        before = np.random.get_state()  # noqa: NPY002
        try:
            _refuse_to_unmask_one(message.content.config_records[RECORD_KEY_CONFIGS])
            return secaggplus_mod(message, context, train)
        except FedbayesError as error:
            return complaint(error, message)
        finally:
            np.random.set_state(before)  # noqa: NPY002

    return answer


def secaggplus_mod(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """Flower's mod, with our masks."""
    return cast(Message, _flower().secaggplus_mod(message, context, call_next))


@cache
def _flower() -> ModuleType:
    return with_masks("flwr.client.mod.secure_aggregation.secaggplus_mod")


def _refuse_to_unmask_one(asked: ConfigRecord) -> None:
    """See that the server wants one of a client's two secrets: both unmask its report."""
    if asked.get(Key.STAGE) != Stage.UNMASK:
        return
    stayed, left = (
        set(cast(list[int], asked.get(key, [])))
        for key in (Key.ACTIVE_NODE_ID_LIST, Key.DEAD_NODE_ID_LIST)
    )
    if stayed & left:
        raise EngineError(
            "the server requested both secrets of a client, which would reveal its update"
        )


def _require_agreed(told: Plan, own: Plan | None, context: Context) -> None:
    """See that the server goes by the numbers that the node's own settings come to."""
    began = context.state.config_records[RECORD_KEY_STATE]
    agreed = None if own is None else (own.threshold, own.range, own.levels)
    if told != own or agreed != tuple(began[name] for name in _AGREED):
        raise EngineError(
            "the server's settings of secure aggregation (threshold, range, levels, ...) differ "
            "from the federation's, so this node sends no update"
        )


_AGREED = ("threshold", "clipping_range", "target_range")
"""Fields of the state of Flower's mod that the server chooses."""


def write_secure_task(task: Task, plan: Any) -> FitIns:
    """A task and the numbers of secure aggregation, fields of a dataclass, as Flower's workflow
    sends them.
    """
    about: dict[str, Scalar] = {
        "client": task.client,
        "round": task.round,
        "ticket": task.state or b"",
        "constants": task.constants,
        "masks": KIND,
        **asdict(plan),
    }
    return FitIns(Parameters([task.message], "fedbayes"), about)


def read_secure_task(fit: FitIns) -> tuple[Task, dict[str, Any]]:
    """The inverse of `write_secure_task`: a task, and the fields of its plan.

    Raises:
        EngineError: the server takes off other masks than ours.
    """
    about: dict[str, Any] = dict(fit.config)
    if (masks := about.pop("masks", "Flower's own")) != KIND:
        raise EngineError(
            f"the server's masks are {one_line(masks)}, this node's are {KIND}. Install the same "
            "version of fedbayes on both"
        )
    names = ("client", "round", "ticket", "constants")
    client, number, ticket, constants = (about.pop(name) for name in names)
    state = cast(bytes, ticket) or None
    task = Task(int(client), int(number), fit.parameters.tensors[0], state, str(constants))
    return task, about
