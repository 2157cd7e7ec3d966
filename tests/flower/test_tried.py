"""The global model as clients elsewhere find it: against evaluation in one place, and node by
node.
"""

import json
from io import StringIO

import numpy as np
import pandas as pd
import pytest

from tests.helpers.flower_runs import federated

pytest.importorskip("flwr")

from rich.console import Console

import fedbayes
from fedbayes import Config
from fedbayes.errors import ConfigError, EngineError, FedbayesWarning
from fedbayes.federation.client_runtime import ClientRuntime
from fedbayes.flower.own_data import own_data
from fedbayes.reports import gather, write_page
from fedbayes.runs.outcome import outcome

DIGITS = {"data": {"clients": 4, "partition": "dirichlet", "limit": 500}, "rounds": 1}


@pytest.fixture
def wards(tmp_path):
    """A table at the server, and one of each of three clients, of which the last is unlike."""
    rng = np.random.default_rng(0)

    def table(name, rows, flip=False):
        x = rng.normal(size=(rows, 2))
        ill = (x[:, 0] + 0.3 * rng.normal(size=rows) > 0) ^ flip
        frame = pd.DataFrame(x, columns=["u", "v"]).assign(ill=np.where(ill, "yes", "no"))
        frame.to_csv(tmp_path / f"{name}.csv", index=False)

    table("server", 80)
    for client in range(3):
        table(client, 400, flip=client == 2)
    return tmp_path


@pytest.mark.parametrize(
    "method",
    [
        {"name": "fedavg"},
        pytest.param({"name": "virtual", "predictions": 3}, marks=pytest.mark.slow),
        pytest.param({"name": "mixture"}, marks=pytest.mark.slow),
    ],
)
def test_the_same_as_in_one_place(method, tmp_path):
    asked = {**DIGITS, "method": method, "metrics": ["auroc"], "engine": "flower-simulation"}
    here, there = (
        fedbayes.run(**asked, evaluate_at=place, folder=tmp_path / place)
        for place in ("server", "clients")
    )
    for one, other in zip(here.metrics, there.metrics, strict=True):
        assert one["global_accuracy"] == other["global_accuracy"]
        assert one["global_nll"] == pytest.approx(other["global_nll"], rel=1e-6)
        for kind in ("global_mean", "global_worst", "global_spread"):
            assert one["metrics"][kind] == pytest.approx(other["metrics"][kind], rel=1e-5)
        for name, values in one["by_client"]["global"].items():
            assert values == pytest.approx(other["by_client"]["global"][name], rel=1e-5)
        # A copy of the model goes to each client beside the round's broadcast.
        assert other["bytes_down"] > one["bytes_down"]
        assert other["link_down"] > one["link_down"]
    summary = there.summary
    assert set(summary["per_client"]["global"]) == set(there.folder.client_names())
    assert "auroc" not in summary["metrics"]["global"]  # it is no sum
    assert "auroc" in summary["metrics"]["global_worst"]


def test_nodes_try_it_on_their_own_rows(wards, tmp_path):
    summary, _ = federated(tmp_path, wards)
    each = summary["per_client"]["global"]
    accuracy = [each[name]["accuracy"] for name in sorted(each)]
    assert min(accuracy[:2]) > 0.6
    assert accuracy[2] < 0.4  # the client that is unlike: the server's own rows would not tell
    result = fedbayes.Result(tmp_path / "run")
    right = total = 0
    for client in range(3):
        frame = pd.read_csv(wards / f"{client}.csv")
        wanted = result.preprocessing
        own = own_data(result.config, wards / f"{client}.csv", wanted)
        rows = own.partition.test
        said = result.predict_frame(frame.iloc[rows][["u", "v"]])["predicted"]
        hits = (said.to_numpy() == frame.ill.to_numpy()[rows]).sum()
        assert accuracy[client] == pytest.approx(hits / len(rows))
        right, total = right + hits, total + len(rows)
    assert summary["global_accuracy"] == pytest.approx(right / total)
    assert summary["metrics"]["global_worst"]["accuracy"] == pytest.approx(min(accuracy))
    spread = summary["metrics"]["global_spread"]["accuracy"]
    assert spread == pytest.approx(np.std(accuracy, ddof=1))


def test_who_does_not_answer_is_left_out_by_name(wards, tmp_path, monkeypatch):
    honest = ClientRuntime.tried

    def tried(self, task):
        if task.client == 1:
            raise EngineError("the disk is full")
        outcome = honest(self, task)
        if task.client == 2 and task.round == 1:
            outcome.scores["correct"] = 1e9
        return outcome

    monkeypatch.setattr(ClientRuntime, "tried", tried)
    with pytest.warns(FedbayesWarning, match=r"1 of 3 clients did not evaluate .*the disk is full"):
        summary, lines = federated(tmp_path, wards)
    assert set(summary["per_client"]["global"]) >= {"client-0", "client-2"}
    assert lines[0]["not_evaluated"].keys() == {"1", "2"}
    assert "for 100 samples" in lines[0]["not_evaluated"]["2"]
    assert lines[1]["not_evaluated"].keys() == {"1"}
    assert lines[0]["by_client"]["global"]["accuracy"][1:] == [None, None]
    for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(text)


def test_more_samples_than_a_report_may_weigh_are_not_believed(wards, tmp_path, monkeypatch):
    """Who claims most of all samples would decide what is said of all of them."""
    honest = ClientRuntime.tried

    def tried(self, task):
        outcome = honest(self, task)
        if task.client == 2:
            outcome.scores["count"] = 2.0**31 - 1
        return outcome

    monkeypatch.setattr(ClientRuntime, "tried", tried)
    with pytest.warns(FedbayesWarning, match="1 of 3 clients did not evaluate"):
        summary, lines = federated(tmp_path, wards)
    assert "the limit is 1,000,000 (aggregation.max_weight)" in lines[-1]["not_evaluated"]["2"]
    assert summary["global_accuracy"] > 0.6


def test_what_does_not_go_together_is_refused():
    asked = {"engine": "flower-simulation", "evaluate_at": "clients", **DIGITS}
    for more, words in (
        ({"secure": {"enabled": True}}, "needs test metrics .* but secure.enabled hides"),
        ({"method": {"name": "local"}}, "local has none"),
        (
            {"attack": {"kind": "label-flip", "clients": 1}},
            "needs honest clients, but attack",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            fedbayes.run(**asked, **more)
    with pytest.warns(FedbayesWarning, match="evaluate_at"):
        fedbayes.run(**DIGITS, evaluate_at="clients")


@pytest.mark.parametrize("likelihood", ["cox", pytest.param("gaussian", marks=pytest.mark.slow)])
def test_other_targets(likelihood, tmp_path):
    rng = np.random.default_rng(1)
    frame = pd.DataFrame(rng.normal(size=(300, 2)), columns=["a", "b"])
    frame["days"] = np.ceil(rng.exponential(np.exp(-frame.a)) * 50)
    frame["died"] = (rng.random(300) < 0.7).astype(int)
    frame.to_csv(tmp_path / "t.csv", index=False)
    label = ["days", "died"] if likelihood == "cox" else ["days"]
    data = {"path": str(tmp_path / "t.csv"), "label": label, "clients": 3, "partition": "iid"}
    data |= {} if likelihood == "cox" else {"drop": ["died"]}
    asked = {"data": data, "task": {"likelihood": likelihood}, "rounds": 1}
    found = [
        fedbayes.run(**asked, engine="flower-simulation", evaluate_at=place).summary
        for place in ("server", "clients")
    ]
    both = [one["per_client"]["global"] for one in found]
    for client, metrics in both[0].items():
        assert metrics == pytest.approx(both[1][client], rel=1e-5)
    metric = "c_index" if likelihood == "cox" else "rmse"
    whole = [one["metrics"]["global"][metric] for one in found]
    assert whole[0] == pytest.approx(whole[1], rel=1e-5)


def shown(summary):
    console = Console(file=StringIO(), width=200)
    console.print(outcome(summary))
    return console.file.getvalue()


def test_metrics_of_a_real_federation_are_of_the_clients_rows(wards, tmp_path):
    """The server's table has 80 rows; the clients have 400 each, which they alone know."""
    summary, lines = federated(tmp_path, wards, engine="flower", evaluate_at="auto")
    asked, _ = federated(tmp_path / "asked", wards, engine="flower", evaluate_at="clients")
    assert summary["per_client"] == asked["per_client"]
    assert summary["client_rows"] == lines[-1]["client_rows"] == 300
    assert "reference_rows" not in summary
    assert "300 test rows of the clients, as they report" in shown(summary)
    result = fedbayes.Result(tmp_path / "run")
    frame = result.frame("clients")
    assert frame.train_samples.tolist() == [300] * 3
    assert frame.test_samples.tolist() == [100] * 3
    own = [summary["per_client"]["global"][name]["accuracy"] for name in frame.index]
    assert frame.global_accuracy.tolist() == own
    (record,) = gather([tmp_path / "run"])
    assert [list(sizes) for sizes in (record.train_sizes, record.test_sizes)] == [
        [300] * 3,
        [100] * 3,
    ]
    assert record.counts is None  # what classes clients have is not known
    assert record.confusion.sum() < 80
    write_page([tmp_path / "run"], tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert "the server&#39;s reference table" in page or "the server's reference table" in page


def test_a_reference_table_is_called_so_and_is_no_clients(wards, tmp_path):
    summary, lines = federated(tmp_path, wards, engine="flower", evaluate_at="server")
    assert "global" not in summary["per_client"]
    assert not {name for name in summary["metrics"] if name.startswith("global_")}
    rows = summary["reference_rows"]
    assert rows == lines[-1]["reference_rows"] < 80
    assert summary["global_accuracy"] == summary["metrics"]["global"]["accuracy"]
    text = shown(summary)
    assert f"{rows} rows of the server's reference table, not of clients" in text
    assert "client-0" not in text.split("clients' own models")[0]
    # What clients report of their own models, on their own rows, stays.
    assert set(summary["per_client"]["local"]) == {"client-0", "client-1", "client-2"}
    assert fedbayes.Result(tmp_path / "run").frame("clients").test_samples.tolist() == [100] * 3


@pytest.mark.parametrize(
    ("more", "clients"),
    [
        ({}, True),
        ({"engine": "sequential"}, False),
        ({"data": {"name": "digits"}}, False),
        ({"evaluate_at": "server"}, False),
        ({"secure": {"enabled": True}}, False),
        ({"privacy": {"noise": 1.0}, "aggregation": {"clip": 1.0}}, False),
    ],
)
def test_clients_are_asked_where_they_have_rows_of_their_own(more, clients):
    source = {"path": "table.csv", "clients": 3}
    assert Config.create(**{"engine": "flower", "data": source, **more}).at_clients == clients
