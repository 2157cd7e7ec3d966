"""Flower's secure aggregation, SecAgg+: a client's end, and the task that it gets.

Keys, shares, masks and rounding are Flower's `secaggplus_mod`.
"""

from collections.abc import Callable
from dataclasses import asdict
from typing import cast

import numpy as np
from flwr.app import Context, Message
from flwr.client.mod import secaggplus_mod
from flwr.common import Code, FitIns, FitRes, Parameters, Scalar, Status, ndarray_to_bytes
from flwr.compat.common.recorddict_compat import fitres_to_recorddict, recorddict_to_fitins

from fedbayes import seeds
from fedbayes.errors import FedbayesError
from fedbayes.federation.checks import decode_report
from fedbayes.federation.client_runtime import Task
from fedbayes.federation.secure import Plan
from fedbayes.flower.node import Node, complaint
from fedbayes.messages import decode


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
        task, plan = read_secure_task(fit)
        client = node(context)
        runtime = client.runtime()
        outcome = client.work(task, runtime)
        broadcast = decode(task.message)
        vector = plan.write(decode_report(outcome.report, broadcast), broadcast)
        place = {"round": task.round, "client": task.client}
        words = seeds.sequence(runtime.run.seed, "rounding", **place).generate_state(8)
        np.random.seed(words)  # noqa: NPY002 - Flower's rounding draws from this one
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


def write_secure_task(task: Task, plan: Plan) -> FitIns:
    """A task and the numbers of secure aggregation, as Flower's workflow sends them."""
    about: dict[str, Scalar] = {
        "client": task.client,
        "round": task.round,
        "ticket": task.state or b"",
        "constants": task.constants,
        **asdict(plan),
    }
    return FitIns(Parameters([task.message], "fedbayes"), about)


def read_secure_task(fit: FitIns) -> tuple[Task, Plan]:
    """The inverse of `write_secure_task`."""
    about = dict(fit.config)
    names = ("client", "round", "ticket", "constants")
    client, number, ticket, constants = (about.pop(name) for name in names)
    state = cast(bytes, ticket) or None
    task = Task(int(client), int(number), fit.parameters.tensors[0], state, str(constants))
    return task, Plan(**about)  # type: ignore[arg-type]
