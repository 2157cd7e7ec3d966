"""An actor of Ray: clients in a process of a cluster.

Ray finds this class by its name, so that fedbayes must be installed on every node. An actor builds
the clients from those files of the run folder that never change (`RunFolder.fixed_files`), which
travel to it: it sees no disk of the run's.
"""

import gc
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from fedbayes.core.here import FOLDER
from fedbayes.core.portable import use_threads
from fedbayes.federation.engines.questions import Header, failure, handle
from fedbayes.version import __version__

Answer = tuple[Header, list[bytes]]


@dataclass(frozen=True)
class ActorPlace:
    """Where an actor is."""

    node: str
    """Ray's name of the node."""
    address: str
    """The node's address."""
    host: str
    """The machine's own name."""
    process: int
    version: str
    """Of fedbayes there."""
    torch: str
    """Version of PyTorch there."""

    @property
    def words(self) -> str:
        """For messages."""
        return f"node {self.address} ({self.host})"


class ActorClients:
    """What an actor is: it builds the clients once, and answers questions on them.

    Args:
        variables: of the environment, for those that the node does not have.
        folder: where the run was started; where the node has it too, relative paths of a config
            are of there.
    """

    def __init__(self, variables: Mapping[str, str], folder: str) -> None:
        # Ctrl-C is for the process that runs the federation, which lets the round end.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for name, value in variables.items():
            os.environ.setdefault(name, value)
        if Path(folder).is_dir():
            os.chdir(folder)
        if FOLDER not in os.environ and folder not in sys.path:
            sys.path.append(folder)  # a user's own modules are looked up there last
        self._clients: Any = None

    def place(self) -> ActorPlace:
        """Where this is."""
        import ray
        import torch

        context = ray.get_runtime_context()
        return ActorPlace(
            context.get_node_id(),
            ray.util.get_node_ip_address(),
            socket.gethostname(),
            os.getpid(),
            __version__,
            torch.__version__,
        )

    def build(
        self, factory: str, files: Mapping[str, bytes], device: str | None, threads: int
    ) -> Header:
        """Build the clients; return a failure instead of raising it.

        Args:
            factory: "package.module:function" of files and device, which gives the clients, and
                their `runtime`.
            files: of the run folder, by name.
            device: that the clients compute on; None: the one that the config names.
            threads: that they compute with.
        """
        try:
            use_threads(threads)
            self._clients = resolve_name(factory)(files, device)
            gc.freeze()  # what was imported stays: collections need not look at it again
        except Exception as error:
            return failure(error)
        return {}

    def answer(
        self, shared: bytes, questions: Sequence[tuple[Header, Sequence[bytes]]]
    ) -> list[Answer]:
        """Answer questions; return a failure instead of raising it.

        Args:
            shared: the bytes that all of them have first.
            questions: headers, and the other bytes.
        """
        return [self._answer(header, [shared, *blobs]) for header, blobs in questions]

    def _answer(self, header: Header, blobs: list[bytes]) -> Answer:
        try:
            return handle(self._clients.runtime, header, blobs)
        except Exception as error:
            return failure(error), []
