"""Asynchronous rounds: FedBuff's update in closed form, and what it has to do with other parts."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedbayes import Config, Simulation
from fedbayes.contracts import Report, RoundContext, Sum
from fedbayes.core.messages import Masked, decode, dense
from fedbayes.core.tensors import Samples, pack, unpack
from fedbayes.errors import ConfigError, FedbayesWarning, RunError
from fedbayes.federation.attacks.engine import AdversarialEngine
from fedbayes.federation.client_runtime import ClientResult
from fedbayes.federation.clock.queue import Queue
from fedbayes.federation.clock.settings import Asynchronous, ClockSettings
from fedbayes.federation.round import run_round
from fedbayes.federation.stages.checks import encode_report
from fedbayes.federation.stages.stale import AsyncRound, as_of_now, remarks
from fedbayes.methods import METHODS
from fedbayes.models import Network
from fedbayes.reports.figures import charts
from fedbayes.reports.gather import gather
from fedbayes.testing import assert_identical
from tests.helpers.cases import cases
from tests.helpers.places import at, run_of, samples
from tests.helpers.toy_clients import Table

DATA = {"name": "digits", "clients": 6, "partition": "iid", "limit": 240}
SMALL = {
    "data": DATA,
    "model": {"hidden": [8]},
    "rounds": 6,
    "cohort": 4,
    "seed": 3,
    "metrics": [],
}
CLOCK = {"speeds": "log-normal", "jitter": 0.2}
WAITING = {"buffer": 2}


def config(**changes):
    return Config.create(**{**SMALL, "clock": CLOCK, "asynchronous": WAITING, **changes})


def timeless(simulation):
    return [
        {k: v for k, v in line.items() if k != "seconds"} for line in simulation.folder.metrics()
    ]


def ended(folder=None, **changes):
    with Simulation(config(**changes), folder) as simulation:
        list(simulation)
    return simulation


class Quadratic:
    """Clients that take one step down ½ ‖φ − b_c‖² of their own, each with a weight of its own."""

    def __init__(self, method, run, centres, step):
        self._method, self._run, self._centres, self._step = method, run, centres, step
        self.asked = []

    def train(self, tasks):
        for task in tasks:
            self.asked.append((task.client, task.round))
            sent = dense(decode(task.message))
            moved = {
                n: w - self._step * (w - self._centres[task.client][n]) for n, w in sent.items()
            }
            report = Report(moved, float(task.client + 1))
            yield ClientResult(encode_report(report), b"", {}, {})


SECONDS = [2, 3, 3, 5, 7, 11]


def rounds_of_quadratics(simulation, settings, rounds, *, engine=None, seconds=SECONDS, **changes):
    """Turns of the queue, and the server's weights after each round, in memory."""
    run, method = simulation.run, simulation.method
    rng = np.random.default_rng(0)
    centres = [
        {
            n: torch.from_numpy(rng.normal(size=t.shape)).float()
            for n, t in run.network.initial.items()
        }
        for _ in seconds
    ]
    clients = Quadratic(method, run, centres, 0.3)
    states = [method.init(run)]
    engine = engine(clients, lambda number: states[number - 1]) if engine else clients
    queue, now, under_way, turns = Queue(Table(seconds), 3, 4), 0.0, (), []
    for number in range(1, rounds + 1):
        turn = queue.buffer(number, now, under_way, settings.buffer, settings.longest)
        now, under_way = turn.now, turn.under_way
        since = {each.client: each.since for each in turn.reports if each.since != number}
        past = AsyncRound(settings, since, lambda number: states[number - 1], turn.starts)
        result = run_round(
            run, method, states[-1], engine, {}, number=number, cohort=turn.cohort, past=past,
            **changes,
        )  # fmt: skip
        assert not result.ledger.refused
        states.append(result.server)
        turns.append(turn)
    assert clients.asked == [(e.client, e.since) for turn in turns for e in turn.reports]
    return turns, [method.model(state, run) for state in states], centres


@pytest.fixture(scope="module")
def sgd():
    """A run whose server takes steps of 0.7 and weighs clients by their samples."""
    method = {"name": "reptile", "server_lr": 0.7, "weighting": "samples"}
    with Simulation(config(method=method)) as simulation:
        yield simulation


@pytest.mark.parametrize("staleness", ["polynomial", "constant"])
def test_an_update_is_that_of_fedbuff(sgd, staleness):
    """w ← w + η Σ n_s (1 + s)^(-a) (φ_s − w_s) / Σ n_s on quadratics, in NumPy."""
    settings = Asynchronous(buffer=2, staleness=staleness, exponent=0.6)
    turns, found, centres = rounds_of_quadratics(sgd, settings, 9)
    assert max(s for turn in turns for s in turn.staleness) > 2
    for name, first in found[0].items():
        past = [first.double().numpy()]
        for turn in turns:
            steps, weights = [], []
            for each, stale in zip(turn.reports, turn.staleness, strict=True):
                then = past[each.since - 1]
                change = -0.3 * (then - centres[each.client][name].numpy())
                steps.append(change * ((1 + stale) ** -0.6 if staleness == "polynomial" else 1))
                weights.append(each.client + 1)
            past.append(past[-1] + 0.7 * np.average(steps, axis=0, weights=weights))
        for state, wanted in zip(found, past, strict=True):
            np.testing.assert_allclose(state[name].numpy(), wanted, rtol=1e-4, atol=1e-5)


def test_reports_that_are_too_stale_are_not_asked_for(sgd):
    settings = Asynchronous(buffer=2, longest=1)
    turns, _, _ = rounds_of_quadratics(sgd, settings, 12)
    assert max(s for turn in turns for s in turn.staleness) == 1
    late = [turn.number - each.since for turn in turns for each in turn.too_stale]
    assert late
    assert min(late) == 2


def test_a_lie_is_measured_from_where_the_client_started(sgd):
    """All clients turn the signs of their changes, so the server goes up in place of down."""
    settings = Asynchronous(buffer=2, staleness="constant")

    def lying(clients, server):
        class Flip:
            collusion = False

            def report(self, report, view):
                start = view.method.model(view.server, view.at.run)
                tensors = {n: 2 * start[n] - t for n, t in report.tensors.items()}
                return replace(report, tensors=tensors)

        class Adversary:
            attack = Flip()

            def attacks(self, client, number):
                return True

        return AdversarialEngine(clients, Adversary(), sgd.method, sgd.run, server)

    turns, found, centres = rounds_of_quadratics(sgd, settings, 6, engine=lying)
    for name, first in found[0].items():
        past = [first.double().numpy()]
        for turn in turns:
            steps = [
                0.3 * (past[e.since - 1] - centres[e.client][name].numpy()) for e in turn.reports
            ]
            weights = [each.client + 1 for each in turn.reports]
            past.append(past[-1] + 0.7 * np.average(steps, axis=0, weights=weights))
        np.testing.assert_allclose(found[-1][name].numpy(), past[-1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("method", "sampling"),
    cases(
        [("fedavg", "uniform"), ("scaffold", "uniform"), ("pvi", "uniform"), ("fedavg", "cyclic")],
        slow=[("pvi", "uniform")],
    ),
)
def test_equal_clients_that_are_all_awaited_are_the_synchronous_run(method, sampling):
    """K = M and equal speeds: the same bits, private states and metrics, in the same time."""
    equal = {"speeds": "equal", "seconds": 2.5}
    whole = {"buffer": 4, "staleness": "constant"}
    changes = {
        "method": {"name": method},
        "sampling": sampling,
        "rounds": 3,
        "clock": equal,
    }
    one = ended(**changes, asynchronous=whole)
    two = ended(**changes, asynchronous={})
    three = ended(**changes | {"clock": {}}, asynchronous={})
    assert_identical(pack(one.server), pack(two.server))
    assert_identical(pack(two.server), pack(three.server))
    assert dict(one.states) == dict(two.states)
    lines = timeless(one)
    assert [line["clock_seconds"] for line in lines] == [2.5, 5.0, 7.5]
    assert {line["asynchronous"]["staleness_max"] for line in lines} == {0}
    for line in lines:
        del line["asynchronous"]
    assert lines == timeless(two)
    assert [{**line, "clock_seconds": 0} for line in timeless(three)] == [
        {**line, "clock_seconds": 0} for line in lines
    ]


def test_a_synchronous_round_lasts_as_long_as_its_slowest_client(tmp_path):
    table = tmp_path / "seconds.csv"
    seconds = [4.0, 1.0, 2.5, 8.0, 3.0, 1.5]
    rows = [f"client-{client},{value}" for client, value in enumerate(seconds)]
    table.write_text("\n".join(["client,seconds", *rows]))
    clock = {"speeds": "file", "file": str(table)}
    simulation = ended(clock=clock, asynchronous={}, cohort=2, rounds=4)
    passed, wanted = 0.0, []
    for number in range(1, 5):
        passed += max(seconds[client] for client in simulation.cohort_of(number))
        wanted.append(passed)
    lines = simulation.folder.metrics()
    assert [line["clock_seconds"] for line in lines] == wanted
    assert simulation.summary()["clock_seconds"] == wanted[-1]


@pytest.mark.parametrize(("every", "sampling"), [(1, "uniform"), (3, "cyclic")])
def test_a_run_goes_on_to_the_same_bits(tmp_path, every, sampling):
    """Stopped with clients at work whose reports come rounds later, from states of long ago."""
    changes = {
        "method": {"name": "scaffold"},
        "asynchronous": CONSTANT,
        "rounds": 8,
        "sampling": sampling,
    }
    whole = ended(tmp_path / "whole", **changes)
    assert max(line["asynchronous"]["staleness_max"] for line in whole.folder.metrics()) > 1
    parts = config(**changes, checkpoint_every=every)
    killed = Simulation(parts, tmp_path / "parts")
    for step in killed:
        if step.number == 5:
            break
    killed.close()  # without what `with` does at the end
    while True:
        with Simulation(None, tmp_path / "parts") as simulation:
            for _ in simulation:
                simulation.stop = True
        if simulation.over:
            break
    assert timeless(simulation) == timeless(whole)
    assert_identical(pack(simulation.server), pack(whole.server))
    left = {path.name for path in simulation.folder.versions.iterdir()}
    assert left >= {path.name for path in whole.folder.versions.iterdir()}
    since = set(simulation.progress.timing.since.tolist())
    assert left == {f"before-{number:07d}.safetensors" for number in since}


CONSTANT = {"buffer": 2, "staleness": "constant"}


def test_a_lost_or_damaged_state_of_the_server_is_named(tmp_path):
    with Simulation(config(), tmp_path / "run") as simulation:
        for _ in simulation:
            simulation.stop = True
    (path,) = simulation.folder.versions.iterdir()
    whole = path.read_bytes()
    for damaged in (whole[:-8], whole[:-1] + bytes([whole[-1] ^ 1]), b""):
        path.write_bytes(damaged)
        with pytest.raises(RunError, match=r"state before round 1, .* lost or damaged"):
            Simulation(None, tmp_path / "run")
    path.unlink()
    with pytest.raises(RunError, match=r"state before round 1, .* lost or damaged"):
        Simulation(None, tmp_path / "run")
    path.write_bytes(whole)
    Simulation(None, tmp_path / "run").close()


def test_another_clock_is_refused_when_a_run_goes_on(tmp_path):
    table = tmp_path / "seconds.csv"
    rows = [f"client-{client},{client + 1}" for client in range(6)]
    table.write_text("\n".join(["client,seconds", *rows]))
    clock = {"speeds": "file", "file": str(table)}
    with Simulation(config(clock=clock), tmp_path / "run") as simulation:
        for _ in simulation:
            simulation.stop = True
    table.write_text(table.read_text().replace("client-3,4", "client-3,5"))
    with pytest.raises(RunError, match="the clock has changed since the run began"):
        Simulation(None, tmp_path / "run")


def test_factors_of_clients_multiply_to_the_posterior():
    """PVI: whoever reports when, the server's posterior is the product of prior and factors."""
    simulation = ended(method={"name": "pvi"}, asynchronous=CONSTANT, rounds=8)
    method, run = simulation.method, simulation.run
    first, last = method.init(run).posterior, simulation.server.posterior
    factors = [
        unpack(method.client_state, dense(decode(state))).factor
        for _, state in simulation.states.items()
    ]
    assert len(factors) > 2
    for name, precision in last.precision.items():
        share = 1 - len(factors) / run.clients  # of those that have not reported, the prior's part
        total = share * first.precision[name] + sum(f.precision[name] for f in factors)
        torch.testing.assert_close(precision, total, rtol=1e-5, atol=1e-6)
        shift = share * first.shift[name] + sum(f.shift[name] for f in factors)
        torch.testing.assert_close(last.shift[name], shift, rtol=1e-5, atol=1e-6)


def test_sparse_reports_stay_silent_where_they_were():
    simulation = Simulation(config(method={"name": "feddrop"}))
    with simulation:
        run, method = simulation.run, simulation.method
        then = method.init(run)
        rng = torch.Generator().manual_seed(0)
        now = replace(
            then,
            weights={n: torch.randn(w.shape, generator=rng) for n, w in then.weights.items()},
        )
        sent = method.message(then, RoundContext(run, 1, 2))
        report = Report(
            {
                n: replace(item, values=item.values + 1) if isinstance(item, Masked) else item + 1
                for n, item in sent.items()
            },
            2.0,
        )
        found = as_of_now(report, method, run, then=then, now=now, weight=0.5)
        assert found.weight == 2.0
        assert any(isinstance(item, Masked) for item in found.tensors.values())
        for name, item in found.tensors.items():
            wanted = now.weights[name] + 0.5
            if isinstance(item, Masked):
                before = sent[name].mask()
                assert torch.equal(item.mask(), before)
                item, wanted = item.dense(), torch.where(before, wanted, 0.0)
            torch.testing.assert_close(item, wanted)


def test_what_reports_that_add_are_is_said_of_every_method():
    able = {n for n, kind in METHODS.items() if kind.reports.stale == "weighed" and n != "global"}
    whole = {name for name, kind in METHODS.items() if kind.reports.stale == "whole"}
    assert {"fedavg", "fedprox", "fedpa", "fedadam", "feddrop", "pfedbayes"} <= able
    assert {"scaffold", "pvi", "fedep", "virtual", "ivon-admm"} <= whole
    repeating = {name for name, kind in METHODS.items() if kind.reports.tracked}
    assert not repeating & able, "clients would keep more than the server adds"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": {"name": "pfnm"}}, "not work with pfnm: an update .* It works with .*fedavg"),
        ({"method": {"name": "fedsparse"}}, "not work with fedsparse"),
        ({"method": {"name": "global"}}, "all data"),
        ({"method": {"name": "scaffold"}}, "scaffold cannot scale down old"),
        ({"clock": {}}, "needs a clock"),
        ({"asynchronous": {"buffer": 7}}, "but there are 6 clients"),
        ({"min_reports": 3}, "min_reports = 3, but a buffer has 2 updates"),
        (
            {"engine": "flower", "sampling": "cyclic"},
            "but async.* takes whichever client is free",
        ),
        ({"sampling": "poisson"}, "needs secret cohorts, but clock.speeds"),
        (
            {
                "sampling": "cyclic",
                "asynchronous": {},
                "clock": {"speeds": "equal", "availability": "share"},
            },
            "sampling = 'cyclic' needs a choice .* but clock.availability leaves",
        ),
        (
            {"engine": "flower-simulation", "secure": {"enabled": True}},
            "whose masks cancel",
        ),
        ({"privacy": {"noise": 1.0}, "aggregation": {"clip": 1.0}}, "fills buffers"),
        (
            {
                "method": {"name": "pvi"},
                "asynchronous": {"buffer": 2, "staleness": "constant"},
                "aggregation": {"clip": 1.0},
            },
            "would clip different changes. Leave",
        ),
        ({"clock": {"speeds": "file"}}, "needs clock.file"),
        ({"clock": {"speeds": "equal", "availability": "file"}}, "needs clock.spells"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(changes, words):
    with pytest.raises(ConfigError, match=words):
        Simulation(config(**changes))


def test_all_that_cannot_be_is_refused_at_once():
    """A line for each: stale reports cannot weigh less, and a clock and updates are missing."""
    changes = {"method": {"name": "scaffold"}, "clock": {}, "min_reports": 3}
    with pytest.raises(ConfigError) as found:
        Simulation(config(**changes))
    lines = str(found.value).splitlines()
    expected = ("cannot scale down old", "needs a clock", "a buffer has 2 updates")
    assert [word in line for word, line in zip(expected, lines, strict=True)] == [True] * 3
    changes = {"method": {"name": "pfnm"}, "compression": {"up": "int8"}}
    with pytest.raises(ConfigError) as found:
        Simulation(config(**changes))
    first, second = str(found.value).splitlines()
    assert first.startswith("compression does not work with pfnm: its updates are not added")
    assert second.startswith("asynchronous.buffer does not work with pfnm: an update cannot")


def test_settings_without_effect_are_named():
    with pytest.warns(UserWarning, match="fewer than 4 can be at work: up to 3 have updates"):
        Simulation(config(asynchronous={"buffer": 4})).close()
    quiet = {"clock": {"spread": 2.0}, "asynchronous": {"longest": 3}}
    with pytest.warns(FedbayesWarning) as told:
        Simulation(config(**quiet)).close()
    said = " ".join(str(warning.message) for warning in told)
    assert "clock.spread has no effect: clock.speeds is none" in said
    assert "asynchronous.longest has no effect: asynchronous.buffer is unset" in said


def test_settings_of_time_that_have_an_effect_are_not_named():
    def told(clock, **settings):
        counts = {"clocked": True, "clients": 6, "cohort": 4}
        return " ".join(remarks(Asynchronous(**settings), ClockSettings(**clock), **counts))

    assert not told({"speeds": "equal"})
    assert "clock.rate_spread has no effect" in told({"speeds": "equal", "rate_spread": 1.0})
    assert not told({"speeds": "equal", "rate_spread": 1.0, "upload": 1000.0})
    assert not told({}, buffer=3)  # 4 at work, and 2 that wait
    assert "fewer than 4 can be at work: up to 3 have" in told({}, buffer=4)


def test_runs_by_the_clock_share_a_figure(tmp_path):
    ended(tmp_path / "one", rounds=4)
    ended(tmp_path / "two", rounds=4, asynchronous={}, clock={"speeds": "equal", "seconds": 600.0})
    ended(tmp_path / "three", rounds=1, asynchronous={}, clock={})
    records = gather([tmp_path / name for name in ("one", "two", "three")])
    (chart,) = charts("clock", records)
    assert chart.x_label == "minutes of the clock"
    one, two, three = chart.curves
    lines = Simulation(None, tmp_path / "one").folder.metrics()
    assert one.x == pytest.approx([line["clock_seconds"] / 60 for line in lines])
    assert one.y == [line["global_accuracy"] for line in lines]
    assert two.x == [10.0, 20.0, 30.0, 40.0]
    assert not three.x


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["workers", "flower-simulation"])
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "feddrop"])
def test_every_engine_has_the_same_numbers(tmp_path, engine, method):
    changes = {"method": {"name": method}, "asynchronous": CONSTANT, "rounds": 5}
    one, two = ended(**changes), ended(**changes, engine=engine)
    assert_identical(pack(one.server), pack(two.server))
    without = ("link_down", "link_up")
    assert [{k: v for k, v in line.items() if k not in without} for line in timeless(two)] == (
        timeless(one)
    )


@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_running_statistics_of_stale_reports_stay_those_of_a_distribution(weight):
    """Three clients start from one state, whose variances are 1, and report one after the other."""
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    run = run_of(Network(module, shape=(4,)), clients=3, lr=0.05, batch_size=8, epochs=5)
    method = METHODS["fedavg"]()
    first = server = method.init(run)
    low, high = torch.full((8,), torch.inf), torch.zeros(8)
    for client in range(3):
        here, data = at(run, client), samples(n=40, seed=client)
        own = Samples(0.3 * data.x, data.y)
        report, _, _ = method.local(method.message(first, here), method.join(here), own, here)
        told = dense(report.tensors)["1.running_var"]
        low, high = torch.minimum(low, told), torch.maximum(high, told)
        total = Sum()
        now = as_of_now(report, method, run, then=first, now=server, weight=weight)
        total.add(client, now)
        server, _ = method.update(server, total, at(run, 0, client + 1))
        found = server.weights["1.running_var"]
        assert (found >= low - 1e-6).all()
        assert (found <= torch.maximum(high, torch.ones(8)) + 1e-6).all()
