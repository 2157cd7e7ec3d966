"""The `ray` engine with real processes: on this machine, and on clusters whose nodes are lost."""

import gc
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from fedbayes import Config, Simulation, resume, run
from fedbayes.core.messages import encode
from fedbayes.errors import ConfigError, EngineError, FedbayesWarning
from fedbayes.federation.client_runtime import Task
from fedbayes.federation.ray_settings import RaySettings
from fedbayes.testing import assert_identical
from tests import ROOT
from tests.helpers.deployment import BIN, free_port, wait_for
from tests.helpers.ray_nodes import PATIENCE, Nodes, actors_of, fedbayes, processes_at

ray = pytest.importorskip("ray")
engine = pytest.importorskip("fedbayes.federation.engines.ray")
cluster = pytest.importorskip("fedbayes.federation.engines.ray_cluster")
ray_room = pytest.importorskip("fedbayes.federation.engines.ray_room")


def config(engine="ray", method="tests.helpers.toy_actors:Slow", rounds=2, clients=6, **more):
    parameters = {} if ":" not in method or "Slow" not in method else {"pause": 0.0}
    return Config.create(
        **{
            "seed": 5,
            "rounds": rounds,
            "engine": engine,
            "data": {"name": "digits", "clients": clients, "partition": "iid"},
            "model": {"hidden": [8]},
            "method": {"name": method, **parameters, **more.pop("parameters", {})},
            **(
                {"ray": {"start_timeout": PATIENCE, **more.pop("ray", {})}}
                if engine == "ray"
                else {}
            ),
            **more,
        }
    )


def told(result):
    """Lines of the rounds, less what a clock says."""
    return [{k: v for k, v in line.items() if k != "seconds"} for line in result.metrics]


@pytest.fixture
def variables(monkeypatch):
    """Variables of the environment, for the time of a test."""

    def put(values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    yield put
    ray.shutdown()


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return run(config("sequential"), tmp_path_factory.mktemp("sequential"))


@pytest.mark.slow
def test_a_run_on_this_machine_has_the_bits_of_the_sequential_engine(
    expected, tmp_path, monkeypatch
):
    """It begins and ends a Ray of its own, keeps private states in the run folder, and goes on on
    another engine after a stop; nothing is left of it.
    """
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    handler = signal.getsignal(signal.SIGTERM)
    before = {name for name in os.environ if name.startswith("RAY")}
    with Simulation(config(ray={"actors": 1}), tmp_path / "run") as simulation:
        next(iter(simulation))
        (place,) = simulation.engine.places
        assert place.process != os.getpid()
        assert signal.getsignal(signal.SIGTERM) == handler
        own = simulation.engine._cluster.folder
        assert own.is_dir()
    assert not own.exists()
    wait_for(lambda: not psutil.pid_exists(place.process), PATIENCE, "end of the actor")
    assert {name for name in os.environ if name.startswith("RAY")} == before
    config_file = tmp_path / "run" / "config.toml"
    text = config_file.read_text()
    config_file.write_text(text.replace('engine = "ray"', 'engine = "sequential"'))
    with pytest.warns(FedbayesWarning, match="engine was 'ray', and is now 'sequential'"):
        ended = resume(tmp_path / "run")
    assert_identical(ended.model, expected.model)
    assert told(ended) == told(expected)


@pytest.mark.parametrize(("borrowed", "stored"), [(False, 1), (True, 2)])
def test_short_messages_go_with_each_call_and_long_ones_are_stored_once(
    monkeypatch, borrowed, stored
):
    puts = []
    monkeypatch.setattr(engine.ray, "put", lambda data: puts.append(data) or len(puts))
    on_ray = object.__new__(engine.OnRay)
    on_ray._cluster = cluster.Cluster("here", borrowed=borrowed)
    on_ray._stored = deque(maxlen=engine.STORED)
    short, long = b"s", bytes(engine.SHORT + 1)
    for message in (short, long, short, long):
        for client in range(2):
            on_ray._shared(Task(client, 1, message, None))
    assert len(puts) == stored
    assert long in puts


@pytest.mark.slow
@pytest.mark.parametrize("width", [2_000, 4_000])
def test_messages_of_several_megabytes_arrive(tmp_path, width):
    """9 MB, longer than what goes with a call, and 17 MB, longer than Ray would have there."""
    asked = {"method": "fedavg", "clients": 2, "rounds": 1, "training": {"epochs": 1}}
    asked["model"] = {"hidden": [width, 1_000]}
    once = run(config("sequential", **asked), tmp_path / "sequential")
    assert_identical(run(config(**asked), tmp_path / "ray").model, once.model)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        (
            "ray://head:10001",
            r"Ray Client is not supported.*ray start --address",
        ),
        ("head", "Write local, auto, or HOST:PORT"),
        ("no-such-host.invalid:6379", r"no Ray answers at no-such-host.invalid:6379"),
    ],
)
def test_addresses_of_no_cluster_are_refused_with_the_way_out(address, words):
    with pytest.raises(EngineError, match=words):
        cluster.connect(address, 5)


def test_a_port_where_nobody_listens_is_told_at_once():
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"no Ray answers at .*Is `ray start --head` running"):
        cluster.connect(f"127.0.0.1:{free_port()}", 60)
    assert time.monotonic() - began < 30
    assert not ray.is_initialized()


def test_auto_without_a_cluster_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)  # others may run here
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(EngineError, match=r"no Ray is running on this machine.*ray start --head"):
        cluster.connect("auto", 5)


@pytest.mark.slow
def test_a_port_of_something_else_is_told_in_time(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with socket.create_server(("", 0)) as other:
        began = time.monotonic()
        with pytest.raises(
            EngineError, match=r"no Ray answers .* within 8 seconds .*the port of the"
        ):
            cluster.connect(f"127.0.0.1:{other.getsockname()[1]}", 8)
        assert time.monotonic() - began < 60


def test_without_the_package_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EngineError, match=r"pip install 'fedbayes\[ray\]'"):
        Simulation(config(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "nodes", "count"),
    [
        ({}, [{"CPU": 4.0}, {"CPU": 3.0}], 7),
        ({"cpus": 2}, [{"CPU": 4.0}, {"CPU": 3.0}], 3),  # not 7 / 2: an actor is on one node
        ({"cpus": 0.1}, [{"CPU": 1.0}], 10),
        ({"cpus": 1, "gpus": 0.4}, [{"CPU": 16.0, "GPU": 2.0}], 4),  # two on each GPU, not 5
        ({"cpus": 1, "gpus": 1}, [{"CPU": 16.0, "GPU": 2.0}, {"CPU": 8.0}], 2),
        ({"resources": {"big": 1}}, [{"CPU": 8.0, "big": 2.0}, {"CPU": 8.0}], 2),
    ],
)
def test_room_is_counted_node_by_node(settings, nodes, count):
    needs = RaySettings(**settings).needs(1)
    there = SimpleNamespace(nodes=[{"Resources": node} for node in nodes])
    assert ray_room.room(there, needs) == count


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"gpus": 2}, "ray.gpus is 2"),
        ({"cpus": 0}, "ray.cpus is 0"),
        ({"resources": {"GPU": 1}}, "GPU with ray.gpus"),
        ({"actor": 3}, "did you mean 'ray.actors'"),
    ],
)
def test_settings_that_cannot_be_are_refused(table, words):
    with pytest.raises(ConfigError, match=words):
        Config.create(ray=table)


def test_settings_of_ray_on_another_engine_are_said_to_do_nothing(tmp_path):
    with pytest.warns(FedbayesWarning, match="ray has no effect: engine is sequential"):
        Simulation(config("sequential").model_copy(update={"ray": RaySettings(actors=3)})).close()


@pytest.fixture
def clients(monkeypatch):
    """What an actor is, in this process."""
    from fedbayes.federation.engines.ray_actor import ActorClients

    handler, folder, path = signal.getsignal(signal.SIGINT), Path.cwd(), [*sys.path]
    yield ActorClients({}, "/no/such/folder")
    signal.signal(signal.SIGINT, handler)
    os.chdir(folder)
    sys.path[:] = path
    gc.unfreeze()


BUILD = "fedbayes.runs.build:elsewhere"


def test_clients_are_built_without_the_run_folder(clients, tmp_path):
    """What travels is all that a node without the run's disk needs."""
    with Simulation(config("sequential"), tmp_path / "run") as simulation:
        files = simulation.folder.fixed_files()
        message = encode(dict(simulation.method.message(simulation.server, None)))
        task = Task(3, 1, message, None)
        here = simulation.runtime.train(task)
    for name in files:
        (tmp_path / "run" / name).unlink()
    assert clients.build(BUILD, files, None, 1) == {}
    header = {"kind": "train", "client": 3, "round": 1, "joined": False, "constants": ""}
    [(reply, blobs)] = clients.answer(message, [(header, [b""])])
    assert blobs == [here.report, here.state]
    assert reply == {"info": here.info, "scores": here.scores}


def test_other_data_on_a_node_and_code_that_is_not_there_are_told(clients, tmp_path):
    table = tmp_path / "table.csv"
    rows = [f"{i % 7},{i % 5},{i % 2}" for i in range(80)]
    table.write_text("a,b,label\n" + "\n".join(rows) + "\n")
    own = {"path": str(table), "label": "label", "clients": 2, "partition": "iid"}
    with Simulation(config("sequential", data=own), tmp_path / "run") as simulation:
        files = simulation.folder.fixed_files()
    table.write_text("a,b,label\n" + "\n".join(["6,4,1", *rows[1:]]) + "\n")
    assert "these data are not the data of the run" in clients.build(BUILD, files, None, 1)["text"]
    table.unlink()
    failure = clients.build(BUILD, files, None, 1)
    assert (failure["error"], str(table) in failure["text"]) == ("DataError", True)
    elsewhere = files["config.toml"].replace(b"tests.helpers.toy_actors", b"no_such_module")
    failure = clients.build(BUILD, {**files, "config.toml": elsewhere}, None, 1)
    assert (failure["error"], "no_such_module" in failure["text"]) == ("ConfigError", True)


@pytest.mark.slow
def test_a_node_that_is_lost_in_the_middle_of_a_round_changes_nothing(tmp_path, variables, capfd):
    slow = {"parameters": {"pause": 1.0}, "clients": 8}
    with Nodes() as nodes:
        variables(nodes.variables)
        second = nodes.add()
        settings = config(ray={"address": nodes.address, "actors": 4}, **slow)
        with Simulation(settings, tmp_path / "lost") as simulation:
            steps = iter(simulation)
            next(steps)
            engine = simulation.engine
            assert len({place.node for place in engine.places}) == 2
            # Four actors take the eight clients in two turns of a second.
            killer = threading.Timer(1.3, lambda: nodes.kill(second))
            killer.start()
            with pytest.warns(FedbayesWarning, match=r"was lost at client \d in round 2") as said:
                list(steps)
            killer.join()
            assert len(said) <= 2 + 1
            assert engine.lost == 2
            assert len(engine.places) == 2
        lost = simulation.folder
    assert "Raylet" not in capfd.readouterr().out
    calm = run(config("sequential", **slow), tmp_path / "calm")
    assert_identical(calm.model, lost.model())
    for file in sorted((tmp_path / "calm" / "clients").iterdir()):
        assert (tmp_path / "lost" / "clients" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.slow
def test_a_lost_driver_is_resumed_and_leaves_no_actors(tmp_path, variables):
    slow = {"parameters": {"pause": 0.5}, "rounds": 3}
    with Nodes() as nodes:
        variables(nodes.variables)
        nodes.add()
        file = tmp_path / "config.toml"
        table = {"address": nodes.address, "actors": 4}
        file.write_text(config(ray=table, **slow).dump())
        driver = fedbayes("run", file, "--out", tmp_path / "run", variables=nodes.variables)
        metrics = tmp_path / "run" / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and metrics.read_text(), PATIENCE, "round")
        assert driver.poll() is None, driver.communicate()
        actors = {process.pid for process in actors_of()}
        assert len(actors) == 4
        driver.kill()
        driver.communicate()
        wait_for(lambda: not actors_of(actors), PATIENCE, "end of the actors")
        going_on = fedbayes("resume", tmp_path / "run", "--json", variables=nodes.variables)
        said, troubles = going_on.communicate(timeout=PATIENCE)
        assert going_on.returncode == 0, troubles
        assert json.loads(said)["rounds"] == 3
        wait_for(lambda: not actors_of(), PATIENCE, "end of the actors")
    calm = run(config("sequential", **slow), tmp_path / "calm")
    ended = Simulation(None, tmp_path / "run").folder
    assert_identical(calm.model, ended.model())


@pytest.mark.slow
def test_a_run_whose_cluster_is_lost_goes_on_on_another_one(tmp_path):
    """Of the head and the node of the run nothing is left: it ends, by itself or by Ray's doing."""
    slow = {"parameters": {"pause": 0.5}, "rounds": 4}
    with Nodes() as nodes:
        file, folder = tmp_path / "config.toml", tmp_path / "run"
        file.write_text(config(ray={"address": nodes.address}, **slow).dump())
        driver = fedbayes("run", file, "--out", folder, variables=nodes.variables)
        metrics = folder / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and metrics.read_text(), PATIENCE, "round")
        nodes.kill(0)
        _, troubles = driver.communicate(timeout=PATIENCE)
        assert driver.returncode in (1, 2), troubles
        if driver.returncode == 2:  # by itself
            assert "`fedbayes resume` to continue" in " ".join(troubles.split())
    stored = folder / "config.toml"
    stored.write_text(stored.read_text().replace(nodes.address, "local"))
    with pytest.warns(FedbayesWarning, match="ray.address was .*, and is now 'local'"):
        ended = resume(folder)
    assert_identical(run(config("sequential", **slow), tmp_path / "calm").model, ended.model)


@pytest.mark.slow
def test_a_driver_that_is_killed_takes_a_ray_of_its_own_with_it(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text(config(rounds=50, parameters={"pause": 0.5}, ray={"address": "local"}).dump())
    driver = fedbayes("run", file, "--out", tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text(), PATIENCE, "round")
    tree = psutil.Process(driver.pid).children(recursive=True)
    assert len(tree) > 3
    driver.kill()
    driver.communicate()
    wait_for(lambda: not [p for p in tree if p.is_running()], PATIENCE, "end of its processes")
    (left,) = Path("/tmp").glob(f"fedbayes-ray-{driver.pid}-*")
    cluster._sweep()
    assert not left.exists()


@pytest.mark.slow
def test_runs_one_after_the_other_use_nothing_up(tmp_path, variables):
    """On one cluster, in one process: actors, memory, threads and files are as before."""
    me = psutil.Process()
    with Nodes() as nodes:
        variables(nodes.variables)
        kept = psutil.Process(nodes.processes[0].pid).children(recursive=True)
        sizes = []
        for number in range(6):
            run(config(ray={"address": nodes.address}), tmp_path / str(number))
            wait_for(lambda: not actors_of(), PATIENCE, "end of the actors")
            gc.collect()
            rss = sum(p.memory_info().rss for p in kept if p.is_running())
            sizes.append((rss, me.memory_info().rss, me.num_threads(), me.num_fds()))
    first, last = sizes[1], sizes[-1]
    assert last[0] - first[0] < 60 << 20  # of the head's processes: its logs and lists of jobs
    assert last[1] - first[1] < 60 << 20
    assert last[2] <= first[2] + 2
    assert last[3] <= first[3] + 4


@pytest.mark.slow
def test_memory_of_actors_is_that_of_one_client_however_many_they_have_had(tmp_path):
    """As that of an actor which has little to do: of broadcasts and reports nothing is kept."""
    settings = config(
        rounds=45, method="fedavg", clients=2, ray={"actors": 2}, model={"hidden": [6000, 200]}
    )
    with Simulation(settings, tmp_path / "run") as simulation:
        sizes = []
        for step in simulation:  # a broadcast, and each report, is of 6 MB
            actors = [psutil.Process(place.process) for place in simulation.engine.places]
            if step.number in (20, 44):
                sizes.append(sum(p.memory_info().rss for p in actors))
        assert len(actors) == 2
    assert sizes[1] - sizes[0] < 120 << 20  # 24 rounds of two clients are 576 MB


@pytest.mark.slow
def test_more_actors_than_there_is_room_for(tmp_path, variables):
    """On this machine fewer are started, and that is said; a cluster is asked to have them."""
    with Simulation(config(ray={"actors": 500}), tmp_path / "own") as simulation:
        with pytest.warns(FedbayesWarning, match=r"of 500 actors are started, of 1 CPU each"):
            next(iter(simulation))
        assert len(simulation.engine.places) <= (os.cpu_count() or 1)
    with Nodes(cpus=3) as nodes:
        variables(nodes.variables)
        began = time.monotonic()
        table = {"address": nodes.address, "actors": 9, "start_timeout": 10}
        with (
            Simulation(config(ray=table), tmp_path / "more") as simulation,
            pytest.raises(EngineError, match=r"no room for 9 actors of 1 CPU .*3 CPU.*room for 3"),
        ):
            next(iter(simulation))
        assert time.monotonic() - began < 10 + PATIENCE
        table = {"address": nodes.address, "resources": {"big": 1}, "start_timeout": 5}
        with (
            Simulation(config(ray=table), tmp_path / "big") as simulation,
            pytest.raises(EngineError, match=r"no room for 1 actor of 1 CPU and 1 big"),
        ):
            next(iter(simulation))


@pytest.mark.slow
def test_actors_are_at_the_gpu_that_ray_gives_them(tmp_path, variables):
    """As far as a machine without one can tell: two at each, and PyTorch finds none there."""
    with Nodes(cpus=4, gpus=2) as nodes:
        variables(nodes.variables)
        table = {"address": nodes.address, "gpus": 0.5, "start_timeout": PATIENCE}
        with (
            Simulation(config(ray=table), tmp_path / "run") as simulation,
            pytest.raises(ConfigError, match=r"node .*device 'cuda' cannot be used"),
        ):
            list(simulation)


@pytest.mark.slow
def test_a_cluster_that_wants_a_token_says_so(tmp_path, monkeypatch):
    with Nodes() as nodes:
        for name in nodes.variables:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HOME", str(tmp_path))
        with pytest.raises(EngineError, match=r"needs a token\. Set RAY_AUTH_MODE=token"):
            cluster.connect(nodes.address, PATIENCE)


@pytest.mark.slow
def test_a_deadly_task_ends_the_run_with_its_name(tmp_path):
    with (
        Simulation(config(method="tests.helpers.toy_actors:Deadly"), tmp_path) as simulation,
        pytest.warns(FedbayesWarning, match="the actor on node .* was lost at client 2 in round 1"),
        pytest.raises(EngineError, match=r"actors were lost 3 times at client 2 in round 1"),
    ):
        list(simulation)


@pytest.mark.slow
def test_a_connection_of_the_users_own_is_used_and_stays(tmp_path, expected):
    """Also in a process where a run had a Ray of its own before, with a token of its own."""
    run(config(ray={"actors": 1}, rounds=1), tmp_path / "before")
    ray.init(address="local", num_cpus=2, log_to_driver=False, logging_level="ERROR")
    try:
        ended = run(config(ray={"actors": 2}), tmp_path / "run")
        assert_identical(ended.model, expected.model)
        assert ray.is_initialized()
        assert ray.get(ray.put(3)) == 3
    finally:
        ray.shutdown()


@pytest.mark.slow
def test_a_node_that_joins_is_made_use_of_from_the_next_round_on(tmp_path, variables, expected):
    with Nodes(cpus=1) as nodes:
        variables(nodes.variables)
        with Simulation(config(ray={"address": nodes.address}), tmp_path / "run") as simulation:
            steps = iter(simulation)
            next(steps)
            assert len(simulation.engine.places) == 1
            nodes.add()
            wait_for(lambda: ray.cluster_resources()["CPU"] == 3, PATIENCE, "second node")
            list(steps)
            assert simulation.engine._seats.count == 3
        assert_identical(expected.model, simulation.folder.model())


@pytest.mark.slow
def test_ctrl_c_lets_the_round_end(tmp_path, expected):
    """It reaches every process of the terminal: the driver, a Ray of its own, and the actors."""
    file = tmp_path / "config.toml"
    slow = {"rounds": 40, "parameters": {"pause": 0.5}}
    file.write_text(config(ray={"address": "local"}, **slow).dump())
    driver = fedbayes("run", file, "--out", tmp_path / "run", start_new_session=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text(), PATIENCE, "round")
    os.killpg(driver.pid, signal.SIGINT)
    said, troubles = driver.communicate(timeout=PATIENCE)
    assert "stopping after this round" in said + troubles
    assert 1 <= len(metrics.read_text().splitlines()) < 40
    assert "error" not in (said + troubles).lower(), troubles
    assert not list(Path("/tmp").glob(f"fedbayes-ray-{driver.pid}-*"))


SCRIPT = ROOT / "examples" / "slurm" / "ray.sh"
STAND_INS = {
    "scontrol": """#!/bin/bash
[[ $* == 'show hostnames twice' ]] && printf '%s\\n' 127.0.0.1 127.0.0.1
""",
    "srun": """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
""",
}


@pytest.mark.slow
def test_the_script_for_slurm_runs_stops_in_time_and_goes_on(tmp_path):
    """With two nodes on this machine, and stand-ins for the commands of Slurm."""
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = secrets.randbelow(20000)
    place = Path(f"/tmp/ray-{job}")
    variables = {
        **{k: v for k, v in os.environ.items() if not k.startswith("RAY")},
        "PATH": os.pathsep.join([str(tmp_path), str(BIN), os.environ["PATH"]]),
        "SLURM_JOB_NODELIST": "twice",
        "SLURM_JOB_ID": str(job),
        "SLURM_CPUS_PER_TASK": "2",
        "RAY_PORT": str(free_port()),
    }
    slow = {"rounds": 6, "parameters": {"pause": 1.0}}
    file, folder = tmp_path / "config.toml", tmp_path / "run"
    file.write_text(config(**slow).dump())
    command = ["bash", SCRIPT, file, folder, "--set", "ray.actors=4"]
    how = {"env": variables, "stdin": subprocess.DEVNULL, "text": True}
    metrics = folder / "metrics.jsonl"

    first = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, **how
    )
    try:
        wait_for(lambda: metrics.exists() and metrics.read_text(), PATIENCE, "round")
        first.send_signal(signal.SIGTERM)  # to the script alone, as --signal=B:TERM@120 has it
        said, _ = first.communicate(timeout=PATIENCE)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(first.pid, signal.SIGKILL)
    assert "stopping after this round" in said
    assert 1 <= len(metrics.read_text().splitlines()) < 6
    assert not place.exists()
    wait_for(lambda: not processes_at(place), PATIENCE, "end of the nodes")
    second = subprocess.run(command, capture_output=True, timeout=2 * PATIENCE, check=False, **how)
    assert second.returncode == 0, second.stderr
    assert len(metrics.read_text().splitlines()) == 6
    assert not processes_at(place)
    calm = run(config("sequential", **slow), tmp_path / "calm")
    assert_identical(calm.model, Simulation(None, folder).folder.model())
