"""Regressions and curves of clients' sums against statsmodels and lifelines on the pooled rows."""

import itertools
import math
import unicodedata
import warnings
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbayes.biostatistics import cox, glm, kaplan_meier, meta_analysis, pool
from fedbayes.biostatistics.curves import Curve
from fedbayes.errors import ColumnError, ConfigError, DataError

sm = pytest.importorskip("statsmodels.api")
lifelines = pytest.importorskip("lifelines")

from lifelines.datasets import load_gbsg2, load_lung, load_rossi  # noqa: E402
from sklearn.datasets import load_breast_cancer, load_diabetes  # noqa: E402
from statsmodels.stats.meta_analysis import combine_effects  # noqa: E402

MOST = 1e-6
"""Largest difference of a coefficient from the pooled fit."""


def parted(table, count, seed=0):
    """The rows at random among so many clients."""
    where = np.random.default_rng(seed).integers(0, count, len(table))
    return {f"site {c}": table[where == c].reset_index(drop=True) for c in range(count)}


def dummies(table, columns):
    return pd.get_dummies(table[columns], drop_first=True, dtype=float, prefix_sep="=")


def agrees(found, fit, names=None):
    """Coefficients, errors, p-values, intervals and likelihood are a statsmodels fit's."""
    order = [(names or {}).get(name, name) for name in found.names]
    order = ["const" if name == "intercept" else name for name in order]
    assert np.abs(found.estimates - fit.params[order]).max() < MOST
    assert np.abs(found.std_errors - fit.bse[order]).max() < MOST
    assert np.abs(found.p_values - fit.pvalues[order]).max() < MOST
    assert np.abs(found.intervals(0.9) - fit.conf_int(0.1).loc[order]).to_numpy().max() < MOST
    assert found.loglik == pytest.approx(fit.llf, abs=1e-7)
    assert found.aic == pytest.approx(fit.aic, abs=1e-6)


@pytest.fixture(scope="module")
def cancer():
    table = load_gbsg2()
    table["many"] = (table.pnodes > 4).astype(int)
    return table


def test_linear_regression_is_the_pooled_one():
    table = load_diabetes(as_frame=True, scaled=False).frame
    found = glm(parted(table, 4), "target")
    fit = sm.OLS(table.target, sm.add_constant(table.drop(columns="target"))).fit()
    agrees(found, fit)
    assert found.bic == pytest.approx(fit.bic)
    assert found.to_dict()["r_squared"] == pytest.approx(fit.rsquared)
    assert found.dispersion == pytest.approx(fit.scale)
    assert found.statistic == "t"


def test_logistic_regression_is_the_pooled_one():
    table = load_breast_cancer(as_frame=True).frame
    columns = ["mean radius", "mean texture", "mean smoothness", "mean symmetry"]
    found = glm(parted(table, 5), "target", columns, family="binomial")
    model = sm.GLM(table.target, sm.add_constant(table[columns]), family=sm.families.Binomial())
    fit = model.fit(tol=1e-14, maxiter=100)
    agrees(found, fit)
    assert found.deviance == pytest.approx(fit.deviance)
    assert found.null_deviance == pytest.approx(fit.null_deviance)
    assert found.frame().loc["mean radius", "odds_ratio"] == pytest.approx(
        np.exp(fit.params["mean radius"])
    )


def test_categories_and_flags_are_coded_as_pooled(cancer):
    table = cancer.assign(old=cancer.age > 60)
    columns = ["age", "horTh", "tgrade", "old"]
    found = glm(parted(table, 4), "many", columns, family="binomial")
    assert found.names == ("intercept", "age", "horTh=yes", "tgrade=II", "tgrade=III", "old")
    x = sm.add_constant(dummies(table, columns).assign(old=table.old.astype(float)))
    fit = sm.GLM(table.many, x, family=sm.families.Binomial()).fit(tol=1e-14)
    agrees(found, fit)
    other = glm(parted(table, 4), "many", columns, family="binomial", references={"tgrade": "III"})
    assert other.names[3:5] == ("tgrade=I", "tgrade=II")
    assert other.estimates[4] == pytest.approx(found.estimates[3] - found.estimates[4])


def test_a_category_that_a_client_lacks_counts_all_the_same(cancer):
    clients = dict(list(cancer.groupby("tgrade")))
    found = glm(clients, "many", ["age", "tgrade"], family="binomial")
    x = sm.add_constant(dummies(cancer, ["age", "tgrade"]))
    agrees(found, sm.GLM(cancer.many, x, family=sm.families.Binomial()).fit(tol=1e-14))


def test_numbers_are_categories_where_they_are_called_so():
    table = load_rossi()
    found = glm(parted(table, 3), "week", ["age", "prio"], categories=["prio"])
    levels = sorted(table.prio.unique())[1:]
    assert found.names == ("intercept", "age", *(f"prio={level}" for level in levels))


def test_poisson_regression_with_exposure_is_the_pooled_one(cancer):
    columns = ["age", "tsize", "tgrade"]
    found = glm(parted(cancer, 4), "pnodes", columns, family="poisson", exposure="time")
    x = sm.add_constant(dummies(cancer, columns))
    model = sm.GLM(cancer.pnodes, x, family=sm.families.Poisson(), exposure=cancer.time)
    fit = model.fit(tol=1e-14, maxiter=100)
    agrees(found, fit)
    assert found.null_deviance == pytest.approx(fit.null_deviance)


@pytest.mark.parametrize("family", ["binomial", "gaussian"])
def test_an_offset_is_added_to_the_predictor(cancer, family):
    table = cancer.assign(known=cancer.tsize / 50, y=cancer.many if family == "binomial" else
                          cancer.progrec)  # fmt: skip
    found = glm(parted(table, 3), "y", ["age"], family=family, offset="known")
    kind = {"binomial": sm.families.Binomial(), "gaussian": sm.families.Gaussian()}[family]
    x = sm.add_constant(table[["age"]])
    fit = sm.GLM(table.y, x, family=kind, offset=table.known).fit(tol=1e-14)
    assert np.abs(found.estimates - fit.params).max() < MOST
    assert np.abs(found.std_errors - fit.bse).max() < MOST
    assert found.null_deviance == pytest.approx(fit.null_deviance)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_offsets_may_be_large_where_their_exponential_is_of_no_count(cancer):
    """Of a line they are a value before; of an event, predictors at which μ rounds to 0 or 1."""
    table = cancer.assign(before=cancer.age * 40 + 1e3, sure=cancer.tsize.astype(float))
    clients = parted(table, 3)
    found = glm(clients, "progrec", ["age"], offset="before")
    fit = sm.OLS(table.progrec - table.before, sm.add_constant(table[["age"]])).fit()
    np.testing.assert_allclose(found.estimates, fit.params, rtol=1e-9)
    np.testing.assert_allclose(found.std_errors, fit.bse, rtol=1e-9)
    found = glm(clients, "many", ["age"], family="binomial", offset="sure")
    eta = found.estimates @ np.array([np.ones(len(table)), table.age]) + table.sure
    loglik = -np.logaddexp(0, np.where(table.many, -eta, eta)).sum()
    assert found.deviance == pytest.approx(-2 * loglik)
    assert np.isfinite(found.null_deviance)
    assert found.null_deviance == pytest.approx(-2 * found.null_loglik)
    sure = parted(cancer.assign(sure=np.where(cancer.many, -80.0, 80.0)), 3)
    with pytest.raises(DataError, match="the coefficients of intercept grow without bound"):
        glm(sure, "many", ["age"], family="binomial", offset="sure")
    with pytest.raises(DataError, match=r"client site 0: the offset is above 500 .* logarithm"):
        glm(clients, "pnodes", ["age"], family="poisson", offset="before")


@pytest.mark.parametrize("family", ["gaussian", "binomial", "poisson"])
def test_a_weight_is_so_many_rows(cancer, family):
    table = cancer.assign(times=np.random.default_rng(1).integers(0, 4, len(cancer)))
    y = {"gaussian": "progrec", "binomial": "many", "poisson": "pnodes"}[family]
    found = glm(parted(table, 3), y, ["age", "horTh"], family=family, weights="times")
    repeated = table.loc[table.index.repeat(table.times)].reset_index(drop=True)
    same = glm({"all": repeated}, y, ["age", "horTh"], family=family)
    assert np.abs(found.estimates - same.estimates).max() < 1e-9
    assert np.abs(found.std_errors / same.std_errors - 1).max() < 1e-9
    assert found.aic == pytest.approx(same.aic)


def test_scales_far_apart_do_no_harm():
    rng = np.random.default_rng(3)
    table = pd.DataFrame({"year": 2020 + rng.integers(-5, 6, 800), "mol": 1e-9 * rng.random(800),
                          "cells": 1e9 + 1e6 * rng.standard_normal(800)})  # fmt: skip
    eta = 0.2 * (table.year - 2020) + 1e9 * table.mol + (table.cells - 1e9) / 1e6 - 0.5
    table["y"] = (rng.random(800) < 1 / (1 + np.exp(-eta))).astype(int)
    found = glm(parted(table, 4), "y", family="binomial")
    near = (table.drop(columns="y") - [2020, 0, 1e9]) / [1, 1e-9, 1e6]
    fit = sm.GLM(table.y, sm.add_constant(near), family=sm.families.Binomial()).fit(tol=1e-14)
    back = fit.params.to_numpy()[1:] / [1, 1e-9, 1e6]
    assert np.abs(found.estimates[1:] / back - 1).max() < 1e-8


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_how_rows_are_divided_makes_no_difference(count, seed):
    rng = np.random.default_rng(seed)
    table = pd.DataFrame({"a": rng.normal(size=60), "b": rng.choice(["u", "v"], 60)})
    table["y"] = rng.poisson(np.exp(0.3 * table.a + 0.2))
    whole = glm({"all": table}, "y", family="poisson")
    clients = {name: part for name, part in parted(table, count, seed).items() if len(part)}
    found = glm(clients, "y", family="poisson")
    assert np.abs(found.estimates - whole.estimates).max() < 1e-9
    assert np.abs(found.covariance - whole.covariance).max() < 1e-9


@pytest.mark.parametrize("ties", ["efron", "breslow"])
def test_cox_regression_is_the_pooled_one(cancer, ties):
    table = cancer.drop(columns="many")
    found = cox(parted(table, 4), "time", "cens", ties=ties)
    x = dummies(table, [c for c in table if c not in ("time", "cens")])
    fit = sm.PHReg(table.time, x, status=table.cens, ties=ties).fit(tol=1e-12)
    order = [list(x).index(name) for name in found.names]
    assert np.abs(found.estimates - fit.params[order]).max() < MOST
    assert np.abs(found.std_errors - fit.bse[order]).max() < MOST
    assert found.loglik == pytest.approx(fit.llf, abs=1e-7)


def coarse(table, to):
    return table.assign(time=np.ceil(table.time / to) * to)


@pytest.mark.parametrize("to", [0, 60])
def test_cox_regression_is_that_of_lifelines(cancer, to):
    """With coarse times nearly every event is tied."""
    table = cancer.drop(columns="many")
    found = cox(parted(table, 4), "time", "cens", coarsen=to)
    pooled = coarse(table, to) if to else table
    x = dummies(pooled, list(pooled))
    fit = lifelines.CoxPHFitter().fit(x, "time", "cens", fit_options={"precision": 1e-14})
    order = list(found.names)
    assert np.abs(found.estimates - fit.params_[order]).max() < MOST
    assert np.abs(found.std_errors - fit.standard_errors_[order]).max() < MOST
    assert found.loglik == pytest.approx(fit.log_likelihood_, abs=1e-7)
    test = fit.log_likelihood_ratio_test()
    assert found.ratio_test[0] == pytest.approx(test.test_statistic, abs=1e-6)
    baseline = lifelines.CoxPHFitter().fit(x, "time", "cens").baseline_cumulative_hazard_
    if not to:  # lifelines too takes Breslow's hazard, at the mean of the features
        theirs = baseline.loc[found.baseline.time].to_numpy()[:, 0]
        assert np.abs(found.baseline.cumulative_hazard - theirs).max() < 1e-5


def test_strata_have_hazards_of_their_own(cancer):
    table = cancer.drop(columns="many")
    found = cox(parted(table, 4), "time", "cens", ["age", "pnodes", "horTh"], strata="tgrade")
    columns = ["age", "pnodes", "horTh", "time", "cens"]
    x = dummies(table, columns).assign(tgrade=table.tgrade)
    fit = lifelines.CoxPHFitter(strata=["tgrade"]).fit(
        x, "time", "cens", fit_options={"precision": 1e-14}
    )
    assert np.abs(found.estimates - fit.params_[list(found.names)]).max() < MOST
    assert np.abs(found.std_errors - fit.standard_errors_[list(found.names)]).max() < MOST
    assert set(found.baseline.tgrade) == {"I", "II", "III"}


@pytest.mark.parametrize("ties", ["efron", "breslow"])
def test_clients_can_be_the_strata_and_then_no_times_travel(cancer, ties):
    table = coarse(cancer.drop(columns="many"), 30)
    clients = parted(table, 4)
    found = cox(clients, "time", "cens", ["age", "pnodes"], strata="client", ties=ties)
    pooled = pd.concat([part.assign(site=name) for name, part in clients.items()])
    same = cox({"all": pooled}, "time", "cens", ["age", "pnodes"], strata="site", ties=ties)
    assert np.abs(found.estimates - same.estimates).max() < 1e-9
    assert np.abs(found.std_errors - same.std_errors).max() < 1e-9
    assert found.loglik == pytest.approx(same.loglik)
    assert found.baseline is None
    assert found.floats < 200


def test_survival_curves_are_the_pooled_ones_exactly(cancer):
    found = kaplan_meier(parted(cancer, 4), "time", "cens", by="tgrade")
    pooled = kaplan_meier({"all": cancer}, "time", "cens", by="tgrade")
    for grade, curve in found.curves.items():
        same = pooled.curves[grade]
        rows = cancer[cancer.tgrade == grade]
        fit = lifelines.KaplanMeierFitter().fit(rows.time, rows.cens)
        steps = fit.event_table.query("observed > 0")
        assert (curve.times == steps.index[steps.index > 0]).all()
        assert (curve.at_risk == steps.at_risk[steps.index > 0]).all()
        assert (curve.events == steps.observed[steps.index > 0]).all()
        assert (curve.survival == same.survival).all()
        assert (curve.intervals() == same.intervals()).all()
        theirs = fit.survival_function_.loc[curve.times].to_numpy()[:, 0]
        assert np.abs(curve.survival - theirs).max() < 1e-13
        bounds = fit.confidence_interval_.loc[curve.times].to_numpy()
        assert np.abs(curve.intervals() - bounds).max() < 1e-12
        assert curve.median()[0] == fit.median_survival_time_


@pytest.mark.parametrize("half", range(1, 80))
def test_the_median_is_where_half_of_the_rows_are_left(half):
    """Also where a product of fractions is a half but for rounding."""
    times = np.arange(1.0, 2 * half + 1)
    curve = Curve(times, 2 * half - np.arange(2.0 * half), np.ones(2 * half))
    assert curve.median()[0] == half


def test_a_curve_is_the_product_of_fractions():
    table = pd.DataFrame({"t": [1, 2, 2, 3, 3, 4, 5], "d": [1, 1, 0, 1, 1, 0, 1]})
    (curve,) = kaplan_meier(parted(table, 2), "t", "d").curves.values()
    wanted = itertools.accumulate(
        [Fraction(6, 7), Fraction(5, 6), Fraction(2, 4), Fraction(0, 1)], lambda a, b: a * b
    )
    assert curve.survival == pytest.approx([float(each) for each in wanted])
    assert (curve.intervals()[-1] == 0).all()
    assert curve.std_errors[0] == pytest.approx(6 / 7 * np.sqrt(1 / (7 * 6)))


@pytest.mark.parametrize("by", ["horTh", "tgrade"])
def test_the_log_rank_test_is_that_of_lifelines(cancer, by):
    from lifelines.statistics import multivariate_logrank_test

    found = kaplan_meier(parted(cancer, 4), "time", "cens", by=by).test
    theirs = multivariate_logrank_test(cancer.time, cancer[by], cancer.cens)
    assert found.chi2 == pytest.approx(theirs.test_statistic, abs=1e-10)
    assert found.p == pytest.approx(theirs.p_value, abs=1e-12)
    assert sum(found.observed.values()) == pytest.approx(sum(found.expected.values()))


def test_lung_with_missing_values_and_status_in_two_numbers():
    table = load_lung()
    columns = ["age", "sex", "ph.ecog", "wt.loss"]
    with pytest.raises(DataError, match=r"1 of 'ph\.ecog'.*14 of 'wt\.loss'.*--drop-missing"):
        cox(parted(table, 3), "time", "status", columns)
    found = cox(parted(table, 3), "time", "status", columns, drop_missing=True)
    whole = table[["time", "status", *columns]].dropna()
    fit = lifelines.CoxPHFitter().fit(whole, "time", "status", fit_options={"precision": 1e-14})
    assert np.abs(found.estimates - fit.params_[columns]).max() < MOST
    assert sum(found.rows.values()) == len(whole)
    assert sum(found.dropped.values()) == len(table) - len(whole)
    two = table.assign(status=table.status + 1)
    with pytest.raises(DataError, match="the values 1 and 2, not 0 and 1"):
        cox(parted(two, 3), "time", "status", columns, drop_missing=True)
    same = cox(parted(two, 3), "time", "status", columns, drop_missing=True, happened="2")
    assert (same.estimates == found.estimates).all()


def test_meta_analysis_is_that_of_statsmodels(cancer):
    clients = parted(cancer, 5)
    found = meta_analysis(clients, "many", ["age", "horTh"], family="binomial")
    assert not found.left_out
    for term, pooled in found.coefficients.items():
        name = {"intercept": "const"}.get(term, term)
        fits = [
            sm.GLM(part.many, sm.add_constant(dummies(part, ["age", "horTh"])),
                   family=sm.families.Binomial()).fit(tol=1e-14)
            for part in clients.values()
        ]  # fmt: skip
        effects = np.array([fit.params[name] for fit in fits])
        assert np.abs(pooled.estimates - effects).max() < MOST
        theirs = combine_effects(effects, np.array([fit.bse[name] ** 2 for fit in fits]))
        assert pooled.tau2 == pytest.approx(max(0, theirs.tau2), abs=1e-9)
        assert pooled.q == pytest.approx(theirs.q, abs=1e-7)
        assert pooled.i2 == pytest.approx(max(0, theirs.i2), abs=1e-8)
        fixed, random = pooled.effect(False), pooled.effect(True)
        assert fixed[:2] == pytest.approx((theirs.mean_effect_fe, theirs.sd_eff_w_fe), abs=1e-8)
        if theirs.tau2 > 0:
            assert random[:2] == pytest.approx(
                (theirs.mean_effect_re, theirs.sd_eff_w_re), abs=1e-8
            )


def test_meta_analysis_of_known_numbers():
    """The example of Borenstein et al. (2009), chapter 14, to the digits of the book."""
    effects = [0.0945, 0.2774, 0.3665, 0.6644, 0.4618, 0.1852]
    variances = [0.0329, 0.0307, 0.0499, 0.0105, 0.0427, 0.0234]
    found = pool(list("ABCDEF"), effects, np.sqrt(variances))
    assert found.effect(False)[0] == pytest.approx(0.4142, abs=5e-4)
    assert found.effect(True)[0] == pytest.approx(0.3582, abs=5e-4)
    assert found.q == pytest.approx(12.0033, abs=2e-2)
    assert found.tau2 == pytest.approx(0.0373, abs=2e-4)


def test_a_site_without_a_fit_is_left_out_by_name(cancer):
    clients = parted(cancer, 3) | {"tiny": cancer[cancer.many == 0].head(20)}
    found = meta_analysis(clients, "many", ["age", "tgrade"], family="binomial")
    assert "in all 20 rows" in found.left_out["tiny"]
    assert set(found.rows) == {"site 0", "site 1", "site 2"}


BASE = pd.DataFrame(
    {
        "y": [0, 1, 0, 1, 1, 0, 1, 0, 0, 1, 1, 0],
        "a": [1.0, 2, 3, 4, 2, 3, 1, 4, 2, 2, 3, 1],
        "c": list("uvuvuvuuvvuv"),
        "n": [0, 1, 2, 0, 1, 3, 1, 0, 2, 4, 1, 0],
    }
)


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ({"b": BASE.a * 2 + 1}, {}, "a, b depend on one another"),
        ({"b": 7.0}, {}, "'b' is the same in all rows"),
        ({"c": "u"}, {}, "column 'c' is 'u' in all rows"),
        ({"y": 1}, {}, "'y' is '1' in all 12 rows"),
        ({"y": BASE.n}, {}, "client s0: column 'y' has [34] different values"),
        ({"a": BASE.y + 0.25 * BASE.a}, {}, "coefficients of a.* grow without bound.*separation"),
        ({"c": np.where(BASE.y == 1, "u", "v")}, {}, "'y' always happens in the 6 rows with c=u"),
        ({"a": [np.inf, *BASE.a[1:]]}, {}, "client s0: column 'a' is infinite in 1 rows"),
        ({"a": [None, *BASE.a[1:]]}, {}, r"1 of 'a' \(s0: 1\).*--drop-missing"),
        ({"when": pd.Timestamp("2024-01-01")}, {}, "'when' has dates"),
        ({"y": -BASE.n}, {"family": "poisson"}, "'y' is negative in 4 rows"),
        ({"w": -1.0}, {"weights": "w"}, "'w' has negative weights"),
        ({"w": 0.0}, {"exposure": "w", "family": "poisson", "outcome": "n"}, "no logarithm"),
        ({}, {"features": ["a", "y"]}, "features lists 'y'"),
        ({}, {"features": ["d"]}, r"client s0 has no column 'd'.*features"),
        ({}, {"outcome": "age"}, r"client s0 has no column 'age'.*outcome"),
        ({}, {"happened": "3"}, "'y' is never '3'"),
        ({}, {"references": {"c": "w"}}, "no category 'w'"),
        ({}, {"references": {"a": "1"}}, "'a' has numbers"),
        ({}, {"drop": ["d"]}, "drop lists 'd'"),
        ({}, {"min_count": 9}, "client s0: it has 6 complete rows.* 9"),
        ({}, {"min_count": 4}, "client s0: fewer than 4 of its rows have c="),
        ({"t": list("abcdefghijkl")}, {"outcome": "n", "family": "gaussian"}, "cannot be"),
        ({}, {"family": "gamma"}, "unknown family 'gamma'"),
    ],
)  # fmt: skip
def test_what_cannot_be_fitted_is_said_with_its_columns(change, options, words):
    table = BASE.assign(**change)
    clients = {"s0": table[:6], "s1": table[6:]}
    features = sorted({"a", "c", *change} - {"y", "w"})
    options = {"outcome": "y", "family": "binomial", "features": features, **options}
    with pytest.raises((DataError, ConfigError), match=words):
        glm(clients, **options)


def test_which_of_a_number_and_a_text_is_the_event_is_asked():
    """Text sorts behind numbers: where one client has 1 alone and another no, no would happen."""
    clients = {"s0": BASE[:6].assign(y=1), "s1": BASE[6:].assign(y="no")}
    with pytest.raises(DataError, match=r"'y' has the values 1 and no.*--event-value"):
        glm(clients, "y", ["a"], family="binomial")
    assert glm(clients, "y", ["a"], family="binomial", happened="1").events == 6


def test_every_analysis_says_which_of_two_texts_is_the_event():
    """Capital letters come first: of Dead and alive, alive is the last."""
    words = BASE.assign(y=np.where(BASE.y == 1, "Dead", "alive"), t=BASE.n + 1)
    clients = {"s0": words[:6], "s1": words[6:]}
    for happened, wanted in (("", "alive"), ("Dead", "Dead")):
        curves = kaplan_meier(clients, "t", "y", happened=happened)
        assert curves.curves["all"].events.sum() == (words.y == wanted).sum()
        found = (
            curves,
            glm(clients, "y", ["a"], family="binomial", happened=happened),
            meta_analysis(clients, "y", ["a"], family="binomial", happened=happened),
            cox(clients, "t", "y", ["a"], happened=happened),
        )
        for one in found:
            assert f" y = {wanted}" in one.summary().splitlines()[0]
            assert one.to_dict()["happened"] == wanted
    assert (
        "time to y: 12 rows of 2 clients"
        in kaplan_meier(
            {"s0": BASE[:6].assign(t=1), "s1": BASE[6:].assign(t=1)}, "t", "y"
        ).summary()
    )


def test_tables_that_no_file_could_hold_are_refused():
    twice = pd.concat([BASE[["y", "a"]], BASE[["a"]]], axis=1)
    with pytest.raises(DataError, match="two columns 'a'"):
        glm({"s0": twice}, "y")
    with pytest.raises(DataError, match="s0: column 'c' has cells with several values"):
        glm({"s0": BASE.assign(c=[[1]] * 12)}, "n", ["c"])


def test_columns_that_differ_between_clients_are_named():
    other = BASE[6:].assign(a=[f"{value} mg" for value in BASE.a[6:]])
    with pytest.raises(DataError, match="'a' has text at client s1 and numbers at client s0"):
        glm({"s0": BASE[:6], "s1": other}, "y", ["a"], family="binomial")
    with pytest.raises(ColumnError, match=r"client s1 has no column 'a' \(did you mean 'A'\?\)"):
        glm({"s0": BASE[:6], "s1": BASE[6:].rename(columns={"a": "A"})}, "y", ["a"])
    both = {"s0": BASE[:6][["y", "a"]], "s1": BASE[6:][["y", "a", "n"]]}
    for clients in (both, dict(reversed(both.items()))):  # whoever comes first
        with pytest.raises(ColumnError, match=r"s0 has no column 'n', which client s1 has.*drop n"):
            glm(clients, "y")
        assert glm(clients, "y", drop=["n"]).names == ("intercept", "a")
    many = pd.DataFrame({"y": BASE.y.tolist() * 10, "id": [f"p{i}" for i in range(120)]})
    with pytest.raises(DataError, match=r"'id' has 60 different texts at client s0.*--drop id"):
        glm({"s0": many[:60], "s1": many[60:]}, "y", family="binomial")


def test_monotone_survival_is_refused():
    table = pd.DataFrame({"t": np.arange(1.0, 13), "d": 1, "x": -np.arange(12.0), "z": BASE.a})
    with pytest.raises(DataError, match=r"coefficients of x grow without bound.*monotone"):
        cox({"s0": table[::2], "s1": table[1::2]}, "t", "d")
    with pytest.raises(DataError, match="'t' is negative in 6 rows"):
        kaplan_meier({"s0": table.assign(t=-table.t)[:6]}, "t", "d")
    with pytest.raises(DataError, match="'d' is '0' in all 12 rows"):
        cox({"s0": table.assign(d=0)}, "t", "d")
    with pytest.raises(ConfigError, match=r"coarsen is inf\. Give 0, or a number"):
        kaplan_meier({"s0": table}, "t", "d", coarsen=math.inf)


def test_a_client_without_a_whole_row_adds_nothing(cancer):
    clients = parted(cancer, 2)
    empty = cancer.head(5).assign(age=np.nan, horTh=None)
    columns = ["age", "horTh"]
    given = {"family": "binomial", "drop_missing": True}
    found = glm(clients | {"empty": empty}, "many", columns, **given)
    assert (found.estimates == glm(clients, "many", columns, **given).estimates).all()
    assert found.dropped["empty"] == 5
    with pytest.raises(DataError, match=r"no row is complete\. Leave"):
        glm({"empty": empty}, "many", columns, **given)


def test_an_intercept_alone_is_the_mean(cancer):
    found = glm(parted(cancer[["many"]], 3), "many", family="binomial")
    assert found.names == ("intercept",)
    rate = cancer.many.mean()
    assert found.estimates[0] == pytest.approx(np.log(rate / (1 - rate)))
    assert found.std_errors[0] == pytest.approx((len(cancer) * rate * (1 - rate)) ** -0.5)


def test_coefficients_have_names_of_their_own():
    table = BASE.rename(columns={"a": "intercept"})
    with pytest.raises(DataError, match="two coefficients would have the name 'intercept'"):
        glm({"s0": table}, "y", ["intercept"], family="binomial")


def test_numbers_too_large_are_refused():
    table = BASE.assign(off=BASE.a * 1e6)
    with pytest.raises(DataError, match="s0: the offset is above 500 in 6 rows"):
        glm({"s0": table[:6], "s1": table[6:]}, "n", ["a"], family="poisson", offset="off")
    table = BASE.assign(a=BASE.a * 1e200)
    clients = {"s0": table[:6], "s1": table[6:]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for outcome, columns, of in (("n", ["a"], {"family": "poisson"}), ("a", ["n"], {})):
            with pytest.raises(DataError, match=r"s0: column 'a' is .*e\+200 in .* another unit"):
                glm(clients, outcome, columns, **of)


@pytest.mark.parametrize("ties", ["efron", "breslow"])
@pytest.mark.parametrize("strata", ["client", "site"])
def test_columns_that_are_the_same_within_strata_are_refused_by_name(cancer, strata, ties):
    """Rounding left variances of 1e-16 of them, and coefficients in the hundreds."""
    clients = {
        name: part.assign(site=name, beds=beds, kind=kind)
        for (name, part), beds, kind in zip(
            parted(cancer, 3).items(), (120.1, 340.1, 77.7), ("city", "land", "land"), strict=True
        )
    }
    options = {"strata": strata, "ties": ties}
    for columns, words in ((["age", "kind"], "kind=land"), (["beds", "age", "kind"], "beds, kind")):
        with pytest.raises(
            DataError, match=f"{words}.* is the same for everyone .* of its stratum"
        ):
            cox(clients, "time", "cens", columns, **options)
    # A column that differs in one stratum alone is of that one.
    part = clients["site 1"]
    clients["site 1"] = part.assign(beds=np.arange(len(part)) % 2 + part.beds)
    both = cox(clients, "time", "cens", ["beds"], **options)
    alone = cox({"site 1": clients["site 1"]}, "time", "cens", ["beds"], **options)
    assert both.estimates == pytest.approx(alone.estimates)
    assert both.std_errors == pytest.approx(alone.std_errors)


def test_sums_travel_and_no_rows(cancer):
    """What a client sends does not grow with its rows."""
    columns = ["age", "tsize", "horTh"]
    once = glm(parted(cancer, 2), "many", columns, family="binomial")
    more = pd.concat([cancer] * 5, ignore_index=True)
    again = glm(parted(more, 2), "many", columns, family="binomial")
    assert once.floats / once.rounds == pytest.approx(again.floats / again.rounds, rel=0.05)
    assert again.std_errors == pytest.approx(once.std_errors / np.sqrt(5))


def test_no_warnings_of_libraries(cancer):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        glm(parted(cancer, 3), "many", ["age"], family="binomial")
        cox(parted(cancer, 3), "time", "cens", ["age", "pnodes"])
        kaplan_meier(parted(cancer, 3), "time", "cens").frame()


def test_clients_that_are_no_tables_by_name_are_refused_with_the_way_out():
    table = pd.DataFrame({"site": ["a", "b"] * 4, "x": range(8), "y": [0, 1, 1, 0, 2, 3, 1, 4]})
    with pytest.raises(DataError, match=r"type DataFrame\. .*table.groupby\('site'\)"):
        glm(table, "y", ["x"])
    assert glm(dict(list(table.groupby("site"))), "y", ["x"]).names == ("intercept", "x")


def test_outcomes_and_columns_are_read_alike_whatever_their_type():
    rng = np.random.default_rng(4)
    frame = pd.DataFrame({0: rng.normal(size=90), 1: rng.integers(0, 2, 90)})
    parts = {f"s{k}": frame.iloc[k::3].reset_index(drop=True) for k in range(3)}
    expected = glm(parts, 1, [0], family="binomial")
    assert expected.names == ("intercept", "0")
    with pytest.raises(ConfigError, match="Give each column one name"):
        glm(parts, ("a", "y"), [0])
    for coded in (bool, "boolean", "Int64", float):
        mixed = {**parts, "s1": parts["s1"].assign(**{"y": parts["s1"][1].astype(coded)})}
        mixed = {
            name: part.rename(columns={1: "y"}) if name != "s1" else part.drop(columns=1)
            for name, part in mixed.items()
        }
        found = glm(mixed, "y", [0], family="binomial")
        np.testing.assert_allclose(found.estimates, expected.estimates, rtol=1e-9)
    truths = {name: part.assign(y=part[1] == 1).drop(columns=1) for name, part in parts.items()}
    flipped = glm(truths, "y", [0], family="binomial", happened=False)
    np.testing.assert_allclose(flipped.estimates, -expected.estimates, rtol=1e-6)


def test_groups_that_are_coded_in_two_ways_are_named():
    frame = pd.DataFrame({"x": np.arange(40.0) % 7, "y": np.arange(40.0) % 5, "g": [0, 1] * 20})
    parts = {"a": frame[:20], "b": frame[20:].assign(g=frame.g[20:].astype(bool))}
    with pytest.raises(
        DataError, match="'g' has true and false at client b, and 0 and 1 at client a"
    ):
        glm(parts, "y", ["x", "g"], categories=["g"])
    days = pd.date_range("2020-01-01", periods=40).strftime("%d.%m.%Y")
    with pytest.raises(DataError, match="column 'day' has dates"):
        glm({"a": frame.assign(day=days)}, "y", ["x", "day"])


def test_names_in_two_forms_of_unicode_are_one():
    frame = pd.DataFrame({"y": np.arange(40.0) % 5, "größe": np.arange(40.0) % 7})
    other = frame.rename(columns={"größe": unicodedata.normalize("NFD", "größe")})
    found = glm({"a": frame[:20], "b": other[20:]}, "y")
    assert found.names == ("intercept", "größe")
    with pytest.raises(DataError, match="two clients have the name 'größe'"):
        glm({"größe": frame[:20], other.columns[1]: frame[20:]}, "y")
