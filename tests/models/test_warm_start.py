"""Weights to start from: `[model] weights`."""

import warnings

import numpy as np
import pytest
import torch

import fedbayes
from fedbayes import Config, Simulation
from fedbayes.errors import ConfigError, FedbayesWarning, ModelError
from fedbayes.models import MLP
from fedbayes.testing import assert_identical

SMALL = {
    "rounds": 2,
    "data": {"name": "digits", "clients": 3, "partition": "iid", "limit": 300},
    "model": {"hidden": [8]},
}


def warm(file, **more):
    return Config.create(**{**SMALL, "model": {**SMALL["model"], "weights": file}, **more})


@pytest.fixture
def first(tmp_path):
    return fedbayes.run(folder=tmp_path / "first", **SMALL)


def test_a_run_goes_on_from_the_model_of_another(first, tmp_path):
    file, start = first.folder.model_file, first.model
    with warnings.catch_warnings():
        warnings.simplefilter("error", FedbayesWarning)
        simulation = Simulation(warm(file), tmp_path / "second")
    assert_identical(simulation.server.weights, start)
    with simulation:
        next(iter(simulation))
    whole = fedbayes.run(warm(file), tmp_path / "whole")
    file.unlink()
    assert_identical(fedbayes.resume(tmp_path / "second").model, whole.model)
    assert whole.model["1.weight"].ne(start["1.weight"]).any()
    assert whole.predictor()(torch.zeros(2, 1, 8, 8)).shape == (2, 10), "without the first file"


@pytest.mark.parametrize(
    "engine", [pytest.param("workers", marks=pytest.mark.slow), "flower-simulation"]
)
def test_engines_start_alike(first, engine):
    if engine.startswith("flower"):
        pytest.importorskip("flwr")
    method = {"name": "virtual", "samples": 2}
    one = fedbayes.run(warm(first.folder.model_file, method=method))
    two = fedbayes.run(warm(first.folder.model_file, method=method, engine=engine))
    assert_identical(one.model, two.model)


def test_a_state_dict_of_ones_own(tmp_path):
    module = MLP(64, [8], 10)
    torch.save({"state_dict": module.state_dict(), "epoch": 3}, tmp_path / "a.ckpt")
    with Simulation(warm(tmp_path / "a.ckpt")) as simulation:
        assert_identical(simulation.server.weights, dict(module.state_dict()))


def test_what_does_not_fit_is_refused(first, tmp_path):
    torch.save(MLP(64, [9], 10).state_dict(), tmp_path / "wide.pt")
    with pytest.raises(ModelError, match=r"1\.weight \(9 x 64\).* but .*1\.weight \(8 x 64\)"):
        Simulation(warm(tmp_path / "wide.pt"), tmp_path / "r")
    torch.save(MLP(64, [8, 8], 10).state_dict(), tmp_path / "deep.pt")
    with pytest.raises(ModelError, match=r"it also has 5\.weight \(10 x 8\), 5\.bias \(10\)"):
        Simulation(warm(tmp_path / "deep.pt"), tmp_path / "r")
    with pytest.raises(ModelError, match=r"file .*not found"):
        Simulation(warm(tmp_path / "absent.pt"), tmp_path / "r")
    nan = {n: t * np.nan for n, t in first.model.items()}
    torch.save(nan, tmp_path / "nan.pt")
    with pytest.raises(ModelError, match="NaN"):
        Simulation(warm(tmp_path / "nan.pt"), tmp_path / "r")
    assert not (tmp_path / "r").exists()
    with pytest.raises(ConfigError, match="init has no effect"):
        Config.create(model={"weights": "a.pt", "init": "normal"})


def test_other_inputs_and_classes_are_told(tmp_path):
    rng = np.random.default_rng(0)
    for name, classes, shift in (("a", ["x", "y"], 0.0), ("b", ["y", "z"], 5.0)):
        labels = np.array(classes)[rng.integers(0, 2, 200)]
        np.savez(tmp_path / f"{name}.npz", x=rng.normal(shift, 1, (200, 64)), y=labels)
    data = {"clients": 2, "partition": "iid"}
    first = fedbayes.run(rounds=1, data={**data, "path": tmp_path / "a.npz"}, model={"hidden": [8]})
    with pytest.warns(FedbayesWarning) as notes:
        Simulation(warm(first.folder.model_file, data={**data, "path": tmp_path / "b.npz"}))
    told = " ".join(str(note.message) for note in notes)
    assert "for the classes x, y, but these data are y, z" in told
    assert "with another standardization" in told


def test_the_same_classes_or_features_in_another_order_are_refused(tmp_path):
    """The outputs would mean other classes, the inputs other features."""
    rng = np.random.default_rng(0)
    rows = [
        (f"{a:.3f}", f"{b:.3f}", "xy"[i % 2]) for i, (a, b) in enumerate(rng.normal(size=(80, 2)))
    ]
    for name, header, order in (("a", "u,v,label", (0, 1, 2)), ("b", "v,u,label", (1, 0, 2))):
        lines = [",".join(row[i] for i in order) for row in rows]
        (tmp_path / f"{name}.csv").write_text("\n".join([header, *lines]) + "\n")
    data = {"clients": 2, "partition": "iid", "path": tmp_path / "a.csv"}
    first = fedbayes.run(rounds=1, data=data, model={"hidden": [8]})
    file = first.folder.model_file
    with pytest.raises(
        ModelError,
        match=r"classes in the order x, y, and these data in the order .*\. Set data\.classes",
    ):
        Simulation(warm(file, data={**data, "classes": ["y", "x"]}))
    other = {**data, "path": tmp_path / "b.csv"}
    with pytest.raises(ModelError, match=r"features in the order u, v.*Set data\.features"):
        Simulation(warm(file, data=other))
    with warnings.catch_warnings():
        warnings.simplefilter("error", FedbayesWarning)
        Simulation(warm(file, data={**other, "features": ["u", "v"]})).close()


def test_a_network_that_is_frozen_whole_is_refused():
    with pytest.raises(ModelError, match="no trainable parameter"):
        fedbayes.run(**{**SMALL, "model": {"name": "tests.helpers.toy_models:stone"}})
