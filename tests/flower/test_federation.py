"""Federations of real processes on loopback: the same numbers, and what goes wrong."""

import json
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import replace

import pytest

from tests.helpers.deployment import at_work, start, write_table

pytest.importorskip("flwr")

from fedbayes import Config, Simulation, run
from fedbayes.federation.engines.sequential import Sequential
from fedbayes.flower.keys import make_keys
from fedbayes.flower.own_data import own_data
from fedbayes.reports.follow import Follower
from fedbayes.runs.build import build_data
from fedbayes.workflows.running import Result
from tests.helpers.deployment import ROOT, Deployment, free_port, wait_for
from tests.helpers.flower_runs import DATA, METHODS, same, settings, without

pytestmark = pytest.mark.slow


@pytest.fixture
def deployment(tmp_path):
    with Deployment(tmp_path) as deployment:
        yield deployment


def rounds_done(deployment, name="run"):
    file = deployment.folder / name / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.fixture(scope="module")
def three_nodes(tmp_path_factory):
    with Deployment(tmp_path_factory.mktemp("federation")) as deployment:
        for client in range(3):
            deployment.start_node(client)
        yield deployment


@pytest.mark.parametrize("label", METHODS)
def test_three_nodes_end_with_the_model_of_the_sequential_engine(label, three_nodes):
    config = Config.create(**settings(label, rounds=2))
    process = start(three_nodes, config, name=label.replace(" ", "-"))
    assert process.wait(timeout=200) == 0, three_nodes.log("federate")
    ended = Result(three_nodes.folder / label.replace(" ", "-"))
    assert same(ended.model, run(config).model)
    assert ended.summary["lost_reports"] == ended.summary["refused_reports"] == 0
    # Small models: 1 kB of Flower's envelope for each message.
    up, link = ended.summary["bytes_up"], ended.summary["link_up"]
    assert up < link < up + 2_000 * 2 * ended.summary["cohort"]
    tickets = list((ended.folder.path / "clients").glob("*"))
    assert all(file.stat().st_size < 200 for file in tickets)


def test_nodes_of_every_kind_end_with_the_same_model(deployment):
    """What stays loaded, what does not, and Flower's own."""
    for client, warm in enumerate([600, 0, None]):
        deployment.start_node(client, warm=warm)
    config = Config.create(**settings("scaffold", rounds=3))
    assert start(deployment, config).wait(timeout=300) == 0, deployment.log("federate")
    ended = Result(deployment.folder / "run")
    assert same(ended.model, run(config).model)
    assert ended.summary["losses"] == []


def test_rounds_take_the_replies_that_come_first(three_nodes):
    """Asynchronous rounds: two of three clients make an update, the third is at work meanwhile."""
    waiting = {"buffer": 2, "staleness": "constant"}
    config = Config.create(**settings("scaffold", rounds=4, asynchronous=waiting))
    process = start(three_nodes, config, name="asynchronous")
    assert process.wait(timeout=400) == 0, three_nodes.log("federate")
    ended = Result(three_nodes.folder / "asynchronous")
    assert ended.summary["rounds"] == 4
    assert ended.summary["losses"] == []
    told = [line["asynchronous"] for line in ended.metrics]
    assert [line["cohort"] for line in ended.metrics] == [2] * 4
    # Whoever started has reported, or is at work at the end.
    assert sum(each["started"] for each in told) == 8 + told[-1]["under_way"]
    assert max(each["staleness_max"] for each in told) > 0
    assert ended.summary["global_accuracy"] > 0.2


def test_two_runs_at_the_same_nodes_do_not_meet(three_nodes):
    configs = {
        f"at-once-{seed}": Config.create(
            **settings("scaffold", rounds=3, seed=seed, round_timeout=250)
        )
        for seed in (1, 2)
    }
    processes = [start(three_nodes, config, name=name) for name, config in configs.items()]
    for process in processes:
        assert process.wait(timeout=500) == 0, three_nodes.log("federate")
    for name, config in configs.items():
        ended = Result(three_nodes.folder / name)
        assert ended.summary["losses"] == []
        assert same(ended.model, run(config).model)


def test_a_killed_node_is_waited_for_and_another_takes_its_place(deployment):
    config = Config.create(**settings("scaffold", rounds=2, round_timeout=200))
    for client in range(3):
        deployment.start_node(client)
    process = start(deployment, config)
    wait_for(lambda: at_work(deployment, 1, 1), 90, "task at node 1")
    deployment.kill(deployment.nodes[1])
    time.sleep(5)
    deployment.start_node(1)
    assert process.wait(timeout=300) == 0, deployment.log("federate")
    ended = Result(deployment.folder / "run")
    assert ended.summary["losses"] == []
    assert same(ended.model, without(config))


def test_a_killed_node_is_lost_for_its_rounds_and_comes_back(deployment):
    method = {"name": "tests.helpers.toy_methods:Straggler", "client": 1, "seconds": 20, "round": 2}
    config = Config.create(
        seed=7, rounds=4, round_timeout=30, min_reports=2, data=DATA, method=method
    )
    for client in range(3):
        deployment.start_node(client)
    process = start(deployment, config)
    wait_for(lambda: at_work(deployment, 1, 2), 120, "task at node 1")
    deployment.kill(deployment.nodes[1])
    wait_for(lambda: rounds_done(deployment) == 2, 90, "second round")
    deployment.start_node(1)
    assert process.wait(timeout=300) == 0, deployment.log("federate")
    ended = Result(deployment.folder / "run")
    losses = ended.summary["losses"]
    assert {(loss["round"], loss["client"]) for loss in losses} >= {(2, 1)}
    assert {loss["client"] for loss in losses} == {1}
    assert "no report within 30 s" in losses[0]["reason"]
    assert "client 1 lost: no report within 30 s" in deployment.log("federate")
    swift = config.model_copy(update={"method": {**config.method, "seconds": 0}})
    assert same(ended.model, without(swift, losses))


def test_a_federation_is_followed_while_a_node_is_away_and_when_it_is_killed(deployment):
    config = Config.create(**settings("fedavg", rounds=3, round_timeout=300))
    for client in (0, 2):
        deployment.start_node(client)
    process = start(deployment, config)
    follower = Follower([deployment.folder / "run"])

    def state():
        (told,) = follower.state()["runs"]
        return told, dict(told["details"]).get("away", "")

    try:
        missing = "client-1: not connected; the round waits for it"
        wait_for(lambda: state()[1] == missing, 120, "word of who is away")
        wait_for(lambda: state()[0]["clients"] == (2, 3), 120, "word of who has answered")
        assert state()[0]["state"] == "running"
        deployment.kill(process)
        wait_for(lambda: state()[0]["state"] == "stopped", 60, "word of its end")
        again = f"fedbayes federate resume {deployment.folder / 'run'}"
        again += f" --superlink {deployment.address} --insecure"
        assert state()[0]["line"].endswith(f"in round 1 of 3; resume with: {again}")
        deployment.start_node(1)
        process = deployment.federate("resume", deployment.folder / "run")
        assert process.wait(timeout=300) == 0, deployment.log("federate")
        wait_for(lambda: state()[0]["state"] == "ended", 60, "word of its end")
        assert state()[0]["line"] == "ended after 3 of 3 rounds: completed"
    finally:
        follower.close()


def test_a_straggler_is_left_behind_for_the_round(deployment):
    method = {"name": "tests.helpers.toy_methods:Straggler", "seconds": 45, "round": 2}
    config = Config.create(
        seed=3, rounds=4, round_timeout=30, min_reports=2, data=DATA, method=method
    )
    for client in range(3):
        deployment.start_node(client)
    assert start(deployment, config).wait(timeout=300) == 0, deployment.log("federate")
    ended = Result(deployment.folder / "run")
    losses = ended.summary["losses"]
    assert (losses[0]["round"], losses[0]["client"]) == (2, 2)
    assert "it is connected, but has not answered" in losses[0]["reason"]
    assert not any(loss["round"] == 4 for loss in losses)
    swift = config.model_copy(update={"method": {**config.method, "seconds": 0}})
    assert same(ended.model, without(swift, losses))


def test_a_report_that_is_announced_and_never_sent_keeps_nobody_waiting(deployment):
    options = {"round_timeout": 60, "min_reports": 2, "calibration": "none"}
    config = Config.create(**settings("fedavg", rounds=2, **options))
    for client in (1, 2):
        deployment.start_node(client)
    options = ["--superlink", deployment.address, "--insecure", "--port", free_port()]
    silent = [
        "python",
        ROOT / "tests" / "helpers" / "silent_node.py",
        *options,
        "--node-config",
        "client=0",
    ]
    deployment.spawn("silent", silent)
    process = start(deployment, config)
    assert process.wait(timeout=200) == 0, deployment.log("federate")
    ended = Result(deployment.folder / "run")
    assert [line["lost"].keys() for line in ended.metrics] == [{"0"}, {"0"}]
    assert "completely" in ended.metrics[0]["lost"]["0"]
    assert same(ended.model, without(config, ended.summary["losses"]))


def test_a_killed_server_app_resumes(deployment):
    config = Config.create(**settings("scaffold", rounds=20))
    for client in range(3):
        deployment.start_node(client)
    process = start(deployment, config)
    wait_for(lambda: rounds_done(deployment) >= 1 and at_work(deployment, 0, 2), 120, "round 2")
    deployment.kill(process)
    assert rounds_done(deployment) < 20
    process = deployment.federate("resume", deployment.folder / "run")
    assert process.wait(timeout=300) == 0, deployment.log("federate")
    ended = Result(deployment.folder / "run")
    assert ended.summary["losses"] == []
    assert same(ended.model, without(config))
    process = deployment.federate("resume", deployment.folder / "run", "--rounds", 22)
    assert process.wait(timeout=300) == 0, deployment.log("federate")
    longer = Config.create(**settings("scaffold", rounds=22))
    assert same(Result(deployment.folder / "run").model, without(longer))


def test_a_restarted_superlink_that_keeps_its_state_in_a_file(tmp_path):
    config = Config.create(**settings("scaffold", rounds=20, round_timeout=120))
    with Deployment(tmp_path, database=True) as deployment:
        for client in range(3):
            deployment.start_node(client)
        process = start(deployment, config)
        wait_for(lambda: at_work(deployment, 0, 2), 120, "round 2")
        deployment.kill(deployment.superlink)
        assert process.poll() is None
        time.sleep(3)
        deployment.start_superlink()
        assert process.wait(timeout=300) == 0, deployment.log("federate")
        ended = Result(tmp_path / "run")
        assert same(ended.model, without(config, ended.summary["losses"]))
        assert ended.summary["losses"] == []
        # What was on its way when it went is sent again; nothing else is.
        assert all("the SuperLink was lost" in t["reason"] for t in ended.summary["troubles"])


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_node_ends_when_it_is_told_to_though_its_superlink_is_gone(sign, deployment):
    node = deployment.start_node(0)
    wait_for(lambda: "SuperNode ID" in deployment.log("node-0"), 120, "node")
    deployment.kill(deployment.superlink)
    wait_for(lambda: "retrying" in deployment.log("node-0"), 120, "word of the SuperLink's end")
    node.send_signal(sign)
    assert node.wait(timeout=60) == 0
    assert "Traceback" not in deployment.log("node-0")


def test_no_node_is_a_clear_error_and_leaves_a_run_that_resumes(deployment):
    config = Config.create(**settings("fedavg", rounds=1, round_timeout=3))
    process = start(deployment, config)
    assert process.wait(timeout=60) == 2
    words = deployment.log("federate")
    assert "no client reported in round 1" in words
    assert "client 0 is not connected" in words
    assert "Traceback" not in words
    for client in range(3):
        deployment.start_node(client)
    file = deployment.folder / "run" / "config.toml"
    file.write_text(file.read_text().replace("round_timeout = 3.0", "round_timeout = 100.0"))
    process = deployment.federate("resume", deployment.folder / "run")
    assert process.wait(timeout=100) == 0, deployment.log("federate")
    assert same(Result(deployment.folder / "run").model, without(config))


def test_ctrl_c_ends_after_the_round(deployment):
    for client in range(3):
        deployment.start_node(client)
    process = start(deployment, Config.create(**settings("fedavg", rounds=500)))
    wait_for(lambda: rounds_done(deployment) >= 1, 120, "first round")
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=100) == 130
    summary = json.loads((deployment.folder / "run" / "summary.json").read_text())
    assert summary["stopped_reason"] == "interrupted"
    assert 2 <= summary["rounds"] == rounds_done(deployment) < 500


@pytest.fixture
def secured(tmp_path):
    """The SuperLink of `federate hub`, with TLS, which lets only admitted keys in."""
    make_keys(tmp_path / "keys", ["localhost", "127.0.0.1"], clients=4)
    with Deployment(tmp_path, certificates=tmp_path / "keys", hub=True) as deployment:
        public = [tmp_path / "keys" / f"client-{client}.pub" for client in range(3)]
        process = deployment.federate("admit", *public)
        assert process.wait(timeout=60) == 0, deployment.log("federate")
        yield deployment


def test_tls_and_keys(secured):
    keys = secured.folder / "keys"
    for client in range(3):
        secured.start_node(client, key=keys / f"client-{client}.key")
    # Nobody without an admitted key gets in, with the same CA or not.
    stranger = secured.start_node(3, key=keys / "client-3.key")
    keyless = secured.start_node(4)
    assert stranger.wait(timeout=60) != 0
    assert keyless.wait(timeout=60) != 0
    assert "No SuperNode found with the given public key" in secured.log("superlink")
    # Nor does anybody without the secret become the ServerApp of a run.
    command = ["fedbayes", "federate", "--superlink", secured.address, *secured.trust]
    impostor = secured.spawn("impostor", [*command, "--out", secured.folder / "impostor"])
    assert impostor.wait(timeout=60) == 2
    assert "answered 401" in secured.log("impostor")
    # The number that a stranger took does not reach the run; the run ends as it should.
    config = Config.create(**settings("fedavg", rounds=2))
    assert start(secured, config).wait(timeout=200) == 0, secured.log("federate")
    ended = Result(secured.folder / "run")
    assert same(ended.model, without(config))
    assert ended.summary["losses"] == []


def test_a_node_with_another_clients_key_gets_no_tasks(secured):
    """The key of client 2 says that it is client 0, before client 0 is there."""
    keys = secured.folder / "keys"
    secured.start_node(0, key=keys / "client-2.key")
    secured.start_node(1, key=keys / "client-1.key")
    config = Config.create(**settings("fedavg", rounds=1, round_timeout=40, min_reports=2))
    process = start(secured, config)
    wait_for(lambda: at_work(secured, 1, 1), 90, "task at node 1")
    secured.start_node(0, key=keys / "client-0.key")
    assert process.wait(timeout=200) == 0, secured.log("federate")
    (line,) = Result(secured.folder / "run").metrics
    assert list(line["lost"]) == ["2"]
    said = " ".join(secured.log("federate").split())
    assert "its key was registered for client-2, but it says that it is client 0" in said


def test_a_killed_node_with_a_key_comes_back(secured):
    """Flower turns the key away while it thinks that its node lives; a supervisor tries again."""
    keys = secured.folder / "keys"
    for client in range(3):
        secured.start_node(client, key=keys / f"client-{client}.key")
    config = Config.create(**settings("scaffold", rounds=2, round_timeout=200))
    process = start(secured, config)
    wait_for(lambda: at_work(secured, 1, 1), 90, "task at node 1")
    secured.kill(secured.nodes[1])
    node = secured.start_node(1, key=keys / "client-1.key")
    with suppress(subprocess.TimeoutExpired):
        while node.wait(timeout=15):
            node = secured.start_node(1, key=keys / "client-1.key")
    assert process.wait(timeout=250) == 0, secured.log("federate")
    ended = Result(secured.folder / "run")
    assert ended.summary["losses"] == []
    assert same(ended.model, without(config))


def test_a_superlink_with_another_certificate_is_not_trusted(secured, tmp_path):
    make_keys(tmp_path / "other", ["127.0.0.1"], clients=0)
    arguments = ["--root-certificates", tmp_path / "other" / "ca.crt"]
    command = ["fedbayes", "federate", "--superlink", secured.address, *arguments]
    assert secured.spawn("distrust", command).wait(timeout=60) == 2
    assert "cannot reach a SuperLink" in secured.log("distrust")
    assert "certificate verify failed" in secured.log("distrust").lower()


class Apart:
    """The samples of clients that lie in files of their own, and the server's test samples."""

    def __init__(self, server, parts):
        self._server, self._parts = server, parts
        self.test_union = server.test_union

    def train(self, client):
        return self._parts[client].train(client)

    def test(self, client):
        return self._parts[client].test(client)


def test_a_project_runs_by_flwr_run_on_data_that_only_its_node_has(tmp_path):
    """Flower starts the ServerApp; the clients' tables lack classes that others have."""
    write_table(tmp_path / "server.csv", 0, [0, 1, 2])
    for client, classes in enumerate([[0, 1], [1, 2], [2]]):
        write_table(tmp_path / f"client-{client}.csv", client + 1, classes)
    config = Config.create(
        seed=2,
        rounds=2,
        round_timeout=150,
        data={"path": str(tmp_path / "server.csv"), "clients": 3, "partition": "iid"},
    )
    (tmp_path / "federation.toml").write_text(config.dump())
    with Deployment(tmp_path, isolation="subprocess") as deployment:
        for client in range(3):
            deployment.start_node(client, data=str(tmp_path / f"client-{client}.csv"))
        project = tmp_path / "project"
        arguments = [project, "--config", tmp_path / "federation.toml"]
        process = deployment.spawn("init", ["fedbayes", "federate", "init", *arguments])
        assert process.wait(timeout=60) == 0, deployment.log("init")
        home = tmp_path / "home-flwr"
        home.mkdir()
        (home / "config.toml").write_text(
            f'[superlink.here]\naddress = "{deployment.address}"\ninsecure = true\n'
        )
        process = deployment.spawn("flwr", ["flwr", "run", project, "here", "--stream"])
        summary = project / "run" / "summary.json"
        wait_for(summary.exists, 200, "end of the run")
        ended = Result(project / "run")

    server = build_data(config)
    schema = server.preprocessing.public()
    parts = [own_data(config, tmp_path / f"client-{client}.csv", schema) for client in range(3)]

    def apart(simulation):
        return Sequential(replace(simulation.runtime, data=Apart(server, parts)))

    with Simulation(config, engine=apart) as simulation:
        steps = [step.metrics for step in simulation]
        assert same(ended.model, simulation.method.model(simulation.server, simulation.run))
    assert ended.summary["losses"] == []
    assert [line["local_accuracy"] for line in ended.metrics] == [
        line["local_accuracy"] for line in steps
    ]


@pytest.mark.data
@pytest.mark.parametrize("method", ["fedavg", "fedsparse"])
def test_ten_rounds_on_mnist(method, tmp_path):
    config = Config.create(
        rounds=10,
        data={"name": "mnist", "clients": 3, "partition": "iid", "limit": 6000},
        model={"hidden": [200, 200]},
        method={"name": method},
        evaluate_every=5,
    )
    with Deployment(tmp_path) as deployment:
        for client in range(3):
            deployment.start_node(client)
        assert start(deployment, config).wait(timeout=580) == 0, deployment.log("federate")
        ended = Result(tmp_path / "run")
    assert ended.summary["rounds"] == 10
    assert ended.summary["losses"] == []
    for way in ("down", "up"):
        assert 1 < ended.summary[f"link_{way}"] / ended.summary[f"bytes_{way}"] < 1.05
    alone = run(config)
    assert same(ended.model, alone.model)
    assert ended.summary["global_accuracy"] > 0.8  # it learns; the model is checked above


def test_nodes_try_the_global_model_on_their_own_test_samples(three_nodes):
    config = Config.create(**settings("fedavg", rounds=1, evaluate_at="clients"))
    process = start(three_nodes, config, "tried")
    assert process.wait(600) == 0, three_nodes.log("federate")
    there = Result(three_nodes.folder / "tried")
    here = run(config.model_copy(update={"engine": "sequential"}))
    assert same(there.model, here.model)
    for client, metrics in here.summary["per_client"]["global"].items():
        found = there.summary["per_client"]["global"][client]
        assert found == pytest.approx(metrics, rel=1e-5)
    assert there.summary["global_accuracy"] == here.summary["global_accuracy"]
