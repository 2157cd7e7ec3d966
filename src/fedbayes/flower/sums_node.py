"""A node's end of biostatistics: questions come as tasks, and are answered with sums."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.compat.common.recorddict_compat import recorddict_to_fitins

from fedbayes.biostatistics import Packet, TableClient
from fedbayes.biostatistics.client import OPEN, SUMS, groupings
from fedbayes.biostatistics.limbs import Limbs
from fedbayes.core.messages import LONGEST_HEADER, decode, encode
from fedbayes.data.source_settings import SourceSettings
from fedbayes.data.sources.tables import UNNAMED, has_row_numbers, read_table
from fedbayes.errors import ConfigError, EngineError, FedbayesError, MessageError
from fedbayes.federation.client_runtime import ClientResult, Task
from fedbayes.federation.settings import FEWEST
from fedbayes.federation.stages.secure import Vector
from fedbayes.flower.node import app_of, complaint, once
from fedbayes.flower.node_config import check_node_config
from fedbayes.flower.secagg_node import masked, read_secure_task, vector_reply
from fedbayes.flower.wire import HELLO, note_question, read_task, write_hello, write_reply

_WORDS = "words"
"""Under which name a packet's words travel."""
_NUMBERS = "numbers."
"""Before the names of its arrays."""


def write_packet(packet: Packet) -> bytes:
    """A question or an answer as bytes."""
    words = np.frombuffer(json.dumps(packet.told).encode(), np.uint8).copy()
    tensors = {_WORDS: torch.from_numpy(words)}
    for name, array in packet.numbers.items():
        values = np.ascontiguousarray(array, np.float64)
        tensors[_NUMBERS + name] = torch.from_numpy(values)
    return encode(tensors)


def read_packet(data: bytes) -> Packet:
    """The inverse of `write_packet`; nothing is taken on trust.

    Raises:
        MessageError: the bytes are no packet.
    """
    tensors = decode(data, longest_header=LONGEST_HEADER)
    words = tensors.pop(_WORDS, None)
    if not isinstance(words, torch.Tensor) or words.dtype != torch.uint8:
        raise MessageError("not a message: it has no words")
    try:
        told = json.loads(words.numpy().tobytes())
    except (ValueError, RecursionError):
        raise MessageError("not a message: its words are not JSON") from None
    if not isinstance(told, dict):
        raise MessageError("not a message: its words are not a table")
    numbers = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float64:
            raise MessageError("not a message: its numbers are not float64")
        numbers[name.removeprefix(_NUMBERS)] = tensor.numpy()
    return Packet(told, numbers)


@dataclass(frozen=True)
class SumsNode:
    """One client at the site of its table, used by a ClientApp."""

    number: int
    table: Callable[[tuple[str, ...]], TableClient]
    """Its table, read when it is asked, with columns of these names as text."""
    secure: bool = False
    """Whether it says sums under secure aggregation alone."""

    def answer(self, message: Message) -> Message:
        """Process a message and return the answer. What the user can fix is answered in plain
        words.
        """
        if message.metadata.message_type == HELLO:
            note_question(message.content)
            return Message(write_hello(self.number), reply_to=message)
        try:
            task = read_task(message.content)
            if task.client != self.number:
                raise EngineError(
                    f"the node of client {self.number} got a question for client {task.client}"
                )
            question = read_packet(task.message)
            if self.secure and question.told.get("ask") not in OPEN:
                raise EngineError(
                    "it needs secure aggregation (secure in its node config). Add --secure"
                )
            answer = self.table(groupings(question)).answer(question)
            outcome = ClientResult(report=write_packet(answer), state=b"", info={}, scores={})
            return Message(write_reply(outcome), reply_to=message)
        except FedbayesError as error:
            return complaint(error, message)

    def masked(self, task: Task, limbs: Limbs) -> Vector:
        """The sums that a task asks for, as a vector to be masked.

        Raises:
            FedbayesError: it asks for something else, or there is no answer.
        """
        question = read_packet(task.message)
        if task.client != self.number or limbs.clients < FEWEST:
            raise EngineError("the question is for another client, or for a sum of too few clients")
        if question.told.get("ask") not in SUMS:
            raise EngineError("the question is for a sum of values that cannot be added")
        return limbs.write(self.table(groupings(question)).answer(question).numbers)


def answering(find: Callable[[Context], SumsNode]) -> ClientApp:
    """The ClientApp of nodes that are found from their contexts."""

    def sums(message: Message, context: Context) -> Message:
        task, about = read_secure_task(recorddict_to_fitins(message.content, keep_input=True))
        return vector_reply(find(context).masked(task, Limbs(**about)), b"", message)

    return app_of(find, masked(sums))


def sums_app() -> ClientApp:
    """The ClientApp of a SuperNode that answers questions of its own table."""
    return answering(once(find_client))


def find_client(context: Context) -> SumsNode:
    """The client of a SuperNode, whose node config says who it is and what it has:

    client: which client it is, from 0.
    data: its own table, a CSV, Parquet or Excel file.
    sheet: of an Excel file with several.
    min-count: fewest rows, in all and of a category, of which it says anything.
    secure: whether it says sums under secure aggregation alone.

    Raises:
        ConfigError: it does not say so.
    """
    given = context.node_config
    client, least = check_node_config(given), given.get("min-count", 0)
    secure = bool(given.get("secure"))
    if "query" in given:
        raise ConfigError("biostatistics reads only files. Set data to the table instead of query")
    if "data" not in given:
        raise ConfigError(
            "the node's table is missing: --node-config 'data=\"/path/to/table.csv\"'"
        )
    if type(least) is not int:
        raise ConfigError("min-count in the node config must be an integer")
    path = Path(str(given["data"])).expanduser().absolute()
    sheet = str(given["sheet"]) if "sheet" in given else None

    @lru_cache(maxsize=1)
    def table(categories: tuple[str, ...]) -> TableClient:
        settings = SourceSettings(sheet=sheet, categorical=categories)
        frame = read_table(path, settings, [])
        return TableClient(frame.drop(columns=UNNAMED) if has_row_numbers(frame) else frame, least)

    return SumsNode(client, table, secure)
