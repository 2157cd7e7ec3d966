"""`fedbayes reproduce`: measurements that are kept, tables and figures."""

import re
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedbayes
from fedbayes.config.config import Config
from fedbayes.errors import ConfigError, DataError, RunError
from fedbayes.fusion.function import fuse_functions
from fedbayes.fusion.settings import DistillationSettings, FunctionSettings
from fedbayes.models import Network
from fedbayes.runs.build import build_data
from fedbayes.runs.simulation import Simulation
from fedbayes.storage.folder import RunFolder
from fedbayes_papers import (
    EXPERIMENTS,
    combined,
    em_claims,
    em_runs,
    em_view,
    gates,
    gpi_claims,
    gpi_fnm,
    gpi_networks,
    gpi_rounds,
    reproduce,
    weight_gates,
)
from fedbayes_papers import lines as experiments
from fedbayes_papers.experiment import Request, Results, finished, mean_and_std
from fedbayes_papers.finding import Claim, Finding, Line, Part, markdown, overview, read_finding
from tests.helpers.command_line import command


def test_what_was_measured_is_kept(tmp_path, monkeypatch):
    """Measured once, then kept; what a kill cut off is measured again."""
    told = []
    federations = [gpi_networks.FusionCase("digits", "iid", 3, 1, seed) for seed in (0, 1)]
    methods = ["locals", "average", "ensemble", "FedAvg", "PFNM", "GPI-FNM"]
    grid = {"sigma0": (1.0,), "gamma": (1.0,), "epsilon": (0.0, 0.3)}

    def fill():
        told.clear()
        request = Request("out", tmp_path, "small", ["digits"], watch=told.append)
        return gpi_networks.fill(request, federations, methods, grid)

    table = fill()
    assert len(table) == len(told) == 12
    means = table.groupby("method")["accuracy"].mean()
    assert means["ensemble"] > means["average"]
    assert means["PFNM"] > means["average"]
    sizes = table[table["method"] == "PFNM"]["sizes"]
    assert all(100 <= size <= 300 for own in sizes for size in own)

    monkeypatch.setattr(gpi_networks, "trained", None)  # nothing is trained any more
    pd.testing.assert_frame_equal(fill(), table)
    assert not told
    monkeypatch.undo()
    file = tmp_path / "out" / "results.jsonl"
    file.write_text("\n".join(file.read_text().splitlines()[:-2]) + "\n")
    pd.testing.assert_frame_equal(fill(), table)
    assert len(told) == 2


def test_settings_are_chosen_and_tried_on_different_samples(tmp_path):
    federation = gpi_networks.FusionCase("digits", "iid", 3, 1, 0)
    silos = gpi_networks.trained(tmp_path, federation)
    chosen = {tuple(row) for row in silos.held_out.x.flatten(1).tolist()}
    tried = {tuple(row) for row in silos.test.x.flatten(1).tolist()}
    assert len(silos.held_out.y) == round(0.2 * (len(silos.held_out.y) + len(silos.test.y)))
    assert not chosen & tried
    # What is tried of each method are settings that it has.
    grid = {"sigma0": (1.0, 10.0), "epsilon": (0.0, 1.0)}
    for method, varied in (("PFNM", ["sigma0"]), ("GPI-FNM", ["sigma0", "epsilon"])):
        own = gpi_networks.grid_of(federation, method, grid)
        assert [*own] == varied
        found = silos.fuse(gpi_rounds.ROUNDS[method], 300, own, {"bias_mean": 0.1})
        assert found["chosen"]["sigma0"] in grid["sigma0"]


def test_a_folder_of_other_settings_is_refused(tmp_path):
    federation = gpi_networks.FusionCase("digits", "iid", 3, 1, 0)
    finished(tmp_path / "run", federation.config({"name": "local"}, epochs=1))
    with pytest.raises(RunError, match="other settings"):
        finished(tmp_path / "run", federation.config({"name": "local"}, epochs=2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["gpi-fnm-one-shot", "gpi-fnm-fig2", "gpi-fnm-fig3", "gpi-fnm-fig4"]
)
def test_figures_on_digits(name, tmp_path, monkeypatch):
    quick = FunctionSettings(distillation=DistillationSettings(steps=200))
    monkeypatch.setattr(gpi_networks, "fuse_functions", partial(fuse_functions, settings=quick))
    text = str(reproduce(name, tmp_path, datasets=["digits"]))
    assert "GPI-FNM is ahead of PFNM in every setting" in text
    assert (tmp_path / name / "figure.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["fedsparse-table1", "fedsparse-fig5", "fedsparse-fig7", "fedsparse-fig8", "em-priors"]
)
def test_methods_are_compared_on_digits(name, tmp_path):
    text = str(reproduce(name, tmp_path, datasets=["digits"], seeds=1))
    gated = name == "fedsparse-fig5"  # which is of gates alone
    assert ("| FedAvg |" in text) != gated
    assert ("| FedSparse, mid |" in text) == (name != "em-priors")
    assert "after 40 rounds" in text
    assert (tmp_path / name / "figure-digits.png").exists()
    again = []
    assert str(reproduce(name, tmp_path, datasets=["digits"], seeds=1, watch=again.append)) == text
    assert not again, "what was run is kept"


@pytest.mark.slow
def test_own_models_with_and_without_draws(tmp_path, monkeypatch):
    """They are measured once; FedAvg's have no gates."""
    monkeypatch.setitem(em_view.ROUNDS, "digits", 2)
    told = []
    ask = {"datasets": ["digits"], "seeds": 1, "watch": told.append}
    text = str(reproduce("fedsparse-local", tmp_path, **ask))
    assert "after 2 rounds" in text
    assert re.search(r"\| FedAvg \| 0\.\d{3} \|  \|", text)
    assert re.search(r"\| FedSparse, mid \| 0\.\d{3} \| 0\.\d{3} \|", text)
    assert told, "what is being done is said"
    told.clear()
    assert str(reproduce("fedsparse-local", tmp_path, **ask)) == text
    assert not told, "what was run is kept"


@pytest.mark.parametrize("method", ["fedadam", "fedsparse"])
def test_own_models_are_those_of_the_next_round(tmp_path, method):
    """One more E-step of every client is what a round in which all take part reports."""
    settings = {"method": {"name": method}, "data": {"clients": 4, "limit": 200}, "rounds": 3}
    longer = fedbayes.run(Config.published(**settings))
    with Simulation(Config.published(**settings | {"rounds": 2}), tmp_path / "run") as simulation:
        for _ in simulation:
            pass
        found = gates._local(simulation)
    assert found["drawn"] == pytest.approx(longer.metrics[-1]["local_accuracy"], abs=1e-6)
    assert ("likely" in found) == (method == "fedsparse")


@pytest.mark.slow
def test_gates_of_weights_on_digits(tmp_path, monkeypatch):
    monkeypatch.setitem(weight_gates.ROUNDS, "small", 10)
    again = []
    text = str(reproduce("fedsparse-fig8-weights", tmp_path, datasets=["digits"], seeds=1))
    assert "| fedsparse | logits | 0.01 | live inputs |" in text
    assert (tmp_path / "fedsparse-fig8-weights" / "figure-digits.png").exists()
    request = {"datasets": ["digits"], "seeds": 1, "watch": again.append}
    assert str(reproduce("fedsparse-fig8-weights", tmp_path, **request)) == text
    assert not again, "what was run is kept"


def test_regression_in_two_pieces_is_regression():
    """The same start, outputs and slopes as one layer; gates of weights find the live piece."""
    live, x = [0, 2, 3], torch.randn(5, 1, 6)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        whole = nn.Linear(6, 4)
        torch.manual_seed(0)
        pieces = weight_gates.live_regression((1, 6), 4, live)
    torch.testing.assert_close(pieces(x), whole(x.flatten(1)))
    for module in (whole, pieces):
        module(x.flatten(1)).square().sum().backward()
    torch.testing.assert_close(pieces.weight.grad, whole.weight.grad[:, live])
    others = whole.weight.grad[:, [1, 4, 5]]
    torch.testing.assert_close(pieces.rest.grad.reshape(4, 3), others)
    assert [entry.tensor for entry in Network(pieces, shape=(1, 6)).entries] == ["weight"]


def test_what_was_gone_as_a_sparsity_was_passed():
    """Sparsities .0, .2, .6 of three quarters live inputs; .3 is a quarter of the way on."""
    row = {"dead": [0.0, 0.2, 0.9], "live": [0.0, 0.2, 0.5]}
    assert weight_gates._gone_at(row, 0.75, 0.3) == pytest.approx((0.375, 0.275))
    assert weight_gates._gone_at(row, 0.75, 0.7) is None


def test_bytes_by_hand():
    """Totals, settled bytes, and accuracy at equal bytes between two evaluations, of which each is
    averaged with its neighbours.
    """
    slow = [{"bytes_down": 10, "bytes_up": 10, "local_accuracy": 0.5, "sparsity": 0.0}] * 6
    fast = [{"bytes_down": 4, "bytes_up": 6, "local_accuracy": 0.6, "sparsity": 0.5}] * 6
    for own, values in ((slow, (0.2, 0.6, 0.7)), (fast, (0.3, 0.5, 0.5))):
        own[:] = [{**line, "round": i} for i, line in enumerate(own, start=1)]
        for place, value in zip((1, 3, 5), values, strict=True):
            own[place]["global_accuracy"] = value
    tried, smoothed = em_runs.evaluated(slow)
    assert tried == [1, 3, 5]
    np.testing.assert_allclose(smoothed, [0.4, 0.5, 0.65])
    assert em_runs.accuracy_at(slow, 60) == pytest.approx(0.45)
    assert em_runs.metrics_at(slow, 4)["global"] == pytest.approx(0.4), "nothing later is known"
    table = em_runs.tabulate({"FedAvg": [slow], "other": [fast]}, 6)
    assert table["global"].tolist() == ["0.650", "0.500"]
    assert table.iloc[1, 4] == "0.500"
    assert table.iloc[1, 5] == "0.500"
    assert table.iloc[1, 7] == "0.450", "60 bytes were spent at round 3"


def _run_of(accuracy, local, sparsity, sent, rounds=4):
    """The lines of a run whose figures stay what they are from the second round on."""
    first = {"round": 1, "global_accuracy": 0.1, "local_accuracy": 0.2, "sparsity": 0.0}
    later = {"global_accuracy": accuracy, "local_accuracy": local, "sparsity": sparsity}
    lines = [first, *({**later, "round": number} for number in range(2, rounds + 1))]
    return [{**line, "bytes_down": sent, "bytes_up": sent} for line in lines]


def test_what_is_not_seen_of_table_1_has_its_cause():
    """The best local models, and the paper's sparsities on its own data set alone."""
    low, mid, high = em_runs.SPARSE
    found = {
        "FedAvg": [_run_of(0.7, 0.8, 0.0, 100)],
        low: [_run_of(0.8, 0.79, 0.2, 80)],
        mid: [_run_of(0.8, 0.78, 0.45, 60)],
        high: [_run_of(0.8, 0.77, 0.56, 50)],
    }
    claims = em_claims.tables_claims(em_runs.Compared("cifar10", found, 4))
    assert [claim.seen for claim in claims] == [True, True, True, True, False, False]
    assert claims[0].measured == "1.00, 0.80, 0.60, 0.50"
    # Low's bytes are 3.2 rounds of FedAvg's, mid's 2.4 and high's 2; FedAvg had .7, .58 and .5.
    assert [claim.measured for claim in claims[1:4]] == ["+0.100", "+0.220", "+0.300"]
    assert "Cause: it is not the draws of the gates" in str(claims[4])
    assert claims[5].measured == "0.20 (0.21), 0.45 (0.47), 0.56 (0.67)"
    assert "λ0 does not govern" in claims[5].cause
    assert len(em_claims.tables_claims(em_runs.Compared("digits", found, 4))) == 5


def test_sparsity_is_followed_to_its_end():
    """When most of it was there, by hand, and how sparse FedL1 is beside it."""
    curve = _run_of(0.7, 0.8, 0.5, 10, rounds=120)
    for line in curve[:110]:
        line["sparsity"] = 0.4
    runs = [curve, _run_of(0.7, 0.8, 0.5, 10, rounds=120)]
    found = dict.fromkeys(em_runs.SPARSE, runs)
    found |= {"FedL1": [_run_of(0.7, 0.8, 0.1, 10)], "FedAvg": [_run_of(0.7, 0.8, 0.0, 10)]}
    compared = em_runs.Compared("cifar10", found, 120)
    assert compared.rounds_until(em_runs.SPARSE[0], 0.95) == (111 + 2) / 2
    claims = em_claims.settles_claims(compared)
    assert all(claim.seen for claim in claims)
    assert claims[-1].measured == "0.100 after 120 rounds"


@pytest.mark.parametrize(
    ("dataset", "average", "accuracy", "seen"),
    [
        ("mnist", 0.9, 0.85, True),
        ("mnist", 0.9, 0.79, False),  # too far behind FedAvg
        ("digits", 0.16, 0.155, False),  # FedAvg has learnt nothing either
        ("cifar100", 0.16, 0.155, True),  # of a hundred classes that is something
    ],
)
def test_nothing_is_seen_in_models_that_do_not_predict(dataset, average, accuracy, seen):
    """They may be sparse, small, settled or better than another that does not predict either."""
    low, mid, high = em_runs.SPARSE
    unpruned = "FedSparse, mid, unpruned"
    found = {
        "FedAvg": [_run_of(average, 0.9, 0.0, 100)],
        "SCAFFOLD": [_run_of(accuracy + 0.001, 0.8, 0.0, 200)],
        "SCAFFOLD, FedSparse": [_run_of(accuracy, 0.8, 0.35, 150)],
        "FedL1": [_run_of(accuracy, 0.8, 0.0, 100)],
        **{m: [_run_of(accuracy, 0.7, 0.5, b)] for m, b in ((low, 80), (mid, 60), (high, 50))},
        unpruned: [_run_of(accuracy, 0.7, 0.5, 90)],
    }
    compared = em_runs.Compared(dataset, found, 4)
    prunes = em_claims.scaffold_claims(compared)[-1]
    assert prunes.seen == seen
    assert prunes.measured.startswith("35% with, 50% without")
    assert ("but global accuracy is below" in prunes.measured) == (not seen)
    assert em_claims.tables_claims(compared)[0].seen == seen
    assert all(claim.seen == seen for claim in em_claims.settles_claims(compared))
    assert all(claim.seen == seen for claim in em_claims.pruning_claims(compared))


def _line_of_rounds(first, last, sent, rounds=9):
    """A run whose accuracy goes from one to another, evaluated in every second round from the
    first, whose messages are all as long.
    """
    steps = np.linspace(first, last, rounds)
    lines = [{"round": n + 1, "local_accuracy": 0.5, "sparsity": 0.1 * n} for n in range(rounds)]
    for n in range(0, rounds, 2):
        lines[n]["global_accuracy"] = float(steps[n])
    return [{**line, "bytes_down": sent, "bytes_up": sent} for line in lines]


def test_budgets_and_rounds_by_hand():
    """Fig. 3 is over bytes and Fig. 6 over rounds: who is ahead where."""
    _, mid, high = em_runs.SPARSE
    found = {
        "FedAvg": [_line_of_rounds(0.1, 0.9, 50)],
        "FedDrop": [_line_of_rounds(0.08, 0.96, 25)],
        "FedL1": [_line_of_rounds(0.1, 0.5, 50)],
        em_runs.SPARSE[0]: [_line_of_rounds(0.1, 0.8, 40)],
        mid: [_line_of_rounds(0.2, 0.8, 25)],
        high: [_line_of_rounds(0.1, 0.6, 20)],
    }
    compared = em_runs.Compared("digits", found, 9)
    assert compared.marks == [1, 3, 5, 7, 9]
    table = em_runs.over_bytes(compared).set_index("method")
    assert list(table.columns) == [f"{share:g} of FedAvg's bytes" for share in em_runs.BUDGETS]
    # A fifth of 900 bytes are 1.8 rounds of FedAvg's, between .2 and .3 (averaged), 3.6 of mid's.
    assert table.iloc[0, 2] == "0.240"
    assert table.loc[mid].tolist()[2] == f"{0.35 + 0.3 * 0.15:.3f}"
    assert table.loc[high].tolist()[4] == "", "it never sent as much"
    claims = em_claims.budget_claims(compared)
    assert [claim.seen for claim in claims] == [True, False, True]
    assert claims[0].measured.endswith("at 0.0 GB")
    rounds = em_runs.over_rounds("sparsity")(compared)
    assert rounds.iloc[0].tolist() == ["FedAvg", "0.000", "0.200", "0.400", "0.600", "0.800"]
    claims = em_claims.rounds_claims(compared)
    assert [claim.seen for claim in claims] == [True, True]
    assert claims[0].measured.startswith(
        f"{em_runs.SPARSE[0]} 0.100 in round 1, FedAvg 0.100; {mid} 0.200 in round 1, FedAvg 0.100"
    )
    last = (0.475 + 0.6) / 2
    assert claims[1].measured == f"0.450 after 9 rounds, {high} {last:.3f}"
    sparse = {
        method: [[{**line, "sparsity": 0.5} for line in run] for run in runs]
        for method, runs in found.items()
    }
    sparse["FedSparse, logits"] = found[mid]  # whole for long, but not the paper's
    (claim, _) = em_claims.rounds_claims(em_runs.Compared("digits", sparse, 9))
    assert not claim.seen, "none can tell"
    assert claim.measured.startswith(f"{em_runs.SPARSE[0]} has lost 0.50 by round 1; ")
    assert "FedSparse, logits 0.200 in round 1, FedAvg 0.100" in claim.measured
    assert "before the global model is first evaluated" in claim.cause


def test_priors_are_compared_after_as_many_rounds(tmp_path, monkeypatch):
    """FedAvg's runs are those of Table 1 and go on for longer; what counts is where all are."""
    asked = {}
    levels = {"Laplace": 0.3, "Laplace, cured": 0.48, "mixture, cured": 0.4}

    def compare(comparison, folder, dataset, watch):
        asked.update(comparison.rounds)
        return {
            method: [_run_of(levels.get(method, 0.5), 0.8, 0.0, 10, rounds)] * 3
            for method, rounds in comparison.rounds.items()
        }

    monkeypatch.setattr(em_view, "compare", compare)
    found = em_view.priors(Request("em-priors", tmp_path, "small", ["cifar10"]))
    table1 = em_view.comparison_of(
        Request("t", tmp_path, "small", ["cifar10"]), "cifar10", ("FedAvg",)
    )
    assert asked.pop("FedAvg") == table1.rounds["FedAvg"] == em_view.SMALL_ROUNDS
    assert set(asked.values()) == {em_view.PRIORS_ROUNDS}
    assert found.parts[0].heading == f"cifar10, after {em_view.PRIORS_ROUNDS} rounds"
    assert [claim.seen for claim in found.claims] == [True, True, True, False]
    assert found.claims[2].measured == "0.480, as published 0.300, FedAvg 0.500"
    assert found.claims[3].cause.endswith("after a third of the rounds FedAvg has 0.500")
    assert found.verdict == "seen in part (3 of 4 claims)"


def test_names_and_data_are_checked(tmp_path, capsys):
    with pytest.raises(ConfigError, match="gpi-fnm-fig2"):
        reproduce("fig9", tmp_path)
    with pytest.raises(ConfigError, match="not on 'har'"):
        reproduce("gpi-fnm-fig2", tmp_path, datasets=["har"])
    assert command("reproduce", "list") == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in EXPERIMENTS)
    assert command("reproduce", "gpi-fnm-fig2", "--scale", "huge") == 2
    assert "small or paper" in capsys.readouterr().err


def test_an_interrupted_experiment_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedbayes_papers.reproduce", interrupted)
    assert command("reproduce", "gpi-fnm-fig2", "-o", tmp_path) == 130
    assert "run the same command again to resume" in capsys.readouterr().err


def test_absent_data_are_named(tmp_path, monkeypatch):
    """Alone, an absent set is an error; among others it is left out."""
    import fedbayes_papers as papers

    def load(settings):
        if settings.name != "cifar10":
            raise DataError(f"{settings.name} is at https://example.org")

    monkeypatch.setattr(papers, "load_dataset", load)
    ran = []
    experiment = papers.Experiment(
        "two",
        "",
        ("cifar10", "femnist"),
        lambda request: ran.append(request.datasets) or finding(experiment="two"),
    )
    monkeypatch.setitem(papers.EXPERIMENTS, "two", experiment)
    told = []
    assert reproduce("two", tmp_path, watch=told.append) == finding(experiment="two")
    assert read_finding(tmp_path / "two" / "finding.json") == finding(experiment="two")
    assert ran == [["cifar10"]]
    assert told == ["left out: femnist is at https://example.org"]
    with pytest.raises(DataError, match="example"):
        reproduce("two", tmp_path, datasets=["femnist"])


@pytest.mark.slow
def test_virtual_on_digits(tmp_path):
    text = str(reproduce("virtual-table2", tmp_path, datasets=["digits"]))
    assert "VIRTUAL is at or within one std" in text
    assert (tmp_path / "virtual-table2" / "figure.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["combined-fig2", "combined-fig3", "combined-fig5", "combined-fig6"]
)
def test_combinations_on_digits(name, tmp_path):
    text = str(reproduce(name, tmp_path, datasets=["digits"]))
    settings = {"combined-fig2": 2, "combined-fig3": 2, "combined-fig5": 3, "combined-fig6": 5}
    claims = [line for line in text.splitlines() if line.startswith(("- Seen: ", "- NOT seen: "))]
    assert len(claims) == settings[name]
    assert (tmp_path / name / "figure.png").exists()


def lines(accuracies, orders):
    return [
        {"global_accuracy": a, "class_accuracy": [a, 1 - a], "amplification": o}
        for a, o in zip(accuracies, orders, strict=True)
    ]


def test_curves_and_claims_of_combinations_by_hand(monkeypatch):
    """A run that ended early keeps the accuracy it had; verdicts are of the mean over seeds."""
    found = [lines([0.5, 0.9, 0.7], [1.0, 2.0, 3.0]), lines([0.7, 0.8], [2.0, 4.0])]
    monkeypatch.setattr(combined, "ROUNDS", 4)
    ends = ["completed", "overflow: 31 orders"]
    curves = combined.Curves("balanced", "linear, c = 1", found, ends, [0.8, 0.9])
    assert curves.accuracies.tolist() == [[0.5, 0.9, 0.7, 0.7], [0.7, 0.8, 0.8, 0.8]]
    line = combined._line(curves)
    assert line["round 1"] == f"0.600 ± {np.std([0.5, 0.7], ddof=1):.3f}"
    assert line["best round"].startswith("0.850")
    assert line["best round"].endswith("(round 2)")
    assert line["last round"].startswith("0.750")
    assert line["negative"].startswith("0.750")
    assert line["positive"].startswith("0.250")
    assert line["orders of amplification"] == "3.5"
    assert line["ended by overflow"] == "1 of 2"

    def of(*values, centre=0.9):
        values = [*values, *[values[-1]] * (4 - len(values))]
        both = [lines(values, [1.0] * 4)] * 2
        return combined.Curves("balanced", "", both, ends, [centre] * 2)

    tried = {"hosts dance": [0.7, 0.8]}
    assert combined._unlearns(of(0.9, 0.55), tried).seen
    refuted = combined._unlearns(of(0.9, 0.65), tried)
    assert not refuted.seen
    assert refuted.cause.endswith("none of what was tried makes it: hosts dance 0.750")
    cause = combined._unlearns(of(0.9, 0.65), tried | {"hosts sleep": [0.5]}).cause
    assert cause == (
        "it takes more than averaging: hosts sleep (hosts dance 0.750, hosts sleep 0.500)"
    )
    assert combined._improves(of(0.8, 0.9, 0.8), of(0.7)).seen
    assert not combined._improves(of(0.8, 0.9, 0.9), of(0.7)).seen
    refuted = combined._improves(of(0.9, 0.9, 0.8), of(0.7))
    assert not refuted.seen
    assert "all data (0.900; the mean 0.700); 1 of 2 runs were ended" in refuted.cause
    assert "all data" not in combined._improves(of(0.8, 0.8), of(0.7)).cause
    assert combined._stays(of(0.8, 0.9, 0.89), of(0.9)).seen
    assert not combined._stays(of(0.8, 0.9, 0.8), of(0.9)).seen
    cause = combined._stays(of(0.7), of(0.9, 0.75)).cause
    assert cause.startswith("the mean of two hosts of such data is behind by 0.150 too, at 0.750; ")
    assert cause.endswith(combined.GROWTH)
    assert combined._stays(of(0.7), of(0.9)).cause == combined.GROWTH
    assert "behind by 0.150" in combined._stays(of(0.8), of(0.75)).cause
    assert combined.GROWTH not in combined._stays(of(0.8), of(0.75)).cause


def test_the_mean_of_models_that_trained_apart(tmp_path):
    """After one round from one start it is what Combined Learning's mean is."""
    config = combined.patients("balanced", "mean", 0, "digits", epochs=3)
    both = fedbayes.run(config.model_copy(update={"rounds": 1}), tmp_path / "mean")
    method = {"name": "local", "start": "common"}
    alone = combined.patients("balanced", None, 0, "digits", method, epochs=3)
    alone = alone.model_copy(update={"rounds": 1})
    fedbayes.run(alone, tmp_path / "alone")
    accuracy = combined._mean_of(RunFolder(tmp_path / "alone"), alone)
    assert accuracy == pytest.approx(both.summary["global_accuracy"])
    assert 0.5 < accuracy < 1.0


def test_a_claim_is_told_either_way():
    """A cause is told of what was not seen alone."""
    for cause, told in (("", ""), ("gravity", " Cause: gravity.")):
        up = Claim(text="up", seen=True, measured="1 to 2", cause=cause)
        down = Claim(text="up", seen=False, measured="2 to 1", cause=cause)
        assert str(up) == "- Seen: up (1 to 2)."
        assert str(down) == f"- NOT seen: up (2 to 1).{told}"


def finding(seen=(True,), seeds=3, experiment="gpi-fnm-fig2", datasets=("mnist",), cause=""):
    claims = [
        Claim(text=f"claim {n}", seen=s, measured="x", cause=cause) for n, s in enumerate(seen)
    ]
    table = "| a |\n| --- |\n| 1 |"
    return Finding(
        experiment=experiment,
        scale="small",
        datasets=datasets,
        seeds=seeds,
        parts=(Part(heading="all", table=table, claims=claims),),
        note="A note.",
    )


def test_a_verdict_takes_three_seeds():
    """Two of them, however clear, are none; the counts are of claims."""
    assert finding((True, True)).verdict == "seen"
    assert finding((True, False)).verdict == "seen in part (1 of 2 claims)"
    assert finding((False, False)).verdict == "refuted"
    assert finding((True, True), seeds=2).verdict == "no verdict from 2 seeds (2 of 2 claims seen)"
    assert finding((False,), seeds=1).verdict == "no verdict from 1 seed (0 of 1 claims seen)"
    assert finding((True, False, False), cause="why").causes == ("why",)
    assert finding((True,), cause="why").causes == ()


def test_a_finding_is_kept_with_its_table(tmp_path, capsys):
    """What is listed, in the terminal too, comes from the files that experiments leave."""
    folder = tmp_path / "gpi-fnm-fig2"
    folder.mkdir()
    found = finding((True, False), cause="tired neurons")
    found.write(folder)
    assert read_finding(folder / "finding.json") == found
    text = (folder / "table.md").read_text()
    assert text == (
        "**all**\n\n| a |\n| --- |\n| 1 |\n\n- Seen: claim 0 (x).\n"
        "- NOT seen: claim 1 (x). Cause: tired neurons.\n\nA note.\n"
    )
    listed = {line.name: line for line in experiments(tmp_path)}
    assert list(listed) == list(EXPERIMENTS)
    verdict = "seen in part (1 of 2 claims); without cifar10"
    assert listed["gpi-fnm-fig2"].verdict == verdict
    assert listed["gpi-fnm-fig3"].finding is None
    (row,) = (
        row
        for row in overview(list(listed.values())).splitlines()
        if "fig2" in row and "gpi" in row
    )
    assert f"| {verdict} | tired neurons | mnist | 3 | small |" in row
    assert command("reproduce", "-o", tmp_path) == 0
    assert "tired neurons" in capsys.readouterr().out
    (folder / "finding.json").write_text('{"experiment": "gpi-fnm-fig2"}')
    assert command("reproduce", "-o", tmp_path) == 2
    assert "is no finding" in capsys.readouterr().err


def test_what_was_measured_on_other_data_is_kept():
    """Unless at another scale, by another version, or as a part of both."""
    mnist, cifar = finding((True, False)), finding((True,), datasets=("cifar10",), seeds=2)
    both = cifar.beside(mnist)
    assert both.datasets == ("mnist", "cifar10")
    assert [part.dataset for part in both.parts] == ["mnist", ""]
    assert both.verdict == "no verdict from 2 seeds (2 of 3 claims seen)"
    part = mnist.parts[0].model_copy(update={"dataset": "mnist"})
    named = both.model_copy(update={"parts": (part, both.parts[1])})
    again = finding((True, True)).beside(named)
    assert again.datasets == ("mnist",), "a part without a data set is of both"
    assert again.verdict == "seen"
    assert cifar.beside(None) == cifar
    for other in ({"scale": "paper"}, {"version": "0.1"}, {"experiment": "gpi-fnm-fig3"}):
        assert cifar.beside(mnist.model_copy(update=other)) == cifar


def test_figures_of_one_data_set_after_the_other(tmp_path, monkeypatch):
    """Measured in one folder, they are one finding."""
    monkeypatch.setattr(gpi_networks, "measure", lambda *_: {"accuracy": 0.5, "sizes": [100]})
    monkeypatch.setattr(gpi_fnm, "choices_of_kl", lambda _: "")
    monkeypatch.setattr("fedbayes_papers.load_dataset", lambda _: None)
    reproduce("gpi-fnm-fig3", tmp_path, datasets=["mnist"])
    assert reproduce("gpi-fnm-fig3", tmp_path, datasets=["cifar10"]).datasets == (
        "mnist",
        "cifar10",
    )
    found = reproduce("gpi-fnm-fig3", tmp_path, datasets=["mnist"])
    assert [part.dataset for part in found.parts] == ["cifar10", "mnist"]
    assert "| mnist | iid |" in found.parts[1].table
    assert read_finding(tmp_path / "gpi-fnm-fig3" / "finding.json") == found


def test_what_cannot_be_measured_here_is_told_from_what_was_not():
    line = Line("table2", "", ("cifar100",), None, absent=("cifar100",))
    assert line.verdict == "beyond this machine: no cifar100 here"
    assert Line("fig2", "", ("mnist", "har"), None, absent=("har",)).verdict == "not measured"


def test_seeds_are_those_asked_for(tmp_path):
    """By default as many as belong to the scale; none is refused."""
    small, paper = (Request("x", tmp_path, scale, ["digits"]) for scale in ("small", "paper"))
    assert list(small.repeats(2, 5)) == [0, 1]
    assert list(paper.repeats(2, 5)) == [0, 1, 2, 3, 4]
    asked = Request("x", tmp_path, "small", ["digits"], seeds=3)
    assert list(asked.repeats(2, 5)) == [0, 1, 2]
    with pytest.raises(ConfigError, match="one seed at least"):
        reproduce("gpi-fnm-fig2", tmp_path, seeds=0)


@pytest.mark.data
def test_the_splits_of_the_patients_fit_the_sheet(tmp_path):
    for name, split in combined.SPLITS.items():
        data = build_data(combined.patients(name, "mean", 0, "einstein"))
        assert data.counts().tolist() == [list(host) for host in split.hosts]
        tested = np.bincount(data.test_labels(), minlength=2)
        assert tested.tolist() == list(split.test)


def test_measurements_under_other_settings_do_not_count(tmp_path):
    """Another grid is another measurement of what is chosen from it, and of nothing else."""
    federations = [gpi_networks.FusionCase("digits", "iid", 3, 1, 0)]
    told = []
    for epsilons in ((0.0,), (0.3,)):
        told.clear()
        grid = {"sigma0": (1.0,), "gamma": (1.0,), "epsilon": epsilons}
        methods = ["locals", "GPI-FNM"]
        request = Request("out", tmp_path, "small", ["digits"], watch=told.append)
        table = gpi_networks.fill(request, federations, methods, grid)
        assert len(table) == 2
    assert len(told) == 1
    assert "GPI-FNM" in told[0]


def test_a_run_ahead_of_its_measurements_begins_anew(tmp_path):
    """A kill between a checkpoint and its measurement must not lose a round."""
    federation = gpi_networks.FusionCase("digits", "iid", 3, 1, 0)
    config = federation.config({"name": "fedavg"}, 3)
    whole = list(gpi_rounds._followed(tmp_path / "whole", config, 0))
    assert [number for number, _, _ in whole] == [1, 2, 3]
    assert not list(gpi_rounds._followed(tmp_path / "whole", config, 3))
    assert list(gpi_rounds._followed(tmp_path / "whole", config, 2)) == whole
    broken = gpi_rounds._followed(tmp_path / "cut", config, 0)
    first = next(broken)
    broken.close()
    assert [first, *gpi_rounds._followed(tmp_path / "cut", config, 1)] == whole


def test_a_measurement_that_was_cut_off_is_left_out(tmp_path):
    file = tmp_path / "results.jsonl"
    file.write_text('{"seed": 0, "accuracy": 0.5}\n{"seed": 1, "acc')
    results = Results(file)
    assert results.missing([{"seed": 0}, {"seed": 1}]) == [{"seed": 1}]
    results.add({"seed": 1, "accuracy": 0.6})
    assert Results(file).table([{"seed": 0}, {"seed": 1}])["accuracy"].tolist() == [0.5, 0.6]


def test_damaged_results_are_named(tmp_path):
    (tmp_path / "results.jsonl").write_text("{no\n")
    with pytest.raises(RunError, match=r"results\.jsonl is damaged"):
        Results(tmp_path / "results.jsonl")


def test_tables_by_hand():
    table = pd.DataFrame(
        {
            "clients": [5, 5, 5, 5, 9, 9],
            "method": ["A", "A", "B", "B", "A", "B"],
            "accuracy": [0.9, 0.92, 0.8, 0.8, 0.7, 0.8],
            "sizes": [[10, 30], [20, 10], None, None, [5], None],
        }
    )
    lines = gpi_claims.summarize(table, ("clients",))
    assert lines.to_dict("records") == [
        {"clients": 5, "A": "0.910 ± 0.014 (25)", "B": "0.800 ± 0.000"},
        {"clients": 9, "A": "0.700 (5)", "B": "0.800"},
    ]
    assert markdown(lines).splitlines()[1] == "| --- | --- | --- |"
    said = gpi_claims.ahead(table, ("clients",), "A", "B")
    assert str(said).startswith(
        "- NOT seen: A is ahead of B in every setting (in 1 of 2, by -0.100"
    )
    assert "to +0.110, mean +0.005" in said.measured
    assert mean_and_std([0.5, 0.7]) == f"0.600 ± {np.std([0.5, 0.7], ddof=1):.3f}"


def test_causes_of_matched_networks_have_their_numbers():
    """Sizes of what is compared: largest layers, of the last round where there are several."""
    rows = [
        {"method": method, "round": number, "sizes": sizes}
        for method, number, sizes in (
            ("GPI-FNM", 1, [900, 10]),
            ("GPI-FNM", 2, [100, 300]),
            ("GPI-FNM", 2, [500, 10]),
            ("PFNM", 1, [1, 1]),
            ("PFNM", 2, [700, 1000]),
            ("GPI-FNM, alternating", 2, [350, 210]),
        )
    ]
    table = pd.DataFrame(rows)
    assert gpi_claims.more_neurons(table).endswith("has 1000 in the last round, GPI-FNM's 400")
    assert not gpi_claims.more_neurons(table.replace({"GPI-FNM": "PFNM", "PFNM": "GPI-FNM"}))
    assert gpi_claims.fewer_neurons(table).startswith("GPI-FNM has 567 neurons in the mean")
    assert "of 350 neurons in its largest layer for ten times 100" in gpi_claims.one_network(table)
