"""A SuperNode whose apps stay loaded: Flower's connection and state, and our processes.

Flower's own SuperNode looks for messages every three seconds. It passes each to a process that a
third one starts, over a server on a port of its own, and looks for the answer twice a second. Here
Flower's functions do the work with the SuperLink. `WarmApps` does the work with the app, over a
socket that nobody else can reach.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from logging import ERROR, INFO, WARNING
from pathlib import Path
from threading import Timer
from typing import Any, NoReturn, ParamSpec, TypeVar

import httpx
from click import ClickException
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Error, Message
from flwr.common.config import parse_config_args
from flwr.common.constant import ErrorCode
from flwr.common.serde import (
    context_from_proto,
    context_to_proto,
    fab_to_proto,
    message_from_proto,
    run_to_proto,
)
from flwr.proto.message_pb2 import Context as ContextProto
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore import log
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError
from flwr.supercore.object_store import ObjectStore, ObjectStoreFactory
from flwr.supercore.run import RunNotRunningException
from flwr.supernode import start_client_internal as flower
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

from fedbayes.core.memory import give_back
from fedbayes.errors import ConfigError, EngineError, RunError, told_as, warn
from fedbayes.flower.node_config import check_node_config
from fedbayes.flower.pace import pause
from fedbayes.flower.superlink import patient
from fedbayes.flower.warm import Answer, AppDied, Contents, Request, WarmApps

SOONEST, LATEST = 0.25, 3.0
"""Seconds between two looks for messages: at least, and at most, which is what Flower's takes."""
_FAREWELL = 5.0
"""Seconds that a node has to end, once it is told to."""

_WAY_IN = (
    "This node could not connect. Check --superlink, --root-certificates and --key, and that the "
    "key is registered (on the hub: fedbayes federate register). After a crash the SuperLink "
    "rejects the same key for up to a minute; then start the node again."
)

_UNREACHED = 15.0
"""Seconds after which a node that is not connected says what to check; it tries on."""
_NO_ANSWER = (
    "No connection to %s yet. Check that the SuperLink runs, and that --superlink is its address "
    "for nodes. Both sides use TLS (--root-certificates), or none does (--insecure). Trying again"
)

P = ParamSpec("P")
T = TypeVar("T")
Keys = tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey]


def read_private_key(file: Path) -> Keys:
    """A client's key, as `federate keys` made it, and its public part, or a RunError."""
    with told_as(
        RunError, f"cannot read the private key {file}", OSError, ValueError, UnsupportedAlgorithm
    ):
        key = load_ssh_private_key(file.expanduser().read_bytes(), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise RunError(
            f"{file} is not an elliptic curve key. Create it with `fedbayes federate keys`"
        )
    return key, key.public_key()


def read_config(text: str) -> dict[str, Any]:
    """What `--node-config` says, as Flower reads it.

    Raises:
        ConfigError: it is no such text, or does not say which client this is.
    """
    try:
        given = parse_config_args([text])
    except (ValueError, OSError, ClickException) as error:
        said = error.format_message() if isinstance(error, ClickException) else str(error)
        raise ConfigError(f"--node-config {text}: {said}") from None
    check_node_config(given)
    if "data" in given and not Path(str(given["data"])).expanduser().exists():
        path = given["data"]
        warn(f"data in the node config is not there yet: {path}. It is read with the first task")
    return given


@dataclass(frozen=True)
class Connection:
    """How a node reaches its SuperLink.

    Args:
        address: host:port.
        certificates: of the CA that signed its certificate, in PEM; None for no TLS.
        keys: the node's, if it has some that were admitted.
    """

    address: str
    certificates: bytes | None
    keys: Keys | None


class SuperNode:
    """A node of a SuperLink.

    Args:
        config: the node's settings for its apps: `fedbayes.flower.node_config`.
        apps: the processes of its runs.
    """

    def __init__(self, config: dict[str, Any], apps: WarmApps) -> None:
        self._config, self._apps = config, apps
        self._store: ObjectStore = ObjectStoreFactory().store()
        self._state = InMemoryNodeState(self._store)

    def serve(self, link: Connection) -> None:
        """Answer messages until a signal ends the process.

        Raises:
            EngineError: the way to the SuperLink ended for good.
        """
        while self._connected(link):
            # A message was lost on the way. A node that connects again gets its task again.
            time.sleep(SOONEST)
        # Flower writes what went wrong to the log, and raises nothing.
        raise EngineError(f"the connection to the SuperLink at {link.address} ended")

    def _connected(self, link: Connection) -> bool:
        """Connect and answer messages until one is lost; False if the connection ended."""
        lost: list[Exception] = []
        with (
            _reminded(link.address) as connected,
            flower._init_connection(
                server_address=link.address,
                insecure=link.certificates is None,
                root_certificates=link.certificates,
                authentication_keys=link.keys,
            ) as (node, receive, send, get_run, get_fab, pull, push, confirm),
        ):
            connected()
            self._state.set_node_id(node)
            log(INFO, "SuperNode ID: %s", node)
            since = time.monotonic()
            while not lost:
                run_id = flower._pull_and_store_message(
                    self._state,
                    self._store,
                    self._config,
                    partial(patient(httpx.HTTPStatusError).invoke, receive),
                    get_run,
                    get_fab,
                    _noted(pull, lost),
                    _noted(confirm, lost),
                    trusted_entities=None,
                )
                if run_id is None:
                    self._apps.reap()
                    time.sleep(pause(time.monotonic() - since, SOONEST, LATEST))
                    continue
                length = self.work(run_id)
                flower._push_messages(
                    self._state, self._store, _noted(send, lost), _noted(push, lost)
                )
                give_back(length)
                since = time.monotonic()
        return bool(lost)

    def work(self, run_id: int) -> int:
        """Have the app of a run answer the message that came for it, and keep the answer; its
        bytes.
        """
        length = 0
        state, store = self._state, self._store
        # Flower notes a task for whoever asks at its server; here is none, and nobody asks.
        state.task_store.clear()
        for message in state.get_messages_legacy(run_ids=[run_id], is_reply=False):
            number = message.metadata.message_id
            state.record_message_processing_start(number)
            tree = store.get_object_tree(number)
            names = {item.object_id for item in iterate_object_tree(tree)}
            contents = [(name, store.get(name) or b"") for name in names]
            store.delete(number)
            try:
                answer = self._ask(run_id, number, contents, message.metadata.ttl)
            except AppDied as error:
                log(ERROR, "%s", error)
                reason = Error(ErrorCode.CLIENT_APP_CRASHED, str(error))
                flower._insert_message(Message(reason, reply_to=message), state, store)
            else:
                self._keep(run_id, answer)
                length += sum(len(content) for _, content in answer.contents)
                del answer
            state.record_message_processing_end(number)
        return length

    def _ask(self, run_id: int, message: str, contents: Contents, seconds: float) -> Answer:
        run = self._state.get_run(run_id)
        assert run is not None
        context = self._state.get_run_series_context(run.series_id)
        fab = self._state.get_fab(run.fab_hash)
        assert context is not None
        assert fab is not None
        request = Request(message, context_to_proto(context).SerializeToString(), contents)
        parts = run_to_proto(run).SerializeToString(), fab_to_proto(fab).SerializeToString()
        return self._apps.ask(run_id, *parts, request, seconds)

    def _keep(self, run_id: int, answer: Answer) -> None:
        """Put an answer where Flower sends it from, and its context where the next one finds it."""
        context = context_from_proto(ContextProto.FromString(answer.context))
        message = message_from_proto(MessageProto.FromString(answer.message))
        run = self._state.get_run(run_id)
        assert run is not None
        self._state.set_run_series_context(run.series_id, context)
        self._state.store_message(message)
        self._store.preregister(run_id, ObjectTree.FromString(answer.tree))
        for name, content in answer.contents:
            self._store.put(name, content)


@contextmanager
def _reminded(address: str) -> Iterator[Callable[[], None]]:
    """Say after a while what to check, unless what is yielded was called before.

    Flower retries without end, and does not say what may be wrong.
    """
    reminder = Timer(_UNREACHED, log, [WARNING, _NO_ANSWER, address])
    reminder.daemon = True
    reminder.start()
    try:
        yield reminder.cancel
    finally:
        reminder.cancel()


def _noted(way: Callable[P, T], lost: list[Exception]) -> Callable[P, T]:
    """A function that also lists its errors, because Flower only logs them; it is tried again while
    the SuperLink is too busy to answer.
    """

    def call(*arguments: P.args, **named: P.kwargs) -> T:
        try:
            found: T = patient(httpx.HTTPStatusError).invoke(way, *arguments, **named)
            return found
        except (RunNotRunningException, ObjectUnavailableError):
            raise  # Nothing is lost: the run has ended, or Flower asks for the object again.
        except Exception as error:
            lost.append(error)
            raise

    return call


def serve(link: Connection, config: dict[str, Any], idle: float) -> None:
    """Run a node until a signal ends it.

    Args:
        link: the connection to its SuperLink.
        config: the node's settings for its apps: `fedbayes.flower.node_config`.
        idle: seconds without work after which the process of a run's app ends; 0: after every
            message.
    """

    def end(signal_number: int, frame: object) -> NoReturn:
        # Flower tells the SuperLink, which may be away for ever.
        last = Timer(_FAREWELL, os._exit, [0])
        last.daemon = True
        last.start()
        sys.exit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    apps = WarmApps(idle)
    log(INFO, "Connecting to %s with%s TLS", link.address, "" if link.certificates else "out")
    try:
        SuperNode(config, apps).serve(link)
    except SystemExit as error:
        if error.code:  # by Flower, which says what happened and not what to do
            log(ERROR, _WAY_IN)
        raise
    finally:
        apps.close()
