"""Largest differences of federated from pooled fits: the table of docs/benchmarks/features.md.

    python benchmarks/biostatistics.py [--secure]

Real tables that come with scikit-learn, statsmodels and lifelines, their rows at random among
clients. The pooled fit is of statsmodels or lifelines, on all rows in one place; lifelines'
precision and statsmodels' tolerance are set to the finest. Needs statsmodels and lifelines. With
--secure the clients are nodes of Flower's simulation, and sums go through secure aggregation.
"""

import sys
import warnings
from contextlib import contextmanager

import numpy as np
import pandas as pd
import statsmodels.api as sm
from lifelines import CoxPHFitter, KaplanMeierFitter
from lifelines.datasets import load_gbsg2, load_rossi
from sklearn.datasets import load_breast_cancer, load_diabetes

from fedbayes import cox, glm, kaplan_meier

CANCER = ["mean radius", "mean texture", "mean smoothness", "mean symmetry"]


@contextmanager
def parted(table, count):
    where = np.random.default_rng(0).integers(0, count, len(table))
    tables = {str(c): table[where == c].reset_index(drop=True) for c in range(count)}
    if "--secure" not in sys.argv:
        yield tables
        return
    from fedbayes.flower.sums import simulated_nodes

    nodes = simulated_nodes(tables, 0, 600, secure=True)
    try:
        yield nodes
    finally:
        nodes.close()


def dummies(table):
    return pd.get_dummies(table, drop_first=True, dtype=float, prefix_sep="=")


def differences(found, params, errors, loglik):
    order = ["const" if name == "intercept" else name for name in found.names]
    return (
        np.abs(found.estimates - params[order]).max(),
        np.abs(found.std_errors - errors[order]).max(),
        abs(found.loglik - loglik),
        found.rounds,
        found.floats,
    )


def generalized(table, outcome, count, family, kind, exposure=""):
    with parted(table, count) as clients:
        found = glm(clients, outcome, family=family, exposure=exposure)
    x = sm.add_constant(dummies(table.drop(columns=[outcome, *filter(None, [exposure])])))
    if family == "gaussian":
        fit = sm.OLS(table[outcome], x).fit()
    else:
        rows = table[exposure] if exposure else None
        model = sm.GLM(table[outcome], x, family=kind, exposure=rows)
        fit = model.fit(tol=1e-14, maxiter=100)
    return differences(found, fit.params, fit.bse, fit.llf)


def hazards(table, time, event, count, ties, by):
    with parted(table, count) as clients:
        found = cox(clients, time, event, ties=ties)
    x = dummies(table)
    if by == "lifelines":
        fit = CoxPHFitter().fit(x, time, event, fit_options={"precision": 1e-14})
        return differences(found, fit.params_, fit.standard_errors_, fit.log_likelihood_)
    x = x.drop(columns=[time, event])
    fit = sm.PHReg(table[time], x, status=table[event], ties=ties).fit(tol=1e-12)
    params, errors = (pd.Series(values, x.columns) for values in (fit.params, fit.bse))
    return differences(found, params, errors, fit.llf)


def curves(table, time, event, count, by):
    with parted(table, count) as clients:
        found = kaplan_meier(clients, time, event, by=by)
    pooled = kaplan_meier({"all": table}, time, event, by=by)
    own = theirs = 0.0
    for group, curve in found.curves.items():
        rows = table[table[by].astype(str) == group]
        fit = KaplanMeierFitter().fit(rows[time], rows[event])
        steps = fit.event_table.query("observed > 0").loc[curve.times]
        assert (steps.at_risk == curve.at_risk).all()
        assert (steps.observed == curve.events).all()
        own = max(own, np.abs(curve.survival - pooled.curves[group].survival).max())
        same = fit.survival_function_.loc[curve.times].to_numpy()[:, 0]
        theirs = max(theirs, np.abs(curve.survival - same).max())
    return own, theirs


def main():
    warnings.simplefilter("ignore")
    diabetes = load_diabetes(as_frame=True, scaled=False).frame
    breast = load_breast_cancer(as_frame=True).frame[[*CANCER, "target"]]
    gbsg2, rossi = load_gbsg2(), load_rossi()
    doctor = sm.datasets.randhie.load_pandas().data
    fits = {
        ("linear, diabetes, 442 rows", 4, "statsmodels OLS"): lambda: generalized(
            diabetes, "target", 4, "gaussian", None
        ),
        ("logistic, breast cancer, 569 rows", 5, "statsmodels GLM"): lambda: generalized(
            breast, "target", 5, "binomial", sm.families.Binomial()
        ),
        ("Poisson, RAND health insurance, 20,190 rows", 10, "statsmodels GLM"): lambda: generalized(
            doctor, "mdvis", 10, "poisson", sm.families.Poisson()
        ),
        ("Poisson with exposure, GBSG2 nodes, 686 rows", 4, "statsmodels GLM"): lambda: generalized(
            gbsg2.drop(columns="cens"), "pnodes", 4, "poisson", sm.families.Poisson(), "time"
        ),
        ("Cox, Efron, GBSG2, 686 rows", 4, "lifelines"): lambda: hazards(
            gbsg2, "time", "cens", 4, "efron", "lifelines"
        ),
        ("Cox, Breslow, GBSG2, 686 rows", 4, "statsmodels PHReg"): lambda: hazards(
            gbsg2, "time", "cens", 4, "breslow", "statsmodels"
        ),
        ("Cox, Efron, Rossi, 432 rows, many ties", 6, "lifelines"): lambda: hazards(
            rossi, "week", "arrest", 6, "efron", "lifelines"
        ),
    }
    print("| fit | clients | pooled fit | coefficients | standard errors | log-likelihood | rounds "
          "| numbers sent |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    for (name, count, by), fit in fits.items():
        coefficients, errors, loglik, rounds, floats = fit()
        print(f"| {name} | {count} | {by} | {coefficients:.1e} | {errors:.1e} | {loglik:.1e} | "
              f"{rounds} | {floats:,} |", flush=True)  # fmt: skip
    print()
    for name, table, time, event, by in (
        ("GBSG2 by horTh", gbsg2, "time", "cens", "horTh"),
        ("Rossi by fin", rossi, "week", "arrest", "fin"),
    ):
        own, theirs = curves(table, time, event, 4, by)
        print(f"Kaplan-Meier, {name}, 4 clients: {own:.1e} from the pooled rows, {theirs:.1e} from "
              "lifelines; all counts equal")  # fmt: skip


if __name__ == "__main__":
    main()
