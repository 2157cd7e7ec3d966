"""The numbers that the README tells of fused digits are those that its commands print."""

import json
import re
from pathlib import Path

import pytest

from tests.command_line import command

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
NUMBER = re.compile(r"(?<![\d.])0?\.\d{3}\b")
TOLERANCE = 0.006
"""Of accuracies of 359 digits: two of them, for other processors round in another way."""


def told(start, end):
    """The numbers of the README between two texts."""
    text = README[README.index(start) : README.index(end)]
    return [float(number) for number in NUMBER.findall(text)]


@pytest.mark.slow
def test_fused_digits(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert command("run", "--method", "local", "--rounds", "30", "--out", "runs/apart") == 0
    clients = sorted(Path("runs/apart/clients").glob("*.safetensors"))
    assert command("fuse", *clients, "-o", "global.safetensors") == 0
    matched = ("-o", "matched.safetensors", "--gamma", "10", "--json")
    capsys.readouterr()
    assert command("fuse", *clients, *matched) == 0
    (units,) = json.loads(capsys.readouterr().out)["sizes"]
    scores = {}
    for model in ("global", "matched"):
        words = ("evaluate", f"{model}.safetensors", *clients, "--run", "runs/apart", "--json")
        assert command(*words) == 0
        scores |= {s["name"]: s["accuracy"] for s in json.loads(capsys.readouterr().out)}
    own = [scores[str(client)] for client in clients]
    measured = [
        scores["matched.safetensors"],
        scores["global.safetensors"],
        min(own),
        max(own),
        scores["average of the inputs"],
        scores["ensemble, uniform"],
    ]
    said = told("Test accuracy: ", "- `--sigma`, `--sigma0`")
    assert said == pytest.approx(measured, abs=TOLERANCE), measured
    assert f"of {units} neurons" in README.replace("\n", " ")
