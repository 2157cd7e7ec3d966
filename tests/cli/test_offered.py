"""Lists have what other installed packages offer by entry points, with the package's name."""

import json
from pathlib import Path

import pytest

from fedbayes.cli.options import completes
from fedbayes.core.lazy import offers
from tests.helpers.command_line import command
from tests.helpers.installed import distribution


@pytest.fixture(autouse=True)
def ward(tmp_path: Path, monkeypatch):
    """A package `ward`; some of what it offers is broken, or has a name that is taken."""
    distribution(
        tmp_path,
        "ward",
        methods={
            "robust-middle": "tests.helpers.toy_methods:Median",
            "fedavg": "tests.helpers.toy_methods:Median",
            "absent": "ward.nowhere:Method",
        },
        models={"tiny": "ward_parts:tiny"},
        data={"ward-rows": "ward_parts:table"},
        stages={"slow": "ward.nowhere:Slow"},
    )
    (tmp_path / "ward_parts.py").write_text("tiny = table = print\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "300")


def test_offers_are_those_of_the_package():
    assert offers("models") == [("tiny", "ward_parts:tiny", "ward")]
    assert [offer.name for offer in offers("methods", ["fedavg"])] == ["absent", "robust-middle"]
    assert completes("method.name")("robust") == ["robust-middle"]


def test_methods_list_them_with_the_package(capsys):
    assert command("methods") == 0
    shown = capsys.readouterr()
    line = next(line for line in shown.out.splitlines() if line.startswith("robust-middle"))
    assert line.split(maxsplit=1)[1].rstrip() == "needs all reports at once (ward)"
    assert shown.out.count("(ward)") == 1
    assert "the method absent of ward is left out: cannot find" in " ".join(shown.err.split())
    assert command("methods", "--matrix") == 0
    assert "robust-middle (ward) " in capsys.readouterr().out
    assert command("methods", "--json") == 0
    told = {one["name"]: one["package"] for one in json.loads(capsys.readouterr().out)}
    assert (told["robust-middle"], told["fedavg"]) == ("ward", "fedbayes")


def test_data_sets_list_them(capsys):
    assert command("data", "list") == 0
    assert "ward-rows  of ward" in capsys.readouterr().out
    assert command("data", "list", "--json") == 0
    last = json.loads(capsys.readouterr().out)[-1]
    assert last == {"name": "ward-rows", "place": "ward_parts:table", "package": "ward"}


def test_the_doctor_lists_all_and_says_what_cannot_be_used(capsys, monkeypatch):
    monkeypatch.setattr("fedbayes.workflows.doctor._shares", lambda cores: {})
    assert command("doctor", "--json") == 0
    found = json.loads(capsys.readouterr().out)["plugins"]
    troubles = {(one["kind"], one["name"]): one["trouble"] for one in found}
    assert troubles.pop(("stage", "slow")).startswith("cannot find the stage 'ward.nowhere:Slow'")
    assert troubles.pop(("method", "absent")).startswith("cannot find the method")
    assert troubles == {
        ("method", "fedavg"): "hidden: the name is built in",
        ("method", "robust-middle"): "",
        ("model", "tiny"): "",
        ("data set", "ward-rows"): "",
    }
    assert {one["package"] for one in found} == {"ward"}
    assert command("doctor") == 0
    assert "robust-middle" in capsys.readouterr().out
