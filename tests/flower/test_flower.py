"""Federations on Flower: the same numbers, private states that stay, and hostile nodes."""

import itertools
import math
import os
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as tries
from hypothesis import strategies as st

from fedbayes import Config, Simulation, resume, run
from fedbayes.errors import DataError, EngineError, FedbayesWarning, MessageError

pytest.importorskip("flwr")

import httpx
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.task_identity import TaskIdentity
from safetensors.torch import load_file

from fedbayes.core.messages import decode, encode
from fedbayes.federation.client_runtime import Task
from fedbayes.flower.engine import Flower
from fedbayes.flower.node import Node, complaint
from fedbayes.flower.poller import LinkError
from fedbayes.flower.roster import Roster
from fedbayes.flower.wire import (
    HELLO,
    TRAIN,
    bytes_record,
    read_reply,
    write_hello,
    write_question,
)
from fedbayes.storage.state_store import StateStore
from fedbayes.workflows.serve.evaluation_set import find_tests
from fedbayes.workflows.serve.model_evaluation import compare, open_model
from tests.helpers.cases import cases
from tests.helpers.flower_runs import DATA, METHODS, same, settings, without


@pytest.mark.parametrize("label", cases(METHODS, slow=["virtual, all at once", "gpi-fnm"]))
def test_simulation_ends_with_the_model_of_the_sequential_engine(label, tmp_path):
    alone = run(**settings(label, engine="sequential"))
    flower = run(folder=tmp_path / "run", **settings(label, engine="flower-simulation"))
    assert same(alone.model, flower.model)
    for mine, theirs in zip(alone.metrics, flower.metrics, strict=True):
        for name in ("global_accuracy", "local_accuracy", "bytes_down", "bytes_up"):
            assert mine[name] == theirs[name]


def test_private_states_stay_with_their_nodes_and_survive_a_resume(tmp_path):
    config = Config.published(**settings("scaffold", engine="flower-simulation", rounds=4))
    whole = run(config, tmp_path / "whole")
    with Simulation(config, tmp_path / "cut") as simulation:
        steps = iter(simulation)
        next(steps), next(steps)
    kept = [len(file.read_bytes()) for file in (tmp_path / "cut" / "clients").iterdir()]
    assert len(kept) == 3
    assert max(kept) < 200  # a ticket, where a control variate would take 30 kB
    for client in range(3):
        # The one before stays: the server may not have taken in the newest.
        files = sorted((tmp_path / "cut" / "nodes" / str(client)).iterdir())
        assert [file.stem.split("-")[1:] for file in files] == [[str(client), n] for n in "12"]
        assert all(file.stat().st_size > 20_000 for file in files)
    assert same(resume(tmp_path / "cut").model, whole.model)


def test_a_lost_private_state_is_named(tmp_path):
    config = Config.published(**settings("scaffold", engine="flower-simulation", round_timeout=5))
    with Simulation(config, tmp_path / "run") as simulation:
        steps = iter(simulation)
        next(steps)
        (file,) = (tmp_path / "run" / "nodes" / "1").iterdir()
        file.unlink()
        lost = next(steps).metrics["lost"]
    assert list(lost) == ["1"]
    assert "private state of client 1 after round 1" in lost["1"]


def test_states_are_kept_as_long_as_a_checkpoint_may_name_them(tmp_path):
    store = StateStore(tmp_path, checkpoint_every=3)
    ticket, tickets = None, {}
    for number in range(1, 8):
        ticket = tickets[number] = store.save(b"state %d" % number, ticket, 5, number)
        # Until the next round begins, only the checkpoint before the newest is surely on the disk.
        before = (number - 1) // 3 * 3 - 3
        for old in range(max(before, 1), number + 1):
            assert store.load(tickets[old], 5) == b"state %d" % old
    with pytest.raises(EngineError, match="after round 2 is not in"):
        store.load(tickets[2], 5)
    with pytest.raises(EngineError, match="ticket"):
        store.load(b"../../etc/passwd:1:x", 5)


@pytest.mark.parametrize(("every", "took"), [(1, {1, 2, 4, 5, 9}), (3, {1, 2, 4, 5, 7, 8, 11})])
def test_what_two_checkpoints_name_is_there_whichever_reports_count(tmp_path, every, took):
    """As against a server that is written down: what each of its checkpoints names."""
    store, ticket, named = StateStore(tmp_path, every), None, {0: None}
    for number in range(1, 13):
        new = store.save(b"state %d" % number, ticket, 5, number)
        # The checkpoint of the last round is being written while this one is trained.
        newest = (number - 1) // every * every
        for checkpoint in (newest, newest - every):
            if named.get(checkpoint):
                store.load(named[checkpoint], 5)
        ticket = new if number in took else ticket
        if number % every == 0:
            named[number] = ticket
    assert len(list(tmp_path.iterdir())) <= 2 * every + 1


@pytest.mark.slow
@tries(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=12), st.integers(1, 4))
def test_what_two_checkpoints_name_is_there_in_asynchronous_rounds(turns, every):
    """A client starts from the server's state of some round, which takes its report rounds later;
    as against a server that is written down."""
    named, ticket, now = {0: None}, None, 0
    with TemporaryDirectory() as folder:
        store = StateStore(Path(folder), every, late=True)
        for number, (idle, late) in enumerate(turns):
            start = now + idle + 1
            for round_ in range(now + 1, start):
                named[round_] = ticket
            new = store.save(b"state %d" % number, ticket, 5, start)
            newest = (start - 1) // every * every
            for checkpoint in (newest, newest - every):
                if named.get(checkpoint):
                    store.load(named[checkpoint], 5)
            for round_ in range(start, start + late):
                named[round_] = ticket
            now, ticket = start + late, new
            named[now] = ticket


def test_a_state_is_on_the_disk_before_it_counts_and_halves_go(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda number: flushed.append(sorted(tmp_path.iterdir())))
    old, new = tmp_path / ".a-5-1.safetensors.1f", tmp_path / ".a-5-2.safetensors.2f"
    for half in (old, new):
        half.write_bytes(b"half")
    os.utime(old, (0, 0))
    store = StateStore(tmp_path)
    ticket = store.save(b"state", None, 5, 1)
    before, after = flushed  # of the file, and of the folder
    (path,) = set(after) - {old, new}
    assert path not in before
    assert sorted(tmp_path.iterdir()) == sorted([new, path])
    (tmp_path / f"{path.stem} (copy).safetensors").write_bytes(b"of its user")
    for number in (2, 3, 4):
        ticket = store.save(b"state", ticket, 5, number)
    assert len(list(tmp_path.iterdir())) == 5  # 2 to 4, a half and the copy


def reply(**changes):
    parts = {
        "report": ArrayRecord({"bytes": Array("uint8", (3,), "fedbayes", b"abc")}),
        "about": ConfigRecord({"ticket": b""}),
        "metrics": MetricRecord({"loss": 0.5}),
        "scores": MetricRecord({"count": 2.0, "nll": 1.5, "correct": 1.0}),
    } | changes
    return RecordDict({name: part for name, part in parts.items() if part is not None})


def test_a_proper_reply_is_read():
    outcome = read_reply(reply())
    assert outcome.report == b"abc"
    assert outcome.scores == {"count": 2, "nll": 1.5, "correct": 1}
    assert outcome.info == {"loss": 0.5}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"report": None}, "lacks the report"),
        ({"about": None}, "lacks the report"),
        ({"metrics": None}, "lacks the report"),
        ({"scores": None}, "lacks the report"),
        ({"scores": ConfigRecord({"count": 1.0})}, "lacks the report"),
        ({"report": ConfigRecord({"bytes": b"abc"})}, "lacks the report"),
        ({"report": ArrayRecord({})}, "lacks the report"),
        ({"about": ConfigRecord({"ticket": "x"})}, "ticket"),
        ({"about": ConfigRecord({"ticket": b"x" * 999})}, "ticket"),
        ({"metrics": MetricRecord({"loss": [1.0]})}, "metrics"),
        ({"metrics": MetricRecord({str(i): 1.0 for i in range(999)})}, "metrics"),
        ({"metrics": MetricRecord({"x" * 101: 1.0})}, "metrics"),
        ({"scores": MetricRecord({"count": [1.0]})}, "scores"),
        ({"scores": MetricRecord({str(i): 1.0 for i in range(999)})}, "scores"),
    ],
)
def test_an_invalid_reply_is_refused(changes, words):
    with pytest.raises(MessageError, match=words):
        read_reply(reply(**changes))


class Hostile(Node):
    """A node that sends something else in place of its report, another thing every round."""

    def train(self, content):
        honest = super().train(content)
        number = content.config_records["about"]["round"]
        if self.client != 1:
            return honest
        report = decode(honest.array_records["report"]["bytes"].data)
        honest.array_records["report"] = bytes_record(HOSTILE[number - 1][0](report))
        return honest


def changed(change):
    def bytes_of(report):
        change(report)
        return encode(report)

    return bytes_of


HOSTILE = [
    (changed(lambda report: report["1.weight"].fill_(math.nan)), "NaN"),
    (changed(lambda report: report.update({"1.bias": torch.zeros(3)})), "shape"),
    (changed(lambda report: report.update({"2.bias": torch.zeros(3)})), "not as expected"),
    (changed(lambda report: report.pop("1.bias")), "not as expected"),
    (changed(lambda report: report.update({"1.bias": report["1.bias"].double()})), "type"),
    (changed(lambda report: report.update({"/weight": torch.tensor(-1.0).double()})), "weight"),
    (changed(lambda report: report.update({"x": torch.zeros(10**6)})), "the limit is"),
    (lambda _: b"nonsense" * 99, "not a message"),
    (lambda _: b"", "not as expected"),
]


def test_hostile_reports_are_refused_and_named_while_the_rounds_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr("fedbayes.flower.simulated.Node", Hostile)
    config = Config.published(
        **settings("fedavg", rounds=len(HOSTILE), engine="flower-simulation", min_reports=2)
    )
    ended = run(config, tmp_path / "run")
    for line, (_, words) in zip(ended.metrics, HOSTILE, strict=True):
        assert list(line["refused"]) == ["1"]
        assert words in line["refused"]["1"]
        assert line["lost"] == {}
        assert not line["skipped"]
    assert ended.summary["refused_reports"] == len(HOSTILE)
    assert [loss["client"] for loss in ended.summary["losses"]] == [1] * len(HOSTILE)
    assert same(ended.model, without(config, ended.summary["losses"]))


class Wire:
    """A grid without Flower behind it: nodes answer at once, and a test says what breaks.

    Args:
        nodes: client of each node, by the node's number.
        runtime: what they train with.
        folder: for private states.
    """

    def __init__(self, nodes, runtime, folder, names=None):
        self.nodes, self.runtime, self.folder = dict(nodes), runtime, folder
        self.names = names or {}  # of admitted keys, by the node's number
        self.since = dict.fromkeys(nodes, "the start")
        self.replies, self.sent = {}, []
        self.breaks = lambda wire, message: None
        self.one_at_a_time = threading.Lock()

    def get_nodes(self):
        return [
            NodeInfo(
                node_id=n,
                last_activated_at=self.since[n],
                name=self.names.get(n),
                public_key=b"key of %d" % n,
            )
            for n in self.nodes
        ]

    def push_messages(self, messages):
        for message in messages:
            number = f"message {len(self.sent)}"
            message.metadata.__dict__["_message_id"] = number
            self.sent.append(message)
            self.replies[number] = message
            yield number

    def pull_messages(self, numbers):
        for number in numbers:
            message = self.replies[number]
            if broken := self.breaks(self, message):
                yield broken
                continue
            node = message.metadata.dst_node_id
            if node in self.nodes:
                states = StateStore(self.folder / str(self.nodes[node]))
                with self.one_at_a_time:
                    yield Node(self.nodes[node], lambda: self.runtime, states).answer(message)

    def trains(self, message, client, times=1):
        """Whether this is the task of a client, the first so many times that it is sent."""
        tasks = [
            m for m in self.sent if m.metadata.message_type == TRAIN and client_of(m) == client
        ]
        return message in tasks[:times]


@pytest.fixture
def grid_of_nodes(monkeypatch):
    """A roster, the nodes that are there, and the answers that have arrived."""
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1
    monkeypatch.setattr("fedbayes.flower.roster.DISCOVER_EVERY", 0.0)
    present, answers, count = set(), {}, itertools.count()
    grid = SimpleNamespace(get_nodes=lambda: [NodeInfo(node_id=each) for each in present])
    poller = SimpleNamespace(
        reach=lambda: nullcontext(grid),
        push=lambda message: f"{message.metadata.dst_node_id}-{next(count)}",
        look=lambda ids: None,
        reply=answers.get,
    )
    return Roster(poller, 3, 60.0), present, answers


def hello_of(node, client):
    asked = Message(RecordDict(), node, HELLO)
    return Message(write_hello(client), reply_to=asked)


def test_an_answer_of_a_node_that_went_away_gives_it_no_place(grid_of_nodes):
    """Else its client would be taken for ever, since only who was met is known to be gone."""
    roster, present, answers = grid_of_nodes
    present.add(7)
    roster.discover()
    (first,) = roster.asked
    present.remove(7)
    answers[first] = hello_of(7, 0)
    assert roster.discover() == [7]
    present.add(8)
    roster.discover()
    (second,) = roster.asked
    answers[second] = hello_of(8, 0)
    roster.discover()
    assert roster.nodes == {0: 8}


def test_nodes_that_have_not_answered_yet_are_told_from_those_that_are_away(grid_of_nodes):
    roster, present, answers = grid_of_nodes
    assert roster.unplaced() == ""
    present |= {7, 8}
    roster.discover()
    assert roster.unplaced().startswith("; 2 connected nodes have not said yet which client")
    number = next(number for number, node in roster.asked.items() if node == 7)
    answers[number] = hello_of(7, 0)
    roster.discover()
    assert roster.unplaced().startswith("; 1 connected node has not said yet which client")


def test_a_node_without_a_place_is_asked_once_at_a_time(grid_of_nodes):
    roster, present, answers = grid_of_nodes
    present |= {7, 8}
    roster.discover()
    for number, node in list(roster.asked.items()):
        answers[number] = hello_of(node, 0)
    roster.discover()  # one is client 0, the other has no place
    (other,) = roster.troubles()
    roster.ask_again()
    roster.discover()
    (number,) = roster.asked
    roster.ask_again()  # at the begin of a round, while its answer is under way
    roster.discover()
    assert [*roster.asked] == [number]
    present.remove(roster.nodes[0])
    roster.discover()
    answers[number] = hello_of(other, 0)
    roster.discover()
    assert roster.nodes == {0: other}
    present.remove(other)
    assert roster.discover() == [other]
    assert not roster.nodes


def client_of(message):
    return message.content.config_records["about"]["client"]


@pytest.fixture
def over(tmp_path, monkeypatch):
    """Runs a round of SCAFFOLD over a wire that a test prepares: the wire, and the metrics."""
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1
    monkeypatch.setattr("fedbayes.flower.roster.DISCOVER_EVERY", 0.0)

    def run_over(breaks, nodes={10: 0, 11: 1, 12: 2}, timeout=2.0, wires=1):  # noqa: B006
        config = Config.published(**settings("scaffold", rounds=1))
        made = []

        def engine(simulation):
            def connect():
                if len(made) == wires:
                    raise LinkError("no wire is left")
                made.append(Wire(nodes, simulation.runtime, tmp_path / "states"))
                made[-1].breaks = breaks
                return made[-1]

            return Flower(connect, simulation.runtime, clients=99, timeout=timeout, poll=0.01)

        with Simulation(config, tmp_path / "run", engine=engine) as simulation:
            (step,) = simulation
            losses = simulation.summary()["losses"]
            assert same(
                simulation.method.model(simulation.server, simulation.run), without(config, losses)
            )
        return made[-1], step.metrics

    return run_over


def test_a_client_that_is_away_delays_an_evaluation_less_than_a_round(tmp_path):
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1
    engine = Flower(lambda: Wire({}, None, tmp_path), None, clients=2, timeout=1.0, poll=0.01)
    tasks = [Task(client, 1, b"", None) for client in range(2)]
    for ask, seconds in ((engine.tried, "0.25"), (engine.train, "1")):
        began = time.monotonic()
        reasons = [outcome.reason for outcome in ask(tasks)]
        assert reasons == [
            f"no report within {seconds} s: client {client} is not connected" for client in (0, 1)
        ]
        assert float(seconds) <= time.monotonic() - began < float(seconds) + 0.5


@pytest.mark.slow
def test_a_client_whose_node_is_away_is_named_while_the_round_waits(tmp_path, monkeypatch):
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1
    monkeypatch.setattr("fedbayes.flower.roster.DISCOVER_EVERY", 0.0)
    told = []

    def engine(simulation):
        wire = Wire({10: 0, 12: 2, 13: 7}, simulation.runtime, tmp_path / "states")

        def breaks(wire, message):
            if message.metadata.message_type == TRAIN:
                told.append((client_of(message), made.at_work()))

        wire.breaks = breaks
        made = Flower(lambda: wire, simulation.runtime, clients=3, timeout=3.0, poll=0.01)
        return made

    config = Config.published(**settings("scaffold", rounds=1))
    with Simulation(config, tmp_path / "run", engine=engine) as simulation:
        (step,) = simulation
        waiting = {
            1: "not connected; the round waits for it; node 13 says: it is client 7, of "
            "clients 0 to 2"
        }
        assert {client for client, _ in told} == {0, 2}
        assert all(client in one.working for client, one in told)
        assert [one.away for _, one in told] == [waiting] * len(told)
        assert list(step.metrics["lost"]) == ["1"]
        assert simulation.at_work().away == {1: "not connected"}
        assert simulation.work().away == {"client-1": "not connected"}


def test_a_reply_that_flower_cannot_read_is_refused(over):
    def breaks(wire, message):
        if wire.trains(message, 1):
            raise ValueError("object of type Bomb")

    _, metrics = over(breaks)
    assert metrics["refused"] == {"1": "its reply cannot be read: object of type Bomb"}
    assert metrics["lost"] == {}


@pytest.mark.slow
def test_a_reply_that_does_not_end_costs_only_its_own_client(over):
    ended = threading.Event()

    def breaks(wire, message):
        if wire.trains(message, 1):
            ended.wait(60)

    began = time.monotonic()
    _, metrics = over(breaks, timeout=4)
    assert time.monotonic() - began < 30
    ended.set()
    assert list(metrics["lost"]) == ["1"]
    assert "has not answered completely" in metrics["lost"]["1"]


def test_a_hello_that_does_not_end_costs_only_its_own_node(over):
    ended = threading.Event()

    def breaks(wire, message):
        if message.metadata.dst_node_id == 13:
            ended.wait(60)

    _, metrics = over(breaks, nodes={10: 0, 11: 1, 12: 2, 13: 3}, timeout=30)
    ended.set()
    assert metrics["lost"] == metrics["refused"] == {}


def test_what_is_wrong_with_data_stays_in_the_nodes_own_log(caplog):
    asked = Message(RecordDict(), 1, TRAIN)
    said = complaint(DataError("column 'name' is wrong: 'Erika'"), asked)
    with pytest.raises(EngineError, match="its data cannot be used; see its own log") as told:
        read_reply(said.content)
    assert "Erika" not in str(told.value)
    assert "Erika" in caplog.text


def test_words_of_a_node_are_one_plain_line():
    said = RecordDict({"error": ConfigRecord({"text": "a\x1b[2J\nb" + "c" * 999})})
    with pytest.raises(EngineError) as told:
        read_reply(said)
    assert str(told.value).isprintable()
    assert len(str(told.value)) < 600


@pytest.mark.parametrize("code", [3, 4, 5])
def test_a_lost_message_is_sent_again(over, code):
    def breaks(wire, message):
        if wire.trains(message, 1):
            return Message(Error(code, "gone"), reply_to=message)

    wire, metrics = over(breaks)
    assert metrics["refused"] == metrics["lost"] == {}
    assert list(metrics["troubles"]) == ["1"]
    assert sum(m.metadata.message_type == TRAIN for m in wire.sent) == 4
    assert metrics["bytes_down"] * 4 / 3 < metrics["link_down"]


def test_a_message_that_is_lost_again_and_again_is_given_up(over):
    def breaks(wire, message):
        if wire.trains(message, 1, times=99):
            return Message(Error(3, "gone"), reply_to=message)

    wire, metrics = over(breaks, timeout=30)
    assert metrics["lost"] == {"1": "its node failed: gone"}
    assert sum(m.metadata.message_type == TRAIN for m in wire.sent) == 2 + 5


def test_a_node_that_came_back_gets_its_task_again(over):
    def breaks(wire, message):
        if wire.trains(message, 1):
            wire.since[11] = "later"
            wire.replies.pop(message.metadata.message_id, None)
            return Message(Error(5, "gone"), reply_to=message)

    wire, metrics = over(breaks)
    assert metrics["lost"] == {}
    asked = [m.metadata.dst_node_id for m in wire.sent if m.metadata.message_type == HELLO]
    assert sorted(asked) == [10, 11, 11, 12]


def test_the_first_of_two_that_claim_a_client_keeps_it(over):
    wire, metrics = over(lambda wire, message: None, nodes={10: 0, 11: 1, 12: 2, 13: 1})
    assert metrics["lost"] == {}
    trained = {m.metadata.dst_node_id for m in wire.sent if m.metadata.message_type == TRAIN}
    assert len(trained) == 3
    assert len(trained & {11, 13}) == 1


@pytest.fixture
def joined(tmp_path, monkeypatch):
    """Runs rounds with nodes that have admitted keys, in one run folder; who trained whom."""
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1
    monkeypatch.setattr("fedbayes.flower.roster.DISCOVER_EVERY", 0.0)

    def run_with(nodes, names, rounds=1, changed=(), timeout=4.0):
        """Node to client that it says it is; node to the name that its key was admitted under."""
        config = Config.published(
            **settings("fedavg", rounds=9, min_reports=1, round_timeout=timeout)
        )
        made = []

        def engine(simulation):
            made.append(Wire(nodes, simulation.runtime, tmp_path / "states", names))
            found = Flower(lambda: made[0], simulation.runtime, clients=3, timeout=timeout)
            found.poll, found.roster.changed = 0.01, frozenset(changed)
            return found

        there = (tmp_path / "run").exists()
        with Simulation(None if there else config, tmp_path / "run", engine=engine) as simulation:
            steps = iter(simulation)
            lines = [next(steps).metrics for _ in range(rounds)]
            simulation.checkpoint()
            why = dict(simulation.engine.roster.troubles())
        trained = {
            (m.metadata.dst_node_id, client_of(m))
            for m in made[0].sent
            if m.metadata.message_type == TRAIN
        }
        return trained, lines[-1], why, made[0]

    return run_with


@pytest.mark.slow
def test_a_key_that_was_admitted_for_one_client_is_no_other(joined):
    names = {10: "client-0", 11: "ward north client-1", 12: "client-2"}
    trained, line, why, wire = joined({12: 0, 11: 1, 10: 0}, names)
    assert trained == {(10, 0), (11, 1)}  # client 0's task is not the liar's, who came first
    assert list(line["lost"]) == ["2"]
    assert why == {12: "its key was registered for client-2, but it says that it is client 0"}
    # It is told so when it is asked again, in the next round.
    trained, _, _, wire = joined({12: 0, 11: 1, 10: 0}, names, rounds=2)
    told = [
        m.content.config_records["told"]["text"]
        for m in wire.sent
        if m.metadata.message_type == HELLO and "told" in m.content.config_records
    ]
    assert told
    assert set(told) == set(why.values())


@pytest.mark.slow
def test_a_client_keeps_the_key_that_it_came_with_first_also_after_a_resume(joined):
    names = {10: "a", 11: "b", 12: "c", 13: "d"}
    assert joined({10: 0, 11: 1, 12: 2}, names)[0] == {(10, 0), (11, 1), (12, 2)}
    # Node 13 takes the number of node 10, which is away, and node 10 comes as client 1.
    trained, line, why, _ = joined({13: 0, 11: 1, 12: 2, 10: 1}, names)
    assert trained == {(11, 1), (12, 2)}
    assert list(line["lost"]) == ["0"]
    assert "client 0 had another key before" in why[13]
    assert "--new-key 0" in why[13]
    # It is no lie if the server's owner says so, and from then on the new key is client 0's.
    assert joined({13: 0, 11: 1, 12: 2}, names, changed=[0])[0] == {(13, 0), (11, 1), (12, 2)}
    assert joined({10: 0, 11: 1, 12: 2}, names)[0] == {(11, 1), (12, 2)}


def test_without_admitted_keys_another_node_can_take_a_place(joined):
    assert joined({10: 0, 11: 1, 12: 2}, {})[0] == {(10, 0), (11, 1), (12, 2)}
    assert joined({13: 0, 11: 1, 12: 2}, {})[0] == {(13, 0), (11, 1), (12, 2)}


def test_two_nodes_that_claim_one_client_are_warned_of(joined):
    with pytest.warns(FedbayesWarning, match="node 13 .d. says that it is client 1") as told:
        joined({10: 0, 11: 1, 12: 2, 13: 1}, {11: "b", 13: "d"}, rounds=2)
    (said,) = [str(one.message) for one in told if "says that" in str(one.message)]
    assert "client 1 is already node 11 (b). If" in said
    assert "--client NUMBER" in said


def test_a_node_that_replays_its_first_reply_does_no_more_than_that(tmp_path, monkeypatch):
    """Its report counts as the one that it is, its ticket is the old one, and rounds go on."""
    replies, tickets = {}, []

    class Replaying(Node):
        def work(self, task, runtime, received=None):
            tickets.extend([task.state] if self.client == 1 else [])
            return super().work(task, runtime, received)

        def train(self, content):
            told = super().train(content)
            return replies.setdefault(self.client, told) if self.client == 1 else told

    monkeypatch.setattr("fedbayes.flower.simulated.Node", Replaying)
    config = Config.published(**settings("scaffold", rounds=4, engine="flower-simulation"))
    ended = run(config, tmp_path / "run")
    assert all(line["lost"] == line["refused"] == {} for line in ended.metrics)
    assert all(torch.isfinite(tensor).all() for tensor in ended.model.values())
    first, *later = tickets
    assert first is None
    assert len(later) == 3
    assert len(set(later)) == 1


def test_clocks_that_jump_change_nothing(tmp_path, monkeypatch):
    config = Config.published(**settings("scaffold", rounds=3, engine="flower-simulation"))
    plain = run(config, tmp_path / "plain")
    honest, jumps = time.time, iter(range(10**9))

    def jumping():
        return honest() + (-1) ** next(jumps) * 1000.0

    monkeypatch.setattr("fedbayes.flower.engine.time.time", jumping)
    assert same(run(config, tmp_path / "jumping").model, plain.model)


def test_a_node_writes_to_its_own_log_why_it_gets_no_tasks(caplog, tmp_path):
    asked = Message(write_question("client 0 is already node 5. If"), 1, HELLO)
    Node(0, lambda: None, StateStore(tmp_path)).answer(asked)
    assert "client 0 is already node 5. If" in caplog.text
    caplog.clear()
    Node(0, lambda: None, StateStore(tmp_path)).answer(Message(write_question(""), 1, HELLO))
    assert not caplog.text


def test_an_app_that_raises_and_a_client_that_is_not_there_are_lost(over):
    def breaks(wire, message):
        if wire.trains(message, 1):
            return Message(Error(2, "ZeroDivisionError"), reply_to=message)

    _, metrics = over(breaks, nodes={10: 0, 11: 1}, timeout=1.0)
    assert metrics["lost"] == {
        "1": "its node failed: ZeroDivisionError",
        "2": "no report within 1 s: client 2 is not connected",
    }
    assert metrics["bytes_down"] * 2 > metrics["link_down"] > metrics["bytes_down"]


def test_a_broken_link_is_opened_again_and_everything_sent_once_more(over):
    broken = []

    def breaks(wire, message):
        if wire.trains(message, 1) and not broken:
            broken.append(wire)
            raise httpx.ConnectError("connection refused")

    wire, metrics = over(breaks, wires=2, timeout=30)
    assert wire is not broken[0]
    assert metrics["lost"] == metrics["refused"] == {}
    assert "the SuperLink was lost: connection refused" in metrics["troubles"]["1"]


def test_a_link_that_stays_broken_is_an_error(over):
    def breaks(wire, message):
        if wire.trains(message, 1, times=99):
            raise httpx.ConnectError("connection refused")

    with pytest.raises(EngineError, match="the SuperLink was lost: no wire is left"):
        over(breaks, timeout=0.5)


def test_a_superlink_that_was_never_there_is_an_error_at_once(over):
    began = time.monotonic()
    with pytest.raises(EngineError, match="no wire is left"):
        over(lambda wire, message: None, wires=0, timeout=60)
    assert time.monotonic() - began < 20


def test_every_node_gets_a_copy_of_the_last_model(tmp_path):
    """Also those that were in no round; with a card, as the run's own file."""
    config = Config.published(
        rounds=2,
        cohort=2,
        data=DATA,
        method={"name": "combined", "alpha": "mean"},
        engine="flower-simulation",
    )
    ended = run(config, tmp_path / "run")
    tests = find_tests(tmp_path / "run" / "model.safetensors", tmp_path / "run", [])
    for client in range(3):
        file = tmp_path / "run" / "nodes" / str(client) / "model.safetensors"
        assert same(load_file(file), load_file(tmp_path / "run" / "model.safetensors"))
        (score,) = compare({"copy": open_model(file, tests)}, tests)
        accuracy = ended.summary["global_accuracy"]
        assert score.metrics["accuracy"] == pytest.approx(accuracy, abs=1e-6)
    assert "without_copy" not in ended.metrics[-1]
    alone = run(config.model_copy(update={"engine": "sequential"}), tmp_path / "alone")
    assert [line["bytes_down"] for line in ended.metrics] == [
        line["bytes_down"] for line in alone.metrics
    ]


def test_a_node_that_cannot_keep_its_copy_is_named(tmp_path, monkeypatch):
    honest = Node.keep

    def keep(self, task):
        if self.client == 1:
            raise EngineError("the disk is full")
        return honest(self, task)

    monkeypatch.setattr(Node, "keep", keep)
    config = Config.published(
        rounds=1,
        data=DATA,
        method={"name": "combined", "alpha": "mean"},
        engine="flower-simulation",
    )
    with pytest.warns(FedbayesWarning, match="1 of 3 clients did not get a copy"):
        ended = run(config, tmp_path / "run")
    assert "the disk is full" in ended.metrics[-1]["without_copy"]["1"]
    assert not (tmp_path / "run" / "nodes" / "1" / "model.safetensors").exists()
    assert (tmp_path / "run" / "nodes" / "2" / "model.safetensors").exists()


def test_a_node_that_could_not_be_asked_is_asked_again(monkeypatch):
    """The link may not take its hello the first time."""
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1
    monkeypatch.setattr("fedbayes.flower.roster.DISCOVER_EVERY", 0.0)
    taken, grid = [None, None, "id"], SimpleNamespace()
    grid.get_nodes = lambda: [NodeInfo(node_id=7, last_activated_at="now")]
    poller = SimpleNamespace(
        reach=lambda: nullcontext(grid),
        push=lambda message: taken.pop(0),
        look=lambda ids: None,
        reply=lambda message_id: None,
    )
    roster = Roster(poller, 3, 60.0)
    for asked in ({}, {}, {"id": 7}):
        assert roster.discover() == []
        assert roster.asked == asked
    roster.discover()  # who was asked is not asked once more
    assert not taken
