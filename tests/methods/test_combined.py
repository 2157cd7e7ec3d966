"""Combined Learning against the formulas of the paper by hand, and its two ends."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedbayes
from fedbayes.contracts import Report, ReportList
from fedbayes.contracts.returned import stopped
from fedbayes.errors import ConfigError
from fedbayes.inference.combination import factors
from fedbayes.methods.combined import Combined, amplification
from fedbayes.models import MLP, Network
from fedbayes.runs.simulation import Simulation
from tests.helpers.command_line import command
from tests.helpers.places import at, run_of, samples

SIZES = st.lists(st.integers(1, 1000), min_size=1, max_size=8)


@given(SIZES, st.floats(-2, 2))
def test_factors_are_the_papers(sizes, c):
    total = sum(sizes)
    assert factors("mean", c, sizes) == pytest.approx([1 / len(sizes)] * len(sizes))
    assert factors("linear", c, sizes) == pytest.approx([c + n / total for n in sizes])
    assert factors("exp", c, sizes) == pytest.approx([math.exp(c * n / total) for n in sizes])


def test_sums_of_factors():
    assert factors("linear", 1.0, [3, 5]).sum() == pytest.approx(1 + 2)
    # "Even for c = 1e-3 the combination is far from a mean."
    assert factors("exp", 1e-3, [3, 5]).sum() == pytest.approx(2, abs=2e-3)


@given(SIZES, st.floats(-2, 2), st.sampled_from(["linear", "exp"]))
def test_normalized_factors_sum_to_1(sizes, c, rule):
    raw = factors(rule, c, sizes)
    if raw.sum() <= 0:
        with pytest.raises(ConfigError, match="cannot be normalized"):
            factors(rule, c, sizes, normalized=True)
    else:
        found = factors(rule, c, sizes, normalized=True)
        np.testing.assert_allclose(found * raw.sum(), raw, rtol=1e-9, atol=1e-9)


def test_the_normalized_form_decides_as_the_papers_with_biases_by_depth():
    """Weights A W_l and biases A^l b_l: outputs are A^L times those of W_l, b_l; in NumPy."""
    torch.manual_seed(1)
    network = Network(MLP(6, [8, 5], 3))
    models = [{n: torch.randn_like(w) for n, w in network.initial.items()} for _ in range(3)]
    alpha = np.array([1.7, 1.2, 1.1])
    total = alpha.sum()
    found = fedbayes.fuse(
        models, method="combined", alpha="linear", c=1.0, counts=[[7], [2], [1]], normalized=True
    ).weights
    x = torch.randn(50, 6).numpy()
    h, ours = x, network(found, torch.from_numpy(x)).numpy()
    for depth, layer in enumerate((1, 3, 5), start=1):
        w, b = (
            sum(
                a * model[f"{layer}.{kind}"].numpy() for a, model in zip(alpha, models, strict=True)
            )
            for kind in ("weight", "bias")
        )
        h = h @ w.T + b * total ** (depth - 1)
        h = np.maximum(h, 0) if depth < 3 else h
    np.testing.assert_allclose(h / total**3, ours, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("alpha", "c"), [("linear", -0.5), ("exp", -50.0)])
def test_weights_that_vanish_end_the_rounds_at_the_last_sound_model(alpha, c):
    network = Network(MLP(4, [3], 3))
    method = Combined(alpha=alpha, c=c)
    here = place(network)
    assert "weights shrink in every round" in " ".join(method.remarks(here.run))
    server = method.init(here.run)
    for _ in range(5):
        before = server
        server, _ = method.update(server, heard(method, server, here, (0.0, 0.0), (1, 1)), here)
        if stopped(server):
            break
    assert stopped(server).startswith("underflow")
    for name, tensor in before.weights.items():
        assert tensor.any()
        assert torch.equal(server.weights[name], tensor)


def test_the_normalized_form_neither_grows_nor_shrinks():
    network = Network(MLP(4, [3], 3))
    for method in (
        Combined(alpha="linear", c=1.0, normalized=True),
        Combined(alpha="exp", c=-50.0, normalized=True),
    ):
        here = place(network)
        assert not method.remarks(here.run)
        server = start = method.init(here.run)
        for _ in range(40):
            reports = heard(method, server, here, (0.0, 0.0), (1, 3))
            server, info = method.update(server, reports, here)
        assert not stopped(server)
        assert info["alpha_sum"] == pytest.approx(1)
        for name, tensor in start.weights.items():
            torch.testing.assert_close(server.weights[name], tensor)
    with pytest.raises(ConfigError, match="cannot be normalized"):
        Combined(alpha="linear", c=-0.5, normalized=True).check(here.run)


def place(network):
    """Where two clients take part."""
    return at(run_of(network, clients=2, cohort=2, rounds=30, seed=0))


def heard(method, server, here, changes, sizes, overflowed=False, metric=0.5):
    """Reports of weights moved by constants."""
    reports = ReportList()
    for client, (change, size) in enumerate(zip(changes, sizes, strict=True)):
        message = method.message(server, here)
        tensors = {name: tensor + change for name, tensor in message.items()}
        for name, value in (
            ("metric", metric),
            ("loss", 1.0),
            ("overflowed", float(overflowed and client == 1)),
        ):
            tensors[f"received/{name}"] = torch.tensor(value, dtype=torch.float64)
        reports.add(client, Report(tensors, float(size)))
    return reports


@pytest.mark.parametrize(("alpha", "c"), [("mean", 0.0), ("linear", 0.7), ("exp", 1.0)])
def test_update_is_the_combination(alpha, c):
    network = Network(MLP(4, [3], 3))
    method = Combined(alpha=alpha, c=c)
    here = place(network)
    server = method.init(here.run)
    after, info = method.update(server, heard(method, server, here, (0.5, -2.0), (30, 10)), here)
    r = np.array([0.75, 0.25])
    weights = {"mean": [0.5, 0.5], "linear": c + r, "exp": np.exp(c * r)}[alpha]
    for name, start in network.initial.items():
        expected = weights[0] * (start + 0.5) + weights[1] * (start - 2.0)
        torch.testing.assert_close(method.model(after, here.run)[name], expected.float())
    assert info["alpha_sum"] == pytest.approx(sum(weights))


def test_buffers_are_averaged():
    """Statistics of a batch normalization are no weights to be scaled."""
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    method = Combined(alpha="linear", c=5.0)
    here = place(Network(module))
    server = method.init(here.run)
    after, _ = method.update(server, heard(method, server, here, (1.0, 3.0), (10, 30)), here)
    assert torch.equal(after.buffers["1.running_mean"], torch.full((4,), 2.5))


def test_amplification_bounds_what_a_network_does():
    torch.manual_seed(2)
    network = Network(MLP(6, [8, 5], 3, bias=False))
    x = 2 * torch.rand(200, 6) - 1
    with torch.no_grad():
        largest = network(network.initial, x).abs().max()
    assert float(largest.log10()) <= amplification(network.initial)
    grown = {name: 10 * w for name, w in network.initial.items()}
    assert amplification(grown) == pytest.approx(amplification(network.initial) + 3)


def test_the_last_sound_model_is_kept():
    network = Network(MLP(4, [3], 3))
    method = Combined(alpha="linear", c=1.0, safe=4.0)
    here = place(network)
    server = method.init(here.run)
    sound = None
    for _ in range(20):
        sound = server
        server, _ = method.update(server, heard(method, server, here, (0.0, 0.0), (1, 1)), here)
        if stopped(server):
            break
    assert "overflow" in stopped(server)
    assert amplification(server.weights) <= 4.0
    for name, tensor in sound.weights.items():
        assert torch.equal(server.weights[name], tensor)
    # The next combination would have been unsafe.
    assert amplification(server.weights) + 2 * math.log10(3) > 4.0


def test_the_mean_is_never_ended_by_the_bound():
    """A convex combination is no larger than the largest model, however loose the bound is."""
    network = Network(MLP(4, [3], 3))
    method = Combined(alpha="mean", safe=1e-3)
    here = place(network)
    server = method.init(here.run)
    assert amplification(server.weights) > 1e-3
    after, info = method.update(server, heard(method, server, here, (1.0, 1.0), (1, 1)), here)
    assert not stopped(after)
    assert info["amplification"] > 1e-3


def test_a_client_that_overflows_says_so():
    network = Network(MLP(4, [3], 3))
    method = Combined()
    here = place(network)
    server = method.init(here.run)
    huge = {name: 1e30 * torch.ones_like(w) for name, w in method.message(server, here).items()}
    here = at(network, lr=1.0)
    report, _, _ = method.local(huge, method.join(here), samples(), here)
    assert float(report.tensors["received/overflowed"]) == 1
    assert all(bool(torch.isfinite(tensor).all()) for tensor in report.tensors.values())
    after, _ = method.update(
        server, heard(method, server, here, (1.0, 1.0), (1, 1), overflowed=True), here
    )
    assert "overflow" in stopped(after)
    for name, tensor in server.weights.items():
        assert torch.equal(after.weights[name], tensor)


def test_the_coordinator_sees_a_plateau():
    network = Network(MLP(4, [3], 3))
    method = Combined(alpha="mean", tolerance=0.011, window=3)
    here = place(network)
    server = method.init(here.run)
    accuracies = [0.5, 0.7, 0.80, 0.82, 0.82, 0.825]
    for number, accuracy in enumerate(accuracies, start=1):
        reports = heard(method, server, here, (0.0, 0.0), (1, 3), metric=accuracy)
        server, _ = method.update(server, reports, here)
        assert bool(stopped(server)) == (number == 6)
    assert "stable point" in stopped(server)


def settings(**method):
    return {
        "rounds": 40,
        "data": {"name": "digits", "clients": 2, "partition": "iid"},
        "model": {"hidden": [16]},
        "training": {"optimizer": "adam", "lr": 0.01, "epochs": 20, "patience": 2},
        "method": {"name": "combined", **method},
    }


def test_a_run_ends_at_its_stable_point(tmp_path):
    run = fedbayes.run(**settings(alpha="mean", tolerance=0.01, window=3), folder=tmp_path / "run")
    summary = run.summary
    assert summary["rounds"] < 40
    assert summary["stopped_reason"].startswith("stable point")
    recent = [line["reported"]["received_accuracy"] for line in run.metrics[-3:]]
    assert max(recent) - min(recent) < 0.02
    # Every client has a copy, on its own test set, and its bytes are counted.
    with Simulation(None, tmp_path / "run") as simulation:
        sizes = simulation.data.test_sizes()
        copy = simulation.evaluate(run.model).clients.sums["correct"].numpy()
    assert summary["local_accuracy"] == pytest.approx(float(np.mean(copy / sizes)))
    size = run.metrics[0]["bytes_down"] / 2
    assert run.metrics[-1]["bytes_down"] == pytest.approx(4 * size, rel=0.01)
    # To resume it does nothing.
    again = fedbayes.resume(tmp_path / "run")
    assert again.summary == {**summary, "folder": again.summary["folder"]}


def test_a_run_that_would_overflow_ends_with_a_sound_model(tmp_path, capsys):
    keys = ("training.epochs=2", "data.clients=4", "method.c=3", "method.preset=published")
    options = [f"--set={key}" for key in keys]
    arguments = ["run", "-m", "combined", "--rounds", "60", *options]
    assert command(*arguments, "--set=method.alpha=linear", "-o", tmp_path / "r", "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["stopped_reason"].startswith("overflow")
    assert summary["rounds"] < 60
    assert all(math.isfinite(value) for value in (summary["global_nll"], summary["global_ece"]))


def test_fusion_by_combination(tmp_path, capsys):
    torch.manual_seed(0)
    models = [MLP(6, [5], 3).state_dict() for _ in range(3)]
    counts = [[1, 2, 3], [0, 4, 0], [5, 5, 5]]
    fusion = fedbayes.fuse(models, method="combined", alpha="exp", c=1.0, counts=counts)
    alpha = np.exp(np.array([6, 4, 15]) / 25)
    for name, tensor in fusion.weights.items():
        expected = sum(a * model[name] for a, model in zip(alpha, models, strict=True))
        torch.testing.assert_close(tensor, expected.float())
    for index, model in enumerate(models):
        torch.save(model, tmp_path / f"{index}.pt")
    paths = [tmp_path / f"{index}.pt" for index in range(3)]
    out = tmp_path / "out.safetensors"
    options = ["--method", "combined", "--alpha", "linear", "--c", "0.5"]
    assert command("fuse", *paths, "-o", out, *options, "--json") == 0
    from safetensors.torch import load_file

    found = load_file(out)
    for name, tensor in found.items():
        expected = sum((0.5 + 1 / 3) * model[name] for model in models)
        torch.testing.assert_close(tensor, expected)
    capsys.readouterr()
    assert command("fuse", *paths, "-o", out, "--method", "combined", "--sigma", "2") == 2
    assert "It works with match, gpi-fnm, pfnm" in " ".join(capsys.readouterr().err.split())
    assert command("fuse", *paths, "-o", out, "--alpha", "cube", "--method", "combined") == 2
    assert "alpha" in capsys.readouterr().err
    new = tmp_path / "new.safetensors"
    huge = ["--method", "combined", "--alpha", "exp", "--c", "1000"]
    assert command("fuse", *paths, "-o", new, *huge) == 2
    assert "the weights overflow. Choose a smaller c" in " ".join(capsys.readouterr().err.split())
    assert not new.exists()


def test_a_model_without_biases_counts_as_one_with_zeros():
    torch.manual_seed(0)
    one, other = MLP(6, [5], 3), MLP(6, [5], 3, bias=False)
    zeros = {n: torch.zeros_like(t) for n, t in one.state_dict().items()}
    with_zeros = {**zeros, **other.state_dict()}
    for pair in ([one.state_dict(), other.state_dict()], [other.state_dict(), one.state_dict()]):
        found = fedbayes.fuse(pair, method="average").weights
        expected = fedbayes.fuse([one.state_dict(), with_zeros], method="average").weights
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor)


@pytest.mark.parametrize(
    ("settings", "idle"),
    [
        ({"window": 3, "watch": "loss"}, ["method.window", "method.watch"]),
        ({"window": 3, "tolerance": 0.0}, []),
        ({"safe": 3.0}, ["method.safe"]),
        ({"safe": 3.0, "alpha": "linear", "c": 1.0}, []),
    ],
)
def test_what_has_no_effect_is_said(settings, idle):
    method = Combined(**{"alpha": "mean", **settings})
    found = [
        note for note in method.remarks(run_of(Network(MLP(4, [3], 3)))) if "no effect" in note
    ]
    assert [note.partition(" ")[0] for note in found] == idle
