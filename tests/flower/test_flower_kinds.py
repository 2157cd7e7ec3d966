"""Batch normalization that is each client's own, and columns of text, over Flower."""

import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

pytest.importorskip("flwr")

import fedbayes
from fedbayes.core.messages import decode_file
from fedbayes.errors import FedbayesWarning
from tests.helpers.flower_runs import federated, same
from tests.helpers.others import available, write_text_network, write_texts
from tests.helpers.own_layers import OWN
from tests.helpers.own_layers import settings as own_layers

pytestmark = pytest.mark.filterwarnings("ignore::fedbayes.errors.FedbayesWarning")


@pytest.mark.parametrize("method", ["fedavg", pytest.param("scaffold", marks=pytest.mark.slow)])
def test_own_batch_normalization_stays_with_its_node(method, tmp_path):
    """The clients' models of the sequential engine; what normalizes lies with the nodes."""
    asked = own_layers(rounds=3, method={"name": method})
    alone = fedbayes.run(**asked, folder=tmp_path / "alone")
    flower = fedbayes.run(**asked, engine="flower-simulation", folder=tmp_path / "run")
    x = np.zeros((4, 1, 8, 8), np.float32) + np.arange(4).reshape(4, 1, 1, 1)
    for client in range(2):
        files = [f for f in (tmp_path / "run" / "nodes" / str(client)).iterdir() if f.is_file()]
        assert files
        for file in files:
            state = decode_file(file.read_bytes())
            assert {n.removeprefix("own/") for n in state if n.startswith("own/")} == OWN
        assert torch.equal(
            flower.trained(client).expectation(x), alone.trained(client).expectation(x)
        )
    own = [flower.trained(client).expectation(x) for client in range(2)]
    assert not torch.equal(*own)
    tickets = [path.read_bytes() for path in (tmp_path / "run" / "clients").iterdir()]
    assert max(map(len, tickets)) < 200


def notes(place):
    """Tables of notes in words, at the server and at three clients."""
    rng = np.random.default_rng(3)
    good, bad = ("well", "stable", "walks"), ("fever", "pain", "worse")

    def table(name, rows):
        ill = rng.random(rows) < 0.5
        text = [" ".join(rng.choice(bad if one else good, 3)) for one in ill]
        text[0] = None
        frame = pd.DataFrame({"age": rng.normal(60, 9, rows).round(), "note": text})
        frame.assign(ill=np.where(ill, "yes", "no")).to_csv(place / f"{name}.csv", index=False)

    table("server", 80)
    for client in range(3):
        table(client, 160)


def test_text_columns_of_nodes_own_tables(tmp_path):
    notes(tmp_path)
    data = {"path": str(tmp_path / "server.csv"), "label": ["ill"], "clients": 3}
    data |= {"partition": "iid", "text": ["note"], "text_width": 32}
    asked = {"data": data, "rounds": 3, "training": {"lr": 0.1, "epochs": 5}}
    summary, _ = federated(tmp_path, tmp_path, **asked)
    assert summary["lost_reports"] == 0
    assert all(one["accuracy"] > 0.9 for one in summary["per_client"]["global"].values())
    frame = pd.read_csv(tmp_path / "1.csv").head(40)
    found = fedbayes.load(tmp_path / "run").predict_frame(frame)
    assert (found.predicted == frame.ill).mean() > 0.9


@pytest.mark.slow
@pytest.mark.skipif(not available("transformers"), reason="needs transformers")
def test_texts_for_a_pretrained_network_at_the_nodes(tmp_path):
    """Adapters of a small network on tokens, of nodes' own tables and of the server's partition."""
    network = write_text_network(tmp_path / "bert")
    for name in ("server", 0, 1, 2):
        write_texts(tmp_path / f"{name}.csv")
    data = {"path": str(tmp_path / "server.csv"), "label": ["outcome"], "clients": 3}
    data |= {"partition": "iid", "tokens": "note", "max_tokens": 12}
    model = {"name": "transformers", "pretrained": str(network), "trains": "lora"}
    asked = {"data": data, "model": model, "rounds": 1}
    alone = fedbayes.run(**asked)
    flower = fedbayes.run(**asked, engine="flower-simulation")
    assert same(alone.model, flower.model)
    summary, lines = federated(tmp_path, tmp_path, **asked)
    assert summary["lost_reports"] == 0
    assert len(summary["per_client"]["global"]) == 3
    assert lines[0]["bytes_up"] < 3 * 40_000  # adapters and the head, and no network
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedbayesWarning)
        frame = pd.read_csv(tmp_path / "1.csv")
        found = fedbayes.load(tmp_path / "run").predict_frame(frame)
    assert len(found) == len(frame)


def test_own_batch_normalization_of_nodes_own_tables(tmp_path):
    notes(tmp_path)
    data = {"path": str(tmp_path / "server.csv"), "label": ["ill"], "clients": 3}
    data |= {"partition": "iid", "text": ["note"], "text_width": 32}
    model = {"name": "tests.flower.test_flower_kinds:normalized", "batch_norm": "local"}
    asked = {"data": data, "model": model, "rounds": 2, "training": {"lr": 0.1, "epochs": 5}}
    summary, _ = federated(tmp_path, tmp_path, **asked, evaluate_at="server")
    assert summary["lost_reports"] == 0
    assert all(one["accuracy"] > 0.9 for one in summary["per_client"]["local"].values())


def normalized(shape, outputs):
    return nn.Sequential(nn.BatchNorm1d(shape[0]), nn.Linear(shape[0], outputs))
