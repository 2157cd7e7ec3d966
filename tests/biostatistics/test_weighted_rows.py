"""Columns that nearly depend on one another, rows with weights, and rows that enter late."""

import json
import warnings

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm

from fedbayes.biostatistics import cox, glm, kaplan_meier, meta_analysis
from fedbayes.errors import ConfigError, DataError, FedbayesWarning
from tests.helpers.command_line import command

lifelines = pytest.importorskip("lifelines")

pytestmark = [
    pytest.mark.filterwarnings("ignore::fedbayes.errors.FedbayesWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Starting with pandas"),
]

EXACT = {"precision": 1e-12}
"""Of lifelines, which else ends four digits earlier."""


def parted(table, count=3):
    return {f"s{i}": table.iloc[i::count].reset_index(drop=True) for i in range(count)}


def currencies(seed, noise=1e-5, rows=240):
    """A price in two currencies, and outcomes of all kinds."""
    rng = np.random.default_rng(seed)
    eur = rng.normal(100, 20, rows)
    usd = 1.1 * eur + noise * 20 * rng.normal(size=rows)
    z = (eur - 100) / 20
    table = pd.DataFrame({"eur": eur, "usd": usd, "line": z + rng.normal(size=rows)})
    table["event"] = (rng.uniform(size=rows) < 1 / (1 + np.exp(-0.5 * z))).astype(int)
    table["count"] = rng.poisson(np.exp(0.3 * z))
    table["time"] = rng.exponential(np.exp(-0.5 * z))
    table["seen"] = (rng.uniform(size=rows) < 0.7).astype(int)
    return table


@pytest.mark.parametrize("noise", [1e-3, 1e-4, 1e-5, 3e-6])
def test_nearly_collinear_columns_are_fitted_as_by_statsmodels(noise):
    """In twenty draws each, and of all families; the sum of the two is known to many digits."""
    families = {"gaussian": "line", "binomial": "event", "poisson": "count"}
    for seed in range(20 if noise == 1e-5 else 3):
        table = currencies(seed, noise)
        for family, outcome in families.items():
            found = glm(parted(table), outcome, ["eur", "usd"], family=family)
            scaled = (table[["eur", "usd"]] - table[["eur", "usd"]].mean()) / 20
            x = sm.add_constant(scaled)
            kind = getattr(sm.families, family.title())()
            fit = sm.GLM(table[outcome], x, family=kind).fit(tol=1e-13, maxiter=100)
            ours = 20 * found.estimates[1:]
            theirs = fit.params.to_numpy()[1:]
            np.testing.assert_allclose(ours, theirs, rtol=2e-3)
            np.testing.assert_allclose(20 * found.std_errors[1:], fit.bse[1:], rtol=2e-3)
            total = np.array([1, 1.1])
            assert ours @ total == pytest.approx(theirs @ total, rel=1e-3, abs=1e-3)
            assert found.loglik == pytest.approx(fit.llf, rel=1e-7)


def test_a_linear_fit_takes_one_step():
    """And the rounds before it, of names, kinds and moments; also where columns nearly depend."""
    for noise in (1.0, 1e-5):
        assert glm(parted(currencies(0, noise)), "line", ["eur", "usd"]).rounds == 6


@pytest.mark.parametrize("noise", [1e-4, 1e-5])
def test_nearly_collinear_hazards(noise):
    for seed in range(2):
        table = currencies(seed, noise)
        found = cox(parted(table), "time", "seen", ["eur", "usd"], ties="breslow")
        scaled = (table[["eur", "usd"]] - table[["eur", "usd"]].mean()) / 20
        fit = sm.PHReg(table.time, scaled, status=table.seen, ties="breslow")
        assert found.loglik == pytest.approx(fit.loglike(20 * found.estimates), rel=1e-9)
        gradient = fit.score(20 * found.estimates)
        assert np.abs(gradient @ np.array([1, -1]) / 2).max() < 1e-4


def test_the_condition_number_names_the_columns():
    table = currencies(0).assign(other=np.arange(240.0) % 7)
    clients = parted(table)
    with pytest.warns(
        FedbayesWarning, match=r"^eur, usd nearly depend.*condition number.*\(--drop"
    ):
        found = glm(clients, "line", ["eur", "usd", "other"])
    x = table[["eur", "usd", "other"]]
    x = ((x - x.mean()) / x.std(ddof=0)).assign(one=1.0)
    assert found.condition[0] == pytest.approx(np.linalg.cond(x), rel=1e-4)
    assert found.to_dict()["condition_number"] == found.condition[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert glm(clients, "line", ["eur", "other"]).condition[0] < 2
    with pytest.raises(DataError, match=r"eur, twice depend on one another.*condition number"):
        glm(parted(table.assign(twice=2 * table.eur)), "event", ["eur", "twice"], family="binomial")


@pytest.mark.parametrize("part", [False, True])
def test_separation_is_told_where_fitted_probabilities_reach_the_ends(part):
    """Of all rows, or of some of them, next to columns that nearly depend on one another too."""
    table = currencies(1)
    table["sure"] = table.event * 2.0 - 1
    if part:  # quasi-separation: below zero the outcome is certain, at zero it is not
        table["sure"] = np.where(table.event & (table.line > 0), 1.0, 0.0)
    for features in (["sure"], ["sure", "eur", "usd"]):
        with pytest.raises(
            DataError, match=r"of sure grow without bound.*fitted probabilities reach"
        ):
            glm(parted(table), "event", features, family="binomial")


def test_a_steep_fit_is_no_separation():
    """Nearly all outcomes are told apart, and fitted probabilities are within 1e-9 of 0 and 1."""
    x = np.linspace(-10, 10, 400)
    y = (x > 0).astype(int)
    y[[190, 195, 204, 209]] = 1 - y[[190, 195, 204, 209]]
    table = pd.DataFrame({"x": x, "y": y})
    found = glm(parted(table), "y", ["x"], family="binomial")
    fit = sm.Logit(y, sm.add_constant(x)).fit(disp=0, tol=1e-14, maxiter=100)
    np.testing.assert_allclose(found.estimates, fit.params, rtol=1e-6, atol=1e-12)


def test_a_curve_of_censored_rows_is_one(tmp_path, capsys):
    table = pd.DataFrame({"t": np.arange(1.0, 31), "e": 0, "g": ["a", "b"] * 15})
    for event in (0, 0.0, False):
        found = kaplan_meier(parted(table.assign(e=event)), "t", "e", by="g")
        assert (found.frame().survival == 1).all()
        assert (found.frame().low == 1).all()
        assert found.test.chi2 == 0
        assert found.test.p == 1
        assert all(np.isinf(curve.median()[0]) for curve in found.curves.values())
    texts = parted(table.assign(e="alive"))
    with pytest.raises(DataError, match=r"'e' is 'alive' in all 30 rows.*--event-value"):
        kaplan_meier(texts, "t", "e")
    assert (kaplan_meier(texts, "t", "e", happened="dead").frame().survival == 1).all()
    table.to_csv(tmp_path / "t.csv", index=False)
    given = ["stats", "km", str(tmp_path / "t.csv"), "--group", "g", "--time", "t"]
    command(*[*given, "--event", "e", "--plot", str(tmp_path / "km.svg")])
    assert "not reached" in capsys.readouterr().out
    with pytest.raises(DataError, match="nothing to explain"):
        cox(parted(table), "t", "e", ["g"])


@pytest.fixture(scope="module")
def cohort():
    """Rows that enter late, with ties, weights and strata."""
    rng = np.random.default_rng(3)
    n = 240
    x, z = rng.normal(size=n), rng.integers(0, 2, n).astype(float)
    entry = rng.exponential(0.4, n)
    time = entry + 0.05 + rng.exponential(np.exp(-0.5 * x + 0.3 * z))
    table = pd.DataFrame({"x": x, "z": z, "entry": entry, "time": time})
    table["event"] = (rng.uniform(size=n) < 0.7).astype(int)
    table["copies"] = rng.integers(0, 4, n)
    table["w"] = rng.gamma(2.0, 0.5, n) + 0.05
    table["g"] = np.where(rng.uniform(size=n) < 0.5, "a", "b")
    return table


def tied(table, step=0.25):
    """Times as multiples of a step."""
    table = table.copy()
    table["time"] = np.ceil(table.time / step) * step
    table["entry"] = np.floor(table.entry / step) * step
    return table


@pytest.mark.parametrize("ties", [False, True])
def test_late_entries_are_those_of_lifelines(cohort, ties):
    table = tied(cohort) if ties else cohort
    found = cox(parted(table), "time", "event", ["x", "z"], entry="entry")
    fit = lifelines.CoxPHFitter().fit(
        table[["x", "z", "entry", "time", "event"]],
        "time",
        "event",
        entry_col="entry",
        fit_options=EXACT,
    )
    np.testing.assert_allclose(found.estimates, fit.params_, rtol=1e-6)
    np.testing.assert_allclose(found.std_errors, fit.standard_errors_, rtol=1e-6)
    assert found.loglik == pytest.approx(fit.log_likelihood_, rel=1e-9)
    curve = kaplan_meier(parted(table), "time", "event", entry="entry").frame()
    there = lifelines.KaplanMeierFitter().fit(table.time, table.event, entry=table.entry)
    at = there.survival_function_at_times(curve.time)
    np.testing.assert_allclose(curve.survival, at, rtol=1e-9)


@pytest.mark.parametrize("ties", ["efron", "breslow"])
def test_late_entries_are_those_of_statsmodels_in_strata_too(cohort, ties):
    table = tied(cohort)
    strata, later = table.g.map({"a": 0, "b": 1}), table.entry + 1e-9
    # To statsmodels who enters at an event time is at risk there, to R and lifelines not.
    for given, options in (({}, {}), ({"strata": strata}, {"strata": "g"})):
        found = cox(parted(table), "time", "event", ["x", "z"], entry="entry", ties=ties, **options)
        fit = sm.PHReg(
            table.time, table[["x", "z"]], status=table.event, entry=later, ties=ties, **given
        )
        assert np.abs(fit.score(found.estimates)).max() < 1e-6
        assert found.loglik == pytest.approx(fit.loglike(found.estimates), rel=1e-9)
    alone = dict(iter(table.groupby("g")))
    apart = cox(alone, "time", "event", ["x", "z"], entry="entry", ties=ties, strata="client")
    np.testing.assert_allclose(apart.estimates, found.estimates, rtol=1e-8)


def test_an_entry_is_before_its_time(cohort):
    late = cohort.assign(entry=cohort.time)
    with pytest.raises(DataError, match="entry time 'entry' is not before 'time' in 80 rows"):
        cox(parted(late), "time", "event", ["x"], entry="entry")


@pytest.mark.parametrize("truncated", [False, True])
def test_a_weight_is_so_many_rows_of_survival(cohort, truncated):
    """After Breslow, whose ties make no difference to copies; and of curves and their test."""
    table, options = tied(cohort), {"entry": "entry"} if truncated else {}
    copied = table.loc[table.index.repeat(table.copies)]
    weighted = {"weights": "copies", **options}
    for strata in ("", "g", "client"):
        given = {"ties": "breslow", "strata": strata}
        found = cox(parted(table), "time", "event", ["x", "z"], **given, **weighted)
        parts = {name: p.loc[p.index.repeat(p.copies)] for name, p in parted(table).items()}
        wanted = cox(parts, "time", "event", ["x", "z"], **given, **options)
        np.testing.assert_allclose(found.estimates, wanted.estimates, rtol=1e-9)
        np.testing.assert_allclose(found.std_errors, wanted.std_errors, rtol=1e-9)
        assert found.loglik == pytest.approx(wanted.loglik)
        assert (found.events, found.total) == (wanted.events, wanted.total)
        if strata != "client":
            np.testing.assert_allclose(found.baseline.survival, wanted.baseline.survival, rtol=1e-9)
    ours = kaplan_meier(parted(table), "time", "event", by="g", **weighted)
    theirs = kaplan_meier(parted(copied), "time", "event", by="g", **options)
    pd.testing.assert_frame_equal(ours.frame(), theirs.frame())
    assert ours.test.chi2 == pytest.approx(theirs.test.chi2)


def test_weights_after_efron_are_those_of_lifelines(cohort):
    table = tied(cohort)[["x", "z", "time", "event", "copies"]]
    table = table[table.copies > 0]
    found = cox(parted(table), "time", "event", ["x", "z"], weights="copies")
    fit = lifelines.CoxPHFitter().fit(
        table, "time", "event", weights_col="copies", fit_options=EXACT
    )
    np.testing.assert_allclose(found.estimates, fit.params_, rtol=1e-6)
    np.testing.assert_allclose(found.std_errors, fit.standard_errors_, rtol=1e-5)


@pytest.mark.parametrize("unit", [1.0, 1000.0])
@pytest.mark.parametrize("family", ["gaussian", "binomial", "poisson"])
def test_sample_weights_of_a_regression_are_those_of_statsmodels(family, unit):
    rng = np.random.default_rng(1)
    table = currencies(1, noise=1.0).assign(w=rng.gamma(2.0, 1.0, 240))
    outcome = {"gaussian": "line", "binomial": "event", "poisson": "count"}[family]
    given = table.assign(w=unit * table.w)
    found = glm(parted(given), outcome, ["eur", "usd"], family=family, sample_weight="w")
    kind = getattr(sm.families, family.title())()
    x = sm.add_constant(table[["eur", "usd"]])
    weights = table.w / table.w.mean()
    fit = sm.GLM(table[outcome], x, family=kind, var_weights=weights).fit(cov_type="HC0", tol=1e-13)
    np.testing.assert_allclose(found.estimates, fit.params, rtol=1e-6)
    np.testing.assert_allclose(found.std_errors, fit.bse, rtol=1e-5)
    assert found.deviance == pytest.approx(fit.deviance)
    assert found.freedom == fit.df_resid
    assert found.robust
    assert found.dispersion == pytest.approx(fit.scale)


def test_sample_weights_of_hazards_are_those_of_lifelines(cohort):
    table = cohort[["x", "z", "time", "event", "w"]]
    found = cox(parted(table), "time", "event", ["x", "z"], sample_weight="w")
    fit = lifelines.CoxPHFitter().fit(
        table, "time", "event", weights_col="w", robust=True, fit_options=EXACT
    )
    np.testing.assert_allclose(found.estimates, fit.params_, rtol=1e-6)
    np.testing.assert_allclose(found.std_errors, fit.standard_errors_, rtol=1e-5)
    other = cox(parted(table.assign(w=1e3 * table.w)), "time", "event", sample_weight="w")
    np.testing.assert_allclose(other.estimates, found.estimates, rtol=1e-8)
    np.testing.assert_allclose(other.std_errors, found.std_errors, rtol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("strata", ["", "g", "client"])
@pytest.mark.parametrize("ties", ["efron", "breslow"])
def test_robust_errors_of_hazards_are_the_infinitesimal_jackknife(cohort, ties, strata):
    """What a little more weight of each row does to the coefficients, by fitting again; with ties,
    late entries and strata. (Mean weights of tied events are held, as in R's survival.)
    """
    table = tied(cohort, 0.05)[:24]
    given = {"entry": "entry", "ties": ties, "strata": strata, "features": ["x", "z"]}
    found = cox(parted(table), "time", "event", sample_weight="w", **given)
    ours, theirs, step = found.covariance, np.zeros((2, 2)), 1e-5
    tolerance = 1e-4 if ties == "breslow" else 0.05
    for row in table.index:
        moved = table.copy()
        moved.loc[row, "w"] *= 1 + step
        shift = cox(parted(moved), "time", "event", weights="w", **given).estimates
        away = (shift - found.estimates) / step
        theirs += np.outer(away, away)
    np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance * np.diag(ours).min())


@pytest.mark.parametrize("truncated", [False, True])
def test_sample_weights_of_curves(cohort, truncated):
    """Curves are those of lifelines; their errors are those of moving each weight a little, and
    Greenwood's where all weights are the same.
    """
    table, options = tied(cohort, 0.05)[:24], {"entry": "entry"} if truncated else {}
    options["by"] = "g"
    found = kaplan_meier(parted(table), "time", "event", sample_weight="w", **options)
    assert found.test is None
    moves = {name: np.zeros(len(curve.times)) for name, curve in found.curves.items()}
    step = 1e-6
    for row in table.index:
        moved = table.copy()
        moved.loc[row, "w"] *= 1 + step
        shifted = kaplan_meier(parted(moved), "time", "event", weights="w", **options)
        for name, curve in shifted.curves.items():
            moves[name] += ((curve.survival - found.curves[name].survival) / step) ** 2
    for name, curve in found.curves.items():
        np.testing.assert_allclose(curve.std_errors, np.sqrt(moves[name]), rtol=1e-3, atol=1e-6)
        own = table[table.g == name]
        entry = own.entry if truncated else None
        fit = lifelines.KaplanMeierFitter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit.fit(own.time, own.event, entry=entry, weights=own.w)
        at = fit.survival_function_at_times(curve.times)
        left = curve.survival > 0  # at 0, lifelines has what rounding left of it
        np.testing.assert_allclose(curve.survival[left], at[left], rtol=1e-9)
    same = kaplan_meier(parted(table.assign(w=7.0)), "time", "event", sample_weight="w", **options)
    plain = kaplan_meier(parted(table), "time", "event", **options)
    for name, curve in plain.curves.items() if not truncated else ():
        np.testing.assert_allclose(same.curves[name].std_errors, curve.std_errors, rtol=1e-9)


def test_weights_are_of_one_kind(cohort):
    for fit, given in ((cox, ["time", "event"]), (kaplan_meier, ["time", "event"]), (glm, ["x"])):
        with pytest.raises(ConfigError, match=r"weights = 'copies'.*sample_weight = 'w'"):
            fit(parted(cohort), *given, weights="copies", sample_weight="w")
    with pytest.raises(DataError, match="column 'w' has negative weights"):
        glm(parted(cohort.assign(w=-1.0)), "x", ["z"], sample_weight="w")


@pytest.mark.slow
def test_the_same_from_the_command_line_over_flower_and_in_secret(cohort, tmp_path, capsys):
    table = tied(cohort).assign(site=np.arange(240) % 3)
    table.to_csv(tmp_path / "t.csv", index=False)
    clients = {str(name): part.drop(columns="site") for name, part in table.groupby("site")}
    given = [str(tmp_path / "t.csv"), "--group", "site", "--json"]
    survival = ["--time", "time", "--event", "event", "--entry", "entry", "--sample-weight", "w"]
    over = ["--engine", "flower-simulation", "--secure"]

    def told(*words):
        command(*words)
        return json.loads(capsys.readouterr().out)

    expected = cox(clients, "time", "event", ["x", "z"], entry="entry", sample_weight="w").to_dict()
    for more in ([], over):
        found = told("stats", "cox", *given, *survival, "-x", "x,z", *more)
        for name in ("coefficients", "std_errors"):
            assert found[name] == pytest.approx(expected[name], rel=1e-9)
    curves = kaplan_meier(clients, "time", "event", entry="entry", sample_weight="w").to_dict()
    found = told("stats", "km", *given, *survival, *over)
    assert found["curves"]["all"]["std_error"] == pytest.approx(
        curves["curves"]["all"]["std_error"]
    )
    line = glm(clients, "x", ["z"], sample_weight="w").to_dict()
    found = told("stats", "glm", *given, "-y", "x", "-x", "z", "--sample-weight", "w", *over)
    assert found["std_errors"] == pytest.approx(line["std_errors"], rel=1e-9)
    both = meta_analysis(
        clients,
        family="cox",
        time="time",
        event="event",
        features=["x"],
        entry="entry",
        weights="w",
    )
    assert len(both.coefficients["x"].sites) == 3
