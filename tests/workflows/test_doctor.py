"""What `fedbayes doctor` finds, next to what the system and the package say."""

import json
import sys
from importlib import metadata

import psutil
import pytest
import torch

from fedbayes.workflows import doctor
from tests.helpers.command_line import command


@pytest.fixture(autouse=True)
def no_timing(monkeypatch):
    monkeypatch.setattr(doctor, "_shares", lambda cores: {})


@pytest.mark.slow
def test_steps_are_timed_and_threads_given_back(monkeypatch):
    monkeypatch.undo()
    threads = torch.get_num_threads()
    assert all(0.05 < share < 20 for share in doctor._shares(2).values())
    assert torch.get_num_threads() == threads


def test_it_finds_this_machine(capsys):
    assert command("doctor", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["machine"]["memory free"] < psutil.virtual_memory().total
    assert found["machine"]["Python"] == sys.version.split()[0]
    assert found["chosen"]["engine"] == "auto"
    assert command("doctor") == 0
    out = capsys.readouterr().out
    assert found["machine"]["processor"].split()[0] in out
    assert "GiB" in out


def test_every_extra_is_listed_and_a_missing_package_is_named(monkeypatch, capsys):
    lines = metadata.requires("fedbayes")
    named = {line.rpartition('extra == "')[2].strip("\"' ") for line in lines if "extra ==" in line}
    named = {name.replace("'", "").rpartition("extra == ")[2] for name in named}
    assert {extra.name for extra in doctor.examine().extras} == named - {"dev", "docs"}
    monkeypatch.setattr(doctor, "requires", lambda name: ["nowhere>=1; extra == 'ray'", "torch"])
    extras = {extra.name: extra.missing for extra in doctor.examine().extras}
    assert extras["ray"] == ("nowhere",)
    assert extras["sql"] == ()
    assert command("doctor") == 0
    assert "pip install 'fedbayes[ray]'" in capsys.readouterr().out


def test_an_extra_whose_import_fails_is_broken(monkeypatch, tmp_path, capsys):
    """A module that is `None` in `sys.modules` raises an error on import."""
    for module in ("sqlalchemy", "mlflow.entities"):
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "peft.py").write_text("raise RuntimeError('operator is missing')")
    monkeypatch.delitem(sys.modules, "peft", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(doctor, "requires", lambda name: ["torch", "nowhere; extra == 'mlflow'"])
    extras = {extra.name: extra.trouble for extra in doctor.examine().extras}
    assert "import of sqlalchemy halted" in extras.pop("sql")
    assert extras.pop("hf").startswith("peft cannot be imported: operator is missing. ")
    assert set(extras.values()) == {""}, "which are sound, or missing anyway"
    assert command("doctor") == 0
    assert "broken: cannot find the import" in " ".join(capsys.readouterr().out.split())


def test_what_is_faster_is_measured(monkeypatch):
    monkeypatch.setattr(doctor, "_shares", lambda cores: {"a": 0.5, "b": 0.95})
    monkeypatch.setattr(doctor, "cpu_count", lambda: 4)
    found = [line for line in doctor.examine().faster if "threads=4" in line]
    assert len(found) == 1
    assert "of a takes 0.50" in found[0]
