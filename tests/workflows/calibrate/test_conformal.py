"""Conformal sets and intervals: against order statistics, on data whose truth is known, and in
runs.
"""

import json
import math
import os
import shutil
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedbayes
from fedbayes.core.seals import sealed_table, unsealed_table
from fedbayes.core.targets import Target
from fedbayes.errors import ConfigError, FedbayesWarning, ModelError, RunError
from fedbayes.likelihoods import build_likelihood
from fedbayes.likelihoods.conformal import (
    GRID,
    Conformal,
    choose_score,
    count,
    scores,
    threshold,
)
from fedbayes.storage.calibrations import (
    CONFORMAL,
    calibrated_model,
    read_calibration,
    read_temperature,
)
from fedbayes.storage.folder import RunFolder
from fedbayes.workflows.calibrate.conformal import calibrate_conformal
from fedbayes.workflows.serve.export import export
from tests.helpers.command_line import cli

CLASSES = build_likelihood("categorical", Target("class", ("a", "b", "c")))
REAL = Target("real", ("cost",), (100.0,), (20.0,))
GAUSSIAN = build_likelihood("gaussian", REAL, noise=1.0)


@given(
    st.lists(st.floats(-1e3, 1e3, allow_subnormal=False), min_size=1, max_size=60),
    st.sampled_from([0.05, 0.5, 0.8, 0.9, 0.95, 0.99]),
    st.integers(1, 4),
)
def test_thresholds_are_order_statistics(found, level, clients):
    """At least the ⌈(n + 1) level⌉-th smallest score, by at most a bin; whoever holds which."""
    parts = [torch.tensor(found[k::clients], dtype=torch.float64)[:, None] for k in range(clients)]
    together = torch.stack([count(part) for part in parts]).sum(dim=0)
    assert int(together.sum()) == len(found)
    fitted = threshold(together, CLASSES, "probability", level)
    rank = next(
        k for k in range(len(found) + 2) if k * 100 >= round(level * 100) * (len(found) + 1)
    )
    if rank > len(found):
        assert fitted.threshold == (None,)
        return
    wanted = sorted(found)[rank - 1]
    end = fitted.threshold[0]
    assert wanted <= end <= wanted + max(0.0068 * abs(wanted), 1e-8)


def test_the_finite_sample_promise_by_brute_force():
    """Exchangeable scores: the share of all orders in which the last is at most the threshold."""
    for n, level in ((4, 0.5), (5, 0.8), (6, 0.7), (9, 0.9)):
        values = torch.arange(1.0, n + 2, dtype=torch.float64)
        held = 0
        for new in range(n + 1):  # which of n + 1 scores is the new one; the others are counted
            rest = torch.cat([values[:new], values[new + 1 :]])[:, None]
            end = threshold(count(rest), CLASSES, "probability", level).threshold[0]
            held += end is None or float(values[new]) <= end
        assert level <= held / (n + 1) < level + 1 / (n + 1) + 1e-12


def test_what_is_left_of_the_promise_where_clients_differ():
    """One row of each of 19 clients, one of which always has the worst score, by brute force."""
    clients, level = 19, 0.9
    alike = torch.arange(1.0, clients + 1, dtype=torch.float64)  # of the others, and a new one
    worst = torch.tensor([1000.0], dtype=torch.float64)
    held = []
    for new in range(clients):
        others = torch.cat([alike[:new], alike[new + 1 :]])
        counted = torch.cat([others, worst])[:, None]
        end = threshold(count(counted), CLASSES, "probability", level).threshold[0]
        held.append(float(alike[new]) <= end)
        assert float(worst) > end  # a new row of the worst client
    coverage = (clients - 1) / clients * sum(held) / clients
    assert coverage == pytest.approx((18 / 19) ** 2)
    assert level * (clients + 1) / (2 * clients) <= coverage < level


def test_bins_leave_nothing_out():
    odd = torch.tensor([-math.inf, -1e9, 0.0, 1e-12, 1e9, math.inf], dtype=torch.float64)[:, None]
    assert int(count(odd).sum()) == 6
    assert int(count(odd)[0, -1]) == 2  # above the grid
    assert (GRID.diff() > 0).all()


def softmax(f):
    return np.exp(f) / np.exp(f).sum(-1, keepdims=True)


def truth(rng, n, skew=0.0):
    """Logits of a model, and classes by other probabilities than its own."""
    f = rng.normal(size=(n, 3)) * 2
    p = softmax(0.4 * f + np.array([skew, 0, -skew]))
    y = (rng.random((n, 1)) > p.cumsum(1)).sum(1).clip(0, 2)
    return torch.tensor(f, dtype=torch.float32)[None], torch.tensor(y)


def test_coverage_of_sets_on_average():
    """20 seeds, 5 clients whose data differ: within a point of 90 % marginally, and per client."""
    held, own = [], []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        counts, tests, rows = [], [], (40, 80, 120, 200, 400)
        for client, n in enumerate(rows):
            f, y = truth(rng, n, skew=client - 2)
            counts.append(count(scores(CLASSES, f, y, "probability", 0.9)))
            tests.append(truth(rng, 10 * n, skew=client - 2))
        common = threshold(torch.stack(counts).sum(0), CLASSES, "probability", 0.9)
        inside = [common.sets(CLASSES, f).gather(1, y[:, None]) for f, y in tests]
        held.append(float(torch.cat(inside).double().mean()))
        for one, (f, y) in zip(counts, tests, strict=True):
            alone = threshold(one, CLASSES, "probability", 0.9)
            own.append(float(alone.sets(CLASSES, f).gather(1, y[:, None]).double().mean()))
    own = np.array(own).reshape(20, 5).mean(0)
    assert abs(np.mean(held) - 0.9) < 0.01
    # Expected is ⌈.9 (n + 1)⌉ / (n + 1); the first client's 40 rows vary by .05 / √20 from it.
    expected = [math.ceil(0.9 * (n + 1)) / (n + 1) for n in (40, 80, 120, 200, 400)]
    np.testing.assert_allclose(own, expected, atol=0.025)
    assert abs(own.mean() - 0.9) < 0.015
    common_alone = [float(part.double().mean()) for part in inside]
    assert max(common_alone) - min(common_alone) > 0.05  # one threshold is not right for each


def by_definition(p, u):
    """E(x, y, u; p) of Romano et al. (2020), equation 5, of every class of one sample: the least τ
    whose generalized inverse quantile set has it.
    """
    order = sorted(range(len(p)), key=lambda k: -p[k])
    mass = [sum(p[k] for k in order[:place]) for place in range(len(p))]
    return {k: mass[place] + (0 if u is None else u * p[k]) for place, k in enumerate(order)}


@pytest.mark.parametrize("random", [False, True])
def test_adaptive_scores_are_those_of_the_definition(random):
    rng = np.random.default_rng(4)
    f = torch.tensor(rng.normal(size=(50, 3)) * 3, dtype=torch.float32)[None]
    coins = torch.from_numpy(rng.random(50)) if random else None
    score = "adaptive-random" if random else "adaptive"
    p = softmax(f[0].double().numpy())
    for k in range(3):
        found = scores(CLASSES, f, torch.full((50,), k), score, 0.9, coins)[:, 0]
        wanted = [by_definition(p[i], coins[i] if random else None)[k] for i in range(50)]
        np.testing.assert_allclose(1 - np.exp(-found), wanted, atol=1e-6)
    top = scores(CLASSES, f, f[0].argmax(1), score, 0.9, coins)
    assert random or bool((top == 0).all())
    sets = Conformal(0.9, score, (0.7,), 99).sets(CLASSES, f, coins)
    wanted = [[e <= 1 - math.exp(-0.7) for _, e in sorted(by_definition(p[i], u).items())]
              for i, u in enumerate(coins if random else [None] * 50)]  # fmt: skip
    assert sets.tolist() == wanted


def test_adaptive_sets_cover_on_average_and_hard_rows_too():
    """20 seeds, 5 clients, a model that knows the probabilities: random ones by 90 % whatever the
    row is like, where the threshold of one probability covers hard rows less.
    """
    rng = np.random.default_rng(0)

    def sample(n):
        hard = rng.random(n) < 0.3
        f = rng.normal(size=(n, 3)) * np.where(hard, 0.3, 6)[:, None]
        y = (rng.random((n, 1)) > softmax(f).cumsum(1)).sum(1).clip(0, 2)
        return torch.tensor(f, dtype=torch.float32)[None], torch.tensor(y), hard

    held = {"probability": [], "adaptive": [], "adaptive-random": []}
    for _ in range(20):
        parts, (f, y, hard) = [sample(n) for n in (40, 80, 120, 200, 400)], sample(4000)
        for score, found in held.items():
            toss = lambda n, score=score: (  # noqa: E731
                torch.from_numpy(rng.random(n)) if score == "adaptive-random" else None
            )
            counts = sum(
                count(scores(CLASSES, g, z, score, 0.9, toss(len(z)))) for g, z, _ in parts
            )
            sets = threshold(counts, CLASSES, score, 0.9).sets(CLASSES, f, toss(len(y)))
            inside = sets.gather(1, y[:, None])[:, 0].numpy()
            found.append((inside.mean(), inside[hard].mean()))
    mean = {score: np.mean(found, 0) for score, found in held.items()}
    assert abs(mean["adaptive-random"][0] - 0.9) < 0.01
    assert abs(mean["adaptive-random"][1] - 0.9) < 0.02
    assert abs(mean["adaptive"][0] - 0.9) < 0.01
    assert mean["probability"][1] < 0.85


@pytest.mark.parametrize("score", ["residual", "quantile"])
@pytest.mark.parametrize("name", ["gaussian", "quantile", "poisson"])
def test_coverage_of_intervals_on_average(name, score):
    """Noise that the model does not know of: uniform, twice as wide; counts with overdispersion."""
    rng = np.random.default_rng(3)
    if name == "poisson":
        likelihood = build_likelihood("poisson", Target("count", ("n",), (5.0,)))
    elif name == "quantile":
        likelihood = build_likelihood("quantile", REAL, levels=[0.05, 0.5, 0.95])
    else:
        likelihood = GAUSSIAN
    held = []

    def sample(n):
        f = rng.normal(size=(n, likelihood.outputs))
        if name == "poisson":
            rate = 5 * np.exp(f[:, 0] / 2) * rng.gamma(4, 1 / 4, n)
            y, f = rng.poisson(rate)[:, None].astype(np.float32), f / 2
        else:
            middle = f.mean(1, keepdims=True)
            f = middle + np.linspace(-1, 1, f.shape[1]) if name == "quantile" else f
            y = 100 + 20 * (middle + rng.uniform(-3, 3, (n, 1)))
        return torch.tensor(f, dtype=torch.float32)[None], torch.tensor(y, dtype=torch.float32)

    for _ in range(20):
        counts = [count(scores(likelihood, *sample(100), score, 0.9)) for _ in range(4)]
        fitted = threshold(torch.stack(counts).sum(0), likelihood, score, 0.9)
        f, y = sample(4000)
        low, high = fitted.interval(likelihood, f)
        assert (low <= high).all()
        held.append(float(((low <= y) & (y <= high)).double().mean()))
    if name == "poisson":  # scores of counts have ties: what is promised is a floor
        assert 0.89 < np.mean(held) < 0.94
    else:
        assert abs(np.mean(held) - 0.9) < 0.01


def test_intervals_by_hand():
    f = torch.tensor([[[0.0], [1.0]]])
    residual = Conformal(0.9, "residual", (7.0,), 50).interval(GAUSSIAN, f)
    np.testing.assert_allclose(torch.cat(residual, 1), [[93, 107], [113, 127]])
    wide = 20 * 1.6448536269514722
    quantile = Conformal(0.9, "quantile", (-3.0,), 50).interval(GAUSSIAN, f)
    np.testing.assert_allclose(quantile[0][:, 0], [100 - wide + 3, 120 - wide + 3])
    np.testing.assert_allclose(quantile[1][:, 0], [100 + wide - 3, 120 + wide - 3])
    low, high = Conformal(0.9, "quantile", (-50.0,), 50).interval(GAUSSIAN, f)
    np.testing.assert_allclose(low, high)  # never the wrong way round
    low, high = Conformal(0.9, "residual", (None,), 2).interval(GAUSSIAN, f)
    assert (low == -math.inf).all()
    assert (high == math.inf).all()


def test_an_interval_of_counts_holds_a_count():
    """Between two ends without one there is the count that is nearest to their middle."""
    counts = build_likelihood("poisson", Target("count", ("n",), (5.0,)))
    f = torch.linspace(-4, 2, 61)[None, :, None]
    for end in (-50.0, -1.0, 0.0, 2.0):
        low, high = Conformal(0.9, "quantile", (end,), 50).interval(counts, f)
        assert ((low >= 0) & (low <= high)).all()
        assert (low == low.round()).all()
        assert (high == high.round()).all()


def test_a_round_that_was_chosen_by_test_rows_is_said(runs, tmp_path):
    folder, _ = runs
    config = fedbayes.Result(folder / "classes").config
    fedbayes.run(config.model_copy(update={"stop_after": 1}), tmp_path / "run")
    with pytest.warns(UserWarning, match="the same test rows chose the round"):
        calibrate_conformal(tmp_path / "run", 0.9)


def test_scores_that_do_not_belong():
    assert choose_score(CLASSES, 0.9) == "probability"
    assert choose_score(GAUSSIAN, 0.9) == "quantile"
    few = build_likelihood("quantile", REAL, levels=[0.25, 0.5, 0.75])
    assert choose_score(few, 0.9) == "residual"
    with pytest.raises(ConfigError, match="has no quantiles for an interval of 90%"):
        choose_score(few, 0.9, "quantile")
    with pytest.raises(ConfigError, match="Choose probability, adaptive, adaptive-random"):
        choose_score(CLASSES, 0.9, "residual")
    labels = build_likelihood("multilabel", Target("labels", ("x", "y")))
    with pytest.raises(ConfigError, match="multilabel predicts neither"):
        choose_score(labels, 0.9)
    with pytest.raises(ConfigError, match=r"is .*\. Give a number above 0"):
        choose_score(CLASSES, 1.5)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run with classes, one with numbers, and one whose clients have own models."""
    folder = tmp_path_factory.mktemp("conformal")
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(900, 3)), columns=["u", "v", "w"])
    frame["site"] = rng.choice(["a", "b", "c"], 900)
    frame["kind"] = np.where(frame.u + rng.normal(size=900) > 0, "up", "down")
    frame["cost"] = 100 + 20 * (frame.u + 0.5 * rng.standard_t(3, size=900))
    frame.to_csv(folder / "t.csv", index=False)
    features = ["u", "v", "w"]
    for name, label, method in (
        ("classes", "kind", "fedavg"),
        ("numbers", "cost", "fedavg"),
        ("own", "kind", "virtual"),
    ):
        data = {"path": str(folder / "t.csv"), "label": [label], "features": features}
        data |= {"group": "site", "test": 0.5}
        fedbayes.run(
            folder=folder / name, data=data, rounds=3, method={"name": method}, calibration="none"
        )
    return folder, frame


def test_rows_that_are_counted_are_not_those_that_are_tested(runs):
    """The coverage that is told, from the files of the run alone."""
    folder, frame = runs
    found = calibrate_conformal(folder / "classes", 0.8)
    result = fedbayes.Result(folder / "classes")
    sets = result.predict_frame(frame[["u", "v", "w"]])["set"]
    inside = np.array([y in names for y, names in zip(frame.kind, sets, strict=True)])
    partition = result.folder.partition()
    counted, tested = [], []
    for client in range(3):
        start, stop = partition.test_offsets[client : client + 2]
        rows = partition.test[start:stop]
        order = fedbayes.core.seeds.numpy_rng(0, "conformal", client=client).permutation(len(rows))
        counted += list(rows[order[: round(len(rows) / 2)]])
        tested += list(rows[order[round(len(rows) / 2) :]])
    assert not set(counted) & set(partition.train)
    assert not set(tested) & set(partition.train)
    assert found.all.counted == len(counted)
    assert found.all.tested == len(tested)
    assert found.all.coverage[0] == pytest.approx(inside[tested].mean())
    assert found.all.size[0] == pytest.approx(np.mean([len(sets[row]) for row in tested]))
    # Of the rows that were counted, the rank is exact up to a bin.
    rank = math.ceil(0.8 * (len(counted) + 1))
    assert rank <= inside[counted].sum() <= rank + 2


def test_predictions_have_sets(runs, tmp_path, capsys):
    folder, frame = runs
    run = folder / "classes"
    code, out, err = cli(capsys, "conformal", run, "--per-client", "--json")
    assert code == 0, err
    told = json.loads(out)
    assert set(told["clients"]) == {"a", "b", "c"}
    assert told["all"]["coverage"][0] > 0.8
    stored = json.loads((run / "calibration.json").read_text())["conformal"]
    for site, name in ((None, "all.csv"), ("b", "b.csv")):
        arguments = ["predict", run, folder / "t.csv", "-o", tmp_path / name]
        arguments += ["--site", site] if site else []
        code, _, err = cli(capsys, *arguments)
        assert code == 0, err
        found = pd.read_csv(tmp_path / name)
        end = math.exp(-(stored["clients"][site] if site else stored["all"])["threshold"][0])
        for kind in ("down", "up"):
            has = found["set"].fillna("").str.split("|").map(lambda names, kind=kind: kind in names)
            far = abs(found[f"p_{kind}"] - end) > 1e-6
            assert (has == (found[f"p_{kind}"] >= end))[far].all()
    code, _, err = cli(capsys, *arguments[:3], "-o", tmp_path / "c.csv", "--level", ".5")
    assert code == 2
    assert "is calibrated for the level 0.9, not for 0.5" in " ".join(err.split())
    plain = fedbayes.load(run, conformal=False).predict_frame(frame)
    assert "set" not in plain


@pytest.mark.parametrize("score", ["adaptive", "adaptive-random"])
def test_adaptive_sets_of_a_run(runs, tmp_path, score, capsys):
    """In pieces of any size, from the run and from a file; coverage as it is told."""
    folder, frame = runs
    run = folder / "classes"
    arguments = ["conformal", run, "--score", score, "--level", "0.8", "--json"]
    code, out, err = cli(capsys, *arguments)
    assert code == 0, err
    told = json.loads(out)
    assert told["score"] == score
    assert told["all"]["coverage"][0] == pytest.approx(0.85, abs=0.1)
    assert export(run, tmp_path / "m.pt2")
    found = []
    for model, rows in ((run, 10_000), (run, 7), (tmp_path / "m.pt2", 100)):
        loaded = fedbayes.load(model)
        path = tmp_path / f"{model.name}{rows}.parquet"
        fedbayes.predict_file(loaded, folder / "t.csv", path, rows=rows)
        found.append(pd.read_parquet(path)["set"].map(tuple).tolist())
    assert found[0] == found[1]
    assert np.mean([a == b for a, b in zip(found[0], found[2], strict=True)]) > 0.995
    assert found[0] == fedbayes.load(run).predict_frame(frame)["set"].tolist()
    sizes = [len(names) for names in found[0]]
    assert (0 in sizes) == (score == "adaptive-random")
    (run / "calibration.json").unlink()


def test_why_sets_are_whole():
    few = Conformal(0.9, "probability", (None,), 8)
    assert few.too_few
    assert not Conformal(0.9, "probability", (None,), 9).too_few


def test_predictions_have_intervals(runs, tmp_path):
    folder, frame = runs
    run = fedbayes.Result(folder / "numbers")
    before = run.predict_frame(frame)
    found = calibrate_conformal(folder / "numbers", 0.9, score="residual")
    after = run.predict_frame(frame)
    np.testing.assert_allclose(before["mean"], after["mean"])
    half = (after.high - after.low) / 2
    np.testing.assert_allclose(half, half[0], rtol=1e-9)
    assert found.all.size[0] == pytest.approx(2 * half[0])
    assert found.all.coverage[0] == pytest.approx(0.9, abs=0.06)


def test_own_models_have_thresholds_of_their_own(runs, tmp_path):
    folder, frame = runs
    found = calibrate_conformal(folder / "own", 0.9, personal=True)
    run = fedbayes.Result(folder / "own")
    assert "set" not in run.predict_frame(frame)  # the global model is another one
    for client, told in found.clients.items():
        sets = run.predict_frame(frame[frame.site == client], client)["set"]
        inside = [y in names for y, names in zip(frame.kind[sets.index], sets, strict=True)]
        assert np.mean(inside) == pytest.approx(0.9, abs=0.08)
        assert told.tested > 20
    with pytest.raises(RunError, match="has no conformal threshold of client a"):
        fedbayes.load(folder / "own", site="a")


def test_thresholds_that_are_replaced_by_those_of_other_models_are_told(runs, tmp_path):
    folder, _ = runs
    copy = shutil.copytree(folder / "own", tmp_path / "own", dirs_exist_ok=True)
    (copy / "calibration.json").unlink(missing_ok=True)
    calibrate_conformal(copy, 0.9)
    with warnings.catch_warnings(action="error"):
        calibrate_conformal(copy, 0.8)
    words = (
        "was for the global model, and is now for clients' own models. Predictions of the global"
    )
    with pytest.warns(FedbayesWarning, match=words):
        calibrate_conformal(copy, 0.9, personal=True)


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_counted(runs, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr("fedbayes.workflows.calibrate.ended_run.stored_data", None)
    with pytest.raises(
        RunError, match=r"cannot write into .*classes, where calibrations are stored"
    ):
        calibrate_conformal(runs[0] / "classes", 0.9)


def test_what_is_not_calibrated_is_told(runs, tmp_path):
    folder, frame = runs
    run = folder / "classes"
    calibrate_conformal(run, 0.9)
    with pytest.raises(RunError, match=r"calibration\.json has no threshold of client b"):
        fedbayes.load(run, site="b")
    path = run / "calibration.json"
    path.write_text(path.read_text().replace('"level": 0.9', '"level": 0.95'))
    with pytest.raises(
        RunError,
        match=r"cannot read .*calibration\.json: its content does not match what was written",
    ):
        fedbayes.load(run)
    calibrate_conformal(run, 0.9)
    text = json.dumps(unsealed_table(path.read_bytes()))

    def rewrite(text):
        path.write_bytes(sealed_table(json.loads(text)))

    rewrite(text.replace('"model": "', '"model": "0'))
    with pytest.warns(
        UserWarning, match=r"calibration\.json \(conformal\) belongs to another model"
    ):
        assert "set" not in fedbayes.load(run).predict_frame(frame)
    for old, new in (("probability", "luck"), ('"level": 0.9', '"level": 9')):
        rewrite(text.replace(old, new))
        with pytest.raises(RunError, match=r"cannot read .*calibration\.json"):
            fedbayes.load(run)
    for old, new in (("probability", "residual"), ('"threshold": [', '"threshold": [1.5,')):
        rewrite(text.replace(old, new))
        with pytest.raises(ModelError, match="has another target"):
            fedbayes.load(run)
    path.unlink()
    with pytest.raises(ConfigError, match="rows is 1"):
        calibrate_conformal(run, share=1.0)
    calibrate_conformal(run, 0.9, share=0.01)
    calibrate_conformal(run, 0.985, share=0.01)
    with pytest.warns(UserWarning, match=r"rows are too few for a level of 98\.5%"):
        fedbayes.load(run).predict_frame(frame)
    calibrate_conformal(run, 0.9, share=0.01)
    with pytest.warns(UserWarning, match="rows are too few for a level of 90%"):
        sets = fedbayes.load(run).predict_frame(frame)["set"]
    assert all(len(names) == 2 for names in sets)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt2"])
def test_exported_models_keep_their_threshold(runs, tmp_path, suffix):
    folder, frame = runs
    calibrate_conformal(folder / "numbers", 0.8, score="residual")
    calibrate_conformal(folder / "classes", 0.8)
    for name, column in (("classes", "set"), ("numbers", "low")):
        path = tmp_path / f"{name}{suffix}"
        export(folder / name, path)
        wanted = fedbayes.Result(folder / name).predict_frame(frame)[column]
        found = fedbayes.load(path).predict_frame(frame)[column]
        if column == "set":
            assert found.tolist() == wanted.tolist()
        else:
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-4)
    (folder / "classes" / "calibration.json").unlink()


def test_files_of_version_0_2_are_read_until_they_are_made_anew(runs):
    """That had a file for each kind of calibration, with what `all` holds of a temperature."""
    run = RunFolder(runs[0] / "classes")
    (run.path / "calibration.json").unlink(missing_ok=True)
    of = {"personal": False, "model": calibrated_model(run, personal=False)}
    found = {"level": 0.9, "score": "probability", "threshold": [1.25], "rows": 40}
    warm = {"temperature": 1.5, "rows": 40}
    older = {
        "conformal": of | {"all": found, "clients": {"a": found | {"rows": 12}}},
        "temperature": of | warm,
    }
    for name, content in older.items():
        table = content | {"format": f"fedbayes-{name}-1"}
        (run.path / f"{name}.json").write_bytes(sealed_table(table))
    conformal = Conformal(0.9, "probability", (1.25,), 40)
    assert read_calibration(CONFORMAL, run) == conformal
    assert read_calibration(CONFORMAL, run, "a").rows == 12
    assert read_temperature(run) == 1.5
    done = calibrate_conformal(run.path, 0.8)
    assert read_calibration(CONFORMAL, run).level == 0.8
    assert read_temperature(run) == 1.5
    assert done.path.name == "calibration.json"
    assert not (run.path / "conformal.json").exists()
    (run.path / "temperature.json").unlink()
    assert read_temperature(run) is None
    done.path.unlink()
