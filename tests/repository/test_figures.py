"""Pictures of the documentation, and a figure that it states of real data."""

import importlib.util
import json
import re

import pytest

import fedbayes
from fedbayes import Config
from tests import ROOT


@pytest.mark.slow
@pytest.mark.data
def test_fedavg_on_mnist_iid(tmp_path):
    config = Config.load(ROOT / "benchmarks" / "mnist_iid.toml")
    run = fedbayes.run(config, tmp_path)
    assert config.rounds == 20
    assert run.summary["global_accuracy"] > 0.955


@pytest.fixture(scope="module")
def pictures():
    spec = importlib.util.spec_from_file_location("draw", ROOT / "docs" / "figures" / "draw.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_diagrams_are_those_that_the_script_draws(pictures):
    for name, draw in pictures.DIAGRAMS.items():
        for word, theme in pictures.THEMES.items():
            stored = (ROOT / "docs" / "figures" / f"{name}-{word}.svg").read_text()
            assert stored == draw(theme)
            assert re.search(r'width="(\d+)"', stored)[1] == "700"


def test_every_picture_is_there_for_light_and_dark_paper_and_on_a_page(pictures):
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.ipynb")]
    shown = "".join(page.read_text() for page in pages)
    for name in [*pictures.DIAGRAMS, *pictures.PICTURES]:
        files = {}
        for word, theme in pictures.THEMES.items():
            (files[word],) = (ROOT / "docs" / "figures").glob(f"{name}-{word}.*")
            if files[word].suffix == ".svg":
                assert theme.paper in files[word].read_text()
        assert f"figures/{files['light'].name}" in shown, name


def test_the_readme_and_the_quickstart_have_the_numbers_of_the_pictures():
    numbers = json.loads((ROOT / "docs" / "figures" / "numbers.json").read_text())
    readme = (ROOT / "README.md").read_text()
    accuracy = f"{numbers['report']['fedavg']:.4f}"
    assert f"global accuracy  {accuracy}" in readme
    assert f"global {accuracy}" in (ROOT / "docs" / "start" / "quickstart.md").read_text()
    own, *others = numbers["fusion"].values()
    (sentence,) = re.findall(r"^Test accuracy: .*?\.$", readme, re.DOTALL | re.MULTILINE)
    shown = [min(own), max(own), *(one for (one,) in others)]
    assert re.findall(r"0\.\d{3}", sentence) == [f"{value:.3f}" for value in shown]
