"""Rounds logged to TensorBoard and MLflow, read back with their own libraries."""

import json

import pytest

import fedbayes
from fedbayes import errors
from fedbayes.config.config import Config
from fedbayes.errors import ConfigError
from fedbayes.runs import tracking
from fedbayes.runs.simulation import Simulation
from fedbayes.storage.best_tracker import flat
from fedbayes.storage.inventory import dotted
from tests.helpers.command_line import command

SETTINGS = {"data": {"name": "digits", "clients": 3, "partition": "iid"}, "rounds": 4}


def broken_off(folder, track, monkeypatch):
    """A run that ends after two rounds and is resumed, one of them logged without counting."""
    config = fedbayes.Config.create(**SETTINGS, checkpoint_every=3)
    with Simulation(config, folder) as simulation, tracking.tracking(track, simulation) as log:
        for step in simulation:
            log(step.metrics)
            if step.number == 2:
                break  # as if killed: no checkpoint of these rounds
    fedbayes.resume(folder, track=track)
    return [json.loads(line) for line in (folder / "metrics.jsonl").open()]


def test_tensorboard(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    lines = broken_off(tmp_path / "run", ["tensorboard"], monkeypatch)
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    found.Reload()
    for key in ("global_accuracy", "bytes_up", "loss"):
        events = found.Scalars(key)
        assert [event.step for event in events] == [1, 2, 3, 4]
        assert [e.value for e in events] == pytest.approx([flat(line)[key] for line in lines])


def test_mlflow(tmp_path, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    lines = broken_off(tmp_path / "run", ["mlflow"], monkeypatch)
    client = MlflowClient((tmp_path / "run" / "mlflow").as_uri())
    run = (tmp_path / "run" / "mlflow-run.txt").read_text()
    history = client.get_metric_history(run, "global_accuracy")
    assert [metric.step for metric in history] == [1, 2, 3, 4]
    assert [m.value for m in history] == pytest.approx([line["global_accuracy"] for line in lines])
    found = client.get_run(run)
    stored = Config.stored(tmp_path / "run" / "config.toml").closed()
    settings = dotted(stored.model_dump(mode="json", exclude_none=True))
    named = {key for key, value in settings if value != {}}
    assert len(named) > 100
    assert found.data.params.keys() == named
    assert found.data.params["data.clients"] == "3"
    assert found.info.status == "FINISHED"


@pytest.mark.parametrize(
    ("breaks", "status"), [(KeyboardInterrupt, "KILLED"), (RuntimeError, "FAILED")]
)
def test_mlflow_is_told_how_a_run_ended(breaks, status, tmp_path, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    def status_of(folder):
        client = MlflowClient((folder / "mlflow").as_uri())
        return client.get_run((folder / "mlflow-run.txt").read_text()).info.status

    config = fedbayes.Config.create(**SETTINGS)
    with (
        pytest.raises(breaks),
        Simulation(config, tmp_path / "broken") as simulation,
        tracking.tracking(["mlflow"], simulation),
    ):
        raise breaks
    assert status_of(tmp_path / "broken") == status
    stable = {"name": "combined", "alpha": "mean", "tolerance": 1.0, "window": 2}
    fedbayes.run(**SETTINGS, method=stable, folder=tmp_path / "stable", track=["mlflow"])
    assert status_of(tmp_path / "stable") == "FINISHED"  # after 2 of 4 rounds, by its own decision


def test_both_from_the_command_line(tmp_path, capsys):
    options = ["--track", "tensorboard", "--track", "mlflow", "--rounds", "1"]
    assert command("run", *options, "-o", tmp_path / "run", "--json") == 0
    assert json.loads(capsys.readouterr().out)["rounds"] == 1
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    assert (tmp_path / "run" / "mlflow").is_dir()


def test_mistakes_leave_no_folder(tmp_path, monkeypatch, capsys):
    assert command("run", "--track", "paper", "-o", tmp_path / "run") == 2
    assert "tensorboard, mlflow" in capsys.readouterr().err
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    assert command("run", "--track", "mlflow", "-o", tmp_path / "run") == 2
    assert "pip install 'fedbayes[mlflow]'" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="tensorboard"):
        fedbayes.run(**SETTINGS, track=["tensorboard"], folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
