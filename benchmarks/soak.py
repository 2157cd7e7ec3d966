"""A federation that runs for long with a fault in every round: nothing may be lost or grow.

    python benchmarks/soak.py [--nodes 100] [--rounds 300] [--cohort 20]
    python benchmarks/soak.py --nodes 6 --cohort 3 --rounds 24 --kill-server 7 --kill-superlink 5

One SuperLink, one server and the nodes on loopback, FedAvg on the digits. Nodes and the processes
of their apps are forks of this process, which has imported everything, so that 100 of them fit into
a few GiB; all else is as with `fedbayes federate`. In each round one of these faults is injected:

- a node, or the process of its app, is killed; a killed node is started again;
- a node is stopped for some seconds, as a laptop that sleeps;
- every 20 rounds the server is killed, and the run resumed;
- every 50 rounds the SuperLink is killed, and started again with its database.

At the end it prints the rounds, the faults and the memory of each part after a quarter of the
rounds and at the end, and compares the model with that of the sequential engine: if an update was
lost or counted twice, it differs. The exit status is 1 if so, or if a part grew by more than a
tenth.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, suppress
from multiprocessing import Pipe
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.helpers.deployment import Deployment

import fedbayes.flower.apps  # noqa: F401  (what forks find loaded)
from fedbayes import Config, run
from fedbayes.flower import supernode, warm, warm_app
from fedbayes.workflows.running import Result

GROWTH = 1.1
"""Memory of a part at the end in ratio to early on, at most."""


class Forked:
    """A process of an app that a spawner forked; what `warm.PersistentApp` needs of `Popen`."""

    def __init__(self, pid):
        self.pid, self.returncode = pid, None

    def poll(self):
        if not psutil.pid_exists(self.pid):
            self.returncode = -1
        return self.returncode

    def kill(self):
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout=None):
        end = time.monotonic() + (timeout or 60.0)
        while self.poll() is None and time.monotonic() < end:
            time.sleep(0.01)


class App(warm.PersistentApp):
    """The process of an app, forked by the spawner."""

    def __init__(self, run, fab, idle):
        self._pipe, theirs = Pipe()
        SPAWNER.send(idle)
        with theirs:
            send_handle(SPAWNER, theirs.fileno(), None)
        self.process = Forked(SPAWNER.recv())
        self._first = [run, fab]


SPAWNER = None
"""The way from a node to what forks its apps."""


def spawn(pipe):
    """Fork an app for each request of a node until the node is gone; never returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the dead
    while True:
        try:
            idle = pipe.recv()
            handle = recv_handle(pipe)
        except (EOFError, OSError):
            os._exit(0)
        if not (pid := os.fork()):
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            pipe.close()
            sys.argv = ["warm_app", str(handle), str(idle)]
            warm_app.main()
            os._exit(0)
        os.close(handle)
        pipe.send(pid)


def node(client, folder, address):
    """Be a node until the connection ends; never returns."""
    global SPAWNER
    os.setsid()
    home = folder / f"home-{client}"
    os.environ |= {"FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0"}
    log = os.open(folder / "nodes.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    SPAWNER, theirs = Pipe()
    if not os.fork():  # before this process has connections, which a fork must not share
        SPAWNER.close()
        spawn(theirs)
    theirs.close()
    warm.PersistentApp = App
    config = {"client": client, "state": str(folder / f"state-{client}")}
    try:
        supernode.serve(supernode.Connection(address, None, None), config, 1e6)
    finally:
        os._exit(1)


class Soak:
    """The nodes, their faults, and what they hold."""

    def __init__(self, deployment, config, given):
        self.deployment, self.given = deployment, given
        self.rng, self.faults = random.Random(0), Counter()
        self.out = deployment.folder / "run"
        self.file = deployment.folder / "config.toml"
        self.file.write_text(config.dump())
        self.nodes = {client: self._forked(client) for client in range(given.nodes)}
        self.asleep = {}
        self.server = deployment.federate(self.file, "--out", self.out)

    def _forked(self, client):
        if pid := os.fork():
            return pid
        node(client, self.deployment.folder, self.deployment.nodes_address)

    def tend(self):
        """Start again what has ended, and wake who slept long enough."""
        while True:
            try:
                ended, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if not ended:
                break
            for client, pid in self.nodes.items():
                if pid == ended:
                    self.nodes[client] = self._forked(client)
        for pid, until in list(self.asleep.items()):
            if time.monotonic() > until:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
                del self.asleep[pid]

    def fault(self, number):
        """Inject one."""
        if number % self.given.kill_superlink == 0:
            self.faults["SuperLink killed"] += 1
            self.deployment.kill(self.deployment.superlink)
            self.deployment.start_superlink()
        elif number % self.given.kill_server == 0:
            self.faults["server killed"] += 1
            self.deployment.kill(self.server)
            self.resume()
        else:
            kind = self.rng.choice(["node killed", "app killed", "node stopped"])
            pid = self.nodes[self.rng.randrange(self.given.nodes)]
            self.faults[kind] += 1
            with suppress(psutil.Error, ProcessLookupError):
                if kind == "node killed":
                    os.killpg(pid, signal.SIGKILL)
                elif kind == "app killed":
                    for app in psutil.Process(pid).children(recursive=True)[1:]:
                        app.kill()
                else:
                    os.kill(pid, signal.SIGSTOP)
                    self.asleep[pid] = time.monotonic() + self.rng.uniform(1, 10)

    def resume(self):
        self.server = self.deployment.federate("resume", self.out)

    def rounds(self):
        """How many are complete."""
        lines = self.out / "metrics.jsonl"
        return len(lines.read_bytes().splitlines()) if lines.exists() else 0

    def memory(self):
        """MiB of the SuperLink, of the server, and of a node with its app."""
        parts = {
            "SuperLink": [self.deployment.superlink.pid],
            "server": [self.server.pid],
            "node": list(self.nodes.values()),
        }
        return {name: sum(map(held, pids)) / len(pids) for name, pids in parts.items()}


def held(pid):
    """MiB that a process and its children hold. Forks share some of it, and less and less, so what
    they have for themselves would grow without a leak.
    """
    total = 0
    with suppress(psutil.Error):
        for one in (process := psutil.Process(pid), *process.children(recursive=True)):
            total += one.memory_info().rss
    return total / 2**20


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--cohort", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--kill-server", type=int, default=20, help="rounds between two kills")
    parser.add_argument("--kill-superlink", type=int, default=50, help="likewise")
    parser.add_argument("--folder", type=Path, help="for logs and the run; else they are deleted")
    given = parser.parse_args()
    config = Config.create(
        rounds=given.rounds,
        cohort=given.cohort,
        round_timeout=600.0,
        evaluate_local_every=0,
        data={"name": "digits", "clients": given.nodes, "partition": "iid"},
        model={"hidden": [32]},
    )
    began, early = time.monotonic(), {}
    with ExitStack() as stack:
        folder = given.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        deployment = stack.enter_context(Deployment(folder, database=True))
        soak, done = Soak(deployment, config, given), 0
        while done < given.rounds or soak.server.poll() is None:
            time.sleep(0.2)
            soak.tend()
            if done < given.rounds and soak.server.poll() is not None:
                soak.faults["server ended by itself"] += 1
                soak.resume()
                time.sleep(5)
            if (now := soak.rounds()) > done:
                done = now
                if done == max(2, given.rounds // 4):
                    early = soak.memory()
                if done == given.rounds - 1:
                    late = soak.memory()
                elif done < given.rounds - 1:
                    soak.fault(done)
                print(f"\r{done} of {given.rounds} rounds", end="", file=sys.stderr, flush=True)
        took = time.monotonic() - began
        for pid in soak.nodes.values():
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        ended = Result(soak.out)
        updates = sum(
            line["cohort"] - len(line["lost"]) - len(line["refused"]) for line in ended.metrics
        )
        alone = run(config.model_copy(update={"engine": "sequential"}), folder / "alone")
        same = all((alone.model[key] == ended.model[key]).all() for key in alone.model)
    print(f"\n{done} rounds of {given.nodes} nodes in {took / 60:.0f} minutes")
    print(", ".join(f"{count} times {what}" for what, count in soak.faults.items()))
    print(f"{updates} of {given.rounds * given.cohort} updates; same model as alone: {same}")
    grown = False
    for part, before in early.items():
        print(f"{part}: {before:.0f} MiB early, {late[part]:.0f} MiB at the end")
        grown |= late[part] > GROWTH * before
    sys.exit(not same or grown)


if __name__ == "__main__":
    main()
