"""What a run that has ended tells in a script or a notebook."""

import io
import json
import re
import subprocess
import sys
import warnings

import numpy as np
import pytest
from matplotlib.image import imread

import fedbayes
from fedbayes.errors import FedbayesWarning, RunError
from fedbayes.reports import gather
from fedbayes.runs.frames import rounds_frame
from fedbayes.storage.best_tracker import flat
from tests.helpers.command_line import command

SMALL = {"rounds": 3, "data": {"clients": 4, "alpha": 0.5}, "model": {"hidden": [8]}}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fedbayes.run(**SMALL, folder=tmp_path_factory.mktemp("runs") / "first")


def test_where_no_run_is_it_is_said(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(RunError, match=r"is not a run folder: it has no config\.toml"):
            fedbayes.Result(folder)


def test_a_frame_has_what_the_lines_have(run):
    frame = run.frame()
    assert frame.index.tolist() == [1, 2, 3]
    lines = [json.loads(text) for text in run.folder.metrics_file.read_text().splitlines()]
    for name in ("global_accuracy", "global_nll", "local_accuracy", "bytes_up", "seconds", "loss"):
        assert frame[name].tolist() == [flat(line)[name] for line in lines], name
    shares = np.array([line["class_accuracy"] for line in lines], float)
    names = [f"class_accuracy/{digit}" for digit in range(10)]
    np.testing.assert_array_equal(frame[names].to_numpy(float), shares)
    assert all(dtype.kind in "iufb" for dtype in frame.dtypes), frame.dtypes
    assert frame["refused"].tolist() == [0, 0, 0]


def test_a_frame_of_clients_has_each_ones_metrics(run):
    frame = run.frame("clients")
    (record,) = gather([run.folder.path])
    assert frame.index.tolist() == list(record.clients)
    assert frame["train_samples"].tolist() == record.train_sizes.tolist()
    assert frame["test_samples"].tolist() == record.test_sizes.tolist()
    assert frame["local_accuracy"].dropna().to_dict() == record.values
    # Local accuracy is their mean, the global one the mean over all test samples.
    local = frame["local_accuracy"].mean()
    assert local == pytest.approx(run.summary["local_accuracy"], rel=1e-12)
    whole = np.average(frame["global_accuracy"], weights=frame["test_samples"])
    assert whole == pytest.approx(run.summary["global_accuracy"], rel=1e-12)
    assert frame["refused"].tolist() == [0] * 4
    assert len(run.frame("troubles")) == 0
    with pytest.raises(
        RunError, match=r"unknown frame 'client'\. Choose rounds, clients or troubles"
    ):
        run.frame("client")


def test_frames_tell_of_troubles():
    warnings.simplefilter("ignore", FedbayesWarning)
    run = fedbayes.run(
        rounds=2,
        data={"clients": 5, "partition": "iid"},
        model={"hidden": [8]},
        attack={"kind": "huge", "clients": 1},
    )
    told = run.frame("troubles")
    bad = told[told["what"] == "refused"]
    assert len(bad) == run.summary["refused_reports"] > 0
    assert bad["client"].value_counts().to_dict() == run.summary["refused_clients"]
    counts = run.frame("clients")["refused"]
    assert counts[counts > 0].to_dict() == run.summary["refused_clients"]
    assert run.frame()["refused"].sum() == len(bad)
    assert all(bad["reason"].str.len() > 10)


def test_a_frame_spreads_tables():
    line = {"round": 1, "privacy": {"noise": 2.0, "clip": {"weights": 0.5}}, "metrics": {}}
    frame = rounds_frame([line])
    assert frame.loc[1].to_dict() == {"privacy/noise": 2.0, "privacy/clip/weights": 0.5}


def test_frames_of_several_seeds_stand_below_one_another():
    runs = fedbayes.run_seeds(fedbayes.Config.create(**SMALL | {"rounds": 1}), 2)
    frame = runs.frame()
    assert frame.index.names == ["seed", "round"]
    accuracies = [run.summary["global_accuracy"] for run in runs.runs.values()]
    assert frame["global_accuracy"].tolist() == accuracies


def test_pages_and_figures_have_all_seeds_of_a_folder(tmp_path):
    fedbayes.run_seeds(fedbayes.Config.create(**SMALL | {"rounds": 1}), 2, tmp_path / "runs")
    page, figure = tmp_path / "page.html", tmp_path / "figure.svg"
    assert command("report", tmp_path / "runs", "--out", page) == 0
    assert "2 runs of fedavg" in page.read_text()
    assert command("plot", tmp_path / "runs", "--out", figure) == 0


def test_figures_are_those_of_the_command_and_notebooks_draw_them(run, tmp_path):
    other = fedbayes.run(**SMALL, method={"name": "fedprox", "proximal": 1.0})
    figure = run.plot("headline", other)
    (axes,) = figure.axes
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["fedavg", "fedprox"]
    for curve, one in zip(axes.lines, (run, other), strict=True):
        assert curve.get_ydata().tolist() == one.frame()["global_accuracy"].tolist()
    named = run.plot("loss", other, names=["a", "b"])
    assert [t.get_text() for t in named.axes[0].get_legend().get_texts()] == ["a", "b"]
    picture = imread(io.BytesIO(figure._repr_png_()))
    assert picture.shape[:2] == (340, 520)
    assert picture[..., :3].std() > 0.05
    # The command draws the same picture.
    fedbayes.reports.plot([run.folder.path], "confusion", tmp_path / "one.png")
    run.plot("confusion").savefig(tmp_path / "two.png", dpi=200)
    one, two = (imread(tmp_path / name) for name in ("one.png", "two.png"))
    np.testing.assert_array_equal(one, two)
    with pytest.raises(RunError, match="unknown figure 'headlin'"):
        run.plot("headlin")
    with pytest.raises(RunError, match="there are 1 names of 2 runs"):
        run.plot("loss", other.folder.path, names=["a"])
    with pytest.raises(RunError, match="given twice"):
        run.plot("loss", run)


def test_runs_of_one_method_go_by_their_folders(run, tmp_path):
    again = fedbayes.run(**SMALL, folder=tmp_path / "second")
    legend = run.plot("headline", again).axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["first", "second"]


def test_a_notebook_shows_what_came_of_it(run):
    html = run._repr_html_()
    assert "fedavg on digits, round 3" in html
    assert f"{run.summary['global_accuracy']:.4f}" in html
    assert str(run.folder.path) in html
    assert len(re.search(r'points="([^"]*)"', html)[1].split()) == 3
    assert repr(run) == f"<Result fedavg on digits, round 3, in {run.folder.path}>"


def test_what_is_shown_can_be_no_markup(run):
    odd = fedbayes.Result(run.folder.path)
    odd.summary = {**odd.summary, "dataset": "<script>x</script>"}
    assert "<script>" not in odd._repr_html_()


@pytest.mark.slow
def test_a_plain_script_is_quiet_and_needs_no_notebook():
    code = (
        "import fedbayes, sys\n"
        f"run = fedbayes.run(**{SMALL | {'rounds': 1}!r})\n"
        "run.frame(), run.plot(), run._repr_html_()\n"
        "assert 'IPython' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
