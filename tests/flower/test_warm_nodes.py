"""Processes of a node that stay loaded: who is asked again, what ends them, what they leave."""

import hashlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("flwr")

import psutil
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.cli.build import build_fab_from_files
from flwr.common.serde import context_from_proto, context_to_proto, fab_to_proto, run_to_proto
from flwr.proto.message_pb2 import Context as ContextProto
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode import start_client_internal as flower

from fedbayes.errors import ConfigError, FedbayesWarning, RunError
from fedbayes.flower import supernode
from fedbayes.flower.keys import make_keys
from fedbayes.flower.node_config import NODE_CONFIG, check_node_config
from fedbayes.flower.pace import pause
from fedbayes.flower.supernode import Connection, SuperNode, read_config, read_private_key, serve
from fedbayes.flower.warm import KEPT, AppDied, Request, WarmApps
from tests.helpers.command_line import command
from tests.helpers.deployment import ROOT, wait_for

APP = """
import os, time
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

client = ClientApp()
here = {"messages": 0}

@client.query("hello")
def answer(message, context):
    told = dict(message.content["told"])
    here["messages"] += 1
    if told["do"] == "die":
        os._exit(7)
    if told["do"] == "raise":
        raise ZeroDivisionError("by the app")
    time.sleep(told.get("nap", 0))
    left = context.state.config_records.get("left")
    before = left["messages"] if left is not None else 0
    context.state["left"] = ConfigRecord({"messages": before + 1})
    reply = {"process": os.getpid(), "messages": here["messages"], "before": before}
    reply |= {"set": context.run_config.get("set", ""), "client": context.node_config["client"]}
    return Message(RecordDict({"reply": ConfigRecord(reply)}), reply_to=message)
"""
PYPROJECT = """
[project]
name = "toy"
version = "1.0.0"
[tool.flwr.app]
publisher = "tests"
[tool.flwr.app.components]
serverapp = "toy:server"
clientapp = "toy:client"
"""


def toy_fab():
    files = {"pyproject.toml": PYPROJECT.encode(), "toy.py": APP.encode()}
    content, _ = build_fab_from_files(files)
    return Fab(hashlib.sha256(content).hexdigest(), content, {})


def about_run(run, fab):
    return replace(
        Run.create_empty(run),
        fab_id="tests/toy",
        fab_version="1.0.0",
        fab_hash=fab.hash_str,
        series_id=run,
    )


class Runs:
    """Runs of a toy app at a node, asked as `SuperNode` asks them."""

    def __init__(self, idle=600.0):
        self.apps = WarmApps(idle)
        self.contexts = {}
        self.fab = toy_fab()

    def message(self, run, **told):
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, run, 1
        content = RecordDict({"told": ConfigRecord(told)})
        message = Message(content, 5, "query.hello", ttl=600)
        message.metadata.__dict__["_message_id"] = message.object_id
        return message

    def ask(self, run, do="answer", seconds=600.0, **told):
        message = self.message(run, do=do, **told)
        context = self.contexts.setdefault(
            run, Context(run, 5, {"client": 3}, RecordDict(), {"set": f"of {run}"})
        )
        contents = [(n, o.deflate()) for n, o in get_all_nested_objects(message).items()]
        request = Request(
            message.metadata.message_id, context_to_proto(context).SerializeToString(), contents
        )
        about = about_run(run, self.fab)
        answer = self.apps.ask(
            run,
            run_to_proto(about).SerializeToString(),
            fab_to_proto(self.fab).SerializeToString(),
            request,
            seconds,
        )
        assert not request.contents  # the process has them, and they may be gigabytes
        self.contexts[run] = context_from_proto(ContextProto.FromString(answer.context))
        root = ObjectTree.FromString(answer.tree).object_id
        reply = inflate_object_from_contents(root, dict(answer.contents))
        assert reply.metadata.reply_to_message_id == message.metadata.message_id
        return reply if reply.has_error() else dict(reply.content["reply"])


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flower"))
    made, before = [], set(psutil.Process().children(recursive=True))

    def make(**settings):
        made.append(Runs(**settings))
        return made[-1]

    yield make
    for each in made:
        each.apps.close()
    assert set(psutil.Process().children(recursive=True)) <= before


def gone(process):
    return not psutil.pid_exists(process) or psutil.Process(process).status() == "zombie"


@pytest.mark.slow
def test_a_runs_process_is_asked_again_until_its_app_raises_or_dies(runs):
    node = runs()
    first, second = node.ask(1), node.ask(1)
    assert first["process"] == second["process"] != os.getpid()
    assert (first["messages"], second["messages"]) == (1, 2)
    assert (first["before"], second["before"]) == (0, 1)
    assert (first["set"], first["client"]) == ("of 1", 3)
    failed = node.ask(1, do="raise")
    assert "ZeroDivisionError" in failed.error.reason
    assert "by the app" in failed.error.reason
    wait_for(lambda: gone(first["process"]), 60, "end of a process whose app raised")
    with pytest.raises(AppDied, match=r"ended while it worked \(exit status 7\)"):
        node.ask(1, do="die")
    third = node.ask(1)
    assert third["process"] != first["process"]
    # What the app left for the run's next message is with the node, not with the process.
    assert (third["messages"], third["before"]) == (1, 2)


@pytest.mark.slow
def test_runs_do_not_share_a_process_and_few_are_kept(runs):
    node = runs()
    told = {run: node.ask(run) for run in range(1, KEPT + 1)}
    for run in told:
        again = node.ask(run)
        assert again["process"] == told[run]["process"]
        assert (again["set"], again["messages"]) == (f"of {run}", 2)
    other = node.ask(KEPT + 1)
    assert other["messages"] == 1
    wait_for(lambda: gone(told[1]["process"]), 60, "end of the process asked longest ago")
    assert node.ask(KEPT)["process"] == told[KEPT]["process"]
    assert len(psutil.Process().children()) == KEPT


@pytest.mark.slow
def test_a_process_without_work_ends_by_itself_and_another_takes_its_place(runs):
    node = runs(idle=3.0)
    first = node.ask(1)
    # The time counts from the end of the work, which may take longer than that.
    second = node.ask(1, nap=7.0)
    assert second["process"] == first["process"]
    wait_for(lambda: gone(first["process"]), 60, "end of an idle process")
    third = node.ask(1)
    assert (third["messages"], third["before"]) == (1, 2)
    wait_for(lambda: gone(third["process"]), 60, "end of an idle process")
    node.apps.reap()
    assert not psutil.Process().children()


@pytest.mark.slow
def test_without_time_to_stay_every_message_has_a_process_of_its_own(runs):
    node = runs(idle=0.0)
    told = [node.ask(1) for _ in range(2)]
    assert [one["messages"] for one in told] == [1, 1]
    assert [one["before"] for one in told] == [0, 1]
    assert told[0]["process"] != told[1]["process"]
    assert not psutil.Process().children()


@pytest.mark.slow
def test_a_process_is_ended_when_nobody_waits_for_its_answer_any_more(runs):
    node = runs()
    process = node.ask(1)["process"]
    began = time.monotonic()
    with pytest.raises(AppDied, match="its answer is no longer needed after 2 s"):
        node.ask(1, seconds=2.0, nap=300.0)
    assert time.monotonic() - began < 60
    assert gone(process)


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("nap", [0.0, 300.0])
def test_no_process_outlives_its_node_however_that_ends(sign, nap, tmp_path):
    script = (
        "import sys, threading\n"
        "from tests.flower.test_warm_nodes import Runs\n"
        "node = Runs()\n"
        "print('process', node.ask(1)['process'], flush=True)\n"
        f"node.ask(1, nap={nap})\n"
        "print('asked', flush=True)\n"
        "threading.Event().wait()\n"
    )
    node = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "FLWR_HOME": str(tmp_path), "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"},
    )
    try:
        told = iter(node.stdout.readline, "")
        process = next(int(line.split()[1]) for line in told if line.startswith("process"))
        if not nap:
            assert "asked\n" in told
        else:
            time.sleep(2)
        assert psutil.pid_exists(process)
        node.send_signal(sign)
        wait_for(lambda: gone(process), 60, "end of the app's process")
    finally:
        node.kill()
        node.wait()


@given(st.floats(0, 1e6), st.floats(1e-3, 1), st.floats(1, 100))
def test_the_time_between_looks_is_a_share_of_what_was_waited(waited, soonest, latest):
    found = pause(waited, soonest, latest)
    assert soonest <= found <= latest
    assert found in {soonest, latest} or found == pytest.approx(waited / 4)
    assert found <= max(soonest, 1.001 * waited / 4)


def test_an_hour_of_waiting_is_some_thousand_looks():
    waited, looks = 0.0, 0
    while waited < 3600:
        waited, looks = waited + pause(waited, 0.25, 3.0), looks + 1
    assert 1195 < looks < 1230  # one every three seconds, and some more before


class Wire:
    """Flower's connection of a node, of which the other end is here."""

    def __init__(self, messages, fab):
        self.messages, self.fab = list(messages), fab
        self.replies, self.objects, self.confirmed = [], {}, []

    def receive(self):
        if not self.messages:
            raise KeyboardInterrupt
        message = self.messages.pop(0)
        self.objects |= {n: o.deflate() for n, o in get_all_nested_objects(message).items()}
        return message, get_object_tree(message)

    def run(self, run):
        return about_run(run, self.fab)

    def send(self, message, tree, seconds):
        self.replies.append((message, tree))
        return {item.object_id for item in flower.iterate_object_tree(tree)}, "a session"

    def push(self, run, session, name, content):
        self.objects[name] = content

    def __enter__(self):
        return (
            5,
            self.receive,
            self.send,
            self.run,
            lambda digest, run: self.fab,
            lambda run, name: self.objects[name],
            self.push,
            lambda run, message: self.confirmed.append(message),
        )

    def __exit__(self, *_):
        pass

    def told(self):
        found = []
        for _, tree in self.replies:
            reply = inflate_object_from_contents(tree.object_id, dict(self.objects))
            found.append(reply.error.reason if reply.has_error() else dict(reply.content["reply"]))
        return found


def test_a_node_gives_messages_to_the_processes_and_sends_what_they_say(runs, monkeypatch):
    node = runs()
    asked = [(1, "answer"), (2, "answer"), (1, "die"), (1, "answer"), (2, "answer")]
    messages = [node.message(run, do=do, number=i) for i, (run, do) in enumerate(asked)]
    wire = Wire(messages, node.fab)
    monkeypatch.setattr(flower, "_init_connection", lambda **_: wire)
    supernode = SuperNode({"client": 3}, node.apps)
    with pytest.raises(KeyboardInterrupt):
        supernode.serve(Connection("127.0.0.1:9", None, None))
    first, other, died, again, last = wire.told()
    assert "exit status 7" in died
    assert first["process"] not in {other["process"], again["process"]}
    assert other["process"] == last["process"]
    assert (again["messages"], again["before"]) == (1, 1)
    assert (last["messages"], last["before"]) == (2, 1)
    assert len(wire.confirmed) == len(asked)
    # Nothing of a message stays with the node.
    assert not supernode._store.store
    assert not supernode._state.msg_store
    assert not supernode._state.task_store


class Broken(Wire):
    """A wire that loses what is sent or fetched on the first connection."""

    def __init__(self, messages, fab, way):
        super().__init__(messages, fab)
        self.way, self.connections = way, 0

    def __enter__(self):
        self.connections += 1
        return super().__enter__()

    def _break(self, way):
        if self.connections == 1 and self.way == way:
            raise OSError(f"{way} breaks")

    def send(self, message, tree, seconds):
        self._break("send")
        return super().send(message, tree, seconds)

    def push(self, run, session, name, content):
        self._break("push")
        super().push(run, session, name, content)


@pytest.mark.parametrize(("way", "connections"), [("send", 2), ("push", 2), ("none", 1)])
def test_a_node_whose_answer_is_lost_connects_anew(runs, monkeypatch, way, connections):
    """The server sees that it went and came back, and sends its task again."""
    node = runs()
    messages = [node.message(1, do="answer", number=i) for i in range(2)]
    wire = Broken(messages, node.fab, way)
    monkeypatch.setattr(flower, "_init_connection", lambda **_: wire)
    with pytest.raises(KeyboardInterrupt):
        SuperNode({"client": 3}, node.apps).serve(Connection("127.0.0.1:9", None, None))
    assert wire.connections == connections
    assert wire.replies


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("client=zero", "client=zero"),
        ("client 0", "client=0"),
        ("client=-1", "client=0"),
        ("client=true", "client=0"),
        ("client=0 dta='x'", "unknown in the node config: dta"),
        ("client=0 secure=1", "secure in the node config must be true or false"),
        ("client=0 data='x' query='y'", "exclude each other"),
        ("client=0 query='y' sheet='May'", "sheet in the node config needs an Excel file"),
        ("nowhere.toml", "nowhere.toml"),
    ],
)
def test_a_node_config_that_cannot_be_is_refused_before_the_node_connects(text, words):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        read_config(text)


def test_what_a_node_needs_is_said_before_it_connects(tmp_path, capsys):
    def refused(*arguments):
        assert command("federate", "node", *arguments) == 2
        return " ".join(capsys.readouterr().err.split())

    assert "--node-config" in refused("--insecure")
    assert "the connection to the SuperLink is missing. Give" in refused(
        "--node-config", "client=0"
    )
    assert "write HOST:PORT" in refused(
        *("--node-config", "client=0", "--insecure", "--superlink", "9092")
    )
    assert "start the node with" in refused("--node-config", "", "--insecure")
    assert "cannot read the private key" in refused(
        *("--node-config", "client=0", "--insecure", "--key", str(tmp_path / "none.key"))
    )
    assert "--warm" in refused("--node-config", "client=0", "--insecure", "--warm", "-1")


@pytest.mark.parametrize(("code", "said"), [(1, True), (0, False)])
def test_a_node_that_flower_does_not_let_in_says_what_to_check(monkeypatch, caplog, code, said):
    def refuse(**_):
        sys.exit(code)

    monkeypatch.setattr(flower, "_init_connection", refuse)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit), caplog.at_level(logging.INFO, "flwr"):
        serve(Connection("127.0.0.1:9", None, None), {"client": 3}, 1.0)
    assert "Connecting to 127.0.0.1:9 without TLS" in caplog.text
    assert ("rejects the same key for up to a minute" in caplog.text) == said


def test_a_node_that_reaches_nobody_says_what_to_check_and_tries_on(monkeypatch, caplog, runs):
    node, tried = runs(), threading.Event()
    wire = Wire([], node.fab)

    @contextmanager
    def late(**_):
        deadline = time.monotonic() + 20
        while "No connection to 127.0.0.1:9 yet" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        tried.set()
        with wire as ways:
            yield ways

    monkeypatch.setattr(supernode, "_UNREACHED", 0.05)
    monkeypatch.setattr(flower, "_init_connection", late)
    with pytest.raises(KeyboardInterrupt), caplog.at_level(logging.INFO, "flwr"):
        SuperNode({"client": 3}, node.apps).serve(Connection("127.0.0.1:9", None, None))
    assert tried.is_set()
    caplog.clear()
    monkeypatch.setattr(flower, "_init_connection", lambda **_: Wire([], node.fab))
    monkeypatch.setattr(supernode, "_UNREACHED", 60.0)
    with pytest.raises(KeyboardInterrupt), caplog.at_level(logging.INFO, "flwr"):
        SuperNode({"client": 3}, node.apps).serve(Connection("127.0.0.1:9", None, None))
    assert "No connection" not in caplog.text


def test_data_that_are_not_there_yet_are_said_before_a_node_connects(tmp_path):
    with pytest.warns(FedbayesWarning, match=r"not there yet: .*none\.csv"):
        read_config(f'client=2 data="{tmp_path / "none.csv"}"')


def test_a_node_config_is_what_was_written(tmp_path):
    (tmp_path / "a b.csv").touch()
    assert read_config(f'client=2 data="{tmp_path}/a b.csv" secure=true min-count=5') == {
        "client": 2,
        "data": f"{tmp_path}/a b.csv",
        "secure": True,
        "min-count": 5,
    }
    assert (
        check_node_config({name: 1 for name in NODE_CONFIG if name != "query"} | {"secure": False})
        == 1
    )


def test_a_key_is_that_of_federate_keys(tmp_path):
    make_keys(tmp_path / "keys", ["localhost"], 1)
    private, public = read_private_key(tmp_path / "keys" / "client-0.key")
    assert private.public_key() == public
    for name in ("client-0.pub", "ca.crt", "missing.key"):
        with pytest.raises(RunError, match=name):
            read_private_key(tmp_path / "keys" / name)
