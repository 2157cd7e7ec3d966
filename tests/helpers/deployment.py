"""A SuperLink and SuperNodes as real processes on loopback, for tests and benchmarks."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from tests import ROOT

BIN = Path(sys.executable).parent


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_for(condition, seconds, what):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.1)
    raise AssertionError(f"no {what} within {seconds} s")


class Deployment:
    """One SuperLink and its nodes; every process belongs to a group of its own.

    Args:
        folder: for logs and for what the processes leave.
        certificates: folder of `federate keys`; None for no TLS.
        database: whether the SuperLink keeps its state in a file.
        hub: whether it is that of `fedbayes federate superlink`; nodes then have their own port.
        host: where it listens; with `hub`, where nodes come.
    """

    def __init__(
        self,
        folder,
        certificates=None,
        database=False,
        isolation="process",
        auth=False,
        hub=False,
        host="127.0.0.1",
    ):
        self.folder = folder
        self.certificates = certificates
        self.database, self.isolation, self.auth = database, isolation, auth
        self.hub, self.host = hub, host
        self.port = free_port()
        self.nodes_port = free_port() if hub else self.port
        self.nodes = {}
        self.processes = []
        self.start_superlink()

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    @property
    def nodes_address(self):
        return f"127.0.0.1:{self.nodes_port}"

    @property
    def trust(self):
        """The options with which a client reaches the SuperLink."""
        if self.certificates is None:
            return ["--insecure"]
        return ["--root-certificates", str(self.certificates / "ca.crt")]

    def spawn(self, name, command, **environment):
        log = (self.folder / f"{name}.log").open("ab")
        home = self.folder / f"home-{name}"
        process = subprocess.Popen(
            [str(BIN / command[0]), *map(str, command[1:])],
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={
                **os.environ,
                "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
                "FLWR_HOME": str(home),
                "FLWR_TELEMETRY_ENABLED": "0",
                "FLWR_DISABLE_UPDATE_CHECK": "1",
                "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
                "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
                **environment,
            },
        )
        self.processes.append(process)
        return process

    def start_superlink(self):
        if self.hub:
            command = ["fedbayes", "federate", "superlink", self.certificates, "--port", self.port]
            command += ["--nodes", f"{self.host}:{self.nodes_port}"]
            self.superlink = self.spawn("superlink", command)
            wait_for(lambda: listens(self.port) and listens(self.nodes_port), 60, "SuperLink")
            return
        command = ["flower-superlink", "--host", self.host, "--port", self.port]
        command += ["--isolation", self.isolation]
        command += ["--disable-runtime-dependency-installation"]
        if self.certificates is None:
            command += ["--insecure"]
        else:
            command += ["--ssl-ca-certfile", self.certificates / "ca.crt"]
            command += ["--ssl-certfile", self.certificates / "server.pem"]
            command += ["--ssl-keyfile", self.certificates / "server.key"]
            command += ["--superexec-auth-secret-file", self.certificates / "superexec.key"]
        if self.auth:
            command += ["--enable-supernode-auth"]
        if self.database:
            command += ["--database", self.folder / "superlink.db"]
        self.superlink = self.spawn("superlink", command)
        wait_for(lambda: listens(self.port), 60, "SuperLink")

    def start_node(self, client, key=None, superlink=None, warm=600, **config):
        """A node of `fedbayes federate node`, or with `warm=None` of `flower-supernode`."""
        config = {"client": client, "state": str(self.folder / f"state-{client}"), **config}
        text = " ".join(f"{k}={v!r}".replace("'", '"') for k, v in config.items())
        link = ["--superlink", superlink or self.nodes_address, *self.trust]
        if warm is None:
            command = ["flower-supernode", *link, "--port", free_port()]
        else:
            command = ["fedbayes", "federate", "node", *link, "--warm", warm]
        command += ["--node-config", text]
        if key is not None:
            command += ["--auth-supernode-private-key" if warm is None else "--key", key]
        self.nodes[client] = self.spawn(f"node-{client}", command)
        return self.nodes[client]

    def federate(self, *arguments):
        """`fedbayes federate` as a process."""
        arguments = [*arguments, "--superlink", self.address, *self.trust]
        if self.certificates is not None and arguments[0] != "admit":
            arguments += ["--superexec-secret", self.certificates / "superexec.key"]
        return self.spawn("federate", ["fedbayes", "federate", *arguments])

    def log(self, name):
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def kill(self, process):
        """End a process and its children at once."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in reversed(self.processes):
            self.kill(process)


def start(deployment, config, name="run"):
    file = deployment.folder / f"{name}.toml"
    file.write_text(config.dump())
    return deployment.federate(file, "--out", deployment.folder / name)


def at_work(deployment, client, number):
    """Whether a node has received its task of a round."""
    return f"ROUND {number}]" in deployment.log(f"node-{client}")


def write_table(path, seed, classes):
    rng = np.random.default_rng(seed)
    lines = ["width,height,depth,label"]
    for _ in range(80):
        label = int(rng.choice(classes))
        values = rng.normal(label, 1.0, 3)
        lines.append(",".join(f"{value:.5f}" for value in values) + f",kind {label}")
    path.write_text("\n".join(lines) + "\n")
