"""Lies in what clients say of their rows: summaries and sums of tables, counts and sums to
calibrate by, scores, and answers in biostatistics.

One of five clients lies in one number of its sums, by any factor. Either its name is in a plain
error, or what comes of all sums together stays near what it would be without the lie.
"""

import json
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import torch

from fedbayes.biostatistics.exchange import Exchange, Packet
from fedbayes.core.plausible import MOST_SHIFT, MOST_SPREAD
from fedbayes.core.targets import Target
from fedbayes.data.tables.summaries import (
    ColumnSummary,
    TableSummary,
    add_summaries,
    check_summaries,
    read_summary,
)
from fedbayes.data.tables.sums import check_sums
from fedbayes.errors import DataError, FedbayesError, MessageError
from fedbayes.federation.stages.checks import check_scores
from fedbayes.inputs import add_sums, read_sums, sums_of, write_sums
from fedbayes.inputs.spectra import add_spectra, read_spectra, spectra_of, write_spectra
from fedbayes.likelihoods.categorical import Categorical
from fedbayes.likelihoods.conformal import BINS, check_counts, count, threshold
from fedbayes.likelihoods.hazards import at_risk, check_at_risk, check_events, event_counts
from fedbayes.likelihoods.temperature import temperature_sums

LIAR = "ward-4"
NUMBERS = (
    *(float("nan"), float("inf"), -float("inf"), 1e300, -1e300, 1e38, 2.0**63, 2.0**53, 1e9),
    *(1e6, 1e3, 30.0, 3.0, 1.5, 1.0, 0.5, 1e-3, 1e-300, 0.0, -1.0, -1e9),
)


def lie(honest, rng):
    """Another number in place of an honest one."""
    number = NUMBERS[rng.integers(len(NUMBERS))]
    return number if rng.random() < 0.5 else number * honest


@cache
def tables():
    """What five clients have: features, of which one is heavy-tailed and one is 0 or 1."""
    rng = np.random.default_rng(1)
    found = []
    for client in range(5):
        rows = 60 + 40 * client
        columns = [
            rng.normal(60 + client, 12, rows),
            rng.lognormal(0, 1, rows),
            (rng.random(rows) < 0.2 + 0.1 * client).astype(float),
        ]
        found.append(np.column_stack(columns))
    return found


def written(content, folder):
    path = folder / f"{LIAR}.json"
    path.write_text(json.dumps(content))
    return path


def summary_of(x):
    columns = [
        ColumnSummary(
            name=f"x{index}",
            kind="number",
            missing=0,
            mean=float(column.mean()),
            squares=float(column.var() * len(column)),
        )
        for index, column in enumerate(x.T)
    ]
    counts = {"a": len(x) // 2, "b": len(x) - len(x) // 2}
    columns.append(ColumnSummary(name="sex", kind="category", missing=0, categories=counts))
    return TableSummary(rows=len(x), columns=tuple(columns))


def numbers_of(content, place=()):
    """The places of all numbers in JSON."""
    if isinstance(content, dict):
        return [p for key, part in content.items() for p in numbers_of(part, (*place, key))]
    if isinstance(content, list):
        return [p for key, part in enumerate(content) for p in numbers_of(part, (*place, key))]
    return [place] if isinstance(content, int | float) else []


def changed(content, rng):
    """A copy with another number in one place, or with far too many categories."""
    copy = json.loads(json.dumps(content))
    places = numbers_of(copy)
    *way, last = places[rng.integers(len(places))]
    part = copy
    for key in way:
        part = part[key]
    told = lie(part[last], rng)
    part[last] = int(told) if isinstance(part[last], int) and np.isfinite(told) else told
    return copy


def near(mean, std, whole):
    """What all are standardized by stays within what one client may move."""
    apart = np.abs(mean - whole.mean(0)) / whole.std(0)
    factor = std / whole.std(0)
    assert np.isfinite(apart).all()
    assert (apart <= 1.5 * MOST_SHIFT).all(), apart
    assert (factor <= 1.5 * MOST_SPREAD).all(), factor


def summaries(rng, folder):
    honest = [summary_of(x) for x in tables()]
    content = changed(json.loads(honest[-1].model_dump_json()), rng)
    if rng.random() < 0.1:
        content["columns"][-1]["categories"] = {f"c{n}": 0 for n in range(100_000)}
    names = [f"ward-{client}" for client in range(5)]
    several = [*honest[:-1], read_summary(written(content, folder))]
    whole = add_summaries(several, names)
    check_summaries(several, names)
    there = [max(whole.rows - c.missing, 1) for c in whole.columns[:2]]
    std = [(c.squares / n) ** 0.5 for c, n in zip(whole.columns[:2], there, strict=True)]
    near(
        np.array([c.mean for c in whole.columns[:2]]),
        np.array(std),
        np.concatenate(tables())[:, :2],
    )


def sums(rng, folder):
    honest = [sums_of(x, categories=["2"]) for x in tables()]
    path = folder / f"{LIAR}.json"
    write_sums(honest[-1], path)
    several = [*honest[:-1], read_sums(written(changed(json.loads(path.read_text()), rng), folder))]
    names = [f"ward-{client}" for client in range(5)]
    whole = add_sums(several, names)
    check_sums(several, names)
    near(whole.mean[:2], whole.std[:2], np.concatenate(tables())[:, :2])


def spectra(rng, folder):
    signals = [x[: len(x) // 10 * 10, :2].reshape(-1, 5, 4).mT / 100 for x in tables()]
    honest = [spectra_of(x) for x in signals]
    path = folder / f"{LIAR}.json"
    write_spectra(honest[-1], path)
    told = changed(json.loads(path.read_text()), rng)
    several = [*honest[:-1], read_spectra(written(told, folder))]
    whole = add_spectra(several, [f"ward-{client}" for client in range(5)])
    mean = whole.mean.mean(1)
    std = np.sqrt(whole.squares / (whole.count * whole.shape[1]) - mean**2)
    near(mean, std, np.concatenate([x.transpose(0, 2, 1).reshape(-1, 4) for x in signals]))


def likelihood():
    return Categorical(target=Target("class", ("a", "b", "c")))


def temperature(rng, folder):
    draws = torch.from_numpy(rng.normal(size=(1, 50, 3)))
    told = temperature_sums(likelihood(), draws, torch.from_numpy(rng.integers(0, 3, 50)))
    told.check(LIAR)  # honest sums are
    part = getattr(told, ("nll", "slope", "curvature")[rng.integers(3)])
    place = rng.integers(len(part))
    part[place] = lie(float(part[place]), rng)
    told.check(LIAR)
    assert 0.01 <= (told + told).temperature() <= 100


def counts(rng, folder):
    told = count(torch.from_numpy(rng.exponential(size=(50, 1))))
    check_counts(told, 1, 50, LIAR)
    other = lie(float(told[0].max()), rng)
    if not np.isfinite(other):
        told = told.double()
    told[0, rng.integers(BINS)] = other if abs(other) < 2**62 else 2**62
    check_counts(told, 1, 50, LIAR)
    assert threshold(told, likelihood(), "probability", 0.5).rows == 50


def hazards(rng, folder):
    y = np.column_stack([rng.integers(1, 20, 50), rng.random(50) < 0.5]).astype(float)
    times, events = event_counts(y)
    risks = at_risk(rng.normal(size=50), y, times)
    for part in (times, events, risks):
        if rng.random() < 0.5:
            place = rng.integers(len(part))
            part[place] = lie(part[place], rng)
    check_events(times, events, 50, LIAR)
    check_at_risk(risks, LIAR)
    assert np.isfinite([*times, *events, *risks]).all()
    assert events.sum() <= 50


def scores(rng, folder):
    told = {"count": 40.0, "nll": 20.0, "correct": 30.0, "confidence": 30.0}
    name = list(told)[rng.integers(4)]
    told[name] = lie(told[name], rng)
    check_scores(told, likelihood())
    metrics = likelihood().metrics(told)
    assert 0 <= metrics["accuracy"] <= 1 + 1e-6
    assert metrics["nll"] >= 0


class Carrier:
    """Clients whose answers a test says."""

    def __init__(self, answers):
        self.answers = answers

    @property
    def names(self):
        return tuple(self.answers)

    def ask(self, question, most):
        return {name: Packet({}, numbers) for name, numbers in self.answers.items()}


def answers(rng, folder):
    honest = {"at_risk": np.array([9.0, 5.0]), "events": np.array([1.0, 2.0])}
    told = {name: array.copy() for name, array in honest.items()}
    told["events"][0] = lie(1.0, rng)
    if rng.random() < 0.1:
        told["events"] = told["events"][:1]
    found = Exchange(Carrier({"ward-0": honest, LIAR: told})).sum(
        "counts", {}, {}, dict.fromkeys(honest, (2,)), counts=True
    )
    assert all((np.isfinite(array) & (array >= 0)).all() for array in found.values())


KINDS = (summaries, sums, spectra, temperature, counts, hazards, scores, answers)


def attack(count, seed):
    """Tell so many lies.

    Returns:
        How many were told and survived, and what failed.
    """
    failures, refused = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(seed, seed + count):
            kind = KINDS[number % len(KINDS)]
            try:
                kind(np.random.default_rng(number), Path(folder))
            except (DataError, MessageError) as error:
                refused += 1
                words = str(error)
                named = kind is scores or "counted rows" in words or LIAR in words
                if not named or len(words) > 1000:
                    failures.append(f"{kind.__name__} {number}: {words:.300}")
            except FedbayesError as error:
                failures.append(f"{kind.__name__} {number}: {error!r:.300}")
            except Exception as error:  # whatever it is, it is a failure
                failures.append(f"{kind.__name__} {number}: {error!r:.300}")
    return count, count - len(failures), failures, {"% refused": 100 * refused / count}
