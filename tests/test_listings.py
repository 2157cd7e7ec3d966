"""The commands that list and draw."""

import json

import pytest

from fedbayes.cli import main
from fedbayes.methods import METHODS


@pytest.fixture
def cli(monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr("sys.argv", ["fedbayes", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        assert stop.value.code == 0, err
        return out

    return call


def test_methods(cli):
    listing = {entry["name"]: entry for entry in json.loads(cli("methods", "--json"))}
    assert listing.keys() == METHODS.keys()
    assert listing["fedprox"]["parameters"]["proximal"]["default"] == 0.01
    text = cli("methods", "fedprox")
    assert "proximal" in text
    assert "fedavgm" not in text


def test_data_list(cli):
    names = [entry["name"] for entry in json.loads(cli("data", "list", "--json"))]
    assert names == [
        "digits", "mnist", "permuted-mnist", "cifar10", "cifar100", "femnist", "har", "vehicle",
        "einstein",
    ]  # fmt: skip
    assert "scikit-learn" in cli("data", "list")


def test_data_show_draws(cli, tmp_path):
    picture = tmp_path / "shares.png"
    text = cli("data", "show", "digits", "--clients", 5, "--alpha", 0.2, "--out", picture)
    assert "5 clients" in text
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_help_is_quick_to_import():
    """Help needs neither PyTorch nor the data libraries."""
    import subprocess
    import sys

    code = "import sys, fedbayes.cli; print([m for m in ('torch', 'datasets') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
