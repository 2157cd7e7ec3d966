"""The workers engine under misfortune."""

import os
import signal
import threading
import time
import warnings

import psutil
import pytest
import torch

from fedbayes import Config, Simulation, run
from fedbayes.contracts import About, Report
from fedbayes.core.messages import encode
from fedbayes.errors import ConfigError, EngineError, FedbayesWarning
from fedbayes.federation.client_runtime import Task
from fedbayes.federation.engines.worker import read, write
from fedbayes.methods.fedavg import FedAvg
from fedbayes.testing import assert_identical

DATA = {"name": "digits", "clients": 6, "partition": "iid"}


class Slow(FedAvg):
    """FedAvg that takes its time, so that a worker can be caught at work."""

    name = "slow"
    about = About("slow FedAvg")

    def local(self, message, client, data, site):
        time.sleep(0.3)
        return super().local(message, client, data, site)


class Suicidal(FedAvg):
    """A method whose third client takes its worker with it."""

    name = "suicidal"
    about = About("kills its worker")

    def local(self, message, client, data, site):
        if site.client == 2:
            print("the end is near")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().local(message, client, data, site)


class Broken(FedAvg):
    """A method with a bug, and one with a user's mistake."""

    name = "broken"
    about = About("raises")
    user: bool = False

    def local(self, message, client, data, site):
        if self.user:
            raise ConfigError("set something else")
        raise ZeroDivisionError("one over zero")


class Chatty(FedAvg):
    """A method that prints, which must not enter the pipe."""

    name = "chatty"
    about = About("prints")

    def local(self, message, client, data, site):
        print("hello", flush=True)
        os.write(1, b"\x00\x01 raw bytes")
        report, state, info = super().local(message, client, data, site)
        return Report(report.tensors, report.weight), state, info


def config(method, engine="workers", **method_parameters):
    return Config.create(
        rounds=2,
        engine=engine,
        devices=["cpu", "cpu:0"] if engine == "workers" else "cpu",
        data_cache=1,
        data=DATA,
        model={"hidden": [8]},
        method={"name": f"{__name__}:{method}", **method_parameters},
    )


def test_frames_come_out_as_they_went_in(tmp_path):
    file = tmp_path / "pipe"
    with file.open("wb") as stream:
        write(stream, {"kind": "x", "number": 0.1}, [b"", b"abc"])
        write(stream, {}, [])
    with file.open("rb") as stream:
        assert read(stream) == ({"kind": "x", "number": 0.1, "sizes": [0, 3]}, [b"", b"abc"])
        assert read(stream) == ({"sizes": []}, [])
        with pytest.raises(EOFError):
            read(stream)


@pytest.mark.slow
def test_a_dead_worker_is_replaced_and_nothing_changes(tmp_path):
    with Simulation(config("Slow"), tmp_path / "killed") as simulation:
        engine = simulation.engine
        steps = iter(simulation)
        next(steps)
        before = engine.pids
        # The second round takes each of two workers three times 0.3 s.
        killer = threading.Timer(0.4, lambda: os.kill(before[0], signal.SIGKILL))
        killer.start()
        list(steps)
        killer.join()
        assert engine.replaced == 1
        assert engine.devices == ["cpu", "cpu:0"]
        assert engine.pids != before
        model = simulation.method.model(simulation.server, simulation.run)
    assert_identical(run(config("Slow", "sequential"), tmp_path / "calm").model, model)


@pytest.mark.slow
def test_a_deadly_task_ends_the_run_with_its_name(tmp_path):
    with (
        Simulation(config("Suicidal"), tmp_path) as simulation,
        pytest.raises(EngineError, match=r"client 2 in round 1 died 3 times.*-9"),
    ):
        list(simulation)


@pytest.mark.slow
def test_a_bug_comes_back_with_its_trace(tmp_path):
    with (
        Simulation(config("Broken"), tmp_path) as simulation,
        pytest.raises(EngineError, match="one over zero"),
    ):
        list(simulation)


@pytest.mark.slow
def test_a_users_mistake_comes_back_as_itself(tmp_path):
    with (
        Simulation(config("Broken", user=True), tmp_path) as simulation,
        pytest.raises(ConfigError, match="set something else"),
    ):
        list(simulation)


@pytest.mark.slow
def test_prints_do_not_enter_the_pipe(tmp_path):
    ended = run(config("Chatty"), tmp_path / "workers")
    assert_identical(ended.model, run(config("Chatty", "sequential"), tmp_path / "one").model)


@pytest.mark.slow
def test_workers_end_with_the_run(tmp_path):
    with Simulation(config("Slow"), tmp_path) as simulation:
        pids = simulation.engine.pids
        next(iter(simulation))
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.slow
def test_closing_leaves_no_process_behind(tmp_path):
    """Also when workers are at work, and none is started in place of those killed."""
    with Simulation(config("Slow"), tmp_path) as simulation:
        outcomes = simulation.engine.train(
            Task(client, 1, encode(dict(simulation.server.weights)), None) for client in range(6)
        )
        next(outcomes)
        me = psutil.Process()
        assert len(me.children()) >= 2
    assert not [child for child in me.children() if "fedbayes" in " ".join(child.cmdline())]


@pytest.mark.slow
def test_threads_are_given_back(tmp_path):
    before = torch.get_num_threads()
    run(config("Slow", "sequential"), tmp_path)
    assert torch.get_num_threads() == before


def test_no_more_workers_than_the_machine_bears(monkeypatch):
    """A slip of the finger starts no thousand processes; the result is that of any number."""
    from types import SimpleNamespace

    from fedbayes.federation.engines import workers

    def machine(cores, gib):
        monkeypatch.setattr(workers, "cpu_count", lambda: cores)
        memory = SimpleNamespace(available=gib << 30)
        monkeypatch.setattr(workers.psutil, "virtual_memory", lambda: memory)

    machine(8, 64)
    with pytest.warns(FedbayesWarning, match="8 of 1000 workers are started: .* 8 cores"):
        assert workers.affordable(1000) == 8
    with pytest.warns(FedbayesWarning, match="4 of 5 workers"):
        assert workers.affordable(5, threads=2) == 4
    machine(64, 3)
    with pytest.warns(FedbayesWarning, match="6 of 1000 workers .* memory"):
        assert workers.affordable(1000) == 6
    machine(1, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert workers.affordable(2) == 2
