"""The best round, and the end of a run whose headline metric stands still."""

import warnings

import pytest

import fedbayes
from fedbayes import Config, Simulation
from fedbayes.core.messages import decode, dense
from fedbayes.data import FederatedData
from fedbayes.errors import ConfigError, FedbayesWarning, RunError
from fedbayes.storage import flusher
from fedbayes.storage.best_tracker import BestTracker, divergence
from fedbayes.testing import assert_identical
from tests.helpers.cut_off import cut_off_at_every_write

JUMPY = {
    "rounds": 9,
    "cohort": 2,
    "data": {"clients": 4, "partition": "dirichlet", "alpha": 0.2},
    "model": {"hidden": [8]},
    "training": {"lr": 0.8},
    "metrics": [],  # those of `auto` come with the last round alone, wherever that is
}
"""Accuracies that rise and fall, so that the best round is not the last."""
LOCAL = {"method": {"name": "local"}, "training": {"lr": 1.5}}


def jumpy(**changes):
    return Config.published(**{**JUMPY, **changes})


def timeless(run):
    return [{k: v for k, v in line.items() if k != "seconds"} for line in run.metrics]


def interrupted(config, folder, rounds):
    with Simulation(config, folder) as simulation:
        steps = iter(simulation)
        for _ in range(rounds):
            next(steps)


def files(folder):
    return {
        path.relative_to(folder): path.read_bytes()
        for place in ("clients", "checkpoints")
        for path in (folder / place).glob("*")
    }


def contents(folder):
    """As `files`; of checkpoints all but the time."""
    found = {}
    for path, data in files(folder).items():
        found[path] = data
        if path.parent.name == "checkpoints":
            found[path] = {k: v for k, v in dense(decode(data)).items() if k != "seconds"}
    return found


def assert_same(one, two):
    one, two = contents(one), contents(two)
    assert one.keys() == two.keys()
    for path, data in one.items():
        if isinstance(data, bytes):
            assert data == two[path]
        else:
            assert_identical(data, two[path])


@pytest.mark.parametrize("changes", [{}, LOCAL, {"checkpoint_every": 4}])
def test_the_best_checkpoint_is_kept_beside_the_newest(tmp_path, changes):
    """Beside a run that keeps every checkpoint."""
    every = fedbayes.run(jumpy(**{**changes, "checkpoint_every": 1}, keep_checkpoints="all"))
    metric = every.summary["headline"]
    told = [line[metric] for line in every.metrics]
    best = told.index(max(told)) + 1
    assert best < 9, "no test of anything"
    run = fedbayes.run(jumpy(**changes, keep_checkpoints="best"), tmp_path)
    assert run.folder.rounds() == [best, 9]
    assert run.summary["best_round"] == best
    for name in ("global_accuracy", "global_nll", "local_accuracy", "sparsity"):
        assert run.summary.get(f"best_{name}") == every.metrics[best - 1].get(name)
        if name in every.summary:
            assert run.summary[name] == every.summary[name]
    if changes is LOCAL:
        named = {
            f"{int(client):07d}-{int(number):07d}.safetensors"
            for checkpoint in (run.folder.progress(best), run.folder.progress(9))
            for client, number in zip(
                checkpoint.states.clients, checkpoint.states.columns["round"], strict=True
            )
        }
        assert {path.name for path in run.folder.clients.iterdir()} == named
        assert len(named) > 4, "the best round and the last name the same states"
        assert "model_round" not in run.summary
    else:
        assert run.summary["model_round"] == best
        assert_identical(run.model, every.server(best).weights)
        assert_identical(run.server().weights, every.server(9).weights)


def test_otherwise_the_model_is_the_last_and_the_summary_says_so(tmp_path):
    run = fedbayes.run(jumpy(), tmp_path)
    assert run.summary["model_round"] == run.summary["rounds"] == 9
    assert not any(name.startswith("best") for name in run.summary)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param(LOCAL, marks=pytest.mark.slow),
        pytest.param({"checkpoint_every": 4}, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_keeps_the_best_ends_the_same_wherever_it_is_broken(tmp_path, changes):
    config = jumpy(**changes, keep_checkpoints="best")
    whole = fedbayes.run(config, tmp_path / "whole")
    for rounds in range(1, 9):
        interrupted(config, tmp_path / str(rounds), rounds)
        again = fedbayes.resume(tmp_path / str(rounds))
        assert timeless(again) == timeless(whole)
        assert_same(again.folder.path, whole.folder.path)
        assert again.summary["best_round"] == whole.summary["best_round"]


@pytest.mark.slow
def test_cut_off_at_every_write_it_keeps_what_its_checkpoints_name(tmp_path, monkeypatch):
    config = jumpy(**LOCAL, keep_checkpoints="best", rounds=5)
    cut_off_at_every_write(config, tmp_path, monkeypatch, assert_same, halves=False)


def test_the_older_best_stays_until_the_new_one_is_on_the_disk(tmp_path, monkeypatch):
    """A disk that fails while the best checkpoint is on its way there: all that the older one
    names is there."""
    config = jumpy(**LOCAL, keep_checkpoints="best")
    run = fedbayes.run(config)
    told = [line[run.summary["headline"]] for line in run.metrics]
    bests = [told.index(max(told[:number])) + 1 if number else 0 for number in range(10)]
    new = next(n for n in range(3, 10) if bests[n] == n and bests[n - 1] < n - 1)
    older = bests[new - 1]

    def fails(path):
        if path.name == f"round-{new:07d}.safetensors":
            raise OSError("no disk")

    monkeypatch.setattr(flusher, "flush", fails)
    with pytest.raises(OSError, match="no disk"), Simulation(config, tmp_path) as simulation:
        for _ in simulation:
            pass
    assert {older, new - 1, new} <= set(simulation.folder.rounds())
    for number in (older, new - 1, new):
        states = simulation.folder.progress(number).states
        named = zip(states.clients.tolist(), states.columns.get("round", ()), strict=True)
        for client, at in named:
            assert (tmp_path / "clients" / f"{client:07d}-{at:07d}.safetensors").exists()


@pytest.mark.parametrize("changes", [{}, LOCAL])
@pytest.mark.parametrize("before", ["last", "all"])
def test_the_best_is_kept_from_when_it_is_asked_for(tmp_path, changes, before):
    """The best of the rounds whose checkpoints there are, which of `last` is the last alone."""
    every = fedbayes.run(jumpy(**changes, keep_checkpoints="all"))
    metric = every.summary["headline"]
    told = [line[metric] for line in every.metrics]
    best = told.index(max(told)) + 1
    assert best < 8, "no test of anything"
    interrupted(jumpy(**changes, keep_checkpoints=before), tmp_path / "run", best + 1)
    file = tmp_path / "run" / "config.toml"
    file.write_text(file.read_text().replace(f'checkpoints = "{before}"', 'checkpoints = "best"'))
    since = told[best:] if before == "last" else told
    wanted = told.index(max(since), len(told) - len(since)) + 1
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with Simulation(None, tmp_path / "run") as simulation:
            next(iter(simulation))
        Simulation(None, tmp_path / "run").close()  # it is known when there are new digests too
        again = fedbayes.resume(tmp_path / "run")
    words = f"checkpoint of round {best}, the best so far, was not kept"
    assert any(words in str(warning.message) for warning in said) == (before == "last")
    assert again.summary["best_round"] == wanted
    assert again.folder.rounds() == sorted({wanted, 9})
    assert [line[metric] for line in again.metrics] == told
    if changes is not LOCAL:
        assert_identical(again.model, every.server(wanted).weights)


def test_a_lost_best_checkpoint_is_told(tmp_path):
    run = fedbayes.run(jumpy(keep_checkpoints="best"), tmp_path)
    (tmp_path / "checkpoints" / f"round-{run.summary['best_round']:07d}.safetensors").unlink()
    with pytest.raises(RunError, match=f"no checkpoint of round {run.summary['best_round']}"):
        fedbayes.resume(tmp_path)


def stopping_round(values, patience, least):
    """The definition, written otherwise: the first round such that none of the `patience` newest
    values is by more than `least` above the last that was an improvement.
    """
    improvements = [0]
    for place, value in enumerate(values):
        if value > values[improvements[-1]] + least:
            improvements.append(place)
        if place - improvements[-1] >= patience:
            return place + 1
    return None


@pytest.mark.parametrize(
    ("changes", "patience", "least", "every"),
    [({}, 2, 0.0, 1), ({}, 1, 0.3, 2), (LOCAL, 2, 0.02, 1)],
)
def test_a_run_whose_headline_stands_still_stops(tmp_path, changes, patience, least, every):
    whole = fedbayes.run(jumpy(**changes, evaluate_every=every))
    metric = whole.summary["headline"]
    # Local accuracies of fewer clients do not compare.
    clients = whole.metrics[-1]["local_clients"]
    lines = [
        line
        for line in whole.metrics
        if metric in line and (changes != LOCAL or line["local_clients"] == clients)
    ]
    values = [line[metric] for line in lines]
    expected = lines[stopping_round(values, patience, least) - 1]["round"]
    assert expected < 9, "no test of anything"
    config = jumpy(**changes, evaluate_every=every, stop_after=patience, stop_min_improvement=least)
    run = fedbayes.run(config, tmp_path / "run")
    assert run.summary["rounds"] == expected
    words = metric.replace("_", " ")
    assert run.summary["stopped_reason"] == f"no better {words} in {patience} evaluations"
    last = run.metrics[-1]
    assert last.pop("stopped") == run.summary["stopped_reason"]
    assert timeless(run) == timeless(whole)[:expected]
    before = files(tmp_path / "run")
    again = fedbayes.resume(tmp_path / "run")
    assert again.summary == run.summary
    assert files(tmp_path / "run") == before
    for rounds in range(1, expected):
        interrupted(config, tmp_path / str(rounds), rounds)
        resumed = fedbayes.resume(tmp_path / str(rounds))
        assert_same(resumed.folder.path, run.folder.path)
        assert resumed.summary["stopped_reason"] == run.summary["stopped_reason"]


def test_rounds_that_tell_nothing_do_not_count():
    standing = BestTracker("global", "a", min_improvement=0.1).after_all(
        [
            {"round": 1, "global_a": 0.5},
            {"round": 2},
            {"round": 3, "global_a": 0.55},
            {"round": 4, "global_a": None},
            {"round": 5, "global_a": 0.55},
        ]
    )
    assert (standing.best, standing.best_round, standing.waited) == (0.55, 3, 2)
    assert standing.after({"round": 6, "global_a": 0.61}).waited == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"stop_after": 3, "evaluate_every": 0},
            "stop_after = 3 compares metrics of the",
        ),
        ({"keep_checkpoints": "best", "evaluate_every": 0}, "keep_checkpoints = 'best'"),
        ({"stop_after": 0}, "stop_after"),
    ],
)
def test_what_could_have_no_effect_is_refused(tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words):
        Simulation(jumpy(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_without_test_samples_nothing_is_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(FederatedData, "test_total", 0)
    with pytest.raises(ConfigError, match="no client has test samples"):
        Simulation(jumpy(stop_after=3), tmp_path / "run")


def test_personal_models_are_those_of_the_round_whose_figures_are_told(tmp_path):
    """With all clients in every round, what they got right is in the best checkpoint."""
    from fedbayes.workflows.calibrate.calibration import trust

    run = fedbayes.run(
        jumpy(**LOCAL, keep_checkpoints="best", cohort=4, rounds=6), tmp_path / "run"
    )
    best = run.summary["best_round"]
    assert best < 6
    progress = run.folder.progress(best)
    right = trust(tmp_path / "run", personal=True).right
    assert int(right.sum()) == int(progress.clients.sums["correct"].sum())
    assert int(right.sum()) != int(run.folder.progress(6).clients.sums["correct"].sum())


def test_a_report_says_that_its_models_are_the_last(tmp_path):
    from fedbayes.reports.gather import gather

    run = fedbayes.run(jumpy(keep_checkpoints="best"), tmp_path / "best")
    fedbayes.run(jumpy(), tmp_path / "last")
    best, last = gather([tmp_path / "best", tmp_path / "last"])
    words = f"the saved model is from round {run.summary['best_round']}"
    assert any(words in note for note in best.notes)
    assert not any("saved model" in note for note in last.notes)


def test_it_runs_on_flower_too(tmp_path):
    """The nodes keep the states that the best checkpoint names."""
    from fedbayes.workflows.calibrate.calibration import trust

    pytest.importorskip("flwr")
    settings = {"keep_checkpoints": "best", "engine": "flower-simulation", "cohort": 4}
    run = fedbayes.run(jumpy(**LOCAL, **settings, rounds=6), tmp_path)
    best = run.summary["best_round"]
    assert best < 6
    assert run.folder.rounds() == [best, 6]
    right = trust(tmp_path, personal=True).right
    assert int(right.sum()) == int(run.folder.progress(best).clients.sums["correct"].sum())


def test_means_over_other_clients_do_not_compare():
    """The first clients that are tried may be the luckiest."""
    lines = [
        {"round": number, "local_accuracy": value, "local_clients": clients}
        for number, value, clients in ((1, 0.99, 1), (2, 0.95, 2), (3, 0.6, 4), (4, 0.7, 4))
    ]
    standing = BestTracker("local", "accuracy").after_all(lines)
    assert (standing.best_round, standing.best, standing.waited) == (4, 0.7, 0)
    assert BestTracker("local", "accuracy").after_all(lines[:3]).best_round == 3
    told = [{**line, "global_accuracy": line["local_accuracy"]} for line in lines]
    assert BestTracker("global", "accuracy").after_all(told).best_round == 1


# ---- the end, beside what was


def told(*values, whose="global"):
    """Lines of rounds with these mean negative log-likelihoods; None: not evaluated."""
    return [
        {"round": number, **({} if value is None else {"metrics": {whose: {"nll": value}}})}
        for number, value in enumerate(values, 1)
    ]


@pytest.mark.parametrize("end", [12.6, 1e25, float("inf")])
@pytest.mark.parametrize("whose", ["global", "local"])
def test_a_model_that_ends_far_worse_than_it_was_is_told_of(end, whose):
    said = divergence(told(3.0, 2.5, None, end, whose=whose))
    assert f"is {end:.4g} at the end, and was 2.5 after round 2" in said


@pytest.mark.parametrize(
    "values",
    [(), (None,), (3.0,), (3.0, 12.9), (800.0, 1500.0), (-30.0, -20.5), (float("inf"), 1e25)],
)
def test_other_ends_are_not(values):
    assert divergence(told(*values)) == ""


def test_under_noise_another_way_out_is_named():
    assert "smaller training.lr" in divergence(told(0.3, 900.0))
    assert divergence(told(0.3, 900.0), noisy=True).endswith(
        "fewer rounds or more clients in each help"
    )


def test_a_run_that_diverged_says_so(tmp_path):
    settings = {"data": {"clients": 3}, "model": {"hidden": [8]}, "metrics": []}
    config = Config.create(rounds=3, method={"name": "ivon-admm"}, training={"lr": 5.0}, **settings)
    simulation = Simulation(config, tmp_path / "r")
    list(simulation)
    with pytest.warns(FedbayesWarning, match="training diverged: .* at the end, and was"):
        simulation.require_an_update()
