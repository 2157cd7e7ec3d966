"""Reports and single figures."""

import json
import shutil

import numpy as np
import pytest
import torch

import fedbayes
from fedbayes.errors import RunError
from fedbayes.experiment.reports import gather, plot
from fedbayes.experiment.reports.charts import FIGURES, charts
from fedbayes.experiment.reports.page import differences, render
from fedbayes.experiment.reports.palette import DARK, LIGHT
from fedbayes.experiment.run import Simulation
from tests.test_fusion import command


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of FedAvg, one of FedSparse with another split, and one that was broken off."""
    folder = tmp_path_factory.mktemp("runs")
    common = {"model": {"hidden": [16]}, "rounds": 4}
    data = {"name": "digits", "clients": 6}
    fedbayes.run(**common, data=data, folder=folder / "a")
    fedbayes.run(
        **common,
        data={**data, "partition": "iid"},
        method={"name": "fedsparse", "server_lr": 0.01},
        folder=folder / "b<i>",
    )
    config = fedbayes.Config.create(**common, data=data, method={"name": "local"})
    with Simulation(config, folder / "c") as simulation:
        next(iter(simulation))
        simulation.checkpoint()
    return [folder / name for name in ("a", "b<i>", "c")]


def test_what_is_gathered(runs):
    a, b, c = gather(runs)
    assert [record.label for record in (a, b, c)] == ["a", "b<i>", "c"]
    run = fedbayes.Run if hasattr(fedbayes, "Run") else None
    assert run is not None
    whole = run(runs[0])
    assert a.last("global_accuracy") == whole.summary["global_accuracy"]
    assert a.total("bytes_up") == whole.summary["bytes_up"]
    assert np.mean(list(a.accuracies.values())) == pytest.approx(whole.summary["local_accuracy"])
    # The confusion matrix, independently: predictions on the union of the test sets.
    with Simulation(None, runs[0]) as simulation:
        data = simulation.data
        samples = data.test_union(0, data.test_total)
        assert a.counts.tolist() == data.counts().tolist()
    with torch.no_grad():
        guess = whole.predictor()(data.raw_test(0, data.test_total)).argmax(dim=1)
    expected = np.zeros((10, 10), int)
    np.add.at(expected, (samples.y.numpy(), guess.numpy()), 1)
    assert a.confusion.tolist() == expected.tolist()
    assert a.ending == b.ending == "completed"
    assert c.ending == "so far"
    assert any("1 of 4 rounds so far" in note for note in c.notes)


def test_differences_of_settings(runs):
    found = dict(differences(gather(runs)))
    assert found["method.name"] == ["fedavg", "fedsparse", "local"]
    assert found["data.partition"] == ["dirichlet", "iid", "dirichlet"]
    assert "rounds" not in found
    assert differences(gather(runs[:1])) == []


def test_bytes_add_up_over_rounds(runs):
    (chart,) = charts("bytes", gather(runs[:1]))
    lines = [json.loads(line) for line in (runs[0] / "metrics.jsonl").open()]
    sent = np.cumsum([line["bytes_down"] + line["bytes_up"] for line in lines])
    factor = {"kB": 1e3, "MB": 1e6}[chart.x_label.split(", ")[1]]
    assert chart.curves[0].x == pytest.approx(sent / factor)
    assert chart.curves[0].y == [line["global_accuracy"] for line in lines]


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_colours_stand_out(theme):
    """WCAG: 3:1 for graphics, 4.5:1 for text."""
    for colours, least in (((*theme.runs, theme.heat), 3.0), ((theme.ink, theme.faint), 4.5)):
        for colour in colours:
            low, high = sorted([luminance(colour), luminance(theme.paper)])
            assert (high + 0.05) / (low + 0.05) >= least, colour


@pytest.mark.parametrize("figure", [*FIGURES, "loss"])
@pytest.mark.parametrize("form", ["png", "svg"])
def test_single_figures(figure, form, runs, tmp_path):
    out = tmp_path / f"figure.{form}"
    plot(runs, figure, out)
    content = out.read_bytes()
    assert content.startswith(b"\x89PNG" if form == "png" else b"<?xml")
    if form == "svg" and figure not in ("split", "confusion"):
        assert b"b&lt;i&gt;" in content, "runs are named, as text"
    plot(runs, figure, out)
    assert out.read_bytes() == content, "the same every time"


def test_mistakes_are_named(runs, tmp_path, capsys):
    out = tmp_path / "report.html"
    assert command("report", tmp_path, "-o", out) == 2
    assert "holds no run" in capsys.readouterr().err
    assert command("report", runs[0], runs[0], "-o", out) == 2
    assert "named twice" in capsys.readouterr().err
    assert command("report", runs[0], "-o", tmp_path / "no" / "x.html") == 2
    assert "no folder" in capsys.readouterr().err
    assert not out.exists()
    assert command("plot", runs[0], "-f", "beauty", "-o", tmp_path / "x.png") == 2
    assert "there are accuracy" in " ".join(capsys.readouterr().err.split())
    assert command("plot", runs[0], "-o", tmp_path / "x.bmp") == 2
    assert ".svg" in capsys.readouterr().err
    with pytest.raises(RunError, match="its folders"):
        gather([runs[0].parent])


def test_absent_data_leave_the_rest(runs, tmp_path):
    """A run whose data are not here is told without the split and the confusion matrix."""
    folder = tmp_path / "moved"
    shutil.copytree(runs[0], folder)
    text = (folder / "config.toml").read_text()
    text = text.replace('name = "digits"', f'name = "own"\npath = "{tmp_path}/gone.npz"')
    (folder / "config.toml").write_text(text)
    (record,) = gather([folder])
    assert record.counts is None
    assert record.confusion is None
    assert any("gone.npz" in note for note in record.notes)
    page = render([record])
    assert "gone.npz" in page
    assert "Global accuracy over rounds" in page


def test_damaged_folders_are_told_as_far_as_they_go(runs, tmp_path):
    """Whatever a kill or a disk took, the other runs and the rest of this one are shown."""
    folder = tmp_path / "damaged"
    shutil.copytree(runs[0], folder)
    (folder / "summary.json").write_text('{"cut')
    shutil.rmtree(folder / "checkpoints")
    (folder / "partition.npz").unlink()
    records = gather([folder, runs[1]])
    assert "Global accuracy over rounds" in render(records)
    notes = " ".join(records[0].notes)
    assert "how it ended is not known" in notes
    assert "no accuracies of clients" in notes
    (folder / "summary.json").write_text("[]")
    (folder / "partition.npz").write_bytes((runs[0] / "partition.npz").read_bytes())
    (record,) = gather([folder])
    assert "it has no checkpoint" in " ".join(record.notes)
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.toml").write_bytes((folder / "config.toml").read_bytes())
    assert "no round is complete" in render(gather([bare]))
    (folder / "metrics.jsonl").write_text("[1, 2]\n")
    with pytest.raises(RunError, match="line 1 is damaged: it is no table"):
        gather([folder])


def test_the_page_asks_for_nothing(runs):
    page = render(gather(runs))
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page
    assert "<i>" not in page, "names are escaped"
