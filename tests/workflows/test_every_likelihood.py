"""What is done with a run that has ended, for every likelihood, beside other programs."""

import json
import re
import warnings

import numpy as np
import onnxruntime
import pandas as pd
import pytest
import sklearn.metrics as sk
import torch
from scipy import stats
from sklearn.datasets import load_diabetes

import fedbayes
from fedbayes.errors import RunError
from fedbayes.models import read_model
from fedbayes.reports import gather
from fedbayes.reports.figures import charts
from fedbayes.reports.headlines import headlines
from fedbayes.reports.page import render
from fedbayes.storage.card import Card
from fedbayes.storage.folder import RunFolder
from fedbayes.storage.formatting import words
from fedbayes.workflows.calibrate.calibration import summary, trust
from tests.helpers.command_line import command

FEATURES = list("abcdef")
TASKS = {
    "gaussian": (["age"], {}),
    "student-t": (["age", "pulse rate (1/min)"], {"noise": "each"}),
    "quantile": (["age"], {"levels": [0.05, 0.25, 0.5, 0.75, 0.95]}),
    "poisson": (["visits"], {}),
    "multilabel": (["fever", "cough"], {}),
    "bernoulli": (["ill"], {}),
    "categorical": (["ill"], {}),
    "cox": (["days", "died"], {}),
}
"""Of each likelihood, columns of targets and settings."""
_ALIKE = ("student-t", "poisson", "bernoulli", "categorical")
"""Whose programs go the way of another's."""


def table():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, len(FEATURES)))
    frame = pd.DataFrame(3 + 2 * x, columns=FEATURES)
    frame["site"] = rng.choice(["north", "south", "west"], len(x))
    frame["age"] = 50 + 10 * x[:, 0] + 5 * rng.normal(size=len(x))
    frame["pulse rate (1/min)"] = 80 - 4 * x[:, 1] + rng.normal(size=len(x))
    frame["visits"] = rng.poisson(np.exp(1 + 0.5 * x[:, 2]))
    frame["fever"] = (x[:, 3] + 0.3 * rng.normal(size=len(x)) > 0).astype(int)
    frame["cough"] = (x[:, 4] > x[:, 5]).astype(int)
    frame["days"] = np.ceil(100 * rng.exponential(np.exp(-0.5 * x[:, 0])))
    frame["died"] = (rng.random(len(x)) < 0.7).astype(int)
    frame["ill"] = np.where(x[:, 0] + x[:, 1] > 0, "yes", "no")
    return frame


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of each likelihood, with two network sizes of everything small."""
    folder, frame, found = tmp_path_factory.mktemp("runs"), table(), {}
    for name, (label, settings) in TASKS.items():
        place = folder / f"{name}.csv"
        frame[[*FEATURES, "site", *label]].to_csv(place, index=False)
        found[name] = fedbayes.run(
            data={"path": str(place), "label": label, "group": "site", "test": 0.4},
            task={"likelihood": name, **settings},
            model={"hidden": [8]},
            training={"epochs": 3},
            rounds=3,
            folder=folder / name,
        )
    return found


def samples_of(run):
    """Raw test samples of all clients, and their targets in the data's own unit."""
    from fedbayes.runs.build import stored_data

    data = stored_data(run.config, run.folder)
    total = data.test_total
    return data.raw_test(0, total), data.test_union(0, total).y.numpy()


@pytest.mark.parametrize("name", [name for name in TASKS if name != "cox"])
def test_metrics_are_those_of_scikit_learn(runs, name):
    run = runs[name]
    x, y = samples_of(run)
    p, metrics = run.predictor()(x).double().numpy(), run.summary["metrics"]["global"]
    if run.preprocessing.classes:
        assert p.shape == (len(y), 2)
        assert metrics["accuracy"] == pytest.approx(sk.accuracy_score(y, p.argmax(1)))
        assert metrics["nll"] == pytest.approx(sk.log_loss(y, np.exp(p)), rel=1e-4)
    elif name == "multilabel":
        assert metrics["exact_match"] == pytest.approx(sk.accuracy_score(y, p > 0.5))
        assert metrics["f1"] == pytest.approx(sk.f1_score(y, p > 0.5, average="micro"))
        each = sum(sk.log_loss(y[:, i], p[:, i]) for i in range(2))
        assert metrics["nll"] == pytest.approx(each, rel=1e-4)
    elif name == "quantile":
        low, high = run.interval(x, 0.9)
        assert metrics["coverage"] == pytest.approx(
            ((low.numpy() <= y) & (y <= high.numpy())).mean()
        )
        median = sk.mean_pinball_loss(y, p, alpha=0.5)
        assert metrics["pinball"] == pytest.approx(median, rel=0.7)  # one of five levels
    else:
        rmse = sk.root_mean_squared_error(y, p, multioutput="raw_values")
        assert metrics["rmse"] == pytest.approx(rmse.mean(), rel=1e-5)
        assert metrics["mae"] == pytest.approx(sk.mean_absolute_error(y, p), rel=1e-5)
        assert metrics["r2"] == pytest.approx(sk.r2_score(y, p), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    TASKS,
)
def test_exported_programs_answer_in_the_unit_of_the_target(runs, name, tmp_path, capsys):
    run = runs[name]
    x, _ = samples_of(run)
    wanted = run.predictor()(x)
    files = [tmp_path / f"model.{kind}" for kind in ("pt2", "onnx")]
    for file in files:
        assert command("export", run.folder.path, "-o", file) == 0
    extra = {"fedbayes.json": ""}
    program = torch.export.load(files[0], extra_files=extra).module()
    session = onnxruntime.InferenceSession(files[1])
    (other,) = session.run(None, {"samples": x.float().numpy()})
    assert [one.name for one in session.get_outputs()] == [
        "logits" if name == "categorical" else "predictions"
    ]
    for answer in (program(x).detach(), torch.as_tensor(other)):
        if name == "categorical":
            answer = answer.log_softmax(-1)
        torch.testing.assert_close(answer, wanted, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(program(x[:1]), program(x)[:1])
    card = Card.load(extra["fedbayes.json"], "model")
    assert card.likelihood == run.likelihood
    assert card.preprocessing.target == run.preprocessing.target
    if not run.preprocessing.classes:
        assert run.preprocessing.target.names[0] in card.outputs


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_files_are_evaluated_by_their_own_likelihood(runs, name, tmp_path, capsys):
    run = runs[name]
    files = [tmp_path / f"model.{kind}" for kind in ("safetensors", "pt2")]
    for file in (*files, tmp_path / "small.pt"):
        small = ["--compact"] if file.stem == "small" else []
        assert command("export", run.folder.path, "-o", file, *small) == 0
    assert Card.load(read_model(files[0])[1], "m").likelihood == run.likelihood
    capsys.readouterr()
    every = ["evaluate", *files, tmp_path / "small.pt", "--run", run.folder.path]
    assert command(*every, "--json") == 0
    one, two, three, *_ = json.loads(capsys.readouterr().out)
    metrics = {k: v for k, v in run.summary["metrics"]["global"].items() if k != "ece"}
    for key, value in metrics.items():
        assert one[key] == three[key] == pytest.approx(value, rel=1e-4), key
    shared = metrics.keys() & two.keys()
    for key in shared:
        assert two[key] == pytest.approx(metrics[key], rel=1e-3), key
    assert shared or name == "quantile"
    assert ("nll" in two) == (name in ("multilabel", "bernoulli", "categorical", "cox"))
    # Without its run, on the rows of a file.
    path = run.config.data.path
    assert command("evaluate", files[0], "--set", f"data.path={path}", "--json") == 0
    (score,) = json.loads(capsys.readouterr().out)
    assert score["rows"] == 300
    assert command(*every) == 0
    head = next(iter(metrics)).replace("_", " ")
    assert head.split()[0] in capsys.readouterr().out


def test_the_ensemble_of_two_gaussians_is_their_mixture(runs, tmp_path, capsys):
    run = runs["gaussian"]
    other = fedbayes.run(run.config.model_copy(update={"rounds": 1}), tmp_path / "other")
    files = [tmp_path / "a.pt", tmp_path / "b.pt"]
    for one, file in zip((run, other), files, strict=True):
        assert command("export", one.folder.path, "-o", file) == 0
    third = tmp_path / "c.safetensors"
    assert command("export", run.folder.path, "-o", third) == 0
    capsys.readouterr()
    assert command("evaluate", third, *files, "--run", run.folder.path, "--json") == 0
    scores = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    x, y = samples_of(run)
    parts = [one.likelihood.own_unit(one.draws()(x)[0].double()) for one in (run, other)]
    density = np.mean([stats.norm(m, s).pdf(y) for m, s in parts], axis=0)
    found = scores["ensemble, uniform"]
    assert found["nll"] == pytest.approx(-np.log(density).mean(), rel=1e-5)
    mean = np.mean([m.numpy() for m, _ in parts], axis=0)
    assert found["rmse"] == pytest.approx(np.sqrt(((mean - y) ** 2).mean()), rel=1e-5)
    assert "average of the inputs" in scores
    counts = tmp_path / "counts.json"
    counts.write_text("[[1, 2], [3, 4]]")
    files = [third, *files, "--counts", counts]
    assert command("evaluate", *files, "--run", run.folder.path) == 2
    assert "Leave them out" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", ["gaussian", "student-t", "poisson", "quantile"])
def test_coverage_by_hand(runs, name, tmp_path, capsys):
    run = runs[name]
    x, y = samples_of(run)
    metrics = summary(trust(run.folder.path))
    for level in (0.5, 0.9):
        low, high = (end.numpy() for end in run.interval(x, level))
        assert metrics[f"coverage_{level}"] == pytest.approx(((low <= y) & (y <= high)).mean())
        if name in ("gaussian", "student-t"):
            f = run.draws()(x)[0].double()
            mean, scale = (part.numpy() for part in run.likelihood.own_unit(f))
            kind = stats.norm if name == "gaussian" else stats.t(run.likelihood.df)
            reach = kind.ppf(0.5 + level / 2) * scale
            np.testing.assert_allclose(low, mean - reach, rtol=1e-6)
            np.testing.assert_allclose(high, mean + reach, rtol=1e-6)
    if name == "gaussian":
        assert metrics["std"] == pytest.approx(float(np.median(scale)), rel=1e-5)
        assert metrics["width_0.9"] == pytest.approx(float(np.median(2 * reach)), rel=1e-5)
    columns = run.preprocessing.target.names
    assert ("width_0.9" in metrics) == (len(columns) == 1)
    picture = tmp_path / "coverage.svg"
    assert command("calibrate", run.folder.path, "--plot", picture) == 0
    assert "inside the 90% interval" in capsys.readouterr().out
    assert "share of targets inside" in picture.read_text()


def test_labels_are_calibrated_one_by_one(runs, tmp_path):
    run = runs["multilabel"]
    x, y = samples_of(run)
    found = trust(run.folder.path)
    p = run.predictor()(x).numpy()
    right = (p > 0.5) == (y > 0.5)
    counts, confidence = found.calibration.count, found.calibration.confidence
    assert int(counts.sum()) == right.size
    total = float((found.calibration.accuracy * counts).sum())
    assert total == pytest.approx(right.sum())
    mean = float((confidence * counts).sum() / counts.sum())
    assert mean == pytest.approx(np.maximum(p, 1 - p).mean(), rel=1e-5)
    with pytest.raises(RunError, match="has no intervals"):
        run.interval(x)


@pytest.mark.parametrize("name", TASKS)
def test_a_report_of_each(runs, name):
    run = runs[name]
    (record,) = gather([run.folder.path])
    likelihood = run.likelihood
    assert record.headline == run.summary["headline"] == f"global_{likelihood.metric}"
    each = run.folder.progress().clients.each(likelihood)
    names = run.folder.client_names()
    assert record.values == {names[c]: found[likelihood.metric] for c, found in each.items()}
    (headline,) = headlines([record])
    assert headline.metric == words(f"global_{likelihood.metric}")
    page = render([record])
    assert "Confusion matrix" in page if record.classes else "Confusion matrix" not in page
    numbers = likelihood.target.kind in ("real", "count")
    assert ("Predicted against true" in page) == numbers
    assert ("Coverage of intervals" in page) == numbers
    assert ("Lower is better." in page) == (not likelihood.higher_is_better)
    (chart,) = charts(likelihood.metric, [record])
    lines = [line["metrics"]["global"][likelihood.metric] for line in run.metrics]
    assert chart.curves[0].y == lines
    if numbers:
        x, y = samples_of(run)
        first, *_ = charts("predictions", [record])
        assert first.x == pytest.approx(y[:, 0].tolist())
        assert first.y == pytest.approx(run.predictor()(x)[:, 0].tolist(), rel=1e-5)


def test_runs_of_several_likelihoods_stand_apart(runs):
    records = gather([runs[name].folder.path for name in ("gaussian", "categorical", "poisson")])
    titles = [chart.title for chart in charts("headline", records)]
    assert titles == [
        "Global rmse over rounds of age",
        "Global accuracy over rounds",
        "Global rmse over rounds of visits",
    ]
    runs_of = [[c.run for c in chart.curves if c.x] for chart in charts("headline", records)]
    assert runs_of == [[0], [1], [2]]
    metrics = [one.metric for one in headlines(records)]
    assert len(metrics) == 3, "other data are not compared"
    assert "global rmse" in render(records)


def test_the_lowest_error_is_the_best(runs, tmp_path):
    run = runs["gaussian"]
    settings = {"keep_checkpoints": "best", "rounds": 8}
    best = fedbayes.run(run.config.model_copy(update=settings), tmp_path / "best")
    errors = [line["metrics"]["global"]["rmse"] for line in best.metrics]
    assert best.summary["best_round"] == int(np.argmin(errors)) + 1
    records = gather([run.folder.path, tmp_path / "best"])
    (headline,) = headlines(records)
    assert headline.metric == "lowest global rmse of 2 runs on gaussian.csv"
    lowest = min(record.last("global_rmse") for record in records)
    assert float(headline.value) == pytest.approx(lowest, rel=1e-3)
    (one,) = [record for record in records if record.label == "best"]
    assert any("the saved one is of round" in note for note in one.notes) == (
        best.summary["best_round"] != 8
    )


def test_seeds_have_every_metric(runs, tmp_path):
    config = runs["poisson"].config.model_copy(update={"rounds": 1})
    done = fedbayes.run_seeds(config, seeds=[0, 1], folder=tmp_path)
    metrics = done.summary["metrics"]
    assert next(iter(metrics)) == "global_rmse"
    for name in ("rmse", "mae", "r2", "nll", "deviance"):
        for whose in ("global", "local"):
            each = [run.summary["metrics"][whose][name] for run in done.runs.values()]
            assert metrics[f"{whose}_{name}"]["mean"] == pytest.approx(np.mean(each))
            assert metrics[f"{whose}_{name}"]["std"] == pytest.approx(np.std(each, ddof=1))


def test_trackers_get_every_metric(runs, tmp_path, monkeypatch):
    from mlflow import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = runs["student-t"].config.model_copy(update={"rounds": 2})
    run = fedbayes.run(config, tmp_path / "run", track=["tensorboard", "mlflow"])
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    found.Reload()
    last = run.metrics[-1]["metrics"]
    for whose, metrics in last.items():
        for name, value in metrics.items():
            assert found.Scalars(f"{whose}_{name}")[-1].value == pytest.approx(value)
    client = MlflowClient((tmp_path / "run" / "mlflow").as_uri())
    stored = client.get_run((tmp_path / "run" / "mlflow-run.txt").read_text()).data.metrics
    assert stored["global_rmse"] == pytest.approx(last["global"]["rmse"])
    name = "rmse/pulse rate (1/min)"
    plain = "global_" + re.sub(r"[^\w\-. ]", "_", name)
    assert stored[plain] == pytest.approx(last["global"][name])


def test_a_folder_of_the_first_version_is_reported(runs, tmp_path):
    """Its lines have no tables of metrics, its config no task, its files no target."""
    import shutil

    folder = tmp_path / "old"
    shutil.copytree(runs["categorical"].folder.path, folder)
    shutil.rmtree(folder / "checkpoints")
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(re.sub(r"\[task\]\n(.+\n)*", "", text))
    stored = json.loads((folder / "preprocessing.json").read_text())
    stored["classes"] = stored.pop("target")["names"]
    (folder / "preprocessing.json").write_text(json.dumps(stored))
    for file in ("metrics.jsonl", "summary.json"):
        lines = (folder / file).read_text()
        lines = [lines] if file == "summary.json" else lines.splitlines()
        kept = [{k: v for k, v in json.loads(line).items() if k != "metrics"} for line in lines]
        (folder / file).write_text("".join(json.dumps(line) + "\n" for line in kept))
    (record,) = gather([folder])
    (new,) = gather([runs["categorical"].folder.path])
    assert record.headline == "global_accuracy"
    assert [one.value for one in headlines([record])] == [one.value for one in headlines([new])]
    assert "no metrics of clients" in " ".join(record.notes)
    assert "Global accuracy over rounds" in render([record])


def test_regression_networks_are_fused(tmp_path, capsys):
    """Three hospitals' networks of the diabetes data, fused and chosen on held-out rows."""
    frame = load_diabetes(as_frame=True, scaled=False).frame
    frame["site"] = np.random.default_rng(0).choice(["a", "b", "c"], len(frame))
    frame.to_csv(tmp_path / "d.csv", index=False)
    run = fedbayes.run(
        data={"path": str(tmp_path / "d.csv"), "label": "target", "group": "site"},
        task={"likelihood": "gaussian", "noise": 0.7},
        method={"name": "local"},
        model={"hidden": [6]},
        training={"epochs": 30},
        rounds=1,
        folder=tmp_path / "run",
    )
    files = []
    for client in "abc":
        files.append(tmp_path / f"{client}.safetensors")
        assert command("export", tmp_path / "run", "--client", client, "-o", files[-1]) == 0
    held_out = frame[frame["site"] == "a"]
    x, y = held_out[list(run.preprocessing.features)], held_out["target"]
    np.savez(tmp_path / "h.npz", x=x.to_numpy(np.float32), y=y.to_numpy(np.float32))
    out, report = tmp_path / "fused.safetensors", tmp_path / "r.json"
    options = ["--select", tmp_path / "h.npz", "--sigma", 1, "--epsilon", 0, "--report", report]
    assert command("fuse", *files, "-o", out, *options) == 0
    assert "rmse" in capsys.readouterr().out
    trials = json.loads(report.read_text())["trials"]
    assert command("evaluate", out, *files, "--run", tmp_path / "run", "--json") == 0
    scores = {score["name"]: score for score in json.loads(capsys.readouterr().out)}
    assert {"ensemble, uniform", "average of the inputs"} <= scores.keys()
    assert scores["ensemble, uniform"]["rmse"] < max(scores[str(f)]["rmse"] for f in files)
    best = min(trial["nll"] for trial in trials)
    again = ["evaluate", out, "--set", f"data.path={tmp_path / 'h.csv'}", "--json"]
    held_out.to_csv(tmp_path / "h.csv", index=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert command(*again) == 0
    (score,) = json.loads(capsys.readouterr().out)
    assert score["nll"] == pytest.approx(best, rel=1e-4)
    counts = tmp_path / "counts.json"
    counts.write_text("[[1, 2], [3, 4], [5, 6]]")
    for method in ("function", "gpi-fnm"):
        assert command("fuse", *files, "-o", out, "--counts", counts, "-m", method) == 2
        assert "Leave" in " ".join(capsys.readouterr().err.split())
    counts.write_text("[[1], [3], [5]]")
    function = ("--minutes", "0", "-m", "function")
    assert command("fuse", *files, "-o", out, "--counts", counts, *function) == 0


def test_learnt_noise_is_not_matched_but_fused_in_function_space(runs, tmp_path, capsys):
    files = [tmp_path / "a.pt", tmp_path / "b.pt"]
    for file in files:
        assert command("export", runs["gaussian"].folder.path, "-o", file) == 0
    assert command("fuse", *files, "-o", tmp_path / "f.pt", "-m", "gpi-fnm") == 2
    assert "task.noise" in capsys.readouterr().err
    options = ("--minutes", "0", "--report", tmp_path / "r.json")
    assert command("fuse", *files, "-o", tmp_path / "f.pt", *options) == 0
    assert json.loads((tmp_path / "r.json").read_text())["divergence"] < 1e-3, "twice the same"


def test_a_predictor_of_a_posterior_has_draws(runs, tmp_path):
    """Of a mixture over draws, interval and mean are those of samples from it."""
    config = runs["gaussian"].config
    settings = {"method": {"name": "virtual", "samples": 4}, "rounds": 1, "folder": tmp_path}
    run = fedbayes.run(
        data=config.data.model_dump(exclude_none=True), task=dict(config.task), **settings
    )
    x, _ = samples_of(run)
    draws = run.draws()(x)
    assert len(draws) > 1
    means, scales = run.likelihood.own_unit(draws.double())
    np.testing.assert_allclose(run.predictor()(x), means.mean(0), rtol=1e-4)
    low, high = run.interval(x, 0.8)
    for end, p in ((low, 0.1), (high, 0.9)):
        below = stats.norm(means.numpy(), scales.numpy()).cdf(end.numpy()).mean(axis=0)
        np.testing.assert_allclose(below, p, atol=1e-6)
    metrics = summary(trust(tmp_path))
    assert metrics["std_between"] == pytest.approx(
        float(means.std(dim=0, correction=0).median()), rel=1e-4
    )
    assert RunFolder(tmp_path).summary()["headline"] == "local_rmse"
