"""The files of `deploy/`, as far as they can be tried without containers."""

import re
import shlex
import socket
import subprocess
import tomllib
from pathlib import Path

import pytest
import typer

pytest.importorskip("flwr")

import click
import yaml  # Flower brings it
from cryptography import x509

from fedbayes import Config
from fedbayes.cli import app
from fedbayes.flower.keys import make_keys
from fedbayes.flower.supernode import read_config, read_private_key
from fedbayes.workflows.running import Result
from tests.helpers.deployment import (
    BIN,
    ROOT,
    Deployment,
    free_port,
    listens,
    wait_for,
    write_table,
)

DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
NODES = [name for name in SERVICES if name.startswith("node-")]
DOCKERFILE = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")


@pytest.fixture(autouse=True)
def paths_of_containers(monkeypatch):
    """Paths of commands are those in a container, and not on this machine."""
    monkeypatch.setattr(click.Path, "convert", lambda kind, value, *_: value)


def options(arguments):
    """The parameters of a command line of fedbayes, parsed as it parses them and not executed."""
    command = typer.main.get_command(app)
    context = command.make_context("fedbayes", list(arguments))
    while hasattr(command, "resolve_command"):
        _, command, left = command.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        context = command.make_context(command.name, left, parent=context)
    return command.name, context.params


def asked(service):
    return options(SERVICES[service]["command"])


def mounts(service):
    """Paths beside the compose file, by where they are in the container."""
    found = {}
    for volume in SERVICES[service].get("volumes", ()):
        outside, inside, *_ = volume.split(":")
        found[inside] = outside
    return found


def outside(service, path):
    """Where a path in a container comes from."""
    for inside, place in mounts(service).items():
        if path == inside or str(path).startswith(f"{inside}/"):
            return Path(place) / Path(path).relative_to(inside)
    raise AssertionError(f"{service} has no {path}")


def test_every_command_exists_and_has_these_options():
    named = {service: asked(service)[0] for service in SERVICES}
    assert named == {
        "keys": "keys",
        "hub": "superlink",
        "admit": "register",
        "node-0": "node",
        "node-1": "node",
        "node-2": "node",
        "server": "run",
    }
    with pytest.raises(Exception, match="No such option"):
        options(["federate", "node", "--node-config", "client=0", "--isolation", "process"])


def test_certificates_and_keys_are_those_that_fedbayes_makes(tmp_path):
    _, made = asked("keys")
    keys = outside("keys", made["folder"])
    make_keys(tmp_path / keys, made["host"], made["clients"])
    trust = x509.load_pem_x509_certificate((tmp_path / keys / "server.pem").read_bytes())
    names = trust.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    names = set(names.get_values_for_type(x509.DNSName))
    secrets = {}
    for service in SERVICES:
        params = asked(service)[1]
        if service in {*NODES, "admit", "server"}:
            assert params["superlink"].rpartition(":")[0] in names
            assert (tmp_path / outside(service, params["root_certificates"])).is_file()
        if service in NODES:
            secrets[service] = outside(service, params["key"])
            read_private_key(tmp_path / secrets[service])
            held = {Path(place) for place in mounts(service).values() if "secrets" in place}
            assert held == {keys / "ca.crt", secrets[service]}
            (number,) = re.findall(r"\d+", service)
            assert read_config(params["node_config"])["client"] == int(number)
            assert secrets[service] == keys / f"client-{number}.key"
    assert len(set(secrets.values())) == len(NODES) == made["clients"]
    admitted = [tmp_path / outside("admit", file) for file in asked("admit")[1]["keys"]]
    assert admitted == [tmp_path / file.with_suffix(".pub") for file in secrets.values()]
    assert all(file.is_file() for file in admitted)
    assert outside("hub", asked("hub")[1]["folder"]) == keys
    assert (tmp_path / outside("server", asked("server")[1]["superexec_secret"])).is_file()


def test_addresses_agree_and_nothing_but_the_port_of_nodes_is_open():
    _, hub = asked("hub")
    port = hub["nodes"].rpartition(":")[2]
    for node in NODES:
        assert asked(node)[1]["superlink"] == f"hub:{port}"
        assert SERVICES[node]["networks"] == SERVICES["hub"]["networks"]
    for service in ("admit", "server"):
        assert asked(service)[1]["superlink"] == f"localhost:{hub['port']}"
        assert SERVICES[service]["network_mode"] == "service:hub"
    assert {s: SERVICES[s]["ports"] for s in SERVICES if "ports" in SERVICES[s]} == {
        "hub": [f"{port}:{port}"]
    }


def test_what_a_node_reads_and_keeps_is_mounted():
    states = set()
    for node in NODES:
        config = read_config(asked(node)[1]["node_config"])
        assert outside(node, config["data"]).name == f"client-{config['client']}.csv"
        assert f"{outside(node, config['data'])}" in str(SERVICES[node]["volumes"])
        states.add(outside(node, config["state"]))
    assert len(states) == len(NODES)
    for service in SERVICES.values():
        assert service["cap_drop"] == ["ALL"]
        assert not str(service["user"]).startswith("0")


def test_the_image_has_what_it_is_built_from():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    for line in re.findall(r"^COPY (.+)", DOCKERFILE, re.MULTILINE):
        for name in line.split()[:-1]:
            assert (ROOT / name).exists()
            assert f"!{name}" in ignored
    assert re.search(r"^FROM python:3\.11", DOCKERFILE, re.MULTILINE)
    installs = re.findall(r"^RUN (pip install .+)", DOCKERFILE, re.MULTILINE)
    (extras,) = re.findall(r"\.\[([\w,]+)\]", installs[-1])
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    assert all("constraints.txt" in shlex.split(line) for line in installs)
    (entry,) = re.findall(r'^ENTRYPOINT \["(\w+)"\]', DOCKERFILE, re.MULTILINE)
    assert entry in project["scripts"]
    assert SERVICES["hub"]["build"] == {"context": "..", "dockerfile": "deploy/Dockerfile"}


@pytest.mark.slow
def test_the_commands_make_a_federation(tmp_path):
    """Those of the compose file, as processes here: paths are those beside it, names loopback."""
    ports = {"8000": str(free_port()), "9092": str(free_port())}

    def here(service, word):
        for inside, place in sorted(mounts(service).items(), key=lambda item: -len(item[0])):
            word = re.sub(rf"(?<![\w/.]){inside}(?=[/\"]|$)", str(tmp_path / place), word)
        word = re.sub(r"^(hub|localhost|0\.0\.0\.0):(\d+)$", r"localhost:\2", word)
        return re.sub("8000|9092", lambda found: ports[found[0]], word)

    spawn = Deployment.spawn
    deployment = object.__new__(Deployment)
    deployment.folder, deployment.processes = tmp_path, []

    def begin(service):
        words = [here(service, word) for word in SERVICES[service]["command"]]
        if service == "hub":
            words = [word.replace("localhost:", "127.0.0.1:") for word in words]
        return spawn(deployment, service, ["fedbayes", *words])

    for folder in ("secrets", "server", "runs", "data", *(f"states/client-{i}" for i in range(3))):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    write_table(tmp_path / "server" / "reference.csv", 0, [0, 1, 2])
    for client in range(3):
        write_table(tmp_path / "data" / f"client-{client}.csv", client + 1, [0, 1, 2])
    config = Config.create(
        rounds=2, data={"path": str(tmp_path / "server" / "reference.csv"), "clients": 3}
    )
    (tmp_path / "server" / "federation.toml").write_text(config.dump())
    with deployment:
        assert begin("keys").wait(120) == 0, deployment.log("keys")
        begin("hub")
        wait_for(lambda: all(listens(int(port)) for port in ports.values()), 120, "hub")
        assert begin("admit").wait(120) == 0, deployment.log("admit")
        for node in NODES:
            begin(node)
        assert begin("server").wait(400) == 0, deployment.log("server")
    ended = Result(tmp_path / "runs" / "first")
    assert ended.summary["losses"] == []
    assert ended.summary["rounds"] == 2


def test_the_hub_is_healthy_while_it_listens_at_both_ports():
    kind, program, *words = SERVICES["hub"]["healthcheck"]["test"]
    assert (kind, program) == ("CMD", "python")

    def healthy(*ports):
        numbers = dict(zip(("8000", "9092"), map(str, ports), strict=True))
        command = [re.sub("8000|9092", lambda found: numbers[found[0]], word) for word in words]
        return subprocess.run([BIN / program, *command], capture_output=True).returncode == 0

    here = ("127.0.0.1", 0)
    with socket.create_server(here) as one, socket.create_server(here) as two:
        open_ports = [each.getsockname()[1] for each in (one, two)]
        assert healthy(*open_ports)
        assert not healthy(open_ports[0], free_port())
        assert not healthy(free_port(), open_ports[1])
