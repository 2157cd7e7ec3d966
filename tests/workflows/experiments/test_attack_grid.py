"""The table of attacks, methods and rules: which runs it has, and what it says of them."""

import json
from io import StringIO
from statistics import fmean, stdev

import numpy as np
import pytest
from rich.console import Console

from fedbayes import run
from fedbayes.config.config import Config
from fedbayes.errors import ConfigError, RunError
from fedbayes.workflows.experiments.attack_grid import (
    AttackCell,
    AttackedRun,
    AttackGrid,
    AttackResult,
)
from fedbayes.workflows.experiments.attack_table import AttackTable
from tests.helpers.command_line import command

SMALL = ["data.limit=200", "data.clients=6", "data.partition=iid", "model.hidden=[8]", "rounds=2"]


def grid(folder, attacks, **lists):
    return AttackGrid(folder, attacks, **{"rules": ["mean"], "overrides": SMALL, **lists})


def test_cells_are_the_runs_of_their_configs(tmp_path):
    """Each cell is what `run` gives for the config that its names stand for."""
    runs = grid(tmp_path / "grid", ["sign-flip:scale=3"], rules=["mean", "krum"])
    outcomes = {(o.cell.rule, o.cell.attack): o for o in runs.run()}
    assert list(outcomes) == [
        (rule, attack) for rule in ("mean", "krum") for attack in ("none", "sign-flip:scale=3")
    ]
    settings = [*SMALL, "aggregation.rule=krum", "aggregation.hostile=1", "min_reports=5"]
    attacked = Config.load(None, [*settings, "attack.kind=sign-flip", "attack.scale=3"])
    alone = run(attacked, tmp_path / "alone").summary
    found = outcomes["krum", "sign-flip:scale=3"]
    assert found.value == alone["global_accuracy"]
    assert [found.value] == found.values
    assert (found.std, found.success) == (None, None)
    assert found.runs[0].hostile == alone["attack"]["clients"]
    assert outcomes["krum", "none"].runs[0].hostile == []
    place = tmp_path / "grid" / "fedavg" / "krum" / "sign-flip_scale=3" / "seed-0"
    assert (place / "summary.json").exists()


@pytest.fixture(scope="module")
def seeded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seeded")
    return folder, grid(folder, ["backdoor", "huge"], seeds=[3, 5]).run()


def test_several_seeds_give_the_mean_of_their_runs(seeded, tmp_path):
    _, outcomes = seeded
    backdoor = outcomes[1]
    asked = [*SMALL, "attack.kind=backdoor"]
    alone = [
        run(Config.load(None, [*asked, f"seed={seed}"]), tmp_path / f"{seed}").summary
        for seed in (3, 5)
    ]
    accuracy = [summary["global_accuracy"] for summary in alone]
    success = [summary["attack_success"] for summary in alone]
    assert backdoor.values == accuracy
    assert (backdoor.value, backdoor.std) == (fmean(accuracy), stdev(accuracy))
    assert (backdoor.success, backdoor.success_std) == (fmean(success), stdev(success))
    hostile = [summary["attack"]["clients"] for summary in alone]
    assert [found.hostile for found in backdoor.runs] == hostile
    assert [found.seed for found in backdoor.runs] == [3, 5]


def test_the_table_has_means_and_standard_deviations(seeded, tmp_path):
    _, (honest, backdoor, huge) = seeded
    table = AttackTable([honest, backdoor, huge])
    assert f"| {honest.value:.3f} ± {honest.std:.3f} |" in table.markdown()
    share = f"({100 * backdoor.success:.0f} ± {100 * backdoor.success_std:.0f}%)"
    assert share in table.markdown()
    refused = fmean(len(found.refused) for found in huge.runs)
    assert f"×{refused:g}" in table.markdown()
    assert table.notes[0].startswith("mean ± standard deviation over 2 seeds; ")
    found = json.loads(json.dumps(table.json()))[1]
    assert found["attack"] == "backdoor"
    assert (found["values"], found["std"]) == (backdoor.values, backdoor.std)
    assert [one["seed"] for one in found["runs"]] == [3, 5]
    table.plot(tmp_path / "p.svg")
    assert f"± {honest.std:.2f}" in (tmp_path / "p.svg").read_text()


@pytest.mark.slow
def test_two_jobs_give_the_numbers_of_one(seeded, tmp_path):
    _, (honest, _, huge) = seeded
    assert grid(tmp_path, ["huge"], seeds=[3, 5]).run(jobs=2) == [honest, huge]


def test_more_seeds_add_to_what_is_there(seeded, tmp_path):
    folder, (honest, *_) = seeded
    runs = grid(folder, [], seeds=[3, 4, 5])
    assert [seed for _, seed in runs.missing] == [4]
    (more,) = runs.run()
    assert [more.values[0], more.values[2]] == honest.values


def test_a_folder_of_an_earlier_layout_is_an_error(tmp_path):
    place = tmp_path / "fedavg" / "mean" / "none"
    run(Config.load(None, [*SMALL, "rounds=1"]), place)
    with pytest.raises(RunError, match=r"none already has a single run\. Choose another folder"):
        grid(tmp_path, ["nan"])


def test_a_table_is_of_runs_on_the_same_data(tmp_path):
    file, x = tmp_path / "rows.npz", np.random.default_rng(0).normal(size=(60, 2))
    data = [f"data.path={file}", "data.clients=4", "data.partition=iid", "model.hidden=[4]"]
    for column, attacks in ((0, ["nan"]), (1, ["nan", "sign-flip"])):
        np.savez(file, x=x.astype(np.float32), y=(x[:, column] > 0).astype(np.int64))
        runs = grid(tmp_path / "grid", attacks, overrides=[*data, "rounds=1"])
        *others, last = runs.run()
    assert not any(outcome.trouble for outcome in others)
    assert "the data have changed since" in last.trouble


def test_what_has_ended_is_not_run_again(tmp_path):
    grid(tmp_path, ["nan"]).run()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("summary.json")}
    assert len(before) == 2
    said = StringIO()
    more = grid(tmp_path, ["nan", "huge"]).run(Console(file=said, width=200))
    first, second = said.getvalue().splitlines()
    assert first == "2 of 3 runs had already ended, and are reused"
    value = f"{more[2].value:.4f}"
    assert second.startswith(f"1 of 1: fedavg, mean, huge, seed 0: global accuracy {value}, in ")
    assert len(more) == 3
    assert all(path.stat().st_mtime_ns == then for path, then in before.items())
    with pytest.raises(RunError, match=r"other settings: .* or choose another folder"):
        grid(tmp_path, ["nan"], overrides=[*SMALL, "training.lr=0.3"]).run()


def test_rules_that_a_method_does_not_take_are_told(tmp_path):
    outcomes = grid(tmp_path, ["nan"], methods=["fedavg", "pfnm"], rules=["mean", "median"]).run()
    missing = {(o.cell.method, o.cell.rule) for o in outcomes if o.value is None}
    assert missing == {("pfnm", "median")}
    table = AttackTable(outcomes)
    (note,) = [note for note in table.notes if "pfnm" in note.partition(":")[0]]
    assert note.startswith("pfnm, median: ")
    assert "its updates are not averaged" in note
    assert "| `pfnm` | median | – | – |" in table.markdown()


def test_a_grid_of_which_nothing_runs_is_an_error(tmp_path):
    with pytest.raises(RunError, match="its updates are not averaged"):
        grid(tmp_path, ["nan"], methods=["pfnm"], rules=["median"]).run()


def test_a_grid_without_an_attack_that_begins_is_an_error(tmp_path):
    with pytest.raises(RunError, match=r"no run was attacked: .*is 7, but there are 6 clients"):
        grid(tmp_path, ["nan:clients=7", "huge:clients=7"]).run()
    assert grid(tmp_path, ["nan:clients=7", "nan"]).run()[-1].value is not None


def hostile(runs, rule, attack):
    config = runs.jobs[AttackCell("fedavg", rule, attack), 0].config
    return config.aggregation.hostile, config.min_reports, config.attack.clients


def test_rules_count_on_as_many_hostile_clients_as_attack_unless_they_are_told(tmp_path):
    runs = grid(tmp_path, ["huge:clients=2", "nan"], rules=["krum", "trimmed-mean:hostile=2"])
    assert hostile(runs, "krum", "nan") == (1, 5, 1)
    assert hostile(runs, "krum", "huge:clients=2") == (2, 7, 2)
    assert hostile(runs, "trimmed-mean:hostile=2", "nan") == (2, 5, 1)
    given = tmp_path / "given.toml"
    given.write_text("[aggregation]\nhostile = 2\n[attack]\nclients = 3\n")
    told = grid(tmp_path, ["nan"], rules=["krum"], config=given)
    assert hostile(told, "krum", "nan") == (2, 7, 3)
    told = grid(tmp_path, ["nan"], rules=["krum"], overrides=[*SMALL, "aggregation.hostile=0"])
    assert hostile(told, "krum", "nan") == (0, 3, 1)


def test_the_command_leaves_the_number_of_hostile_clients_to_the_config(tmp_path, monkeypatch):
    from fedbayes.workflows.experiments import attack_grid

    given = tmp_path / "given.toml"
    given.write_text("[attack]\nclients = 3\n")
    seen = []

    def watched(grid, console, jobs):
        seen.append([(job.seed, job.config.attack.clients, jobs) for job in grid.jobs.values()][1:])
        raise RunError("seen")

    monkeypatch.setattr(attack_grid.AttackGrid, "run", watched)
    for more in ([], ["--malicious", "2", "--seeds", "2", "--jobs", "3"]):
        command("attack", str(given), "--kinds", "nan", "--rules", "mean", *more)
    assert seen == [[(0, 3, 1)], [(0, 2, 3), (1, 1, 3), (1, 2, 3)]]


def test_settings_of_an_attack_of_ones_own_reach_it(tmp_path):
    kind = "tests.helpers.toy_attacks:Shrink:share=0.25:clients=2"
    runs = grid(tmp_path, [kind])
    attack = runs.jobs[AttackCell("fedavg", "mean", kind), 0].config.attack
    assert (attack.arguments, attack.clients) == ({"share": 0.25}, 2)


def test_runs_without_the_metric_that_they_are_for_are_an_error_that_says_so(tmp_path):
    private = [*SMALL, "rounds=1", "privacy.noise=1"]
    runs = grid(
        tmp_path, ["huge"], methods=["virtual:samples=1"], rules=["mean:clip=1"], overrides=private
    )
    with pytest.raises(RunError, match=r"no local_accuracy: privacy.metrics is off"):
        runs.run()


def test_why_a_run_came_to_nothing_is_told_again(tmp_path):
    settings = [*SMALL, "aggregation.max_weight=1"]
    first, again = (
        [outcome.trouble for outcome in grid(tmp_path, [], overrides=settings).run()]
        for _ in range(2)
    )
    assert first == again
    assert "no round had an update; its weight is" in again[0]


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        ({"attacks": ["sign-flop"]}, "did you mean 'sign-flip'"),
        ({"attacks": ["nan"], "methods": ["fedavgg"]}, "did you mean 'fedavg'"),
        ({"attacks": ["nan"], "rules": ["medial"]}, "aggregation.rule is 'medial'"),
        ({"attacks": ["nan", "nan"]}, "listed twice"),
        ({"attacks": ["nan:x"]}, "cannot find the attack 'nan:x'"),
        ({"attacks": ["scale=3:nan"]}, "is not a name with settings"),
        ({"attacks": ["backdoor:shade=3"]}, "attack.shade is not a setting"),
    ],
)
def test_mistakes_are_told_before_anything_runs(tmp_path, lists, words):
    attacks = lists.pop("attacks")
    with pytest.raises((ConfigError, RunError), match=words):
        grid(tmp_path / "grid", attacks, **lists).run()
    assert not (tmp_path / "grid" / "fedavg" / "mean" / "nan").exists()


def outcome(attack, *values, higher_is_better=True, **facts):
    runs = [AttackedRun(seed, value, **facts) for seed, value in enumerate(values)]
    cell = AttackCell("fedavg", "mean", attack)
    return AttackResult(cell, runs, "global_accuracy", higher_is_better)


def test_a_drop_is_marked():
    table = AttackTable(
        [
            outcome("none", 0.9),
            outcome("huge", 0.871, refused={"3": 20}),
            outcome("nan", 0.869),
            outcome("backdoor", 0.9, success=0.75),
            outcome("weight", float("nan")),
        ]
    )
    cells = table.markdown().splitlines()[2]
    assert cells == "| `fedavg` | mean | 0.900 | 0.871 ×1 | **0.869 ▼** | 0.900 75% | **nan ▼** |"
    assert table.notes[0].count(";") == 2


def test_a_drop_is_one_of_means():
    """Each of the attacked runs but one is as good as an honest one."""
    honest = outcome("none", 0.9, 0.8, 0.7)
    table = AttackTable([honest, outcome("huge", 0.95, 0.85, 0.5), outcome("nan", 0.9, 0.85, 0.6)])
    cells = table.markdown().splitlines()[2]
    assert cells.endswith("| 0.800 ± 0.100 | **0.767 ± 0.236 ▼** | 0.783 ± 0.161 |")


def test_runs_of_some_seeds_that_are_missing_are_told():
    broken = outcome("huge", 0.9, None)
    broken.runs[1] = AttackedRun(1, trouble="it broke")
    table = AttackTable([outcome("none", 0.9, 0.8), AttackResult(broken.cell, broken.runs)])
    assert table.markdown().splitlines()[2].endswith("| – |")
    assert table.notes[1] == "fedavg, mean, huge, seed 1: it broke"


def test_an_error_that_rises_is_a_drop():
    errors = [outcome(k, v, higher_is_better=False) for k, v in (("none", 2.0), ("nan", 1.5))]
    assert "▼" not in AttackTable(errors).markdown()
    worse = [errors[0], outcome("nan", 2.1, higher_is_better=False)]
    assert "**2.100 ▼**" in AttackTable(worse).markdown()


def test_the_command_prints_draws_and_writes(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["attack", "--kinds", "nan", "--rules", "mean,median", "--malicious", "2"]
    arguments += [w for s in SMALL for w in ("--set", s)]
    assert command(*arguments, "--plot", "p.svg", "--report", "t.md") == 0
    said = capsys.readouterr().out
    assert "trimmed" not in said
    assert "honest" in said
    assert (tmp_path / "t.md").read_text().startswith("| method | rule | honest | nan |")
    assert "median" in (tmp_path / "p.svg").read_text()
    assert command(*arguments, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [(o["rule"], o["attack"]) for o in found] == [
        (rule, attack) for rule in ("mean", "median") for attack in ("none", "nan")
    ]
    assert all(0 <= o["value"] <= 1 for o in found)
    assert len(found[1]["runs"][0]["hostile"]) == 2
    assert command("attack", "--plot", "p.bmp") == 2
    assert "unknown format" in capsys.readouterr().err


def test_a_run_that_broke_off_is_judged_as_the_others(tmp_path):
    settings = ["data.name=diabetes", "data.clients=3", "model.hidden=[4]", "training.lr=0.01"]
    asked = [*settings, "rounds=6", "stop_refused=2"]
    honest, broken = grid(tmp_path, ["nan:start=3:clients=3"], overrides=asked).run()
    assert "were rejected" in broken.trouble
    assert broken.value == pytest.approx(honest.value, rel=1)
    assert not broken.higher_is_better
    assert not honest.higher_is_better
    assert sorted(broken.runs[0].refused.values()) == [2, 2, 2]
