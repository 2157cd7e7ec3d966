"""Federations behind scikit-learn's interface."""

import pickle
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pandas as pd
import pytest
import sklearn
from scipy.stats import norm
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from sklearn.model_selection import GridSearchCV, GroupKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import fedbayes
from fedbayes import FederatedClassifier, FederatedRegressor
from fedbayes.errors import ConfigError, DataError, FedbayesWarning, RunError
from fedbayes.methods import METHODS

X, Y = load_breast_cancer(return_X_y=True)
SITE = np.array(["north", "south", "west"])[np.arange(len(Y)) % 3]
QUICK = {"rounds": 2, "model": {"hidden": [8]}, "random_state": 0}
CHECKED = {
    "rounds": 4,
    "training": {"batch_size": 16},
    "n_clients": 2,
    "model": {"hidden": [20]},
    "random_state": 0,
}


@pytest.fixture(autouse=True)
def nothing_is_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ResourceWarning)  # temporary folders of runs elsewhere
        warnings.filterwarnings("ignore", "`torch.jit.script`", DeprecationWarning)  # PyTorch's own
        yield


def expected_failures(estimator):
    why = "a float32 matrix product of one row may differ from that of many in its last digit"
    return {"check_methods_subset_invariance": why}


@parametrize_with_checks(
    [
        FederatedClassifier(**CHECKED),
        FederatedRegressor(**CHECKED),
    ],
    expected_failed_checks=expected_failures,
)
@pytest.mark.filterwarnings("ignore")
def test_scikit_learns_checks(estimator, check):
    warnings.simplefilter("ignore")
    check(estimator)


@pytest.mark.slow
@parametrize_with_checks(
    [
        FederatedClassifier(),
        FederatedClassifier(
            {"name": "virtual", "kl_weight": 0.001, "server_likelihood": 1}, rounds=5, n_clients=2
        ),
        FederatedRegressor(likelihood="student-t"),
    ],
    expected_failed_checks=expected_failures,
)
def test_scikit_learns_checks_with_other_settings(estimator, check):
    warnings.simplefilter("ignore")
    check(estimator)


@pytest.mark.parametrize("method", ["fedavg", {"name": "fedprox", "proximal": 0.5}, "fedsparse"])
def test_it_learns_what_a_run_of_the_same_config_learns(method, tmp_path):
    """Weights are those of `fedbayes.run` on the same rows, which are in a file there."""
    model = FederatedClassifier(method, **QUICK, training={"lr": 0.05}, cohort=2)
    model.fit(X, Y, clients=SITE)
    file = tmp_path / "mine.npz"
    x = X.astype(np.float32)
    np.savez(file, x=x, y=Y, groups=SITE, x_test=x[:9], y_test=Y[:9], groups_test=SITE[:9])
    settings = model.config_.model_dump(exclude={"data"})
    data = {"path": file, "partition": "natural"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedbayesWarning)
        run = fedbayes.run(**settings, data=data)
    mine = model._federation.model()
    assert mine.keys() == run.model.keys()
    for name, tensor in run.model.items():
        assert np.array_equal(tensor.numpy(), mine[name].numpy()), name
    np.testing.assert_allclose(
        model.predict_log_proba(X[:20]), run.predictor()(x[:20]).numpy(), rtol=1e-4, atol=1e-6
    )
    lines = run.frame()
    for column in ("bytes_up", "bytes_down", "loss"):
        np.testing.assert_array_equal(model.history_[column], lines[column])


def test_nothing_is_left_on_disk_and_threads_may_fit_and_predict(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    alone = FederatedClassifier(**QUICK).fit(X, Y)
    wanted = alone.predict_proba(X)
    with ThreadPoolExecutor(4) as pool:
        fits = [pool.submit(FederatedClassifier(**QUICK).fit, X, Y) for _ in range(4)]
        asked = [pool.submit(alone.predict_proba, X) for _ in range(16)]
        for fit in fits:
            assert np.array_equal(fit.result().predict_proba(X), wanted)
        for one in asked:
            assert np.array_equal(one.result(), wanted)
    assert list(tmp_path.iterdir()) == []
    assert threading.active_count() < 20


def test_clients_are_those_that_are_given():
    model = FederatedClassifier(**QUICK).fit(X, Y, clients=SITE)
    assert model.clients_.tolist() == ["north", "south", "west"]
    counts = model._federation.preprocessing.samples
    assert counts == len(Y)
    assert model.history_["cohort"].tolist() == [3, 3]
    # Whose a row is matters, not what the clients are called or in what order rows come.
    renamed = FederatedClassifier(**QUICK).fit(X, Y, clients=np.char.add("a-", SITE))
    assert np.array_equal(renamed.predict_proba(X), model.predict_proba(X))
    other = FederatedClassifier(**QUICK).fit(X, Y, clients=np.roll(SITE, 1))
    assert not np.array_equal(other.predict_proba(X), model.predict_proba(X))


def test_numbers_and_categories_may_name_clients():
    numbers = FederatedClassifier(**QUICK).fit(X, Y, clients=pd.Series(np.arange(len(Y)) % 3 + 10))
    assert numbers.clients_.tolist() == [10, 11, 12]
    frame = pd.Series(SITE, dtype="category")
    assert FederatedClassifier(**QUICK).fit(X, Y, clients=frame).clients_.tolist() == [
        "north",
        "south",
        "west",
    ]


def test_each_client_may_predict_with_its_own_model():
    # The sites disagree on what the classes are called, which no global model can tell.
    y = np.where(SITE == "west", 1 - Y, Y)
    quick = {**QUICK, "rounds": 15}
    own = FederatedClassifier("local", **quick).fit(X, y, clients=SITE)
    with pytest.raises(RunError, match="only clients have models"):
        own.predict(X)
    assert own.score(X, y, client=SITE) > 0.95
    west = SITE == "west"
    assert np.array_equal(own.predict(X, client=SITE)[west], own.predict(X[west], client="west"))
    assert (own.predict(X, client="north") == own.predict(X, client="west")).mean() < 0.2
    both = FederatedClassifier(**quick).fit(X, y, clients=SITE)
    assert both.score(X, y) < 0.8
    with pytest.raises(RunError, match=r"^clients have no own models: .* between rounds under "):
        both.predict(X, client="north")
    with pytest.raises(
        ValueError, match=r"unknown client 'east'\. The clients are north, south, west"
    ):
        own.predict(X, client="east")
    with pytest.raises(ValueError, match="one id for each"):
        own.predict(X, client=SITE[:-1])
    few = FederatedClassifier("local", **quick | {"rounds": 1}, clients_per_round=1)
    few.fit(X, y, clients=SITE)
    absent = next(site for k, site in enumerate(few.clients_) if k not in few._federation.states)
    with pytest.raises(RunError, match=f"client {absent} has no own model: it was in no r"):
        few.predict(X, client=absent)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_fits_and_predicts(method):
    warnings.simplefilter("ignore", FedbayesWarning)
    network = {"hidden": [4]} | ({"norm": "batch"} if method == "fedbn" else {})
    model = FederatedClassifier(method, rounds=1, n_clients=2, model=network)
    model.fit(X[:80], Y[:80])
    client = None if METHODS[method]().models.has_global else 0
    proba = model.predict_proba(X[:10], client=client)
    assert proba.shape == (10, 2)
    np.testing.assert_allclose(proba.sum(1), 1)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict_proba(X[:10], client=client), proba)


def test_intervals_are_those_of_the_predictive_distribution():
    x, y = load_diabetes(return_X_y=True)
    model = FederatedRegressor("local", likelihood="gaussian", **QUICK).fit(x, y)
    mean, std = model.predict(x, return_std=True, client=0)
    low, high = model.predict_interval(x, 0.9, client=0)
    # One draw is a normal distribution, whose quantiles are known.
    np.testing.assert_allclose(high, norm(mean, std).ppf(0.95), rtol=1e-9)
    np.testing.assert_allclose(low, norm(mean, std).ppf(0.05), rtol=1e-9)


@pytest.mark.slow
def test_regression_in_the_unit_of_the_target():
    x, y = load_diabetes(return_X_y=True)
    model = FederatedRegressor(rounds=30, random_state=0).fit(x, y)
    assert model.score(x, y) > 0.5
    moved = FederatedRegressor(rounds=30, random_state=0).fit(x, 10 * y + 5000)
    np.testing.assert_allclose(moved.predict(x), 10 * model.predict(x) + 5000, rtol=0.01)
    both = FederatedRegressor(rounds=30, random_state=0).fit(x, np.stack([y, -y], 1))
    assert both.predict(x).shape == (len(y), 2)
    assert both.score(x, np.stack([y, -y], 1)) > 0.5
    std = both.predict(x, return_std=True)[1]
    assert std.shape == (len(y), 2)
    assert (std > 0).all()


def test_counts_and_quantiles():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 3))
    y = rng.poisson(np.exp(0.5 + x[:, 0]))
    counts = FederatedRegressor(likelihood="poisson", random_state=0).fit(x, y)
    mean, std = counts.predict(x, return_std=True)
    np.testing.assert_allclose(std, np.sqrt(mean), rtol=1e-6)
    assert np.corrcoef(mean, np.exp(x[:, 0]))[0, 1] > 0.9
    with pytest.raises(DataError, match="whole number"):
        FederatedRegressor(likelihood="poisson").fit(x, y + 0.5)
    spread = FederatedRegressor(
        likelihood={"likelihood": "quantile", "levels": [0.1, 0.5, 0.9]}, random_state=0
    ).fit(x, y.astype(float))
    with pytest.raises(ValueError, match="no standard deviation"):
        spread.predict(x, return_std=True)
    low, high = spread.predict_interval(x, 0.8)
    assert 0.6 < ((low <= y) & (y <= high)).mean() < 0.95


def test_pictures_go_into_a_network_of_pictures():
    x, y = load_digits(return_X_y=True)
    module = "tests.helpers.toy_models:stack"
    model = FederatedClassifier(
        model=module,
        shape=(1, 8, 8),
        rounds=10,
        partition={"partition": "dirichlet", "alpha": 1.0},
        random_state=0,
    ).fit(x[:400], y[:400])
    assert model.score(x[:400], y[:400]) > 0.3
    with pytest.raises(DataError, match="81 values in a sample, and X has 64"):
        clone(model).set_params(shape=(1, 9, 9)).fit(x, y)


def test_missing_values_become_the_mean():
    holes = X.copy()
    holes[::7, 3] = np.nan
    model = FederatedClassifier(**QUICK).fit(holes, Y)
    filled = np.where(np.isnan(holes), np.nanmean(holes.astype(np.float32), 0), holes)
    np.testing.assert_allclose(model.predict_proba(holes), model.predict_proba(filled), atol=1e-5)


def test_columns_of_a_frame_are_known_by_name():
    frame, y = load_breast_cancer(return_X_y=True, as_frame=True)
    model = FederatedClassifier(**QUICK).fit(frame, y)
    assert model.feature_names_in_.tolist() == list(frame.columns)
    with pytest.raises(ValueError, match="should match those that were passed during fit"):
        model.predict(frame[frame.columns[::-1]])


def test_cross_validation_hands_on_whose_rows_are():
    seen = []

    class Watched(FederatedClassifier):
        def fit(self, X, y, clients=None):
            seen.append(clients)
            return super().fit(X, y, clients=clients)

        def score(self, X, y, sample_weight=None, client=None):
            seen.append(client)
            return super().score(X, y, sample_weight=sample_weight)

    model = Watched(**QUICK)
    with sklearn.config_context(enable_metadata_routing=True):
        asks = model.set_fit_request(clients=True).set_score_request(client="clients")
        scores = cross_val_score(asks, X, Y, params={"clients": SITE}, cv=3)
    assert len(scores) == 3
    assert min(scores) > 0.8
    assert [len(part) for part in seen[::2]] == [379, 379, 380]
    assert [len(part) for part in seen[1::2]] == [190, 190, 189]
    seen.clear()
    # A hospital that no model has seen: without routing, as older code does it.
    cross_val_score(model, X, Y, groups=SITE, params={"clients": SITE}, cv=GroupKFold(3))
    assert [len(np.unique(part)) for part in seen[::2]] == [2, 2, 2]


def test_settings_in_tables_can_be_searched():
    search = GridSearchCV(
        FederatedClassifier(**QUICK, training={"batch_size": 16}),
        {"training__lr": [1e-4, 0.1], "method": ["fedavg", {"name": "fedprox", "proximal": 0.1}]},
        cv=2,
    ).fit(X, Y)
    assert search.best_params_["training__lr"] == 0.1
    assert search.best_estimator_.training == {"batch_size": 16, "lr": 0.1}
    assert search.estimator.training == {"batch_size": 16}  # the copy was changed
    found = search.best_estimator_.get_params()
    assert found["training__batch_size"] == 16
    model = FederatedClassifier().set_params(model__hidden=[3], likelihood__likelihood="auto")
    assert model.model == {"name": "mlp", "hidden": [3]}
    with pytest.raises(ValueError, match="Invalid parameter 'random'"):
        model.set_params(random__state=1)
    piped = make_pipeline(StandardScaler(), FederatedClassifier(**QUICK)).fit(X, Y)
    assert piped.score(X, Y) > 0.8


def test_noise_is_accounted_for():
    pytest.importorskip("dp_accounting")
    private = FederatedClassifier(
        **QUICK,
        n_clients=20,
        settings={"aggregation.clip": 1.0, "privacy": {"noise": 4.0, "delta": 1e-3}},
    ).fit(X, Y)
    assert 0 < private.privacy_["epsilon"] < 20
    assert private.privacy_["delta"] == 1e-3
    other = clone(private).fit(X, Y)  # the noise follows from no seed
    assert not np.array_equal(other.predict_proba(X), private.predict_proba(X))
    same = clone(private).set_params(settings__privacy={"noise": 4.0, "repeatable": True})
    warnings.simplefilter("ignore", FedbayesWarning)
    np.testing.assert_array_equal(
        same.fit(X, Y).predict_proba(X), clone(same).fit(X, Y).predict_proba(X)
    )


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"method": "fedavgg"}, "did you mean 'fedavg'"),
        ({"method": {"name": "fedprox", "proximall": 1}}, "proximall"),
        ({"training": 3}, "training is 3; give a dict"),
        ({"training": {"lr": -1}}, "training.lr"),
        ({"settings": {"seed": 3}}, "Set it with random_state"),
        ({"settings": {"training": {"lr": 3}}}, "Set it with training"),
        ({"settings": {"engine": "workers"}}, "no effect in memory. Use fedbayes.run"),
        ({"settings": {"agregation.rule": "median"}}, "agregation"),
        ({"settings": {"a": 1, "a.b": 2}}, "a is not a table"),
        ({"partition": "natural"}, "Give fit an array of clients"),
        ({"partition": {"alpa": 1}}, "partition has 'alpa'"),
        ({"likelihood": "gaussian"}, "not classes"),
        ({"rounds": 0}, "rounds"),
        ({"cohort": 9}, "clients_per_round is 9, but there are 5 clients"),
    ],
)
def test_settings_that_will_not_do_are_named(parameters, text):
    with pytest.raises(ConfigError, match=text):
        FederatedClassifier(**parameters).fit(X, Y)


def test_bad_input_is_named():
    model = FederatedClassifier(**QUICK)
    for clients, text in (
        (SITE[:10], r"clients has shape \(10,\)"),
        (np.where(np.arange(len(Y)) == 4, np.nan, 1.0), "no id in row 4"),
        (np.array([1, "a"] * 300, dtype=object)[: len(Y)], "both text and numbers"),
    ):
        with pytest.raises(ValueError, match=text):
            model.fit(X, Y, clients=clients)
    with pytest.raises(ValueError, match="only one class"):
        model.fit(X, np.ones(len(Y)))
    with pytest.raises(DataError, match="row 0, column 2, too large for float32"):
        model.fit(np.where(np.arange(30) == 2, 1e300, X), Y)
    with pytest.raises(DataError, match="3 samples are not enough for 5 clients"):
        model.fit(X[17:20], Y[17:20])
    with pytest.raises(DataError, match="nothing to learn"):
        FederatedRegressor(**QUICK).fit(X, np.ones(len(Y)))
    with pytest.raises(RunError, match="a smaller"):
        model.set_params(rounds=9, training={"lr": 1e30, "epochs": 3}).fit(X, Y)
    with pytest.raises(RunError, match="no round had an update: client 0: "):
        model.set_params(rounds=1).fit(X, Y)


def test_numbers_of_which_float32_keeps_too_little_are_named():
    """All that tells the classes apart is lost where a large constant is added."""
    x = np.arange(60.0)[:, None]
    model = FederatedClassifier(**QUICK, n_clients=2)
    with pytest.warns(
        FedbayesWarning, match="'column 0' has a rounding error of 59 in float32, and a standard"
    ):
        model.fit(x + 1_700_000_000, x[:, 0] > 30)
    with pytest.warns(FedbayesWarning, match="'y' has a rounding error of"):
        FederatedRegressor(**QUICK, n_clients=2).fit(x, 1000 * x[:, 0] + 1_700_000_000)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "X: ")
        model.fit(np.c_[x, x * 0 + 1_700_000_000, x * 1e9], x[:, 0] > 30)
