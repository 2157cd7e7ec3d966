"""What a real federation costs over local training: time and bytes, on loopback.

    python benchmarks/federation.py [rounds] [digits | fedavg | fedsparse ...]
    python benchmarks/federation.py large [width]

One SuperLink and three SuperNodes as processes on this machine: FedAvg on the digits of
scikit-learn, where there is next to nothing to train, so that a round is what the link costs; and
FedAvg and FedSparse on MNIST, with an MLP of two layers of 200 units. Between every node and the
SuperLink stands a proxy that counts all the bytes of the TCP connections: what the link really
carried, with HTTP, polling and heartbeats. Nodes are those of `fedbayes federate node`, whose
processes stay loaded, and then those of `flower-supernode`. For both and each method it prints
seconds a round beside those of the sequential engine and of two workers on the same tasks, and the
bytes of the link in ratio to those of the encoded messages: counted by the engine (Flower's
objects), and by the proxy. How busy the machine was with other work is told too. Needs the data
(FEDBAYES_DATA, or the hub).

`large` is a round of one client with two layers of so many units (12,500: 629 MB each way; 23,200:
2.16 GB, with a tensor of more than 2 GiB). It prints the time, and the largest memory of SuperLink,
node and server. At once all of them take about six times the message, and 2.3 GB.
"""

import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.helpers.deployment import Deployment

from fedbayes import Config, run
from fedbayes.workflows.running import Result


class Proxy:
    """Forwards TCP connections and counts their bytes."""

    def __init__(self, port):
        self.down = self.up = 0
        self._target = port
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            node, _ = self._listener.accept()
            link = socket.create_connection(("127.0.0.1", self._target))
            threading.Thread(target=self._carry, args=(node, link, "up"), daemon=True).start()
            threading.Thread(target=self._carry, args=(link, node, "down"), daemon=True).start()

    def _carry(self, source, sink, way):
        try:
            while data := source.recv(1 << 16):
                with self._lock:
                    setattr(self, way, getattr(self, way) + len(data))
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass


MNIST = {"data": {"name": "mnist"}, "model": {"hidden": [200, 200]}}
CASES = {
    "digits": {"data": {"name": "digits"}, "method": {"name": "fedavg"}},
    "fedavg": {**MNIST, "method": {"name": "fedavg"}},
    "fedsparse": {**MNIST, "method": {"name": "fedsparse"}},
}
NODES = {"federate node": 600, "flower-supernode": None}


def measure(case, rounds):
    tables = CASES[case]
    data = {**tables["data"], "clients": 3, "partition": "iid"}
    tables = {**tables, "data": data, "engine": "sequential"}
    config = Config.published(rounds=rounds, **tables, evaluate_every=0)
    alone = run(config)
    local = seconds(alone)
    workers = seconds(run(config.model_copy(update={"engine": "workers", "workers": 2})))
    print(f"{case}: {local:.1f} s a round sequentially, {workers:.1f} s by two workers")
    for name, warm in NODES.items():
        remote, model, summary, wire = federated(config, warm)
        print(
            f"  {name}: {remote:.1f} s a round, {remote - local:+.1f} s to the sequential engine, "
            f"{remote - workers:+.1f} s to the workers; same model: {same(alone.model, model)}; "
            f"load {os.getloadavg()[0]:.0f}"
        )
        for way in ("down", "up"):
            sent = summary[f"bytes_{way}"]
            print(
                f"    {way}: {sent:,} bytes encoded, {summary[f'link_{way}'] / sent:.4f} of it as "
                f"Flower's objects, {wire[way] / sent:.4f} on the wire",
                flush=True,
            )


def federated(config, warm):
    """Seconds a round, the model, the summary, and the bytes on the wire."""
    with tempfile.TemporaryDirectory() as name, Deployment(Path(name)) as deployment:
        proxy = Proxy(deployment.port)
        for client in range(3):
            deployment.start_node(client, superlink=f"127.0.0.1:{proxy.port}", warm=warm)
        file = Path(name) / "config.toml"
        file.write_text(config.dump())
        process = deployment.federate(file, "--out", Path(name) / "run")
        if process.wait() != 0:
            sys.exit(deployment.log("federate"))
        ended = Result(Path(name) / "run")
        return seconds(ended), ended.model, ended.summary, {"down": proxy.down, "up": proxy.up}


def large(width):
    """Carry one message of a wide network there and back."""
    network = {"model": {"hidden": [width, width]}, "training": {"batch_size": 64}}
    data = {"name": "digits", "clients": 1, "partition": "iid", "limit": 64}
    rare = {"evaluate_every": 0, "evaluate_local_every": 0, "calibration": "none"}
    config = Config.published(rounds=1, data=data, **network, **rare)
    with tempfile.TemporaryDirectory() as name, Deployment(Path(name), database=True) as deployment:
        node = deployment.start_node(0)
        file = Path(name) / "config.toml"
        file.write_text(config.dump())
        began = time.monotonic()
        process = deployment.federate(file, "--out", Path(name) / "run")
        roles = {"SuperLink": deployment.superlink, "node": node, "server": process}
        most, together = dict.fromkeys(roles, 0), 0
        while process.poll() is None:
            now = {role: memory(one.pid) for role, one in roles.items()}
            most = {role: max(most[role], now[role]) for role in roles}
            together = max(together, sum(now.values()))
            time.sleep(0.2)
        if process.returncode != 0:
            sys.exit(deployment.log("federate"))
        took, summary = time.monotonic() - began, Result(Path(name) / "run").summary
    sent = ", ".join(f"{summary[f'bytes_{way}']:,} bytes {way}" for way in ("down", "up"))
    held = ", ".join(f"{role} {most[role] / 2**30:.1f} GiB" for role in roles)
    together = f"{together / 2**30:.1f} GiB at once"
    print(f"{sent}: {took:.0f} s; memory of the {held}; {together}")


def memory(pid):
    """Bytes of a process and its children; 0 once it has ended."""
    total = 0
    try:
        for one in (process := psutil.Process(pid), *process.children(recursive=True)):
            total += one.memory_info().rss
    except psutil.Error:
        pass
    return total


def seconds(ended):
    """Of a round; the first waits for the nodes to say who they are."""
    return statistics.median(line["seconds"] for line in ended.metrics[1:])


def same(one, other):
    return all((one[name] == other[name]).all() for name in one)


if __name__ == "__main__":
    if sys.argv[1:2] == ["large"]:
        sys.exit(large(int(sys.argv[2]) if len(sys.argv) > 2 else 12_500))
    for name in sys.argv[2:] or CASES:
        measure(name, int(sys.argv[1]) if len(sys.argv) > 1 else 10)
