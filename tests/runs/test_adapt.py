"""`predict --adapt`: the model of a client that took no part, from a few of its rows."""

import numpy as np
import pandas as pd
import pytest
import torch

import fedbayes
from fedbayes.core.tensors import Samples
from fedbayes.errors import DataError, RunError
from fedbayes.reports.result import StoredRun
from fedbayes.runs.build import stored_run
from fedbayes.runs.personal import adapted_model
from tests.helpers.cases import cases
from tests.helpers.command_line import command

RNG = np.random.default_rng(0)
USUAL = np.array([1.0, -1.0, 0.0])


def rows(slopes, count):
    """Rows of one site, whose odds have these slopes."""
    x = RNG.normal(size=(count, 3))
    ill = RNG.random(count) < 1 / (1 + np.exp(-x @ slopes))
    return pd.DataFrame(x, columns=list("abc")).assign(ill=np.where(ill, "yes", "no"))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Rows of sites that differ, a few rows of another one, and many to predict."""
    place = tmp_path_factory.mktemp("adapt")
    sites = [rows(USUAL + RNG.normal(size=3), 40).assign(site=f"s{k}") for k in range(12)]
    pd.concat(sites).to_csv(place / "train.csv", index=False)
    other = USUAL + np.array([2.0, 1.5, -2.0])
    rows(other, 30).to_csv(place / "own.csv", index=False)
    rows(other, 1000).to_csv(place / "new.csv", index=False)
    return place


def trained(place, method, hidden=()):
    """A run of the sites."""
    folder = place / method
    if not folder.exists():
        data = {"path": str(place / "train.csv"), "label": "ill", "group": "site"}
        settings = {"data": data, "model": {"hidden": list(hidden)}, "rounds": 6}
        fedbayes.run(out=folder, method=method, progress=False, **settings)
    return folder


def accuracy(model, place):
    """Of classes of the new rows."""
    new = pd.read_csv(place / "new.csv")
    return float((model.predict(new) == new.ill).mean())


@pytest.mark.filterwarnings("ignore::fedbayes.errors.FedbayesWarning")
@pytest.mark.parametrize(
    ("method", "hidden"),
    cases(
        [("hierarchical", ()), ("ditto", ()), ("virtual", ()), ("perfedavg", ()), ("fedper", (8,))],
        slow=[("virtual", ())],
    ),
)
def test_few_rows_make_a_model_for_another_client(place, method, hidden):
    folder = trained(place, method, hidden)
    adapted = accuracy(fedbayes.load(folder, adapt=place / "own.csv"), place)
    if method != "fedper":  # which has no global model
        assert adapted > accuracy(fedbayes.load(folder), place) + 0.05
    assert adapted > 0.75


@pytest.mark.filterwarnings("ignore::fedbayes.errors.FedbayesWarning")
def test_a_hierarchy_adapts_to_the_mode_under_its_population(place):
    """There the gradient of Σ log p(y | φ) − (φ − μ)ᵀ Σ⁻¹ (φ − μ) / 2 is zero."""
    stored = StoredRun(trained(place, "hierarchical"))
    method, seen = stored.config.build_method(), stored.preprocessing
    run = stored_run(stored.folder, stored.config, seen)
    own = pd.read_csv(place / "own.csv")
    x, y = seen.apply(own.drop(columns="ill")), torch.tensor(own.ill == "yes").long()
    found = adapted_model(stored.folder, method, run, Samples(x, y))["last/mean"].numpy()
    mean = stored.model["last/mean"].numpy()
    precision = np.linalg.inv(stored.model["last/covariance"].numpy())
    features = np.hstack([x.numpy(), np.ones((len(x), 1))]).astype(float)
    logits = features @ found.reshape(2, -1).T
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    slope = ((p - np.eye(2)[y.numpy()]).T @ features).ravel() + precision @ (found - mean)
    assert np.abs(found - mean).max() > 0.1
    np.testing.assert_allclose(slope, 0, atol=1e-3)


@pytest.mark.filterwarnings("ignore::fedbayes.errors.FedbayesWarning")
def test_the_command_writes_predictions_or_nothing(place, tmp_path, capsys):
    folder = trained(place, "ditto")
    out, own = tmp_path / "p.csv", place / "own.csv"
    given = ["predict", folder, place / "new.csv", "-o", out]
    assert command(*given, "--adapt", tmp_path / "none.csv") == 2
    assert "not found" in capsys.readouterr().err
    assert command(*given, "--adapt", own, "--client", "s1") == 2
    assert "Leave out --client" in capsys.readouterr().err
    assert not out.exists()
    assert command(*given, "--adapt", own) == 0
    told = pd.read_csv(out)
    wanted = fedbayes.load(folder, adapt=own).predict_proba(pd.read_csv(place / "new.csv"))
    np.testing.assert_allclose(told[["p_no", "p_yes"]], wanted, atol=1e-6)


@pytest.mark.filterwarnings("ignore::fedbayes.errors.FedbayesWarning")
def test_what_cannot_be_adapted_is_an_error(place, tmp_path):
    own = place / "own.csv"
    with pytest.raises(RunError, match="clients keep no model between rounds under fedavg"):
        fedbayes.load(trained(place, "fedavg"), adapt=own)
    ditto = trained(place, "ditto")
    with pytest.raises(RunError, match="needs one run folder"):
        fedbayes.load(ditto / "model.safetensors", adapt=own)
    pd.read_csv(own).drop(columns="ill").to_csv(tmp_path / "bare.csv", index=False)
    with pytest.raises(DataError, match="no column 'ill'"):
        fedbayes.load(ditto, adapt=tmp_path / "bare.csv")
