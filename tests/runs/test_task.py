"""The `[task]` table of a config, and the likelihood that comes of it."""

import dataclasses
import subprocess
import sys
import tomllib
import warnings

import numpy as np
import pandas as pd
import pytest
import torch

from fedbayes.config.config import Config, settings
from fedbayes.config.schema import schema
from fedbayes.core.targets import Target
from fedbayes.errors import ConfigError, DataError, FedbayesWarning, ModelError, RunError
from fedbayes.likelihoods import LIKELIHOODS, find_likelihood
from fedbayes.likelihoods.gaussian import Gaussian
from fedbayes.runs import build
from fedbayes.runs.build import build_data, build_likelihood, stored_data
from fedbayes.storage.card import Card
from fedbayes.storage.folder import RunFolder
from fedbayes.workflows.serve.evaluation_set import find_tests
from fedbayes.workflows.serve.model_files import ModelFiles, read_with_card, write_model

CLASSES = Target("class", ("no", "yes"))
REAL = Target("real", ("y",), (1.0,), (2.0,))
TARGETS = {
    "class": CLASSES,
    "labels": Target("labels", ("a", "b")),
    "real": REAL,
    "count": Target("count", ("n",), (3.0,)),
    "survival": Target("survival", ("days", "died")),
}


class Narrow(Gaussian):
    """A likelihood of a user's own."""

    name = "narrow"
    depth: int = 3


def test_the_default_is_left_to_the_data():
    config = Config.create()
    assert config.task == {"likelihood": "auto"}
    assert config.target_kinds == ()
    assert Config.create(task={}).task == config.task


def test_defaults_of_the_likelihood_are_filled_in():
    config = Config.create(task={"likelihood": "gaussian"})
    assert config.task == {"likelihood": "gaussian", "noise": "learnt"}
    assert config.target_kinds == ("real",)
    assert Config.create(task={"likelihood": "gaussian", "noise": 0.5}).task["noise"] == 0.5


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_a_dump_loads_to_what_was_dumped(name, tmp_path):
    config = Config.create(task={"likelihood": name})
    text = config.dump()
    (tmp_path / "c.toml").write_text(text)
    assert Config.load(tmp_path / "c.toml") == config
    own = find_likelihood(name).model_fields.keys() - {"target"}
    assert tomllib.loads(text)["task"].keys() == {"likelihood", *own}
    rows = {row.key for row in settings(None, name) if row.key.startswith("task.")}
    assert rows == {"task.likelihood", *(f"task.{field}" for field in own)}
    branches = {b["title"]: b for b in schema()["properties"]["task"]["oneOf"]}
    assert branches.keys() == {"auto", *LIKELIHOODS, "your own"}
    assert branches[name]["properties"].keys() == {"likelihood", *own}


def test_settings_on_the_command_line(tmp_path):
    config = Config.load(None, ["task.likelihood=gaussian", "task.noise=each"])
    assert config.task == {"likelihood": "gaussian", "noise": "each"}
    (tmp_path / "c.toml").write_text('[task]\nlikelihood = "gaussian"\nnoise = 0.1\n')
    assert Config.load(tmp_path / "c.toml", ["task.noise=each"]).task["noise"] == "each"
    # The settings were the other likelihood's.
    changed = Config.load(tmp_path / "c.toml", ["task.likelihood=poisson"])
    assert "noise" not in changed.task
    labels = Config.load(None, ["data.path=x.csv", "data.label=a,b"]).data.label
    assert labels == ("a", "b")


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ({"likelihood": "gausian"}, r"unknown likelihood .*'gausian' \(did you mean 'gaussian'"),
        ({"likelihood": 3}, "the name of the likelihood is 3; it must be a string"),
        (
            {"likelihood": "gaussian", "nois": 1},
            r"task.nois is not a setting of gaussian \(did you mean 'noise'",
        ),
        ({"likelihood": "gaussian", "noise": -1}, "task.noise is -1"),
        ({"likelihood": "gaussian", "target": 1}, "task.target is not a setting"),
        ({"noise": "each"}, r"task.noise is a setting of gaussian, .* not of auto\. Choose"),
        ({"name": "gaussian"}, "task.name is not a setting"),
        ({"nothing": 1}, "task.nothing is not a setting"),
        ({"likelihood": "no.such:Thing"}, "cannot find the likelihood"),
        ({"likelihood": "math:pi"}, "not a class derived from"),
        (3, "task is 3; give a table with settings such as task.likelihood"),
    ],
)
def test_mistakes_name_the_key(task, says):
    with pytest.raises(ConfigError, match=says):
        Config.create(task=task)


def test_a_likelihood_of_ones_own():
    config = Config.create(task={"likelihood": f"{__name__}:Narrow", "depth": 4})
    assert config.task == {"likelihood": f"{__name__}:Narrow", "noise": "learnt", "depth": 4}
    likelihood = build_likelihood(config, REAL)
    assert isinstance(likelihood, Narrow)
    assert likelihood.depth == 4
    with pytest.raises(ConfigError, match=r"task\.dept is not a setting"):
        Config.create(task={"likelihood": f"{__name__}:Narrow", "dept": 4})


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("class", "categorical"),
        ("labels", "multilabel"),
        ("real", "gaussian"),
        ("count", "poisson"),
        ("survival", "cox"),
    ],
)
def test_auto_is_by_the_target_and_said(kind, name):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        likelihood = build_likelihood(Config.create(), TARGETS[kind])
    assert likelihood.name == name
    assert likelihood.target == TARGETS[kind]
    told = [str(one.message) for one in said]
    assert len(told) == (kind != "class")
    assert all(f"its likelihood is {name}" in text for text in told)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FedbayesWarning)
        build_likelihood(Config.create(), TARGETS[kind], quiet=True)
        build_likelihood(Config.create(task={"likelihood": name}), TARGETS[kind])


@pytest.mark.parametrize("name", LIKELIHOODS)
@pytest.mark.parametrize("kind", TARGETS)
def test_a_likelihood_takes_the_targets_of_its_kinds(name, kind):
    config = Config.create(task={"likelihood": name})
    if kind in config.target_kinds:
        assert build_likelihood(config, TARGETS[kind]).target == TARGETS[kind]
    else:
        with pytest.raises(ConfigError, match=f"{name}.*{kind}"):
            build_likelihood(config, TARGETS[kind])


def test_the_likelihood_decides_how_labels_are_read(tmp_path):
    file = tmp_path / "t.csv"
    file.write_text("x,label\n" + "".join(f"{k},{k % 4}\n" for k in range(40)))
    for name, kind in {"auto": "class", "gaussian": "real", "poisson": "count"}.items():
        config = Config.create(data={"path": file, "clients": 2}, task={"likelihood": name})
        with warnings.catch_warnings(action="ignore", category=FedbayesWarning):
            assert build_data(config).target.kind == kind


def test_a_run_keeps_its_target(tmp_path):
    """Center and scale are the run's, as the features' statistics are; another kind is refused."""
    file = tmp_path / "t.csv"
    file.write_text("x,label\n" + "".join(f"{k},{k % 4}\n" for k in range(40)))
    data = {"path": file, "clients": 2, "partition": "iid"}
    config = Config.create(data=data, task={"likelihood": "gaussian"})
    first = build_data(config)
    folder = RunFolder(tmp_path / "run")
    folder.create(config, first.partition, first.preprocessing)
    file.write_text("x,label\n" + "".join(f"{k},{k % 5}\n" for k in range(40)))
    with pytest.warns(FedbayesWarning, match="some values or labels have changed"):
        again = stored_data(config, folder)
    assert again.target == first.target
    with pytest.raises(RunError, match=r"targets were real: label, .* now class: 0, 1, 2, 3, 4"):
        stored_data(Config.create(data=data), folder)


def test_a_mistake_costs_no_pytorch():
    code = (
        "import sys\nfrom fedbayes.config.config import Config, settings\n"
        "try: Config.create(task={'likelihood': 'gausian'})\nexcept Exception as e: print(e)\n"
        "settings(None)\nprint('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip().endswith("False")
    assert "did you mean 'gaussian'" in out.stdout


def test_weights_of_another_target_are_said(tmp_path, monkeypatch):
    file = tmp_path / "t.csv"
    file.write_text("x,label\n" + "".join(f"{k},{k % 4}\n" for k in range(40)))
    data = {"path": file, "clients": 2, "partition": "iid"}
    classes, real = (
        Config.create(data=data, task={"likelihood": name}, model={"weights": tmp_path / "w"})
        for name in ("categorical", "gaussian")
    )
    card = Card.of(classes, build_data(classes).preprocessing, 1)
    monkeypatch.setattr(build, "read_model", lambda file: ({}, card.dump()))
    with pytest.warns(
        FedbayesWarning, match="trained for the classes 0, 1, 2, 3, but these data are re"
    ):
        build.note_start(real, build_data(real).preprocessing)


# What models of other targets are tried on.


@pytest.fixture
def regression(tmp_path):
    """The model file of a run on a real target, whose card says how rows are read."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(80, 3)), columns=["a", "b", "rent"]).round(4)
    frame.to_csv(tmp_path / "t.csv", index=False)
    data = {"path": tmp_path / "t.csv", "label": "rent", "clients": 2, "partition": "iid"}
    config = Config.create(data=data, task={"likelihood": "gaussian"})
    preprocessing = build_data(config).preprocessing
    model = tmp_path / "m.safetensors"
    card = Card.of(config, preprocessing, 1)
    write_model(model, {"0.weight": torch.zeros(1, 2)}, card)
    assert read_with_card(model)[1] == card
    return model, preprocessing


def test_new_rows_are_read_as_the_model_was_trained(regression, tmp_path):
    """By the card a column of few values is real, and found by its name."""
    model, preprocessing = regression
    new = tmp_path / "new.csv"
    new.write_text("b,rent,a\n1,7,2\n3,7,4\n")
    found = find_tests(model, None, [f"data.path={new}"])
    assert found.preprocessing == preprocessing
    assert found.samples.y.tolist() == [[7], [7]]
    assert found.samples.x.tolist() == [[2, 1], [4, 3]]
    moved = tmp_path / "moved.csv"
    moved.write_text("b,price,a\n1,7,2\n3,8,4\n")
    with pytest.raises(DataError, match="no column 'rent'"):
        find_tests(model, None, [f"data.path={moved}"])
    with pytest.raises(ModelError, match=r"has targets real: price; the model was trained on real"):
        find_tests(model, None, [f"data.path={moved}", "data.label=price"])


def test_the_model_says_what_is_predicted(regression):
    with pytest.raises(ConfigError, match=r"task.likelihood has no effect.*\(real: rent\)"):
        find_tests(regression[0], None, ["data.path=t.csv", "task.likelihood=poisson"])


def test_other_data_have_another_target(regression):
    with pytest.raises(ModelError, match="samples of shape"):
        find_tests(regression[0], None, ["data.name=diabetes"])


def test_models_of_other_targets_are_not_fused(regression, tmp_path):
    model, preprocessing = regression
    card = read_with_card(model)[1]
    scaled = dataclasses.replace(preprocessing.target, scale=(9.0,))
    other = tmp_path / "other.safetensors"

    def write(target):
        changed = dataclasses.replace(preprocessing, target=target)
        weights = {"0.weight": torch.zeros(1, 2)}
        write_model(other, weights, dataclasses.replace(card, preprocessing=changed))

    write(scaled)
    with pytest.raises(ModelError, match="different standardizations"):
        ModelFiles().card([model, other])
    write(Target("real", ("tax",), (0.0,), (1.0,)))
    with pytest.raises(ModelError, match="predicts real: tax"):
        ModelFiles().card([model, other])
