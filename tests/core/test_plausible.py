"""Sums that clients send: what is believed of them, against NumPy on the rows themselves."""

import json

import numpy as np
import pandas as pd
import pytest
import torch

from fedbayes import Config
from fedbayes.biostatistics.columns import ColumnDescription
from fedbayes.biostatistics.exchange import Exchange
from fedbayes.contracts import Federation
from fedbayes.core.plausible import (
    LARGEST,
    MOST_SHIFT,
    MOST_SPREAD,
    MOST_TIMES_ROWS,
    PlausibleMoments,
    check_moments,
    check_rows,
)
from fedbayes.data.tables.summaries import add_summaries, read_summary
from fedbayes.errors import DataError, MessageError
from fedbayes.federation.client_runtime import ClientResult
from fedbayes.federation.stages.checks import check_scores
from fedbayes.likelihoods.temperature import temperature_sums
from fedbayes.runs.build import build_data
from fedbayes.runs.client_evaluation import try_at_clients
from tests.helpers.command_line import command
from tests.hostile.sums import Carrier, attack, likelihood, summary_of, tables


def moments(x):
    return PlausibleMoments(np.full(x.shape[1], float(len(x))), x.mean(0), x.var(0) * len(x))


def decided_alone(tables):
    """The same by hand: clients of which one column breaks a bound, by the rows themselves."""
    found = {}
    whole = np.concatenate(list(tables.values()))
    for name in tables:
        others = np.concatenate([x for other, x in tables.items() if other != name])
        shift = np.abs(whole.mean(0) - others.mean(0)) / others.std(0)
        spread = whole.std(0) / others.std(0)
        found[name] = np.maximum(shift / MOST_SHIFT, spread / MOST_SPREAD)
    return found


@pytest.mark.parametrize("seed", range(30))
def test_one_client_decides_alone_as_its_rows_say(seed):
    rng = np.random.default_rng(seed)
    clients = {
        f"c{k}": rng.normal(rng.normal(0, 10), rng.lognormal(0, 2), (rng.integers(5, 90), 3))
        for k in range(rng.integers(3, 7))
    }
    found = decided_alone(clients)
    told = {name: moments(x) for name, x in clients.items()}
    if max(each.max() for each in found.values()) <= 1:
        check_moments(told, ["a", "b", "c"])
        return
    worst = max(found, key=lambda name: found[name].max())
    column = "abc"[int(found[worst].argmax())]
    with pytest.raises(DataError, match=f"^{worst}: the column '{column}' has mean"):
        check_moments(told, ["a", "b", "c"])


def test_both_outcomes_are_tried_above():
    rows = np.random.default_rng(0).normal(size=(40, 3))
    check_moments({f"c{k}": moments(rows) for k in range(3)}, ["a", "b", "c"])
    with pytest.raises(DataError, match=r"c2: the column '[abc]'"):
        check_moments({f"c{k}": moments(rows + 40 * (k == 2)) for k in range(3)}, ["a", "b", "c"])


def test_what_honest_tables_may_be():
    """Other units are told of; rare flags, site-level columns and two clients are not."""
    rng = np.random.default_rng(0)
    for draw in (
        lambda k: (rng.random((500, 1)) < (0.5 if k else 0.001)).astype(float),
        lambda k: np.full((50, 1), (500.0, 520.0, 90_000.0)[k]),  # beds of the hospital
        lambda k: np.zeros((50, 1)) if k else rng.normal(100, 1, (50, 1)),
        lambda k: rng.lognormal(0, 1.5, (300, 1)),
    ):
        check_moments({f"c{k}": moments(draw(k)) for k in range(3)}, ["x"])
    far = {"a": moments(rng.normal(0, 1, (50, 1))), "b": moments(rng.normal(1e6, 1, (50, 1)))}
    check_moments(far, ["x"])
    check_moments({}, [])
    empty = PlausibleMoments(*np.zeros((3, 1)))
    check_moments({"a": empty, "b": moments(rng.normal(size=(50, 1))), "c": empty}, ["x"])


def test_rows_of_one_client():
    check_rows({"a": 60, "b": 60, "c": 60 * MOST_TIMES_ROWS})
    check_rows({"a": 60, "b": 10**6})
    check_rows({"a": 0, "b": 0, "c": 5})
    with pytest.raises(DataError, match="c has 60,001 rows, and the median client has 60"):
        check_rows({"a": 60, "b": 60, "c": 60_001})
    with pytest.raises(
        DataError, match=r"a has 61 rows, and the limit is 60 .aggregation\.max_weight"
    ):
        check_rows({"a": 61, "b": 1}, 60)


@pytest.fixture
def wards(tmp_path, monkeypatch):
    """A config whose columns are encoded by five clients' summaries, and what changes one."""
    monkeypatch.chdir(tmp_path)
    names = [f"ward-{k}" for k in range(5)]
    for name, x in zip(names, tables(), strict=True):
        summary_of(x).write(tmp_path / f"{name}.json")
    frame = pd.DataFrame(tables()[0], columns=["x0", "x1", "x2"])
    frame["sex"], frame["label"] = ["a", "b"] * 30, ["yes", "no"] * 30
    frame.to_csv("reference.csv", index=False)
    source = {"path": "reference.csv", "clients": 2, "summaries": [f"{n}.json" for n in names]}

    def told(change):
        content = json.loads(summary_of(tables()[4]).model_dump_json())
        change(content)
        (tmp_path / "ward-4.json").write_text(json.dumps(content))
        return Config.create(data=source, rounds=1)

    return told


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c["columns"][0].update(mean=1e300), "'x0' are too large for float32"),
        (lambda c: c["columns"][0].update(squares=1e300), "'x0' are too large for float32"),
        (lambda c: c["columns"][0].update(mean=1e30), "'x0' has mean 1e\\+30"),
        (lambda c: c["columns"][1].update(squares=1e12), "'x1' has mean .* deviation"),
        (lambda c: c["columns"][0].update(mean=float("nan")), "finite number"),
        (lambda c: c.update(rows=10**9), "1,000,000,000 rows"),
        (lambda c: c.update(rows=2**53), "9,007,199,254,740,992 rows"),
        (
            lambda c: c["columns"][3].update(categories={str(n): 1 for n in range(100_000)}),
            "not add to 220 rows",
        ),
        (
            lambda c: c["columns"][3].update(categories={str(n): 0 for n in range(100_000)}),
            "100,000 categories",
        ),
        (lambda c: c["columns"][3].update(categories={"x" * 10**5: 1}), "100,000 characters"),
    ],
)
def test_one_summary_poisons_nobody(change, words, wards, tmp_path, capsys):
    config = wards(change)
    with pytest.raises(DataError, match=words) as told:
        build_data(config)
    assert "ward-4.json" in str(told.value)
    assert len(str(told.value)) < 900
    (tmp_path / "c.toml").write_text(config.dump())
    assert command("run", "c.toml", "--out", "runs/a") == 2
    assert "Traceback" not in capsys.readouterr().err
    assert not (tmp_path / "runs" / "a").exists()


def test_honest_summaries_are_believed(wards):
    assert build_data(wards(lambda c: None)).preprocessing.mean[0] == pytest.approx(
        np.concatenate(tables())[:, 0].mean()
    )


def test_categories_of_all_together_are_limited(wards, tmp_path):
    names = [f"ward-{k}.json" for k in range(5)]
    for k, name in enumerate(names):
        content = json.loads((tmp_path / name).read_text())
        for column in content["columns"]:
            column["missing"] += 400 - content["rows"]
        content["columns"][3] |= {"categories": {f"{k} {n}": 1 for n in range(300)}, "missing": 0}
        content["rows"] = 400
        (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(DataError, match="together: the column 'sex' has 1,500 categories"):
        build_data(Config.create(data={"path": "reference.csv", "clients": 2, "summaries": names}))


def test_a_sum_of_too_many_rows_is_no_traceback(wards, tmp_path):
    one = read_summary(tmp_path / "ward-0.json")
    with pytest.raises(DataError, match="and the limit is"):
        add_summaries([one, one.model_copy(update={"rows": 2**53})], ["a", "b"])


def test_lies_in_sums_are_refused_or_without_effect():
    """A few of those of `make hostile`; other seeds than there."""
    tried, survived, failures, _ = attack(210, 10**6)
    assert not failures
    assert tried == survived == 210


@pytest.mark.parametrize("factor", [0.5, 2.0, 1e30])
def test_sums_for_a_temperature_agree_with_their_slopes(factor):
    rng = np.random.default_rng(0)
    draws = torch.from_numpy(rng.normal(size=(1, 80, 3)))
    told = temperature_sums(likelihood(), draws, torch.from_numpy(rng.integers(0, 3, 80)))
    told.check("ward")
    sharp = temperature_sums(likelihood(), 1e6 * draws, torch.zeros(80, dtype=torch.int64))
    sharp.check("ward")  # of a network that is far too sure
    told.slope.mul_(factor)
    with pytest.raises(
        DataError, match=r"^ward: (these sums are impossible|its sums are not finite)"
    ):
        told.check("ward")


class Tries:
    """An engine whose clients say these scores."""

    def __init__(self, told):
        self.told = told

    def tried(self, tasks):
        yield from (ClientResult(b"", b"", {}, own) for own in self.told)


def tried(told, monkeypatch):
    from types import SimpleNamespace

    run = SimpleNamespace(
        network=SimpleNamespace(constants_digest=""), clients=len(told), likelihood=likelihood()
    )
    assert Federation.__annotations__.keys() >= {"network", "clients", "likelihood"}
    return try_at_clients(Tries(told), run, {}, 1, (), 1e6)


HONEST = {"count": 50.0, "nll": 20.0, "correct": 40.0, "confidence": 40.0}


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ({**HONEST, "count": 60_000.0, "nll": 1e6}, "over 1,000 times those of the median"),
        ({**HONEST, "nll": float("inf")}, "its scores are infinite"),
        ({**HONEST, "nll": 1e300}, "beyond float32"),
        ({**HONEST, "nll": float("nan")}, "impossible"),
        ({**HONEST, "correct": 51.0}, "'correct' is 51 for 50"),
        ({**HONEST, "count": 2e6}, "the limit is 1,000,000 (aggregation.max_weight)"),
    ],
)
def test_a_liar_among_those_that_try_a_model_is_left_out_and_named(lie, words, monkeypatch):
    found = tried([HONEST, HONEST, lie], monkeypatch)
    assert list(found.asked.missed) == [2]
    assert words in found.asked.missed[2]
    assert found.line["global_accuracy"] == 0.8
    assert found.metrics["nll"] == pytest.approx(0.4)
    assert words in found.line["not_evaluated"]["2"]


def test_a_model_that_diverged_everywhere_is_said_to(monkeypatch):
    diverged = {**HONEST, "nll": float("inf")}
    found = tried([diverged, diverged, HONEST], monkeypatch)
    assert not found.asked.missed
    assert found.metrics["nll"] == float("inf")


def test_scores_beyond_the_square_of_a_float32_are_refused():
    check_scores({**HONEST, "nll": 1e70}, likelihood())
    with pytest.raises(MessageError, match="beyond float32"):
        check_scores({**HONEST, "nll": 51 * LARGEST**2}, likelihood())


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        (np.array([1e300]), "beyond 3.4e\\+38"),
        (np.array([np.nan]), "not finite"),
        (np.array([-1.0]), "negative numbers of rows"),
        (np.array([1.0, 2.0]), "sums that were not requested"),
    ],
)
def test_answers_of_counts(numbers, words):
    carrier = Carrier({"a": {"n": np.array([2.0])}, "b": {"n": numbers}})
    with pytest.raises(MessageError, match=f"client b .*{words}"):
        Exchange(carrier).sum("counts", {}, {}, {"n": (1,)}, counts=True)


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 2**60},
        {"whole": 9},
        {"columns": {"x": {"kind": "number", "missing": 9}}},
        {"columns": {"x": {"kind": "text", "missing": 0, "levels": ["x" * 2000]}}},
        {"columns": {"x": {"kind": "text", "missing": 0, "levels": ["x"] * 100_001}}},
    ],
)
def test_what_a_client_says_of_its_columns_is_bounded(change):
    honest = {"rows": 8, "whole": 8, "columns": {"x": {"kind": "number", "missing": 0}}}
    ColumnDescription.model_validate(honest)
    with pytest.raises(ValueError, match="validation error"):
        ColumnDescription.model_validate({**honest, **change})
