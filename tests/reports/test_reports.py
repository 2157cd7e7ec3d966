"""Reports and single figures."""

import json
import re
import shutil
from dataclasses import replace
from datetime import datetime
from importlib.metadata import version

import numpy as np
import pytest
import torch

import fedbayes
from fedbayes.errors import RunError
from fedbayes.reports import gather, plot
from fedbayes.reports.draw import draw
from fedbayes.reports.figures import FIGURES, charts
from fedbayes.reports.headlines import headlines
from fedbayes.reports.page import differences, render
from fedbayes.reports.palette import looks
from fedbayes.runs.simulation import Simulation
from tests.helpers.cases import cases
from tests.helpers.command_line import command


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
    whole = fedbayes.Result(runs[0])
    assert a.last("global_accuracy") == whole.summary["global_accuracy"]
    assert a.total("bytes_up") == whole.summary["bytes_up"]
    assert np.mean(list(a.values.values())) == pytest.approx(whole.summary["local_accuracy"])
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
    assert any("only clients have models" in note for note in c.notes)
    assert any("1 of 4 rounds so far" in note for note in c.notes)


def test_the_calibration_is_that_of_the_last_round(runs):
    for record in gather(runs[:2]):
        assert record.calibration.error == pytest.approx(record.last("global_ece"), abs=1e-6)
        assert int(record.calibration.count.sum()) == record.test_sizes.sum()


def test_headlines(runs, tmp_path):
    """A run leads with what its method is for; only like is compared with like."""
    records = gather(runs)
    (one,) = headlines(records[:1])
    value = records[0].last("global_accuracy")
    assert (one.value, one.metric) == (f"{value:.3f}", "global accuracy")
    curve = [line["global_accuracy"] for line in records[0].metrics]
    assert one.curve == curve
    assert f"; {curve[0]:.3f} at first; " in one.text
    # Wilson's interval, by its two ends: where the share is 1.96 standard errors off.
    n = records[0].test_sizes.sum()
    for end in map(float, re.search(r"interval (\S+) to (\S+)", one.text).groups()):
        assert abs(value - end) / np.sqrt(end * (1 - end) / n) == pytest.approx(1.96, abs=0.06)
    (alone,) = headlines(records[2:])
    assert alone.metric == "local accuracy"
    assert alone.value == f"{records[2].last('local_accuracy'):.3f}"
    best, other = headlines(records)
    assert float(best.value) == pytest.approx(
        max(r.last("global_accuracy") for r in records[:2]), abs=1e-3
    )
    assert best.metric == "highest global accuracy of 2 runs on digits"
    assert (other.run, other.metric) == (2, "local accuracy on digits")
    # A run whose last rounds were not evaluated: the accuracy is of the round that it is of.
    lines = [*records[0].metrics[:2], {**records[0].metrics[2], "global_accuracy": None}]
    (early,) = headlines([replace(records[0], metrics=lines, final={})])
    assert early.text.startswith("after 2 rounds;")
    elsewhere = replace(records[1], settings={**records[1].settings, "data.name": "mnist"})
    assert len(headlines([records[0], elsewhere])) == 2
    nothing = replace(records[0], metrics=[], final={})
    assert headlines([nothing]) == []
    assert "0 of 4 rounds" in render([nothing]), "a page all the same"


def test_the_title_names_every_file(runs):
    """Of runs on several tables, one for each client."""
    (record,) = gather(runs[:1])

    def titled(*others):
        data = {"data.path": "/x/north.csv", "data.more": [f"/y/{name}.csv" for name in others]}
        return render([replace(record, settings=record.settings | data)])

    assert "<title>fedavg on north.csv + south.csv – " in titled("south")
    assert "<h1>fedavg on north.csv and 3 other files</h1>" in titled("south", "west", "east")
    more = {"data.path": "/x/north.csv", "data.more": ["/y/south.csv"]}
    alone = {"data.path": "/x/north.csv"}
    both = [replace(record, settings=record.settings | data) for data in (more, alone)]
    assert len(headlines(both)) == 2, "other data are not compared"


def test_a_page_says_what_ran_and_when(runs):
    (record,) = gather(runs[:1])
    made = datetime(2026, 3, 4, 5, 6)
    page = render([record], made)
    assert "<h1>fedavg on digits</h1>" in page
    assert "6 clients, 4 rounds, mlp" in page
    assert "run folder a, started" in page
    assert f"by fedbayes {version('fedbayes')}" in page
    assert "Report of 2026-03-04 05:06" in page
    written = datetime.fromtimestamp((runs[0] / "config.toml").stat().st_mtime)
    assert f"started {written:%Y-%m-%d %H:%M}" in page
    assert "1 of 4 rounds" in render(gather(runs[2:]))


def test_clients_are_listed_by_name(runs):
    (record,) = gather(runs[:1])
    page = render([record])
    listed = re.findall(
        r'<tr><td>(client-\d)</td><td(?: class="worst")?>([\d.]+)<span.*?</td>'
        r"<td>(\d+)</td><td>(\d+)</td>",
        page,
    )
    lowest = min(record.values.values())
    assert page.count('class="worst"') == list(record.values.values()).count(lowest)
    assert [name for name, *_ in listed] == sorted(record.values, key=record.values.get)
    for name, accuracy, train, test in listed:
        client = record.clients.index(name)
        assert int(train) == record.counts[client].sum()
        assert int(test) == record.test_sizes[client]
        assert float(accuracy) == pytest.approx(record.values[name], abs=1e-3)
    # Of many, those with the lowest; the others are counted.
    many = [replace(record, label=str(n)) for n in range(8)]
    page = render(many)
    assert page.count("1 of 6 clients are not listed.") == 8
    untried = dict(list(record.values.items())[:4])
    assert "2 have no accuracy" in render([replace(record, values=untried)])


def test_constant_sparsity_and_size_are_no_charts(runs):
    """A dense model's are in the table; whoever asks for the figure still gets it."""
    dense, sparse = gather(runs[:2])
    page = render([dense])
    assert "Size of the global model" not in page
    assert "<h3>Sparsity" not in page
    assert "Negative log-likelihood over rounds" in page
    assert "training loss" in page
    assert charts("sparsity", [dense])
    moving = replace(sparse, metrics=[{**m, "sparsity": m["round"] / 9} for m in sparse.metrics])
    page = render([dense, moving])
    assert "Size of the global model" in page
    assert "<h3>Sparsity" in page


def test_values_of_other_sizes_have_a_logarithmic_axis(runs):
    one, other = gather(runs[:2])
    (chart,) = charts("loss", [one, other])
    assert not chart.log
    large = replace(other, metrics=[{**m, "loss": 1e4} for m in other.metrics])
    (chart,) = charts("loss", [one, large])
    assert chart.log
    zero = replace(other, metrics=[{**m, "loss": 0.0} for m in other.metrics])
    (chart,) = charts("loss", [large, zero])
    assert not chart.log, "zero has no logarithm"


def test_names_in_figures_are_no_formulas(runs):
    one, other = gather(runs[:2])
    large = replace(other, metrics=[{**m, "loss": 1e4} for m in other.metrics])
    drawn = draw(charts("loss", [one, large]), ["_$x_{$", "costs $a$"], "svg", looks("ab")).decode()
    assert "> _$x_{$</text>" in drawn, "a legend leaves out what begins with _"
    assert ">costs $a$</text>" in drawn
    assert "mathdefault{10^{4}}" in drawn, "an axis of powers of ten"
    assert ">$\\mathdefault" not in drawn, "which are drawn as such"
    (heat,) = charts("confusion", [one])
    named = replace(heat, columns=["$0-$50", *heat.columns[1:]], rows=["$x_{$", *heat.rows[1:]])
    drawn = draw([named], ["a"], "svg", looks("a")).decode()
    assert all(f">{name}</text>" in drawn for name in ("$0-$50", "$x_{$"))


def test_differences_of_settings(runs):
    found = dict(differences(gather(runs)))
    assert found["method.name"] == ["fedavg", "fedsparse", "local"]
    assert found["data.partition"] == ["default", "iid", "default"]
    assert "rounds" not in found
    assert differences(gather(runs[:1])) == []


def test_bytes_add_up_over_rounds(runs):
    (chart,) = charts("bytes", gather(runs[:1]))
    lines = [json.loads(line) for line in (runs[0] / "metrics.jsonl").open()]
    sent = np.cumsum([line["bytes_down"] + line["bytes_up"] for line in lines])
    factor = {"kB": 1e3, "MB": 1e6}[chart.x_label.split(", ")[1]]
    assert chart.curves[0].x == pytest.approx(sent / factor)
    assert chart.curves[0].y == [line["global_accuracy"] for line in lines]


@pytest.mark.parametrize("figure", [*FIGURES, "loss"])
@pytest.mark.parametrize("form", cases(["png", "svg"], slow=["svg"]))
def test_single_figures(figure, form, runs, tmp_path):
    if figure in ("metrics", "clock", "predictions", "coverage", "privacy"):
        with pytest.raises(RunError, match="nothing to draw"):
            plot(runs, figure, tmp_path / "x.png")  # of numbers, a clock or noise: these have none
        return
    out = tmp_path / f"figure.{form}"
    plot(runs, figure, out)
    content = out.read_bytes()
    assert content.startswith(b"\x89PNG" if form == "png" else b"<?xml")
    if form == "svg" and figure not in ("split", "confusion"):
        assert b"b&lt;i&gt;" in content, "runs are named, as text"
    if form == "svg":  # whose ids would be drawn at random
        plot(runs, figure, out)
        assert out.read_bytes() == content, "the same every time"


def test_mistakes_are_named(runs, tmp_path, capsys):
    out = tmp_path / "report.html"
    assert command("report", tmp_path, "-o", out) == 2
    assert "is not a run" in capsys.readouterr().err
    assert command("report", runs[0], runs[0], "-o", out) == 2
    assert "given twice" in capsys.readouterr().err
    assert command("report", runs[0], "-o", tmp_path / "no" / "x.html") == 2
    assert "folder not found" in capsys.readouterr().err
    assert not out.exists()
    assert command("plot", runs[0], "-f", "beauty", "-o", tmp_path / "x.png") == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "Choose headline" in told
    assert all(told.split().count(f"{name},") == 1 for name in FIGURES if name != "headline")
    assert command("plot", runs[0], "-o", tmp_path / "x.bmp") == 2
    assert ".svg" in capsys.readouterr().err
    with pytest.raises(RunError, match="the run folders in it"):
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
    # Who has how much is in the run folder itself.
    (whole,) = gather(runs[:1])
    assert record.train_sizes.tolist() == whole.counts.sum(axis=1).tolist()
    assert record.test_sizes.sum() == whole.confusion.sum()
    assert "Clients by name" in page
    assert record.classes == whole.classes
    shares = np.diag(whole.confusion) / whole.confusion.sum(axis=1)
    assert [share for _, share in record.by_class()] == pytest.approx(shares.tolist())
    for name, share in zip(whole.classes, shares, strict=True):
        assert f">{name}</td><td>{share:.3f}</td></tr>" in page
    assert "Accuracy by class" not in render([whole]), "the confusion matrix tells it"
    (folder / "preprocessing.json").write_text("{")
    (record,) = gather([folder])
    assert any("the target is unknown" in note for note in record.notes)
    assert [name for name, _ in record.by_class()] == [str(label) for label in range(10)]


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
    assert "the end of the run is unknown" in notes
    assert "no metrics of clients" in notes
    (folder / "summary.json").write_text("[]")
    (folder / "partition.npz").write_bytes((runs[0] / "partition.npz").read_bytes())
    (record,) = gather([folder])
    assert "it has no checkpoint" in " ".join(record.notes)
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.toml").write_bytes((folder / "config.toml").read_bytes())
    (record,) = gather([bare])
    assert record.train_sizes.tolist() == record.counts.sum(axis=1).tolist()
    assert "no round is complete" in render([record])
    (folder / "metrics.jsonl").write_text("[1, 2]\n")
    with pytest.raises(RunError, match="line 1 is damaged: it is not a table"):
        gather([folder])


def test_what_a_page_leaves_out_is_said_where_it_is_written(runs, tmp_path, capsys):
    """Of a config whose lines were cut off, the first settings and how many more."""
    folder = tmp_path / "cut"
    shutil.copytree(runs[0], folder)
    lines = (folder / "config.toml").read_text().splitlines(keepends=True)
    (folder / "config.toml").write_text("".join(lines[:5]))
    for call in ("report",), ("plot", "-f", "bytes"):
        out = tmp_path / ("x.html" if call == ("report",) else "x.png")
        assert command(call[0], folder, *call[1:], "-o", out) == 0
        told = " ".join(capsys.readouterr().err.split())
        assert "note: cut:" in told
        assert "differs from the config of the run in" in told
        assert "more. Restore it" in told
        assert len(told) < 3000
        assert out.exists()


def test_a_damaged_model_is_named_where_the_page_is_written(runs, tmp_path, capsys):
    """In the page too, beside what other files tell."""
    folder, out = tmp_path / "run", tmp_path / "x.html"
    shutil.copytree(runs[0], folder)
    assert command("report", folder, "-o", out) == 0
    assert "damaged" not in capsys.readouterr().err
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\1\2\3\4")
    assert command("report", folder, "-o", out) == 0
    told = " ".join(capsys.readouterr().err.split())
    page = out.read_text()
    for text in (told, page):
        assert f"{folder / 'model.safetensors'} or SHA256SUMS next to it is damaged" in text
        assert "Restore it from a copy; or remove" in text
    assert "Global accuracy over rounds" in page


def test_the_page_asks_for_nothing(runs):
    page = render(gather(runs)).replace("http://www.w3.org/2000/svg", "")
    assert "http://" not in page
    assert "https://" not in page
    assert "<i>" not in page, "names are escaped"
