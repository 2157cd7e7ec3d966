"""Probabilities of survival from networks: baseline hazards against lifelines and by definition."""

import json
import math
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedbayes
from fedbayes.core.seals import sealed_table, unsealed_table
from fedbayes.errors import ConfigError, FedbayesWarning, ModelError, RunError
from fedbayes.likelihoods.hazards import Hazards, at_risk, breslow, event_counts
from fedbayes.runs.build import stored_data
from fedbayes.workflows.calibrate.hazards import _as_written, estimate_hazards
from fedbayes.workflows.serve.export import export
from tests.helpers.command_line import command
from tests.helpers.regressions import rossi, settings_of

lifelines = pytest.importorskip("lifelines")

pytestmark = pytest.mark.filterwarnings("ignore::fedbayes.errors.FedbayesWarning")


def estimated(parts):
    """From what clients send: [(risk, y)]."""
    told = [event_counts(y) for _, y in parts]
    times = np.unique(np.concatenate([own for own, _ in told]))
    events, sums = np.zeros(len(times)), np.zeros(len(times))
    for (risk, y), (own, counts) in zip(parts, told, strict=True):
        events[np.searchsorted(times, own)] += counts
        sums += at_risk(risk, y, times)
    last = max(y[:, 0].max() for _, y in parts)
    return breslow(times, events, sums, last=float(last), rows=sum(len(y) for _, y in parts))


@given(
    st.lists(
        st.tuples(st.integers(0, 6), st.booleans(), st.floats(-3, 3)), min_size=1, max_size=25
    ).filter(lambda rows: any(event for _, event, _ in rows)),
    st.integers(1, 4),
)
def test_hazards_are_those_of_the_definition(rows, clients):
    """Whoever holds which rows."""
    y = np.array([[time, event] for time, event, _ in rows], float)
    risk = np.array([one for _, _, one in rows])
    parts = [(risk[k::clients], y[k::clients]) for k in range(clients)]
    found = estimated([part for part in parts if len(part[1])])
    for at in (-1, 0, 0.5, 3, 6, 9):
        wanted = 0.0
        for time in sorted({t for t, event, _ in rows if event and t <= at}):
            deaths = sum(event and t == time for t, event, _ in rows)
            wanted += deaths / sum(math.exp(r) for t, _, r in rows if t >= time)
        assert found.at([at])[0] == pytest.approx(wanted, rel=1e-9)


def test_survival_is_that_of_lifelines():
    """Of lifelines' own log-risks: the same probabilities."""
    from lifelines.datasets import load_rossi

    frame = load_rossi()
    fit = lifelines.CoxPHFitter().fit(frame, "week", "arrest")
    risk = fit.predict_log_partial_hazard(frame).to_numpy()
    y = frame[["week", "arrest"]].to_numpy(float)
    where = np.random.default_rng(0).integers(0, 4, len(frame))
    found = estimated([(risk[where == k], y[where == k]) for k in range(4)])
    times = [1, 10, 20, 52]  # in between lifelines interpolates
    wanted = fit.predict_survival_function(frame, times=times).T.to_numpy()
    np.testing.assert_allclose(found.survival(risk, times), wanted, atol=1e-9)
    assert found.events == frame.arrest.sum()
    # A constant in all log-risks changes nothing.
    moved = estimated([(risk + 7, y)])
    np.testing.assert_allclose(moved.survival(risk + 7, times), wanted, atol=1e-9)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A linear network that has become the regression, of rows of three sites."""
    place = tmp_path_factory.mktemp("rossi")
    frame = rossi(place)
    given = {"model": {"hidden": []}, "rounds": 8, "method": {"name": "fedavg"}}
    given["training"] = {"batch_size": 1000, "epochs": 20, "lr": 0.3}
    found = fedbayes.run(**settings_of(place, **given), folder=place / "run")
    return place, frame, found


def test_a_run_tells_probabilities_of_survival(run, tmp_path):
    place, frame, result = run
    out = tmp_path / "out.csv"
    told = estimate_hazards(place / "run", per_client=True)
    times = [10, 26.5, 52]
    data = stored_data(result.config, result.folder)
    rows = np.concatenate([data.partition.train_rows(k) for k in range(3)])
    x = frame.drop(columns=["week", "arrest", "site"])
    risk = fedbayes.load(place / "run").expectation(x)[:, 0].double().numpy()
    y = frame[["week", "arrest"]].to_numpy(float)
    wanted = estimated([(risk[rows], y[rows])]).survival(risk, times)
    arguments = ["predict", place / "run", place / "rossi.csv", "-o", out]
    assert command(*arguments, "--times", "10,26.5", "--times", "52") == 0
    table = pd.read_csv(out)
    names = ["survival_10", "survival_26.5", "survival_52"]
    assert list(table.columns)[-4:] == ["risk", *names]
    np.testing.assert_allclose(table[names], wanted, atol=1e-5)
    near = fedbayes.load(place / "run").foretelling([0.1, 5, 10.0000001, 10.0000002])
    digits = ["survival_0.1", "survival_5", "survival_10.0000001", "survival_10.0000002"]
    assert list(near.predict_frame(x).columns)[-4:] == digits
    # The regression of lifelines on the same rows, as far as the network is that.
    fit = lifelines.CoxPHFitter().fit(frame.drop(columns="site").iloc[rows], "week", "arrest")
    regression = fit.predict_survival_function(x, times=[10, 26, 52]).T.to_numpy()
    assert np.abs(table[names].to_numpy() - regression).max() < 0.08
    assert np.abs(table[names].to_numpy() - regression).mean() < 0.02
    # How many events were to be expected, by hand.
    tests = data.partition.test
    hazards = estimated([(risk[rows], y[rows])])
    own = fedbayes.load(place / "run", site="site 1")
    assert own.hazards.rows == len(data.partition.train_rows(1))
    whole = estimate_hazards(place / "run").all
    expected = (hazards.at(y[tests, 0]) * np.exp(risk[tests])).sum()
    assert whole.expected == pytest.approx(expected, rel=1e-4)
    assert whole.observed == y[tests, 1].sum()
    assert told.rows == len(rows)


@pytest.mark.parametrize("coarsen", [0.0, 0.1, 0.25])
def test_times_are_those_of_the_table_and_not_of_float32(coarsen):
    """An event at 0.1 has happened by 0.1; and what is on a grid stays there."""
    times = np.random.default_rng(0).integers(1, 400, 200) / 10
    found = _as_written(times.astype(np.float32), coarsen)
    steps = [Fraction(str(time)) / Fraction(str(coarsen or 0.1)) for time in times]
    wanted = [float(math.ceil(step) * Fraction(str(coarsen or 0.1))) for step in steps]
    assert found.tolist() == wanted


def test_training_rows_expect_as_many_events_as_there_are(run):
    """A property of Breslow's estimate: over the rows it is of, expected events are observed."""
    place, _, _ = run
    found = estimate_hazards(place / "run", rows="test")
    assert found.all.expected == pytest.approx(found.all.observed, rel=1e-6)
    alone = estimate_hazards(place / "run", rows="test", per_client=True)
    for one in alone.clients.values():
        assert one.expected == pytest.approx(one.observed, rel=1e-6)


def test_files_and_sites_have_their_hazards(run, tmp_path):
    place, frame, _ = run
    estimate_hazards(place / "run", per_client=True, coarsen=13)
    model = fedbayes.load(place / "run").foretelling([26, 52])
    wanted = model.predict_frame(frame)
    assert set(model.hazards.times) == {13.0, 26.0, 39.0, 52.0}
    for name in ("model.safetensors", "model.pt2"):
        export(place / "run", tmp_path / name)
        found = fedbayes.load(tmp_path / name).foretelling([26, 52]).predict_frame(frame)
        np.testing.assert_allclose(found.survival_26, wanted.survival_26, atol=1e-5)
    site = fedbayes.load(place / "run", site="site 2").foretelling([52]).predict_frame(frame)
    assert np.abs(site.survival_52 - wanted.survival_52).max() > 1e-3


def test_what_cannot_be_told_is_said(run, tmp_path, capsys):
    place, _, _ = run
    assert command("hazards", place / "run", "--json") == 0
    assert json.loads(capsys.readouterr().out)["last"] == 52
    assert command("hazards", place / "run") == 0
    assert "wrote" in capsys.readouterr().out
    arguments = ["predict", place / "run", place / "rossi.csv", "-o", tmp_path / "o.csv"]
    for more, words in (
        (["--times", "60"], "the longest observation was 52. Choose"),
        (["--times", "x"], "--times has 'x'"),
        (["--site", "site 1", "--times", "9"], "has no hazards of client site 1"),
    ):
        assert command(*arguments, *more) == 2
        assert words in " ".join(capsys.readouterr().err.split())
        assert not (tmp_path / "o.csv").exists()
    for step in (-1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match=f"coarsen is {step:g}. Give 0, or a number"):
            estimate_hazards(place / "run", coarsen=step)
    with pytest.raises(ConfigError, match="rows is 'all'"):
        estimate_hazards(place / "run", rows="all")
    fedbayes.run(folder=tmp_path / "digits", data={"clients": 2}, rounds=1)
    with pytest.raises(ConfigError, match="need a survival likelihood"):
        estimate_hazards(tmp_path / "digits")
    with pytest.raises(ConfigError, match="times work only with survival"):
        fedbayes.load(tmp_path / "digits").foretelling([1])
    path = place / "run" / "calibration.json"
    known = unsealed_table(path.read_bytes())
    path.write_bytes(sealed_table(known | {"hazards": known["hazards"] | {"model": "another"}}))
    with pytest.warns(FedbayesWarning, match=r"calibration\.json \(hazards\) belongs to another"):
        model = fedbayes.load(place / "run")
    with pytest.raises(
        ConfigError,
        match=r"no baseline hazard\. .* fedbayes calibrate RUN --method hazards",
    ):
        model.foretelling([1])
    text = json.dumps(known)
    assert '"last": 52.0' in text
    path.write_bytes(sealed_table(json.loads(text.replace('"last": 52.0', '"last": 1.0'))))
    with pytest.raises(RunError, match=r"cannot read .*calibration\.json"):
        fedbayes.load(place / "run")
    path.unlink()


def test_hazards_that_cannot_be():
    with pytest.raises(ModelError, match="has diverged"):
        at_risk(np.array([800.0]), np.array([[1.0, 1.0]]), np.array([1.0]))
    for times, cumulative, last in (
        ((), (), 1.0),
        ((1.0, 1.0), (0.1, 0.2), 2.0),
        ((1.0, 2.0), (0.2, 0.1), 2.0),
        ((1.0,), (math.nan,), 2.0),
    ):
        with pytest.raises(ValueError, match="not a cumulative hazard"):
            Hazards(times, cumulative, last, 1, 1)
