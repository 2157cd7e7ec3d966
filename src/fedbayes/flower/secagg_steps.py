"""Flower's secure aggregation, SecAgg+: the steps of its protocol over a grid.

Flower's workflow was made for grids and nodes that are sound. `SecaggSteps` stands between: it
keeps the round's time, counts bytes, and lets nothing through that is no proper answer.
"""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar, cast

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common import bytes_to_ndarray
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.compat.common.recorddict_compat import recorddict_to_fitres
from flwr.supercore.primitives.asymmetric import bytes_to_public_key

from fedbayes.errors import EngineError, FedbayesError, MessageError
from fedbayes.federation.stages.secure import MODULUS
from fedbayes.flower.engine import GRACE, SOONEST
from fedbayes.flower.pace import pause
from fedbayes.flower.poller import Poller
from fedbayes.flower.wire import is_ticket, link_size, one_line, raise_complaint

_WAITS = {
    Stage.SETUP: 0.25,
    Stage.SHARE_KEYS: 0.25,
    Stage.COLLECT_MASKED_VECTORS: 0.8,
    Stage.UNMASK: 1.0,
}
"""Share of what is left of a round's time that a step of the protocol may take."""


class DroppedEarly(Exception):
    """Nodes went away before all keys were shared: the workflow cannot go on.

    It can take off the masks of nodes that go away later; of these nobody holds shares.
    """


@dataclass
class SecaggSteps:
    """What the workflow has for a grid: one step of the protocol at a time.

    It keeps the round's time, counts bytes, and lets no answer through that would trip the
    workflow.
    """

    poller: Poller
    """The way to the nodes."""
    poll: float
    """Seconds between two looks at it, at most."""
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
        since = now = time.monotonic()
        until = now + _WAITS[stage] * max(0.0, self.deadline - now)
        waiting = {number: m for m in asked if (number := self._push(m))}
        answers: list[Message] = []
        while waiting:
            # An answer is a masked vector, or keys and shares for everybody.
            self.poller.look(waiting, 8 * (1 + self.entries) + 1024 * len(asked))
            for number in list(waiting):
                if (answer := self.poller.reply(number)) is not None:
                    since = time.monotonic()
                    answers += self._take(answer, waiting.pop(number), stage)
            if not waiting or time.monotonic() >= until:
                break
            waited = time.monotonic() - since
            time.sleep(pause(waited, min(SOONEST, self.poll), self.poll))
        for node in {m.metadata.dst_node_id for m in asked} - {
            answer.metadata.src_node_id for answer in answers
        }:
            late = EngineError(f"it has not sent its {_STEPS[stage]} in time")
            self.lost.setdefault(node, late)
        if stage in (Stage.SETUP, Stage.SHARE_KEYS) and len(answers) < len(asked):
            raise DroppedEarly
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
        number = self.poller.push(copy)
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
                raise EngineError(f"its node failed: {one_line(reason)}")
            self.up[node] += link_size(answer)
            raise_complaint(answer.content, "its node says: ")
            try:
                if answer.metadata.src_node_id != node:
                    raise ValueError("it has the name of another node")
                CHECKS[stage](answer, asked, self.entries)
            except Exception as error:  # whatever Flower's readers raise on a stranger's bytes
                raise MessageError(f"it has no valid {_STEPS[stage]}: {one_line(error)}") from None
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
        raise ValueError(f"{key} is not a list of {kind.__name__}")
    return cast(list[T], found)


def _check_keys(answer: Message, asked: Message, entries: int) -> None:
    for key in (Key.PUBLIC_KEY_1, Key.PUBLIC_KEY_2):
        bytes_to_public_key(cast(bytes, _record(answer)[key]))


def _check_shares(answer: Message, asked: Message, entries: int) -> None:
    others = {int(k) for k in _record(asked) if k != Key.STAGE} - {asked.metadata.dst_node_id}
    if sorted(_many(answer, Key.DESTINATION_LIST, int)) != sorted(others):
        raise ValueError("they are for the wrong clients")
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
    if not is_ticket(ticket):
        raise ValueError("its ticket is invalid")


def _check_opened(answer: Message, asked: Message, entries: int) -> None:
    wanted = [
        n
        for key in (Key.ACTIVE_NODE_ID_LIST, Key.DEAD_NODE_ID_LIST)
        for n in _many(asked, key, int)
    ]
    if sorted(_many(answer, Key.NODE_ID_LIST, int)) != sorted(wanted):
        raise ValueError("they differ from those that were requested")
    shares = _many(answer, Key.SHARE_LIST, bytes)
    if len(shares) != len(wanted) or not all(len(s) > 4 and len(s) % 16 == 4 for s in shares):
        raise ValueError("some are invalid")


CHECKS = {
    Stage.SETUP: _check_keys,
    Stage.SHARE_KEYS: _check_shares,
    Stage.COLLECT_MASKED_VECTORS: _check_masked,
    Stage.UNMASK: _check_opened,
}
_STEPS = {
    Stage.SETUP: "keys",
    Stage.SHARE_KEYS: "key shares",
    Stage.COLLECT_MASKED_VECTORS: "masked report",
    Stage.UNMASK: "shares that reveal the sum",
}
"""What a node is asked for in each step of the protocol."""
