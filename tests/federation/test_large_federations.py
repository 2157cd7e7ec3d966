"""Federations of any size: samples by a function, and nothing grows with clients unheard of."""

import json
import math
import shutil
from statistics import fmean

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedbayes
from fedbayes import Config, Simulation
from fedbayes.core.by_client import ByClient
from fedbayes.core.targets import Target
from fedbayes.core.tensors import pack, unpack
from fedbayes.data.numbered import Numbered
from fedbayes.errors import ConfigError, DataError, RunError
from fedbayes.likelihoods import build_likelihood
from fedbayes.runs.build import build_data
from fedbayes.runs.cohorts import sample_cohort
from fedbayes.storage.folder import RunFolder
from fedbayes.storage.private_states import ClientStates
from fedbayes.storage.scores import ClientScores
from tests.helpers import toy_clients

MANY = 1_000_000


def config(clients=MANY, function="separated", data=None, **changes):
    given = {
        "rounds": 3,
        "cohort": 5,
        "model": {"hidden": [4]},
        "training": {"batch_size": 4},
        "data": {
            "generator": f"tests.helpers.toy_clients:{function}",
            "clients": clients,
            "test_clients": 6,
            **(data or {}),
        },
    }
    return Config.published(**given | changes)


def told(run):
    """Lines of a run without what is measured by the clock."""
    return [{k: v for k, v in line.items() if k != "seconds"} for line in run.metrics]


# What is kept by client, against dicts.

tables = st.dictionaries(
    st.integers(0, 12), st.dictionaries(st.sampled_from("ab"), st.integers(1, 9)), max_size=6
)


@given(st.lists(tables, max_size=4))
def test_rows_are_those_that_were_given_last(updates):
    found, known = ByClient(), {}
    for rows in updates:
        for name in "ab":
            named = {c: row[name] for c, row in rows.items() if name in row}
            column = {name: torch.tensor([*named.values()], dtype=torch.float64)}
            found = found.having(torch.tensor([*named], dtype=torch.int64), column, {"b": -1})
            for client, value in named.items():
                known.setdefault(client, {})[name] = value
    assert found.clients.tolist() == sorted(known)
    for client in range(13):
        row = found.row(client)
        assert (row is not None) == (client in known)
        for name, column in found.columns.items():
            if row is not None:
                assert column[row] == known[client].get(name, -1 if name == "b" else 0)
    again = unpack(ByClient, pack(found))
    assert again.clients.equal(found.clients)
    assert again.columns.keys() == found.columns.keys()


@given(st.integers(0, 30), st.text(max_size=10) | st.integers(-3, 40).map("client-{}".format))
def test_numbered_names_are_those_of_a_list(clients, name):
    names, plain = Numbered(clients), [f"client-{n}" for n in range(clients)]
    assert list(names) == plain
    assert (name in names) == (name in plain)
    if name in plain:
        assert names.index(name) == plain.index(name)
    else:
        with pytest.raises(ValueError, match="is not one of"):
            names.index(name)
    assert names[1:-1] == plain[1:-1]
    assert list(names[:7]) == plain[:7]
    assert list(names[:-2]) == plain[:-2]


scores = st.fixed_dictionaries({"count": st.integers(1, 5), "right": st.floats(0, 1)})


@settings(max_examples=50)
@given(st.lists(st.dictionaries(st.integers(0, 9), scores | st.just(None)), min_size=1, max_size=5))
def test_means_are_those_of_the_scores_that_each_client_gave_last(rounds):
    likelihood = build_likelihood("categorical", Target("class", ("ant", "bee")))
    found, known = ClientScores(), {}
    for said in rounds:
        now = {
            client: {}
            if one is None
            else {
                "count": float(one["count"]),
                "correct": one["right"] * one["count"],
                "nll": one["right"] + client,
                "confidence": 0.5,
            }
            for client, one in said.items()
        }
        found = found.after(now)
        known |= {client: one for client, one in now.items() if one}
        each = [likelihood.metrics(known[client]) for client in sorted(known)]
        means = {name: fmean(own[name] for own in each) for name in (each[0] if each else ())}
        assert found.means(likelihood) == pytest.approx(means)
        assert found.tested == len(known)
        assert [*found.each(likelihood)] == sorted(known)


# What it costs: counted, not timed.


def run_of(clients, tmp_path, monkeypatch, **changes):
    """A run whose names of clients are never gone through; what it left, and whom it asked."""

    def refuse(names):
        raise AssertionError("all names of clients were asked for")

    toy_clients.ASKED.clear()
    monkeypatch.setattr(Numbered, "__iter__", refuse)
    run = fedbayes.run(config(clients, **changes), tmp_path / str(clients))
    return run, list(toy_clients.ASKED)


@pytest.mark.parametrize("method", ["scaffold", "fedavg"])
def test_a_million_clients_leave_what_two_thousand_leave(tmp_path, monkeypatch, method):
    few, asked_few = run_of(2000, tmp_path, monkeypatch, method={"name": method})
    many, asked_many = run_of(MANY, tmp_path, monkeypatch, method={"name": method})
    assert len(asked_many) <= len(asked_few) + 1  # no client twice in the few rounds of the many
    cohorts = [sample_cohort(0, number, MANY, 5) for number in (1, 2, 3)]
    looked_at = set(build_data(config()).owners.tolist())
    assert set(asked_many) == looked_at.union(*cohorts)
    sizes = []
    for run in (few, many):
        paths = [path for path in run.folder.path.rglob("*") if path.is_file()]
        sizes.append(sum(path.stat().st_size for path in paths))
        assert len(paths) < 25
        folders = [path for path in run.folder.path.rglob("*") if path.is_dir()]
        assert max(len([*folder.iterdir()]) for folder in folders) <= 15
    assert sizes[1] == pytest.approx(sizes[0], rel=0.05)
    assert many.summary["clients"] == MANY
    progress = many.folder.progress()
    had_part = sorted({client for cohort in cohorts for client in cohort})
    assert progress.clients.table.clients.tolist() == had_part
    assert progress.weights.clients.tolist() == (had_part if method == "fedavg" else [])
    assert progress.states.clients.tolist() == (had_part if method == "scaffold" else [])


def test_lines_tell_of_the_clients_of_a_round_alone(tmp_path):
    run = fedbayes.run(config(metrics="accuracy"), tmp_path / "run")
    owners = build_data(config()).owners.tolist()
    for line in run.metrics:
        of_round = sample_cohort(0, line["round"], MANY, 5)
        assert line["by_client"]["local"]["client"] == of_round
        assert line["by_client"]["global"]["client"] == owners
        assert len(line["by_client"]["local"]["accuracy"]) == 5
    summary = run.summary["per_client"]
    assert list(summary["global"]) == [f"client-{client}" for client in owners]
    last = run.metrics[-1]["by_client"]["global"]
    told = [one["accuracy"] for one in summary["global"].values()]
    assert told == last["accuracy"]
    assert np.mean(told) == pytest.approx(run.summary["metrics"]["global_mean"]["accuracy"])
    with pytest.raises(RunError, match="1,000,000 clients with generated samples"):
        run.frame("clients")
    assert list(run.frame("troubles").columns) == ["round", "client", "what", "reason"]


def test_samples_are_kept_up_to_a_bound():
    data = build_data(config(data={"cache": 0}))
    before = data.calls
    data.train(7)
    data.test(7)
    assert data.calls == before + 1
    data.train(8)
    data.train(7)
    assert data.calls == before + 3
    kept = build_data(config(data={"cache": 1}))
    before = kept.calls
    for client in (7, 8, 7, 8):
        kept.train(client)
    assert kept.calls == before + 2


# Whose samples are what.


@settings(max_examples=20, deadline=None)
@given(st.integers(0, MANY - 1), st.sampled_from([0.25, 0.5, "clients"]), st.integers(4, 9))
def test_each_sample_is_trained_on_or_tested_on(client, test, samples):
    data = build_data(config(data={"test": test, "arguments": {"samples": samples}}, seed=3))
    x, y = toy_clients.separated(client, 3, samples)
    mean, std = data.preprocessing.statistics
    wanted = (x.astype(np.float32) - mean) / std
    train, tested = data.train(client), data.test(client)
    held_out = 0 if test == "clients" else min(max(1, round(test * samples)), samples - 1)
    assert len(tested.y) == held_out
    found = np.concatenate([train.x.numpy(), tested.x.numpy()])
    order, other = np.lexsort(found.T), np.lexsort(wanted.T)
    np.testing.assert_allclose(found[order], wanted[other], atol=1e-5)
    labels = np.concatenate([train.y.numpy(), tested.y.numpy()])
    assert (labels[order] == y[other]).all()
    assert train.x.dtype == torch.float32
    assert train.y.dtype == torch.int64


@pytest.mark.parametrize("test", ["default", "clients"])
def test_the_union_is_of_the_clients_that_are_looked_at(test):
    data = build_data(config(data={"test": test}))
    owners = data.owners.tolist()
    assert owners == sorted(set(owners))
    parts = [data.test(client) for client in owners]
    union = data.test_union(0, data.test_total)
    assert union.x.equal(torch.cat([part.x for part in parts]))
    assert union.y.equal(torch.cat([part.y for part in parts]))
    assert data.test_sizes().tolist() == [len(part.y) for part in parts]
    trained = torch.cat([data.train(client).x for client in owners])
    assert trained.mean(0).tolist() == pytest.approx([0] * 4, abs=1e-5)
    assert trained.std(0, unbiased=False).tolist() == pytest.approx([1] * 4, abs=1e-4)
    beyond = [client for client in owners if client >= MANY]
    assert beyond == ([MANY + n for n in range(6)] if test == "clients" else [])
    assert all(not len(data.train(client).y) for client in beyond)


def test_clients_that_are_held_out_are_never_trained_on(tmp_path):
    run = fedbayes.run(config(20, data={"test": "clients"}, cohort=20), tmp_path / "run")
    assert run.folder.progress().weights.clients.tolist() == [*range(20)]
    assert set(run.summary["per_client"]["global"]) == {f"client-{20 + n}" for n in range(6)}
    assert "local" not in run.summary["per_client"]


@pytest.mark.parametrize(
    ("function", "shape", "kind"),
    [("separated", (4,), "class"), ("numbers", (3,), "real"), ("pictures", (1, 8, 8), "class")],
)
def test_shape_and_target_are_inferred(function, shape, kind):
    data = build_data(config(function=function))
    assert data.shape == shape
    assert data.target.kind == kind
    assert data.train(12345).x.shape[1:] == shape
    if kind == "real":
        assert data.target.center[0] == pytest.approx(5, abs=1)
    assert data.preprocessing.scale == (255 if function == "pictures" else 1)


def test_classes_are_named():
    data = build_data(config(data={"classes": ["ant", "bee", "cat"]}))
    assert data.classes == ("ant", "bee", "cat")


# The same on every engine, and after a kill.


@pytest.mark.slow
def test_workers_compute_the_same_and_resume_goes_on(tmp_path):
    whole = fedbayes.run(config(method={"name": "scaffold"}), tmp_path / "whole")
    beside = fedbayes.run(
        config(method={"name": "scaffold"}, engine="workers", workers=1), tmp_path / "beside"
    )
    with Simulation(config(method={"name": "scaffold"}), tmp_path / "cut") as simulation:
        next(iter(simulation))
    cut = fedbayes.resume(tmp_path / "cut")
    assert told(whole) == told(beside) == told(cut)
    for name, values in whole.model.items():
        assert values.equal(beside.model[name])
        assert values.equal(cut.model[name])


def test_a_function_that_has_changed_is_noticed(tmp_path, monkeypatch):
    with Simulation(config(), tmp_path / "run") as simulation:
        next(iter(simulation))
    before = toy_clients.separated
    monkeypatch.setattr(
        toy_clients, "separated", lambda client, seed: before(client, seed, changed=True)
    )
    with pytest.raises(RunError, match=r"data have changed since .* began"):
        fedbayes.resume(tmp_path / "run")


# What a user may get wrong.


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("raises", r"the function failed: KeyError: 'no such shard' \(toy_clients.py, line \d+\)"),
        ("ends", "the function failed: SystemExit: no shard"),
        ("nothing", r"it returned a NoneType\. Return a pair \(x, y\)"),
        ("NaN", r"x is NaN in sample 3 at \(0,\)"),
        (
            "narrow",
            r"x of a sample has the shape 3, and of client .* 4\. All clients need the same shape",
        ),
        ("bytes", "x of a sample has the shape 4 x 4, and of client"),
        ("outside", r"the label 7 of sample 5 is not in 0 to 1 \(the classes 0, 1\)"),
        ("negative", "the label -1 of sample 5 is negative. Classes must be whole numbers from 0"),
        ("fractions", "y contains real numbers, and that of client .* whole numbers"),
        ("words", "y is of type .*, not numbers"),
        ("unequal", "8 samples and 7 targets"),
        ("empty", "it returned no samples"),
        ("single", "of its 1 samples 1 are left for training, fewer than data.min_samples = 2"),
        ("flat", "samples are single numbers"),
    ],
)
def test_what_a_function_gives_is_refused_by_client_and_function(how, why):
    looked_at = build_data(config()).owners
    odd = next(client for client in range(MANY) if client not in looked_at)
    data = build_data(config(function="spoilt", data={"arguments": {"odd": odd, "how": how}}))
    data.train(odd + 1)
    with pytest.raises(DataError, match=f"^tests.helpers.toy_clients:spoilt, client {odd}: {why}"):
        data.train(odd)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("negative", ", client 7: the label -1 of sample 5 is negative"),
        (
            "huge",
            r": the largest label is 500000, and only 3 of the 500,001 classes from 0 occur",
        ),
    ],
)
def test_labels_that_are_no_classes_are_refused_before_a_network_is_built(how, why):
    few = {"clients": 20, "test_clients": 20, "arguments": {"odd": 7, "how": how}}
    with pytest.raises(DataError, match=f"^tests.helpers.toy_clients:spoilt{why}"):
        build_data(config(function="spoilt", data=few))


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (
            "unseeded",
            r"it returned other samples at the second call.*default_rng\(\[seed, client\]\)",
        ),
        ("absent", "cannot find data.generator 'tests.helpers.toy_clients:absent'"),
        ("no_function", "is not a function"),
    ],
)
def test_functions_that_do_not_do(function, why):
    with pytest.raises(DataError, match=why):
        build_data(config(function=function))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({"clients": None}, "Set data.clients"),
        ({"partition": "iid"}, "partition has no effect on a generator"),
        ({"limit": 5}, "limit has no effect on a generator"),
        ({"test": "official"}, "test = 'official' has no effect on a generator.*choose a fraction"),
        ({"name": "mnist"}, "exclude each other"),
        ({"generator": None, "test": "clients"}, "it works only with a generator"),
        ({"generator": None, "name": "generator"}, "needs generator"),
    ],
)
def test_settings_that_do_not_go_together(data, why):
    with pytest.raises(ConfigError, match=why):
        config(data=data)


def test_what_needs_all_clients_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="pools the samples of all clients"):
        fedbayes.run(config(method={"name": "global"}, cohort=1.0), tmp_path / "pooled")
    with pytest.raises(ConfigError, match="a node for each of 1,000,000"):
        fedbayes.run(config(engine="flower-simulation"), tmp_path / "nodes")
    with pytest.raises(ConfigError, match=r"clock\.by_samples needs the number of samples"):
        fedbayes.run(config(clock={"speeds": "equal", "by_samples": True}), tmp_path / "clock")
    assert not (tmp_path / "pooled").exists()
    assert not (tmp_path / "nodes").exists()


def test_the_clock_of_a_million_clients_and_asynchronous_rounds(tmp_path):
    made = config(clock={"speeds": "log-normal"}, asynchronous={"buffer": 3})
    run = fedbayes.run(made, tmp_path / "run")
    assert [line["cohort"] for line in run.metrics] == [3] * 3
    assert run.summary["clock_seconds"] > 0


def test_a_model_of_many_clients_is_learnt(tmp_path):
    training, data = {"lr": 0.3, "epochs": 2}, {"test_clients": 20}
    made = config(rounds=15, cohort=10, training=training, data=data, evaluate_every=0)
    run = fedbayes.run(made, tmp_path / "run")
    assert run.summary["global_accuracy"] > 0.8


# Folders of private states.


def test_states_are_in_folders_of_a_thousand_clients(tmp_path):
    states = ClientStates(tmp_path / "clients")
    states.round = 2
    clients = [0, 999, 1000, 123_456, 999_999]
    for client in clients:
        states[client] = str(client).encode()
    found = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.safetensors"))
    assert found == [
        "clients/0000000-0000002.safetensors",
        "clients/0000999-0000002.safetensors",
        "clients/0001/0001000-0000002.safetensors",
        "clients/0123/0123456-0000002.safetensors",
        "clients/0999/0999999-0000002.safetensors",
    ]
    for folder in tmp_path.rglob("0*"):
        assert folder.stat().st_mode & 0o077 == 0
    again = ClientStates(tmp_path / "clients", states.known)
    assert {client: again[client] for client in again} == {c: str(c).encode() for c in clients}


def test_a_run_of_an_older_version_has_all_states_in_one_folder(tmp_path):
    made = config(method={"name": "scaffold"})
    whole = fedbayes.run(made, tmp_path / "whole")
    with Simulation(made, tmp_path / "cut") as simulation:
        next(iter(simulation))
    folder = tmp_path / "cut" / "clients"
    for file in list(folder.glob("*/*")):
        file.replace(folder / file.name)
    for empty in folder.glob("0???"):
        empty.rmdir()
    shutil.copytree(tmp_path / "cut", tmp_path / "read")
    progress = RunFolder(tmp_path / "read").progress()
    states = ClientStates(tmp_path / "read" / "clients", progress.states)
    assert all(states[client] for client in states)
    assert told(fedbayes.resume(tmp_path / "cut")) == told(whole)
    left = {path.name for path in (tmp_path / "cut" / "clients").rglob("*.safetensors")}
    assert left == {path.name for path in (tmp_path / "whole" / "clients").rglob("*.safetensors")}
    assert not [*folder.glob("*.safetensors")]


def test_a_line_of_a_million_is_short(tmp_path):
    run = fedbayes.run(config(), tmp_path / "run")
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        assert len(line) < 10_000
        assert math.isfinite(json.loads(line)["metrics"]["local"]["accuracy"])
    assert len(json.dumps(run.summary)) < 20_000
