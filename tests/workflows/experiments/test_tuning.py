"""Tuning: its budget, its ranges, the rows that it judges by, and what it chooses."""

import json
import tomllib

import numpy as np
import pytest
from scipy import stats

import fedbayes
from fedbayes import Config
from fedbayes.data import load_dataset, partition
from fedbayes.errors import ConfigError, FedbayesWarning, RunError
from fedbayes.workflows.experiments.grid_worker import in_words
from fedbayes.workflows.experiments.ranges import Range, declared_ranges, drawn, given_ranges
from fedbayes.workflows.experiments.tuning import _explained, halving, tuned_methods
from tests.helpers.command_line import command

QUICK = {"clients": 3, "model": {"hidden": [4]}, "rounds": 2, "training": {"steps": 3}}


@pytest.mark.parametrize(("rounds", "budget"), [(27, 4), (20, 3), (9, 9), (2, 5), (1, 6)])
def test_halving_spends_at_most_the_budget_and_all_of_it(rounds, budget):
    """Rounds counted trial by trial: a trial that goes on adds what it had not had."""

    def spent(plan):
        had = [0] * plan[0][0]
        for kept, length in plan:
            had[:kept] = [length] * kept
        return sum(had)

    plan = halving(rounds, budget)
    assert plan[-1][1] == rounds
    assert [length for _, length in plan] == sorted({length for _, length in plan})
    assert spent(plan) <= budget * rounds
    larger = [(max(1, (plan[0][0] + 1) // 3**k), length) for k, (_, length) in enumerate(plan)]
    assert spent(larger) > budget * rounds


def test_ranges_are_those_that_are_given():
    found, rest = given_ranges(
        [
            "training.lr=0.01..1",
            "training.epochs=[1, 2]",
            "model.hidden=[8]",
            "data.alpha=0.5",
            "training.momentum=0..0.9",
            "training.batch_size=8..64",
        ]
    )
    assert found == {
        "training.lr": Range(0.01, 1.0),
        "training.epochs": Range(choices=(1, 2)),
        "training.momentum": Range(0.0, 0.9),
        "training.batch_size": Range(8, 64, whole=True),
    }
    assert rest == ["model.hidden=[8]", "data.alpha=0.5"]
    with pytest.raises(ConfigError, match="less than the second"):
        given_ranges(["training.lr=1..0.1"])


@pytest.mark.parametrize(
    "ranges",
    [
        {"data.alpha": (0.1, 1)},
        {"rounds": (2, 6)},
        {"rounds": [2, 6]},
        {"training.epochs": (1.2, 1.4)},
    ],
)
def test_ranges_without_an_effect_are_rejected(tmp_path, ranges):
    with pytest.raises(ConfigError, match=r"Give (one value|another range)"):
        fedbayes.tune("fedavg", budget=1, ranges=ranges, out=tmp_path, **QUICK)
    assert not list(tmp_path.rglob("summary.json"))


def test_no_trial_has_a_value_outside_of_a_range_that_is_given(tmp_path):
    ranges = {"training.lr": (0.001, 0.01), "privacy.noise": (0.1, 1.0)}  # neither has its default
    settings = {**QUICK, "aggregation": {"clip": 1.0}}
    frame = fedbayes.tune("fedavg", budget=3, ranges=ranges, out=tmp_path, **settings).frame()
    assert frame["training.lr"].between(0.001, 0.01).all()
    assert frame["privacy.noise"].between(0.1, 1).all()


def test_a_setting_with_a_value_is_not_searched(tmp_path):
    methods = "fedprox,rate=fedprox:training.lr=0.05,pull=fedprox:proximal=2"
    made = fedbayes.tune(methods, budget=1, out=tmp_path / "one", **QUICK)
    assert {one.label: sorted(one.ranges) for one in made.methods} == {
        "fedprox": ["method.proximal", "training.lr"],
        "rate": ["method.proximal"],
        "pull": ["training.lr"],
    }
    settings = {**QUICK, "training": {"steps": 3, "lr": 0.05}}
    with pytest.raises(ConfigError, match="fedavg has no setting to search"):
        fedbayes.tune("fedprox,fedavg", budget=1, out=tmp_path / "two", **settings)


def test_draws_are_even_in_the_logarithm_and_their_own():
    spans = {"a": Range(1e-3, 10.0), "b": Range(0.0, 2.0), "c": Range(1, 4, whole=True)}
    found = [drawn(spans, [7, number]) for number in range(400)]
    a = (np.log([one["a"] for one in found]) - np.log(1e-3)) / np.log(1e4)
    assert stats.kstest(a, "uniform").pvalue > 0.01
    assert stats.kstest(np.array([one["b"] for one in found]) / 2, "uniform").pvalue > 0.01
    assert {one["c"] for one in found} == {1, 2, 3, 4}
    assert abs(stats.spearmanr(a, [one["b"] for one in found]).statistic) < 0.15
    alone = drawn({"b": spans["b"]}, [7, 3])
    assert alone["b"] == found[3]["b"]  # a further range changes no other


def test_methods_declare_ranges_around_what_they_recommend():
    config = Config.create(method={"name": "fedprox"}, training={"lr": 0.2})
    found = declared_ranges(config, {})
    assert found == {"training.lr": Range(0.02, 2.0), "method.proximal": Range(1e-4, 10)}
    given = {"method.proximal": Range(choices=(1, 2)), "method.kl_weight": Range(0.1, 1)}
    found = declared_ranges(config, given)  # the second is a parameter of other methods
    assert found == {"training.lr": Range(0.02, 2.0), "method.proximal": Range(choices=(1, 2))}
    with pytest.raises(ConfigError, match="cannot have a range"):
        declared_ranges(config, {"training": Range(0.1, 1)})


@pytest.mark.parametrize("name", ["digits", "diabetes"])
def test_validation_rows_are_training_rows_and_no_test_row_is_left(name):
    settings = {"name": name, "clients": 4, "partition": "iid"}
    dataset = load_dataset(Config.create(data=settings).data)
    whole = partition(dataset, Config.create(data=settings).data, 5)
    judged = partition(dataset, Config.create(data={**settings, "validation": 0.25}).data, 5)
    for client in range(4):
        own = np.concatenate([judged.train_rows(client), judged.test_rows(client)])
        assert sorted(own.tolist()) == whole.train_rows(client).tolist()
        share = len(judged.test_rows(client)) / len(own)
        assert share == pytest.approx(0.25, abs=1 / len(own))


def test_the_share_that_a_setting_explains():
    x = np.geomspace(0.01, 1, 9)
    span = Range(0.01, 1.0)
    assert _explained(list(x), np.log(x) ** 2 - np.log(x), span) == pytest.approx(1)
    two = [0, 1] * 4
    y = np.array([1.0, 3, 2, 4, 1, 3, 2, 4])
    fraction = stats.f_oneway(y[::2], y[1::2]).statistic / (
        stats.f_oneway(y[::2], y[1::2]).statistic + 6
    )  # R² of an analysis of variance with 1 and 6 degrees of freedom
    assert _explained(two, y, Range(choices=(0, 1))) == pytest.approx(fraction)
    assert _explained(two[:4], y[:4], Range(choices=(0, 1))) is None


def test_every_method_has_its_budget_and_its_best_run(tmp_path):
    made = fedbayes.tune("fedavg,fedprox", budget=2, out=tmp_path / "t", **QUICK)
    frame = made.frame()
    assert frame.groupby("method").size().to_dict() == {"fedavg": 2, "fedprox": 2}
    for entry in made.summary["methods"]:
        assert set(entry) == {"method", "settings", "validation"}
        own = frame[frame.method == entry["method"]]
        assert entry["validation"] == own.validation.max()
        best = own[own.validation == own.validation.max()].sort_values("nll").iloc[0]
        assert all(best[key] == value for key, value in entry["settings"].items())
        written = tomllib.loads((tmp_path / "t" / f"{entry['method']}.toml").read_text())
        assert written["training"]["lr"] == entry["settings"]["training.lr"]
        assert written["data"]["validation"] == 0.0
    # The first trial has the recommended settings, judged by validation rows alone.
    settings = {key: value for key, value in QUICK.items() if key != "clients"}
    plain = fedbayes.run(method="fedavg", data={"clients": 3, "validation": 0.2}, **settings)
    first = frame[(frame.method == "fedavg") & (frame.trial == 0)].iloc[0]
    assert first.validation == plain.summary["global_accuracy"]

    # The same call runs nothing again, and a larger budget adds to it.
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("summary.json")}
    more = fedbayes.tune("fedavg,fedprox", budget=3, out=tmp_path / "t", **QUICK)
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("summary.json")}
    assert len(after) == len(before) + 2
    assert all(after[path] == time for path, time in before.items())

    variants, said, given = tuned_methods(tmp_path / "t")
    assert {"data.clients=3", f"rounds={QUICK['rounds']}"} <= set(given)
    assert more.frame().query("trial < 2").reset_index(drop=True).equals(frame)
    assert [one.label for one in variants] == ["fedavg", "fedprox"]
    assert "3 runs of each method" in said
    assert "training.lr" in said


def test_a_run_that_stops_early_is_no_worse_for_it(tmp_path):
    small = {"clients": 3, "data": {"limit": 400}, "rounds": 25, "stop_after": 2}
    made = fedbayes.tune("fedavg", budget=3, out=tmp_path, **small)
    trials = made.methods[0].trials
    assert len({trial.rounds for trial in trials}) > 1
    told = [json.loads(path.read_text()) for path in sorted(tmp_path.rglob("summary.json"))]
    plain = [one["metrics"]["global_uncalibrated"] for one in told]
    found = [(-one["accuracy"], one["nll"]) for one in plain]
    assert made.methods[0].best.number == found.index(min(found))
    assert trials[made.methods[0].best.number].rounds < max(trial.rounds for trial in trials)


def test_trials_are_judged_by_the_round_whose_model_is_kept(tmp_path):
    small = {"clients": 3, "data": {"limit": 400}, "rounds": 8, "keep_checkpoints": "best"}
    small["calibration"] = "none"
    made = fedbayes.tune("fedavg", budget=3, out=tmp_path, **small)
    told = [json.loads(path.read_text()) for path in sorted(tmp_path.rglob("summary.json"))]
    assert any(one["best_round"] < 8 for one in told)
    for trial, one in zip(made.methods[0].trials, told, strict=True):
        assert trial.validation == one["best_metrics"]["global"]["accuracy"]
        assert trial.nll == one["best_metrics"]["global"]["nll"]


def test_a_comparison_has_the_settings_of_the_config_of_the_search(tmp_path):
    config = tmp_path / "own.toml"
    config.write_text('[method]\nname = "fedprox"\nweighting = "uniform"\nproximal = 0.5\n')
    place = tmp_path / "t"
    fedbayes.tune("fedprox,fedavg", place, budget=1, config=config, **QUICK)
    found = fedbayes.compare(tuned=place, seeds=1, out=tmp_path / "c")
    for label, grid in found.grid.settings.items():
        searched = tomllib.loads((place / f"{label[1]}.toml").read_text())
        assert grid.model_dump()["method"]["weighting"] == searched["method"]["weighting"]
    assert found.grid.settings["digits", "fedprox"].method["weighting"] == "uniform"
    assert found.grid.settings["digits", "fedavg"].method["weighting"] == "auto"


def test_halving_needs_runs_that_were_evaluated_on_its_way(tmp_path):
    fedbayes.tune("fedavg", budget=1, out=tmp_path, **{**QUICK, "rounds": 6})
    with pytest.raises(RunError, match="was not evaluated after round 1"):
        fedbayes.tune("fedavg", budget=1, search="halving", out=tmp_path, **{**QUICK, "rounds": 6})


def test_halving_drops_the_worse_trials(tmp_path):
    settings = {**QUICK, "rounds": 6}
    made = fedbayes.tune("fedavg", budget=2, search="halving", out=tmp_path, **settings)
    plan = halving(6, 2)
    lengths = sorted((t.rounds for t in made.methods[0].trials), reverse=True)
    wanted = [0] * plan[0][0]
    for kept, length in plan:
        wanted[:kept] = [length] * kept
    assert lengths == wanted
    assert made.methods[0].best.rounds == 6
    again = fedbayes.tune("fedavg", budget=2, search="halving", out=tmp_path, **settings)
    assert again.frame().drop(columns="seconds").equals(made.frame().drop(columns="seconds"))


def test_minutes_are_a_budget_too(tmp_path):
    made = fedbayes.tune("fedavg", minutes=1e-6, out=tmp_path, **QUICK)
    assert len(made.methods[0].trials) == 1  # a run that began is not cut short


def test_budgets_and_ranges_of_python_are_checked(tmp_path):
    for budget in (0, 1.5):
        with pytest.raises(ConfigError, match="a whole number of runs"):
            fedbayes.tune("fedavg", budget=budget, out=tmp_path, **QUICK)
    with pytest.raises(ConfigError, match=r"is \('a', 'b'\)"):
        fedbayes.tune("fedavg", ranges={"training.lr": ("a", "b")}, out=tmp_path, **QUICK)


def test_failed_runs_count_as_minutes_too(tmp_path):
    """Some learning rates are so large that runs fail, after rounds that took time."""
    settings = {**QUICK, "rounds": 8, "training": {"steps": 3, "optimizer": "sgd"}}
    ranges = {"training.lr": (0.1, 1e25)}
    made = fedbayes.tune("fedavg", budget=6, ranges=ranges, out=tmp_path, **settings)
    trials = made.methods[0].trials
    assert any(trial.trouble for trial in trials)
    for trial in trials:
        lines = tmp_path / "fedavg" / f"trial-{trial.number:03d}" / "seed-0" / "metrics.jsonl"
        rounds = [json.loads(line)["seconds"] for line in lines.read_text().splitlines()]
        assert trial.seconds == pytest.approx(sum(rounds))
        assert rounds


@pytest.mark.slow
def test_a_search_by_minutes_goes_on_after_a_failure(tmp_path):
    settings = {**QUICK, "rounds": 8, "training": {"steps": 3, "optimizer": "sgd"}}
    ranges = {"training.lr": [0.1, 1e25]}
    made = fedbayes.tune("fedavg", minutes=0.05, ranges=ranges, out=tmp_path, **settings)
    trials = made.methods[0].trials
    assert trials[0].trouble
    assert made.methods[0].best.settings == {"training.lr": 0.1}


def test_invalid_values_are_found_before_the_first_minute(tmp_path):
    ranges = {"training.momentum": (0.0, 1.5)}
    with pytest.raises(ConfigError, match=r"training\.momentum is 1"):
        fedbayes.tune("fedavg", minutes=1, ranges=ranges, out=tmp_path, **QUICK)
    assert not list(tmp_path.rglob("seed-0"))


def test_on_the_command_line(tmp_path, capsys):
    place = ("tune", "--rounds", 1, "--clients", 2, "-s", "model.hidden=[4]", "-o", tmp_path / "t")
    ask = (*place, "--methods", "fedavg", "--budget", 2, "-s", "training.lr=[0.1,0.3]", "--json")
    assert command(*ask) == 0
    told = json.loads(capsys.readouterr().out)
    assert list(told) == ["methods"]
    (only,) = told["methods"]
    assert set(only) == {"method", "settings", "validation"}
    assert only["settings"]["training.lr"] in (0.1, 0.3)
    assert command(*place, "--budget", 2, "--minutes", 1) == 2
    assert "Give one of them" in capsys.readouterr().err
    assert command(*place, "--methods", "fedavg", "-s", "training.typo=0.1..1") == 2
    assert "training.typo" in capsys.readouterr().err


@pytest.mark.slow
def test_processes_come_to_the_same_and_the_result_is_compared(tmp_path):
    one = fedbayes.tune("fedavg,pvi", budget=2, out=tmp_path / "one", **QUICK)
    two = fedbayes.tune("fedavg,pvi", budget=2, jobs=2, out=tmp_path / "two", **QUICK)
    assert one.summary == two.summary
    found = fedbayes.compare(tuned=tmp_path / "one", seeds=2, out=tmp_path / "c", **QUICK)
    assert any("2 runs of each method" in note for note in found.notes)
    for variant in found.grid.methods.values():
        assert any(setting.startswith("training.lr=") for setting in variant.settings)
    with pytest.raises(ConfigError, match="Leave --methods out"):
        fedbayes.compare("fedavg", tuned=tmp_path / "one", out=tmp_path / "d")


def test_methods_that_cannot_run_are_left_out(tmp_path):
    diabetes = {**QUICK, "budget": 1, "data": {"name": "diabetes"}}
    with pytest.warns(FedbayesWarning, match="gaussian-head is left out.*predicts classes"):
        found = fedbayes.tune("fedavg,gaussian-head", out=tmp_path / "two", **diabetes)
    assert [one.label for one in found.methods] == ["fedavg"]
    with (
        pytest.warns(FedbayesWarning, match="is left out"),
        pytest.raises(RunError, match="no run came to an end"),
    ):
        fedbayes.tune("gaussian-head", out=tmp_path / "one", **diabetes)


def test_a_full_disk_is_no_fault_of_the_code(tmp_path):
    with pytest.raises(FileNotFoundError) as found:
        (tmp_path / "gone" / "file").write_text("")
    told = in_words(found.value)
    assert told.startswith(f"{tmp_path / 'gone' / 'file'}: No such file")
    assert "Run the same command again" in told
