"""Forgetting a client: against closed forms, and against runs that it was never part of."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

import fedbayes
from fedbayes.contracts.mean_field import MeanFieldClient
from fedbayes.contracts.product import PosteriorServer
from fedbayes.core.by_client import ByClient
from fedbayes.data import DataSettings, Partition
from fedbayes.errors import DataError, RunError
from fedbayes.inference.gaussian import NaturalGaussian, standard
from fedbayes.methods.fedlap import FedLap
from fedbayes.methods.pvi import Pvi
from fedbayes.runs.build import build_runtime
from fedbayes.runs.simulation import Simulation
from fedbayes.workflows.calibrate.ended_run import EndedRun
from fedbayes.workflows.clients.forgetting import FORGOTTEN_FILE, begin, forgotten
from tests.helpers.command_line import command
from tests.helpers.places import network, run_of


def exact(rows, prior, share):
    """The factor of y = w x + N(0, 1) of some rows: its likelihood and its share of the prior."""
    x, y = rows
    precision = {"w": (x * x).sum(0) + share / prior**2}
    return NaturalGaussian(precision, {"w": (x * y[:, None]).sum(0)})


@pytest.mark.parametrize("method", [Pvi(prior_std=2.0), FedLap(prior_std=2.0)])
def test_in_linear_regression_the_posterior_is_that_of_the_others(method):
    """Λ = 1/σ² + Σ x², Λ μ = Σ x y, each by a column of a design that is orthogonal."""
    rng = torch.Generator().manual_seed(3)
    draw = lambda n: torch.randn(n, 2, generator=rng, dtype=torch.float64)  # noqa: E731
    clients = [(x := draw(n), x[:, 0] - x[:, 1] + draw(n)[:, 0]) for n in (5, 9, 40, 7)]
    factors = [exact(rows, 2.0, 1 / 4) for rows in clients]
    posterior = factors[0] * factors[1] * factors[2] * factors[3]
    run = run_of(network(), clients=4)

    server = PosteriorServer(posterior)
    for gone in (2, 0):
        server = method.forget(server, MeanFieldClient(factors[gone]), run)

    left = [clients[1], clients[3]]
    wanted = exact([torch.cat(part) for part in zip(*left, strict=True)], 2.0, 1.0)
    for part in ("precision", "shift"):
        found = getattr(server.posterior, part)["w"]
        torch.testing.assert_close(found, getattr(wanted, part)["w"], rtol=1e-12, atol=1e-12)
    product = standard({"w": torch.ones(2)}) ** 0.0
    for kept in (1, 3):
        product = product * method.remaining(MeanFieldClient(factors[kept]), run, 2).factor
    for part in ("precision", "shift"):
        found = getattr(product, part)["w"]
        torch.testing.assert_close(found, getattr(wanted, part)["w"], rtol=1e-12, atol=1e-12)


def test_who_never_took_part_takes_nothing_along():
    posterior = standard({"w": torch.ones(3)})
    empty = MeanFieldClient(NaturalGaussian({}, {}))
    found = Pvi().forget(PosteriorServer(posterior), empty, run_of(network()))
    assert torch.equal(found.posterior.precision["w"], posterior.precision["w"])


def test_rows_of_clients_move_up_and_those_of_the_client_go():
    table = ByClient(torch.tensor([1, 4, 5]), {"a": torch.tensor([10.0, 40.0, 50.0])})
    assert table.without(4).clients.tolist() == [1, 4]
    assert table.without(4).columns["a"].tolist() == [10.0, 50.0]
    assert table.without(0).clients.tolist() == [0, 3, 4]


def test_a_partition_without_a_client_has_the_rows_of_the_others():
    rows = np.arange(9), np.array([0, 4, 6, 9]), np.arange(9, 12), np.array([0, 1, 1, 3])
    found = Partition(*rows, names=("a", "b", "c")).without(["b"])
    assert found.names == ("a", "c")
    assert found.train_rows(0).tolist() == [0, 1, 2, 3]
    assert found.train_rows(1).tolist() == [6, 7, 8]
    assert found.test_rows(1).tolist() == [10, 11]
    with pytest.raises(DataError, match="exclude lists unknown clients: d"):
        Partition(*rows, names=("a", "b", "c")).without(["d"])


def line(slopes, rows=(12, 20, 16, 28)):
    """Rows of clients whose x and y have mean 0 and variance 1, and these correlations, so that
    standardization and the orthogonality of slope and intercept do not depend on who is there.
    """
    rng, parts = np.random.default_rng(2), []
    for number, (slope, count) in enumerate(zip(slopes, rows, strict=True)):
        x, e = rng.standard_normal((2, count))
        x = (x - x.mean()) / x.std()
        e = e - e.mean() - (e @ x / count) * x
        y = slope * x + np.sqrt(1 - slope**2) * e / e.std()
        train = pd.DataFrame({"x": x, "y": y, "site": f"s{number}", "part": "train"})
        parts += [train, train.head(2).assign(part="test")]
    return pd.concat(parts, ignore_index=True)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "line.csv"
    line((0.9, -0.5, 0.3, 0.6)).to_csv(file, index=False)
    return file


REGRESSION = {
    "method": {"name": "fedlap", "damping": 1.0, "kl_weight": 1.0},
    "model": {"name": "mlp", "hidden": []},
    "task": {"likelihood": "gaussian", "noise": 1.0},
    "training": {"optimizer": "sgd", "lr": 0.5, "steps": 40, "batch_size": 64},
    "calibration": "none",
}


def of(file, **more):
    data = {"path": file, "label": "y", "group": "site", "split": "part", **more}
    return {"data": data, **REGRESSION}


def test_a_linear_regression_without_a_client_is_that_which_never_had_it(table, tmp_path):
    """No round is needed: clients' factors do not depend on one another."""
    whole = fedbayes.run(out=tmp_path / "whole", rounds=3, **of(table))
    never = fedbayes.run(out=tmp_path / "never", rounds=3, **of(table, exclude=["s3"]))
    found = fedbayes.forget(whole, "s3", out=tmp_path / "found", rounds=0)
    assert forgotten(found.folder).way == "factor"
    for name, wanted in never.model.items():
        torch.testing.assert_close(found.model[name], wanted, rtol=1e-6, atol=1e-6)
    moved = max((whole.model[n] - wanted).abs().max() for n, wanted in never.model.items())
    assert moved > 0.01
    nll = found.summary["metrics"]["global"]["nll"]
    assert nll == pytest.approx(never.summary["metrics"]["global"]["nll"], abs=1e-6)


def test_a_regression_without_a_client_is_that_of_the_other_tables(tmp_path):
    """A generalized linear model, by the sums of the clients that are left."""
    frame = line((0.9, -0.5, 0.3, 0.6)).drop(columns="part")
    frame["z"] = (frame["y"] > 0.2).astype(int)
    frame.to_csv(tmp_path / "all.csv", index=False)
    frame[frame["site"] != "s2"].to_csv(tmp_path / "others.csv", index=False)
    settings = DataSettings(path=tmp_path / "all.csv", group="site", exclude=("s2",))
    left = fedbayes.client_tables((), settings)
    assert list(left.tables) == ["s0", "s1", "s3"]
    others = fedbayes.client_tables(tmp_path / "others.csv", group="site")
    for family, outcome, drop in (("gaussian", "y", ["z"]), ("binomial", "z", ["y"])):
        found, wanted = (
            fedbayes.glm(each.tables, family=family, outcome=outcome, drop=drop)
            for each in (left, others)
        )
        assert found.frame().equals(wanted.frame())
    with pytest.raises(DataError, match="exclude lists unknown clients: s9"):
        fedbayes.client_tables((), settings.model_copy(update={"exclude": ("s9",)}))


SMALL = {"clients": 4, "model": {"hidden": [8]}, "training": {"steps": 5}}


def test_nothing_of_the_client_is_in_the_new_run(tmp_path):
    before = fedbayes.run(method="pvi", rounds=2, out=tmp_path / "a", **SMALL)
    own = before.folder.partition()
    found = fedbayes.forget(before, 1, out=tmp_path / "b", rounds=2)
    names = ["client-0", "client-2", "client-3"]
    assert list(found.folder.client_names()) == names
    assert found.config.data.exclude == ("client-1",)
    division = found.folder.partition()
    for number, client in enumerate((0, 2, 3)):
        assert division.train_rows(number).tolist() == own.train_rows(client).tolist()
        assert division.test_rows(number).tolist() == own.test_rows(client).tolist()
    states = sorted(path.name for path in found.folder.clients.iterdir())
    assert states == [f"000000{client}-0000003.safetensors" for client in range(3)]
    assert [line["round"] for line in found.metrics] == [1, 2, 3]
    assert list(found.summary["per_client"]["global"]) == names
    told = json.loads((found.folder / FORGOTTEN_FILE).read_text())
    assert {**told, "removed": 0, "remains": 0} == {
        "earlier": [],
        "client": "client-1",
        "run": str(tmp_path / "a"),
        "way": "factor",
        "round": 2,
        "rounds": 2,
        "removed": 0,
        "remains": 0,
    }
    # It goes on like any run.
    longer = fedbayes.resume(found.folder, rounds=4)
    assert longer.summary["rounds"] == 4
    assert before.folder.clients.exists()  # that of before is as it was


def test_what_no_factor_has_is_told(tmp_path):
    """A posterior that the server moved by itself is more than the product of the factors."""
    before = fedbayes.run(method="pvi", rounds=1, out=tmp_path / "a", **SMALL)
    assert not any("not the product" in text for text in remains(before, tmp_path / "b"))
    before.folder.reopen()
    before.folder.lock()
    progress = before.folder.progress()
    server = {n: t * 1.1 if "shift" in n else t for n, t in progress.server.items()}
    before.folder.create(before.config, before.folder.partition(), before.preprocessing)
    before.folder.lines.drop_after(1)
    before.folder.save(replace(progress, server=server))
    before.folder.unlock()
    assert any("not the product" in text for text in remains(before, tmp_path / "c"))


def test_the_file_with_the_rows_of_the_client_is_named(tmp_path):
    """Its own; the one file of all clients; all, if each has its rows."""
    frame = pd.DataFrame({"a": np.arange(60.0), "label": ["x", "y"] * 30})
    files = [tmp_path / f"{name}.csv" for name in ("north", "south", "west")]
    for file in files:
        frame.to_csv(file, index=False)
    whole = frame.assign(ward=["north", "south", "west"] * 20)
    whole.to_csv(tmp_path / "whole.csv", index=False)
    more = {"method": "pvi", "rounds": 1, "model": {"hidden": [4]}, "training": {"steps": 1}}

    several = fedbayes.run(data=files, out=tmp_path / "a", **more)
    one = {"path": tmp_path / "whole.csv", "group": "ward"}
    together = fedbayes.run(data=one, out=tmp_path / "b", **more)
    mixed = {"path": files[0], "more": files[1:], "partition": "iid", "clients": 3}
    mixed = fedbayes.run(data=mixed, out=tmp_path / "c", **more)

    def places(run, client):
        told = begin(run.folder.path, client, run.folder.path.with_suffix(".new"), 0).remains
        (found,) = (text for text in told if text.startswith(f"the rows of {client} in "))
        return found.split(". Delete them there")[0].split(" in ", 1)[1]

    assert places(together, "south") == str(tmp_path / "whole.csv")
    assert places(mixed, "client-1") == ", ".join(map(str, files))
    assert places(several, "south") == str(files[1])


FACTORS = [
    {"name": "pvi"},
    {"name": "fedgvi"},
    {"name": "virtual", "samples": 1},
    {"name": "fedep"},
    {"name": "fedlap"},
    {"name": "fedlap", "covariance": "none"},
    {"name": "fedlap", "covariance": "none", "inputs": "auto", "points": 20},
    {"name": "dsvgd", "particles": 3},
]


@pytest.mark.slow
@pytest.mark.parametrize("method", FACTORS, ids=lambda table: "-".join(map(str, table.values())))
def test_under_every_method_with_factors(method, tmp_path):
    """Without all clients nothing but the prior is left, also where some were in no round."""
    more = {"clients_per_round": 2, "rounds": 3, "seed": 1}
    before = fedbayes.run(method=method, out=tmp_path / "a", **SMALL, **more)
    found = fedbayes.forget(before, 1, out=tmp_path / "b", rounds=1)
    told = forgotten(found.folder)
    assert told.way == "factor"
    assert not any("not the product" in text for text in told.remains)
    assert len(found.folder.client_names()) == 3


def remains(run, out):
    return begin(run.folder.path, 1, out, 0).remains


@pytest.mark.slow
def test_two_clients_one_after_the_other(tmp_path):
    before = fedbayes.run(method="pvi", rounds=2, out=tmp_path / "a", **SMALL)
    once = fedbayes.forget(before, "client-3", out=tmp_path / "b", rounds=0)
    twice = fedbayes.forget(once, "client-0", out=tmp_path / "c", rounds=0)
    other = fedbayes.forget(before, "client-0", out=tmp_path / "d", rounds=0)
    other = fedbayes.forget(other, "client-3", out=tmp_path / "e", rounds=0)
    assert twice.config.data.exclude == ("client-3", "client-0")
    for name, wanted in other.model.items():
        torch.testing.assert_close(twice.model[name], wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("gone", ["north", "south"])
def test_rows_held_out_are_rows_that_nobody_trained_on_before(gone, tmp_path):
    """Numbers of clients change, but not which of their rows are held out."""
    frame = pd.DataFrame({"a": np.arange(120.0), "ward": ["north", "south", "west"] * 40})
    frame["label"] = np.random.default_rng(0).choice(["x", "y"], 120)
    frame.to_csv(tmp_path / "wards.csv", index=False)
    data = {"path": tmp_path / "wards.csv", "label": "label", "group": "ward"}
    more = {"method": "pvi", "rounds": 1, "model": {"hidden": []}, "training": {"steps": 1}}
    before = fedbayes.run(data=data, out=tmp_path / "a", **more)
    once = fedbayes.forget(before, gone, out=tmp_path / "b", rounds=0)
    other = next(name for name in ("south", "north") if name != gone)
    twice = fedbayes.forget(once, other, out=tmp_path / "c", rounds=0)

    def held_out(run):
        ended = EndedRun.open(run.folder, personal=False)
        runtime = build_runtime(ended.config, ended.data, quiet=True)
        parts = [runtime.parts(client)[1].x for client in range(ended.data.clients)]
        return dict(zip(ended.data.names, parts, strict=True))

    first = held_out(before)
    assert len(first["west"])
    for run in (once, twice):
        for name, x in held_out(run).items():
            assert torch.equal(x, first[name])


def test_what_remains_of_names_and_of_clients_that_went_earlier(tmp_path):
    frame = pd.DataFrame({"a": np.arange(120.0), "ward": ["north", "south", "west"] * 40})
    frame["sex"] = np.where(frame["ward"] == "south", "none", "f")
    frame["label"] = np.where((frame["ward"] == "south") & (frame["a"] > 60), "z", "x")
    frame.loc[frame["a"] % 2 == 0, ["sex", "label"]] = ["m", "y"]
    frame.to_csv(tmp_path / "wards.csv", index=False)
    data = {"path": tmp_path / "wards.csv", "label": "label", "group": "ward"}
    more = {"rounds": 1, "model": {"hidden": []}, "training": {"steps": 1}}

    def told(method, client):
        out = tmp_path / f"{method}-{client}"
        run = fedbayes.run(method=method, data=data, out=tmp_path / f"old-{out.name}", **more)
        return out, "; ".join(begin(run.folder.path, client, out, 1).remains)

    assert "sex=none, z" in told("fedavg", "south")[1]
    once, remains = told("pvi", "south")
    assert "sex=none, z" in remains
    assert "new run has" not in told("pvi", "west")[1]
    twice = begin(once, "west", tmp_path / "twice", 1)
    assert twice.earlier == ("south",)
    assert any("count the training rows of south, west" in text for text in twice.remains)
    assert forgotten(tmp_path / "twice") == twice
    with pytest.raises(RunError, match="is inside of"):
        begin(once, "west", once / "inside", 1)
    frame[frame["ward"] != "south"].to_csv(tmp_path / "wards.csv", index=False)
    with pytest.raises(RunError, match=r"changed since \S*pvi-south began: classes"):
        begin(once, "west", tmp_path / "late", 1)


def test_averages_start_again_as_if_the_client_had_never_been_there(tmp_path):
    before = fedbayes.run(method="fedavg", rounds=2, out=tmp_path / "a", **SMALL)
    found = fedbayes.forget(before, "client-1", out=tmp_path / "b")
    data = {"clients": 4, "exclude": "client-1"}
    settings = {"model": {"hidden": [8]}, "training": {"steps": 5}, "data": data}
    never = fedbayes.run(method="fedavg", rounds=2, **settings)
    assert forgotten(found.folder).way == "start"
    for name, wanted in never.model.items():
        assert torch.equal(found.model[name], wanted)


def test_epsilon_of_both_runs_adds_up(tmp_path):
    noise = {"privacy": {"noise": 1.0}, "aggregation": {"clip": 1.0}}
    before = fedbayes.run(method="fedavg", rounds=1, out=tmp_path / "a", **SMALL, **noise)
    plain = fedbayes.run(method="fedavg", rounds=1, out=tmp_path / "c", **SMALL)
    told = [
        [text for text in begin(run.folder.path, 1, tmp_path / out, 1).remains if "loss" in text]
        for run, out in ((before, "b"), (plain, "d"))
    ]
    assert [len(texts) for texts in told] == [1, 0]


def test_or_from_the_last_checkpoint_without_it(tmp_path):
    more = {"clients_per_round": 1, "sampling": "cyclic", "keep_checkpoints": "all"}
    before = fedbayes.run(method="fedavg", rounds=4, out=tmp_path / "a", **SMALL, **more)
    found = fedbayes.forget(before, "client-2", out=tmp_path / "b", rounds=0)
    told = forgotten(found.folder)
    assert (told.way, told.round) == ("checkpoint", 2)
    for name, wanted in before.server(2).weights.items():
        assert torch.equal(found.model[name], wanted)


def test_a_copy_of_the_data_loses_the_rows(tmp_path):
    frame = line((0.9, -0.5, 0.3, 0.6)).drop(columns="part")
    settings = {"label": "y", "group": "site", "model": {"hidden": []}, "rounds": 2}
    before = fedbayes.run(data=frame, method="pvi", out=tmp_path / "a", **settings)
    kept = before.folder.partition()
    found = fedbayes.forget(before, "s1", out=tmp_path / "b", rounds=1)
    (copy,) = found.folder.glob("data.*")
    assert sorted(pd.read_parquet(copy)["site"].unique()) == ["s0", "s2", "s3"]
    old, new = frame.to_numpy(), pd.read_parquet(copy).to_numpy()
    division = found.folder.partition()
    for number, client in enumerate((0, 2, 3)):
        mine, theirs = division.train_rows(number), kept.train_rows(client)
        assert (new[mine] == old[theirs]).all()
    assert fedbayes.resume(found.folder, rounds=3).summary["rounds"] == 3


def test_a_run_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    before = fedbayes.run(method="pvi", rounds=1, out=tmp_path / "a", **SMALL)

    def broken(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(Simulation, "adopt", broken)
    with pytest.raises(KeyboardInterrupt):
        fedbayes.forget(before, 0, out=tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_what_cannot_be_forgotten(tmp_path):
    before = fedbayes.run(method="pvi", rounds=1, out=tmp_path / "a", **SMALL)
    with pytest.raises(RunError, match="has no client 'north'"):
        fedbayes.forget(before, "north", out=tmp_path / "b")
    with pytest.raises(RunError, match="already has a run"):
        fedbayes.forget(before, 0, out=tmp_path / "a")
    with pytest.raises(RunError, match="no client was removed"):
        forgotten(before.folder)
    one = fedbayes.run(method="pvi", rounds=1, clients=1, model={"hidden": []}, out=tmp_path / "o")
    with pytest.raises(RunError, match="the only client"):
        fedbayes.forget(one, 0, out=tmp_path / "b")
    with pytest.raises(RunError, match="run fedbayes fuse again"):
        fedbayes.forget(before.folder.model_file, 0, out=tmp_path / "b")


def test_on_the_command_line(tmp_path, capsys):
    fedbayes.run(method="pvi", rounds=1, out=tmp_path / "a", **SMALL)
    place = ("forget", tmp_path / "a", "--client", "client-2", "-o", tmp_path / "b")
    assert command(*place, "--rounds", 1, "--json") == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["rounds"] == 2
    assert f"delete the old run with: rm -r {tmp_path / 'a'}" in said.err.replace("\n", "")
    assert command(*place) == 2
    assert "already has a run" in capsys.readouterr().err
