"""One function drives every run to its end."""

import io
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from rich.console import Console

import fedbayes
from fedbayes import Config, Simulation
from fedbayes.errors import ConfigError, RunError
from fedbayes.start import drive
from tests.helpers.command_line import command

SMALL = {"rounds": 3, "data": {"clients": 3, "partition": "iid"}, "model": {"hidden": [4]}}


def begin(folder, **changes):
    config = Config.create(**SMALL | changes)
    return lambda notify: Simulation(config, folder, notify=notify)


def console():
    return Console(file=io.StringIO(), width=200)


def test_a_config_may_be_a_file_and_has_no_keys_beside_it(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("rounds = 1\n[data]\nclients = 3\n[model]\nhidden = [4]\n")
    for run in (fedbayes.run, lambda *given, **more: fedbayes.run_seeds(*given, seeds=1, **more)):
        for config in (file, str(file), Config.load(file)):
            with pytest.raises(ConfigError, match=r"^rounds cannot be combined with a config"):
                run(config, rounds=2)
        with pytest.raises(ConfigError, match="config is of type dict"):
            run({"rounds": 1})
        with pytest.raises(ConfigError, match="config file"):
            run(tmp_path / "none.toml")
    assert fedbayes.run(str(file)).summary["clients"] == fedbayes.run(file).summary["clients"] == 3


def test_every_round_is_shown_and_listened_to(tmp_path):
    shown, seen = console(), []
    simulation = drive(
        begin(tmp_path / "run"), shown, listener=lambda run, step: seen.append(step.number)
    )
    assert seen == [1, 2, 3]
    assert simulation.over
    assert simulation._engine is None  # it is closed
    assert "fedavg on digits: 3 clients" in shown.file.getvalue()
    assert "round 3/3" in shown.file.getvalue()


def test_what_came_of_it_is_said_before_it_is_an_error(tmp_path):
    said = []
    diverging = {"lr": 1e30, "epochs": 3}
    with pytest.raises(RunError, match="had an update"):
        drive(
            begin(tmp_path / "run", training=diverging),
            None,
            conclude=lambda run: said.append(run.summary()["stopped_reason"]),
        )
    assert said == ["no round had an update"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_graceful_stop_ends_after_the_round_and_gives_the_signal_back(number, tmp_path):
    before = signal.getsignal(number)
    shown = console()

    def interrupt(simulation, step):
        if step.number == 1:
            os.kill(os.getpid(), number)

    simulation = drive(begin(tmp_path / "run"), shown, listener=interrupt, graceful=True)
    assert not simulation.over
    assert simulation.summary()["stopped_reason"] == "interrupted"
    assert simulation.progress.round == 1
    assert "stopping after this round" in shown.file.getvalue()
    assert signal.getsignal(number) is before
    assert drive(lambda notify: Simulation(None, tmp_path / "run"), None).over


def test_a_second_signal_stops_at_once(tmp_path):
    def interrupt(simulation, step):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        drive(begin(tmp_path / "run"), console(), listener=interrupt, graceful=True)


def test_it_is_there_before_pytorch_is():
    code = "import sys, fedbayes.start; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 610. MiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes.\nat C++"),
        RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"),
    ],
)
def test_memory_that_ends_in_the_middle_is_one_line(error, monkeypatch, capsys, tmp_path):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr("fedbayes.runs.simulation.Simulation", fails)
    assert command("run", "--out", tmp_path / "run") == 2
    told = " ".join(capsys.readouterr().err.split())
    assert f"error: there is not enough memory: {str(error).splitlines()[0]}. Use fewer" in told


def test_a_file_that_does_not_fit_into_memory_is_named(tmp_path, monkeypatch, capsys):
    np.savez(tmp_path / "big.npz", x=np.zeros((60, 5), np.float32), y=np.arange(60) % 2)
    monkeypatch.chdir(tmp_path)

    def full(*_, **__):
        raise MemoryError

    monkeypatch.setattr(np, "load", full)
    assert command("run", "big.npz", "--rounds", 1, "--out", "run") == 2
    assert "big.npz does not fit into memory" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
