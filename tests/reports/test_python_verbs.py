"""The verbs of the command line on results of runs, and predictions as scikit-learn has them."""

import json
import warnings

import numpy as np
import pytest
from sklearn.datasets import load_diabetes, load_digits
from sklearn.metrics import accuracy_score

import fedbayes
from fedbayes.errors import ConfigError, FedbayesWarning
from tests.helpers.command_line import command


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verbs") / "digits"
    return fedbayes.run(data={"limit": 600, "clients": 3}, rounds=2, folder=folder)


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verbs") / "numbers"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedbayesWarning)
        return fedbayes.run(data="diabetes", clients=2, rounds=2, folder=folder)


def test_classes_are_predicted_as_scikit_learn_does(digits):
    x, y = load_digits(return_X_y=True)
    x = x.reshape(-1, 1, 8, 8)
    p = digits.predict_proba(x)
    assert p.dtype == np.float64
    assert p.shape == (len(x), 10)
    np.testing.assert_allclose(p.sum(1), 1, rtol=1e-12)
    labels = digits.predict(x)
    assert (labels == digits.classes_[p.argmax(1)]).all()
    assert accuracy_score(y.astype(str), labels) > 0.5
    np.testing.assert_allclose(p, np.exp(digits.predictor()(x)), atol=1e-6)
    loaded = fedbayes.load(digits.folder)
    np.testing.assert_array_equal(loaded.predict_proba(x), p)
    assert (loaded.predict(x) == labels).all()
    with pytest.raises(
        ConfigError,
        match=r"predict_interval needs numbers.*predict_proba",
    ):
        digits.predict_interval(x)


def test_numbers_have_intervals(numbers):
    x = load_diabetes(scaled=False).data
    mean = numbers.predict(x)
    assert mean.shape == (len(x),)
    narrow, wide = (numbers.predict_interval(x, level) for level in (0.5, 0.95))
    assert all(end.shape == mean.shape for end in (*narrow, *wide))
    assert (wide[0] < narrow[0]).all()
    assert (narrow[0] < mean).all()
    assert (mean < narrow[1]).all()
    low, high = numbers.interval(x, 0.5)
    np.testing.assert_allclose(narrow, [low[:, 0], high[:, 0]])
    with pytest.raises(ConfigError, match="predict_proba needs classes"):
        numbers.predict_proba(x)


def test_evaluate_says_what_the_command_prints(digits, capsys):
    assert command("evaluate", digits.folder, "--json") == 0
    (printed,) = json.loads(capsys.readouterr().out)
    found = digits.evaluate()
    assert found.index.tolist() == ["all", *printed["clients"]]
    for name in found.columns:
        assert found.loc["all", name] == pytest.approx(printed[name])
    assert digits.evaluate(metrics=()).columns.tolist() == ["accuracy", "nll"]


def test_evaluate_on_another_data_set(numbers):
    whole = numbers.evaluate("diabetes", metrics=())
    assert whole.index.tolist() == ["all"]
    assert whole.loc["all", "rmse"] > 0


def test_export_and_report_write_files(digits, numbers, tmp_path):
    done = digits.export(tmp_path / "m.safetensors")
    assert done.path == tmp_path / "m.safetensors"
    x = load_digits().images[:9, None]
    np.testing.assert_allclose(
        fedbayes.load(done.path).predict_proba(x), digits.predict_proba(x), atol=1e-6
    )
    page = digits.report(tmp_path / "r.html")
    assert "<html" in page.read_text()[:200]
    both = digits.report(tmp_path / "both.html", numbers)
    assert "diabetes" in both.read_text()


def test_calibrate_is_that_of_the_command(digits, capsys):
    level = digits.calibrate("conformal", level=0.8)
    assert command("calibrate", digits.folder, "-m", "conformal", "--level", "0.8", "--json") == 0
    assert json.loads(capsys.readouterr().out)["all"]["coverage"] == list(level.all.coverage)
    found = digits.calibrate()
    assert command("calibrate", digits.folder, "-m", "temperature", "--json") == 0
    assert json.loads(capsys.readouterr().out)["temperature"] == found.temperature
    with pytest.raises(ConfigError, match=r"method is 'platt'\. Choose auto, temperature"):
        digits.calibrate("platt")


def test_calibrated_intervals_are_used(numbers):
    x = load_diabetes(scaled=False).data[:5]
    found = numbers.calibrate(level=0.8)
    assert found.level == 0.8
    low, high = numbers.predict_interval(x)
    frame = numbers.predict_frame(x)
    np.testing.assert_allclose([low, high], frame[["low", "high"]].T)


PUBLIC = [name for name in fedbayes.__all__ if not name.startswith("__")]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_an_example(name):
    assert ">>> " in (getattr(fedbayes, name).__doc__ or ""), f"{name} has no example"
