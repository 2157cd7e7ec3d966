"""Clusters of Ray as real processes on this machine."""

import os
import secrets
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil

from tests.helpers.deployment import BIN, free_port, listens, wait_for

PATIENCE = 240
"""Seconds that a start may take on a machine that has much else to do."""


class Nodes:
    """A head and whatever nodes are added, each with processes of its own.

    Args:
        token: whether the cluster wants one.
    """

    def __init__(self, cpus=2, gpus=0, token=True):
        # Names of sockets are in there, and have a hundred letters at most.
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        self.variables = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
        if token:
            self.variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.port, self.processes = free_port(), []
        self.address = f"127.0.0.1:{self.port}"
        try:
            head = ["--head", f"--port={self.port}", "--include-dashboard=false"]
            self._start(*head, f"--temp-dir={self.folder}", cpus=cpus, gpus=gpus)
            wait_for(lambda: listens(self.port), PATIENCE, "head of Ray")
        except BaseException:
            self.close()
            raise

    def add(self, cpus=2):
        """One more node; its number."""
        return self._start(f"--address={self.address}", cpus=cpus)

    def _start(self, *arguments, cpus, gpus=0):
        counts = [f"--num-cpus={cpus}", f"--num-gpus={gpus}", "--object-store-memory=200000000"]
        with (self.folder / "said.txt").open("ab") as said:
            process = subprocess.Popen(
                [BIN / "ray", "start", *arguments, *counts, "--block"],
                env={**os.environ, **self.variables},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
        self.processes.append(process)
        return len(self.processes) - 1

    def kill(self, number):
        """As if somebody had pulled the plug of a node."""
        node = psutil.Process(self.processes[number].pid)
        for process in [node, *node.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.processes[number].wait()

    def close(self):
        """End all nodes."""
        for number, process in enumerate(self.processes):
            if process.poll() is None:
                self.kill(number)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def actors_of(processes=None):
    """Processes of actors that are on this machine, by what Ray calls them."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cmdline() and process.cmdline()[0].startswith("ray::ActorClients"):
                found.append(process)
    return found if processes is None else [p for p in found if p.pid in processes]


def processes_at(folder):
    """Processes of a Ray in a folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(str(folder) in word for word in process.cmdline()):
                found.append(process)
    return found


def fedbayes(*arguments, variables=None, **more):
    """The command, as a process."""
    return subprocess.Popen(
        [BIN / "fedbayes", *map(str, arguments)],
        env={**os.environ, **(variables or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )
