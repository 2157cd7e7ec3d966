"""The SuperLink of a federation, as a stranger, a node and its operator find it."""

import asyncio
import http.client
import json
import re
import socket
import ssl
import stat
import subprocess
import time
import warnings
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from shutil import which
from threading import Thread
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")

import psutil
from flwr.app import ConfigRecord, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.superlink.main import create_app

from fedbayes import Config, Simulation
from fedbayes.errors import EngineError, FedbayesWarning, RunError
from fedbayes.flower import host_and_port, hub, wire
from fedbayes.flower.keys import key_names, make_keys, read_public_key
from fedbayes.flower.project import hello_files
from fedbayes.flower.registry import _row, introduced
from fedbayes.flower.roster import Identity
from fedbayes.flower.superlink import LinkError, SuperLink
from tests.helpers.command_line import command
from tests.helpers.deployment import BIN, ROOT, Deployment, free_port, listens, wait_for
from tests.helpers.flower_runs import settings

ADDRESSES = [
    a.address
    for interface in psutil.net_if_addrs().values()
    for a in interface
    if a.family == socket.AF_INET and not a.address.startswith("127.")
]
"""Of this machine on networks."""
outside = pytest.mark.skipif(not ADDRESSES, reason="this machine is on no network")


# ---- what reaches Flower's application


def asked(path, server, kind="http", headers=()):
    """What an application that says 200 to everything answers behind the guard."""

    async def anything(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    said = []

    async def send(message):
        said.append(message)

    scope = {"type": kind, "path": path, "server": server, "headers": list(headers)}
    app = hub.only_nodes_from_outside(anything, inside=8000)
    asyncio.run(app(scope, None, send))
    return said[0].get("status", said[0]["type"])


def flower_paths():
    return sorted({*create_app().openapi()["paths"], "/docs", "/openapi.json"})


def test_of_flowers_paths_only_those_of_nodes_are_open_to_others():
    paths = flower_paths()
    assert len(paths) > 60
    assert {"/v1/control/start-run", "/v1/control/register-node", "/health"} <= set(paths)
    assert all(asked(path, ("127.0.0.1", 8000)) == 200 for path in paths)
    for server in (("192.0.2.2", 9092), ("127.0.0.1", 9092), ("::", 9092), None):
        opened = [path for path in paths if asked(path, server) == 200]
        assert opened == [path for path in paths if path.startswith("/v1/fleet/")]
        assert len(opened) == 12


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/list-runs",
        "//v1/fleet/register-node",
        "/V1/FLEET/register-node",
        "/v1/fleet",
        "/v1/fleet\\register-node",
        "/../v1/fleet/register-node",
        "",
        "*",
    ],
)
def test_nothing_that_only_looks_like_a_path_of_nodes_is_open(path):
    assert asked(path, ("0.0.0.0", 9092)) == 404


def test_what_is_no_request_or_too_long_a_one_is_turned_away():
    outer = ("192.0.2.2", 9092)
    path = "/v1/fleet/push-object"
    assert asked(path, outer, kind="websocket") == "websocket.close"
    assert asked(path, outer, headers=[(b"content-length", b"536870912")]) == 200
    assert asked(path, outer, headers=[(b"content-length", b"536870913")]) == 413
    assert asked(path, outer, headers=[(b"transfer-encoding", b"chunked")]) == 413


# ---- how it is started


def test_what_a_hub_needs_is_said_before_it_starts(tmp_path, capsys):
    with pytest.raises(RunError, match=r"has no ca.crt\. Create keys with: fedbayes federate keys"):
        hub.serve(tmp_path, ("127.0.0.1", 9092), 8000)
    make_keys(tmp_path / "keys", ["localhost"], clients=0)
    with pytest.raises(EngineError, match="port 8000 is"):
        hub.serve(tmp_path / "keys", ("0.0.0.0", 8000), 8000)
    for address in ("9092", "0.0.0.0", "0.0.0.0:0", "0.0.0.0:99999", "a b:9092", "x:y"):
        with pytest.raises(EngineError, match="write HOST:PORT"):
            host_and_port("--nodes", address)
    assert host_and_port("--nodes", "[::]:9092") == ("::", 9092)
    assert command("federate", "superlink", str(tmp_path / "keys"), "--nodes", "9092") == 2
    assert "--nodes 9092: write HOST:PORT" in capsys.readouterr().err
    assert command("federate", "superlink", str(tmp_path)) == 2
    assert "nodes with an admitted key come" not in capsys.readouterr().err


def test_a_taken_address_is_a_plain_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EngineError, match=f"cannot listen at 127.0.0.1:{port}: .*in use"):
            hub._listen("127.0.0.1", port)


@pytest.mark.parametrize("name", ["superlink.db", "server.pem", "server.key"])
def test_a_damaged_file_of_the_hub_is_named(name, tmp_path, monkeypatch):
    monkeypatch.setattr(hub.os, "umask", lambda mask: None)
    make_keys(tmp_path / "keys", ["localhost"], clients=0)
    (tmp_path / "keys" / name).write_bytes(b"garbage, and no end of it " * 500)
    with pytest.raises(RunError, match=name):
        hub.serve(tmp_path / "keys", ("127.0.0.1", free_port()), free_port())


def test_the_port_of_nodes_is_named_when_runs_are_started_there(listening):
    link = SuperLink(f"127.0.0.1:{listening('127.0.0.1', 404)}")
    with pytest.raises(LinkError, match="is not the port for nodes; use"):
        link.check()


# ---- an open control API is noticed


class Open(BaseHTTPRequestHandler):
    status = 200

    def do_POST(self):
        assert self.path == "/v1/control/list-runs"
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *arguments):
        pass


@pytest.fixture
def listening():
    """Starts servers that answer as a control API would; gives their ports."""
    servers = []

    def listen(host, status=200):
        kind = type("Handler", (Open,), {"status": status})
        server = HTTPServer((host, 0), kind)
        servers.append(server)
        Thread(target=server.serve_forever, daemon=True).start()
        return server.server_address[1]

    yield listen
    for server in servers:
        server.shutdown()
        server.server_close()


@outside
@pytest.mark.parametrize(
    ("host", "status", "opened"),
    [("127.0.0.1", 200, False), ("0.0.0.0", 200, True), ("0.0.0.0", 404, False)],
)
def test_a_control_api_that_others_reach_is_found(host, status, opened, listening):
    link = SuperLink(f"localhost:{listening(host, status)}")
    found = link.open_to_others()
    assert bool(found) == opened
    if opened:
        assert found.rpartition(":")[0].strip("[]") not in ("127.0.0.1", "localhost", "::1")


# ---- nodes say who they are


def reply(**records):
    content = RecordDict({name: ConfigRecord(values) for name, values in records.items()})
    return SimpleNamespace(content=content, has_error=lambda: False)


def test_a_hello_has_the_versions_of_the_node():
    answer = reply(**{n: dict(r) for n, r in wire.write_hello(3).config_records.items()})
    hello = wire.read_hello(answer)
    assert hello.client == 3
    assert hello.versions == wire.own_versions()
    assert hello.versions.keys() == {"fedbayes", "flwr", "torch", "python"}


@pytest.mark.parametrize(
    ("told", "read"),
    [
        ({}, {}),
        ({"torch": "9" * 10**6}, {"torch": "9" * 40}),
        ({"torch": "2.0\x1b[31m\n"}, {"torch": "2.0 [31m "}),
        ({"torch": 5, "python": ["3"], "flwr": b"1"}, {}),
        ({"rm -rf": "1", **{str(i): "x" for i in range(1000)}}, {}),
    ],
)
def test_versions_are_read_without_trust(told, read):
    assert wire.read_hello(reply(hello={"client": 1}, versions=told)).versions == read


def test_a_node_of_an_older_version_still_says_who_it_is():
    assert wire.read_hello(reply(hello={"client": 1})) == wire.Hello(1, {})


@pytest.fixture
def grid():
    config = Config.create(**settings("fedavg", rounds=1, engine="flower-simulation"))
    with Simulation(config) as simulation:
        yield simulation.engine


def test_nodes_are_asked_and_those_that_cannot_say_are_named(grid, monkeypatch):
    from fedbayes.flower.node import Node

    honest = Node.answer

    def answer(self, message):
        if self.client == 2:
            raise EngineError("no data here")
        return honest(self, message)

    monkeypatch.setattr(Node, "answer", answer)
    with grid.poller.reach() as open_grid:
        ids = {node.node_id for node in open_grid.get_nodes()}
    with warnings.catch_warnings(action="error"):
        roster = introduced(grid.poller._connect, ids, 30)
    assert sorted(hello.client for hello in roster.hellos.values()) == [0, 1]
    assert list(roster.troubles().values()) == ["no data here"]
    assert roster.hellos.keys() | roster.troubles().keys() == ids


def test_a_node_that_never_answers_is_waited_for_as_long_as_was_said(grid):
    start = time.monotonic()
    roster = introduced(grid.poller._connect, {123}, 1.0)
    assert 1.0 <= time.monotonic() - start < 20
    assert len(roster.hellos) == 3


def test_a_run_tells_of_nodes_with_other_versions(monkeypatch):
    written = wire.write_hello

    def older(client):
        content = written(client)
        content.config_records["versions"]["torch"] = "2.0.1"
        return content

    monkeypatch.setattr("fedbayes.flower.node.write_hello", older)
    config = Config.create(**settings("fedavg", rounds=1, engine="flower-simulation"))
    with (
        pytest.warns(FedbayesWarning, match=r"client 0 has torch 2\.0\.1 \(here"),
        Simulation(config) as simulation,
    ):
        list(simulation)


def test_keys_are_admitted_for_their_clients():
    zero, ward = Path("keys/client-0.pub"), Path("ward.pub")
    assert key_names([zero], []) == {zero: "client-0"}
    assert key_names([ward, zero], [2, 0]) == {ward: "ward client-2", zero: "client-0"}
    numbers = [
        Identity.of(NodeInfo(name=name)).number for name in ("ward client-2", "client-0", "ward")
    ]
    assert numbers == [2, 0, None]
    with pytest.warns(FedbayesWarning, match=r"used\. Give it with --client NUMBER"):
        assert key_names([ward], []) == {ward: "ward"}
    for wrong in ([1], [1, 1], [1, 2, 3]):
        with pytest.raises(EngineError, match="2 different numbers"):
            key_names([zero, ward], wrong)


def test_a_key_that_is_registered_already_keeps_its_node_and_its_client(monkeypatch):
    known = [NodeInfo(node_id=7, name="client-0", public_key=b"zero")]
    asked = []
    control = SimpleNamespace(
        RegisterNode=lambda request: asked.append(request.name) or NodeInfo(node_id=8),
        ListNodes=lambda request: SimpleNamespace(nodes_info=known),
    )
    monkeypatch.setattr(SuperLink, "_control", lambda self: nullcontext(control))
    link = SuperLink("hub:8000")
    assert [link.admit(b"zero", "client-0"), link.admit(b"one", "client-1")] == [7, 8]
    assert asked == ["client-1"]
    with pytest.raises(LinkError, match="registered at hub:8000, as client-0, not as client-2"):
        link.admit(b"zero", "client-2")


def test_when_a_node_was_seen_last():
    def node(**more):
        return _row(NodeInfo(node_id=1, registered_at="2026-01-01T00:00:00+00:00", **more))

    assert node(status="registered").last_seen is None
    assert datetime.now(UTC) - node(status="online").last_seen < timedelta(seconds=5)
    on, off = "2026-01-02T00:00:00+00:00", "2026-01-03T12:00:00+02:00"
    seen = node(status="offline", last_activated_at=on, last_deactivated_at=off).last_seen
    assert seen == datetime(2026, 1, 3, 10, tzinfo=UTC)
    assert node(status="offline", last_deactivated_at="yesterday").last_seen is None
    assert node(status="x\x1b[2J", name="a\nb").status == "x [2J"


# ---- as an attacker, and as the operator, with real processes


@pytest.fixture
def deployed(tmp_path):
    """As docs/howto/deploy.md has it: nodes come at every address, three clients are admitted."""
    make_keys(tmp_path / "keys", ["localhost", "127.0.0.1", *ADDRESSES], clients=4)
    with Deployment(
        tmp_path, certificates=tmp_path / "keys", hub=True, host="0.0.0.0"
    ) as deployment:
        public = [tmp_path / "keys" / f"client-{client}.pub" for client in range(3)]
        for known in (public[:1], public):
            process = deployment.federate("admit", *known)
            assert process.wait(timeout=60) == 0, deployment.log("federate")
        yield deployment


def stranger_at(address, deployment):
    """Whoever has the public certificate of the CA and nothing else."""
    return SuperLink(address, deployment.certificates / "ca.crt")


def attacks(link, deployment):
    """What a stranger tried, and what came of it."""
    key = read_public_key(deployment.certificates / "client-3.pub")
    tried = {
        "list runs": link.check,
        "list nodes": link.nodes,
        "start a run": lambda: link.submit(hello_files()),
        "register a node": lambda: link.admit(key, "stranger"),
        "become the server": lambda: link.take(1),
    }
    came = {}
    for what, act in tried.items():
        try:
            came[what] = act()
        except LinkError as error:
            came[what] = error
    return came


@pytest.mark.slow
def test_a_stranger_with_the_public_certificate_gets_nowhere(deployed):
    for host in ("127.0.0.1", *ADDRESSES):
        came = attacks(stranger_at(f"{host}:{deployed.nodes_port}", deployed), deployed)
        assert all("answered 404" in str(error) for error in came.values()), came
    for host in ADDRESSES:
        came = attacks(stranger_at(f"{host}:{deployed.port}", deployed), deployed)
        assert all("cannot reach" in str(error) for error in came.values()), came
    # Nor by another spelling of the path, nor by saying that one comes from elsewhere.
    trust = ssl.create_default_context(cafile=deployed.certificates / "ca.crt")
    for path in (
        "/v1/fleet/../control/list-runs",
        "/v1/fleet/%2e%2e/control/list-runs",
        "/v1/fleet/..%2fcontrol/list-runs",
        "//v1/control/list-runs",
        f"https://localhost:{deployed.port}/v1/control/list-runs",
    ):
        line = http.client.HTTPSConnection("localhost", deployed.nodes_port, context=trust)
        spoofed = {"x-forwarded-for": "127.0.0.1", "host": f"localhost:{deployed.port}"}
        line.request("POST", path, b"", {"content-type": "application/protobuf", **spoofed})
        assert line.getresponse().status in (401, 404), path
    # A node with a key of its own is turned away by Flower.
    stranger = deployed.start_node(3, key=deployed.certificates / "client-3.key")
    assert stranger.wait(timeout=60) != 0
    nodes = stranger_at(f"localhost:{deployed.port}", deployed).nodes()  # the operator's way
    assert sorted(node.name for node in nodes) == ["client-0", "client-1", "client-2"]
    assert {node.status for node in nodes} == {"registered"}
    for file in deployed.certificates.glob("superlink.db*"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert (deployed.certificates / "superlink.db").is_file()


@outside
@pytest.mark.slow
def test_a_superlink_at_every_interface_is_warned_of(tmp_path):
    make_keys(tmp_path / "keys", ["localhost", "127.0.0.1", *ADDRESSES], clients=4)
    with Deployment(
        tmp_path, certificates=tmp_path / "keys", auth=True, host="0.0.0.0"
    ) as deployment:
        came = attacks(stranger_at(f"{ADDRESSES[0]}:{deployment.port}", deployment), deployment)
        assert came["list runs"] is None  # as of Flower: nobody is asked for a password
        assert came["start a run"] > 0
        assert came["register a node"] > 0
        process = deployment.federate("--set", "round_timeout=1", "--out", tmp_path / "run")
        process.wait(timeout=100)
        words = " ".join(deployment.log("federate").split())
        assert "can start runs, which nodes execute, and register keys" in words
        assert "fedbayes federate superlink" in words


@pytest.mark.slow
@pytest.mark.skipif(not which("nginx"), reason="no nginx here")
def test_the_proxy_of_the_documentation_lets_nodes_through_and_nobody_else(tmp_path):
    text = (ROOT / "docs" / "howto" / "deploy.md").read_text()
    (server,) = re.findall(r"```nginx\n(.*?)```", text, re.DOTALL)
    make_keys(tmp_path / "keys", ["localhost", "127.0.0.1"], clients=4)
    with Deployment(tmp_path, certificates=tmp_path / "keys", auth=True) as deployment:
        deployment.nodes_port = free_port()
        for written, here in (
            ("/etc/fedbayes/keys", str(tmp_path / "keys")),
            ("listen 9092", f"listen {deployment.nodes_port}"),
            ("127.0.0.1:8000", deployment.address),
        ):
            assert written in server
            server = server.replace(written, here)
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        places = " ".join(f"{kind}_temp_path {tmp_path}/{kind};" for kind in kinds)
        (tmp_path / "nginx.conf").write_text(
            f"daemon off; pid {tmp_path}/nginx.pid; events {{}} "
            f"http {{ access_log off; {places} {server} }}"
        )
        paths = ["-p", tmp_path, "-e", "stderr", "-c", tmp_path / "nginx.conf"]
        deployment.spawn("nginx", [which("nginx"), *paths])
        wait_for(lambda: listens(deployment.nodes_port), 30, "nginx")
        came = attacks(stranger_at(deployment.nodes_address, deployment), deployment)
        assert all("answered 404" in str(error) for error in came.values()), came
        for way in ("fleet/../control", "fleet/%2e%2e/control", "fleet/..%2fcontrol", "/control"):
            trust = ssl.create_default_context(cafile=deployment.certificates / "ca.crt")
            line = http.client.HTTPSConnection("localhost", deployment.nodes_port, context=trust)
            line.request("POST", f"/v1/{way}/list-runs", b"")
            assert line.getresponse().status in (400, 401, 404), way
        assert deployment.federate("admit", tmp_path / "keys" / "client-0.pub").wait(60) == 0
        deployment.start_node(0, key=tmp_path / "keys" / "client-0.key")
        link = stranger_at(deployment.address, deployment)
        wait_for(lambda: link.nodes()[0].status == "online", 90, "node behind nginx")


@pytest.mark.slow
def test_nodes_are_listed_with_their_clients_and_when_they_were_seen(deployed):
    def listed(*options):
        link = ["--superlink", deployed.address, *deployed.trust]
        process = subprocess.run(
            [BIN / "fedbayes", "federate", "nodes", *link, *options],
            capture_output=True,
            text=True,
            timeout=150,
            check=True,
        )
        return process.stdout

    secret = ["--superexec-secret", deployed.certificates / "superexec.key"]
    assert {row["status"] for row in json.loads(listed("--json"))["nodes"]} == {"registered"}
    for client in (0, 1):
        deployed.start_node(client, key=deployed.certificates / f"client-{client}.key")

    def online():
        found = json.loads(listed("--json", "--ask", "0"))["nodes"]
        return sum(row["status"] == "online" for row in found) == 2

    wait_for(online, 120, "two nodes")
    found = json.loads(listed("--json", *secret))
    assert found["here"] == wire.own_versions()
    told = {row["name"]: (row["client"], row["versions"]) for row in found["nodes"]}
    here = wire.own_versions()
    assert told == {"client-0": (0, here), "client-1": (1, here), "client-2": (None, {})}
    table = listed(*secret)
    assert "as here" in table
    assert "never" in table
    # Without the secret nobody speaks for the server: that is said, and the rest listed.
    process = subprocess.run(
        [BIN / "fedbayes", "federate", "nodes", "--superlink", deployed.address, *deployed.trust],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert process.returncode == 0
    assert "answered 401" in process.stderr
    assert "--superexec-secret" in process.stderr
    assert "client-2" in process.stdout
    # A hub that was ended knows its nodes again.
    deployed.kill(deployed.superlink)
    deployed.start_superlink()
    again = json.loads(listed("--json", "--ask", "0"))["nodes"]
    assert [row["name"] for row in again] == ["client-0", "client-1", "client-2"]
