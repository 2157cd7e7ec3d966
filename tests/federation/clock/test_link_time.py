"""Time on the link: seconds of clients' messages, by the bytes that pass and the clients' rates."""

from dataclasses import replace

import numpy as np
import pytest

from fedbayes import Config, Simulation
from fedbayes.contracts import Part, Report, Reports
from fedbayes.core.messages import Masked
from fedbayes.core.tensors import pack
from fedbayes.errors import ConfigError, FedbayesWarning, RunError
from fedbayes.federation.client_runtime import ClientFailure
from fedbayes.federation.clock.clock import Clock, Lengths
from fedbayes.federation.clock.queue import Queue
from fedbayes.federation.clock.rates import rate
from fedbayes.federation.clock.settings import ClockSettings
from fedbayes.federation.clock.tables import read_rates
from fedbayes.federation.engines.sequential import Sequential
from fedbayes.methods import METHODS
from fedbayes.methods.fedavg import FedAvg
from fedbayes.testing import Tampering, assert_identical

NAMES = ("a", "b", "c")
DATA = {"name": "digits", "clients": 6, "partition": "iid", "limit": 240}
SMALL = {"data": DATA, "model": {"hidden": [8]}, "rounds": 4, "cohort": 4, "seed": 3}
SLOW = {"speeds": "log-normal", "download": "40 kB/s", "upload": 1000, "rate_spread": 0.7}
WAITING = {"buffer": 2, "staleness": "constant"}


class Keeping(FedAvg):
    """A method of somebody's own: clients leave out of their reports what is near zero."""

    name = "keeping"
    reports = Reports({"weights": Part(mask="chosen")})

    def report(self, solved, problem, client, at):
        report, client, info = super().report(solved, problem, client, at)
        tensors = {
            n: Masked.keep(t, {tuple(range(t.ndim)): t.abs() > 0.05})
            for n, t in report.tensors.items()
        }
        return Report(tensors, report.weight), client, info


def config(**changes):
    return Config.create(**{**SMALL, "clock": SLOW, **changes})


class Weighed:
    """A run whose messages were weighed on their way, by client and the round of its start."""

    def __init__(self, settings, folder=None):
        self.lengths = {}

        def weigh(task, outcome):
            lengths = Lengths(len(task.message), len(outcome.report))
            self.lengths[task.client, task.round] = lengths
            return outcome

        with Simulation(settings, folder) as self.simulation:
            inside = Sequential(self.simulation.runtime)
            self.simulation._engine = Tampering(inside, weigh)
            self.lines = [step.metrics for step in self.simulation]

    @property
    def times(self):
        return [line["clock_seconds"] for line in self.lines]


def clock_of(simulation):
    """The clock of a run, made anew."""
    names = simulation.data.names[: simulation.data.clients]
    sizes = simulation.data.train_sizes()
    return Clock(simulation.config.clock, names, sizes, simulation.config.seed)


@pytest.mark.parametrize(
    ("said", "bytes_a_second"),
    [
        (20, 20.0),
        (0.5, 0.5),
        ("3", 3.0),
        ("20 MB/s", 20e6),
        (" 1.5kB/s ", 1500.0),
        ("2e-3 GB/s", 2e6),
        ("8 Mbit/s", 1e6),
        ("1 Gbit/s", 125e6),
        ("64 kbit/s", 8000.0),
        ("7 B/s", 7.0),
    ],
)
def test_rates_are_bytes_a_second(said, bytes_a_second):
    assert rate(said) == pytest.approx(bytes_a_second, rel=1e-12)
    assert ClockSettings(speeds="equal", upload=said).upload == pytest.approx(bytes_a_second)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("0 MB/s", "a rate must be 0.001 bytes per second or more"),
        (1e-4, "a rate must be 0.001 bytes per second or more"),
        (-3, "a rate must be 0.001 bytes per second or more"),
        ("fast", "give bytes per second"),
        ("", "give bytes per second"),
        ("nan", "give bytes per second"),
        ("inf MB/s", "give bytes per second"),
        (float("nan"), "give bytes per second"),
        ("1e400", "give bytes per second"),
        (True, "give bytes per second"),
        ([1], "give bytes per second"),
        ("20 MB", "known units are B/s, kB/s, MB/s"),
        ("20 mb/s", "known units are B/s, kB/s, MB/s"),
        ("file", "needs clock.file.*Set clock.speeds = 'file'"),
        (1e300, "the largest number is"),
    ],
)
def test_what_is_no_rate_is_refused_by_its_key(said, words):
    with pytest.raises(ConfigError, match=rf"(?s)clock.*{words}") as found:
        config(clock={"speeds": "equal", "download": said})
    assert "download" in str(found.value)


def test_seconds_are_work_and_bytes_by_rates():
    table = ClockSettings(speeds="equal", seconds=4.0, download=1000, upload="250 B/s")
    clock = Clock(table, NAMES, np.ones(3), 0)
    assert clock.seconds(1, 1, Lengths(3000, 500)) == 4.0 + 3.0 + 2.0
    assert clock.ends(1, 1, 10.0, Lengths(0, 250)) == 15.0
    only = Clock(table.model_copy(update={"download": None}), NAMES, np.ones(3), 0)
    assert only.seconds(1, 1, Lengths(3000, 500)) == 6.0
    # They pass while a client is there: for half of every 10 seconds.
    away = table.model_copy(update={"availability": "share", "period": 10.0, "wave": 1.0})
    assert Clock(away, NAMES, np.ones(3), 0).ends(1, 1, 0.0, Lengths(3000, 500)) == 14.0


def test_rates_are_spread_around_their_medians_down_and_up_alike():
    table = ClockSettings(speeds="equal", download=2000, upload=500, rate_spread=0.6)
    many = [str(n) for n in range(20000)]
    clock = Clock(table, many, np.ones(20000), 5)
    down = np.array([clock.seconds(c, 1, Lengths(down=2000)) - 1.0 for c in range(20000)])
    up = np.array([clock.seconds(c, 1, Lengths(up=500)) - 1.0 for c in range(20000)])
    np.testing.assert_allclose(down, up, rtol=1e-9)
    assert (np.log(up).mean(), np.log(up).std()) == pytest.approx((0.0, 0.6), abs=0.02)


def test_rates_of_a_file_stand_next_to_seconds(tmp_path):
    path = tmp_path / "clients.csv"
    path.write_text("client,upload,seconds,download\na,100,1,5 MB/s\nb,1 kB/s,2,7\nc,3,3,9\n")
    table = ClockSettings(speeds="file", file=path, download="file", upload="file")
    clock = Clock(table, NAMES, np.ones(3), 0)
    assert clock.seconds(0, 1, Lengths(10_000_000, 300)) == 1 + 2 + 3
    assert clock.seconds(1, 1, Lengths(14, 500)) == 2 + 2 + 0.5
    mixed = table.model_copy(update={"download": 1000.0})
    assert Clock(mixed, NAMES, np.ones(3), 0).seconds(2, 1, Lengths(1000, 6)) == 3 + 1 + 2


def test_a_spread_of_no_rates_is_named():
    with pytest.warns(
        FedbayesWarning,
        match=r"clock.rate_spread has no effect.* no median rate",
    ):
        Simulation(config(clock={"speeds": "equal", "rate_spread": 1.0})).close()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("client,seconds\na,1\n", "has no column upload"),
        (
            "client,upload\na,0\n",
            "line 2: upload is '0'; a rate must be 0.001 bytes per second or more",
        ),
        ("client,upload\na,slow\n", "line 2: upload is 'slow'; give bytes per second"),
        ("client,upload\na,1 furlong/s\n", "line 2: upload is '1 furlong/s'; known units"),
        ("client,upload\na,\n", "line 2: upload is missing"),
        ("client,upload\na,1,2\n", "line 2: it has more cells than there are columns"),
        ("client,upload,upload\na,1,2\n", "has the column upload twice"),
        ("client,upload\na,1\nb,2\n", "has no row for client c"),
        ("client,upload\na,1\na,2\n", "line 3: client 'a' occurs twice"),
    ],
)
def test_wrong_rates_of_a_file_are_named_with_their_line(tmp_path, text, words):
    path = tmp_path / "clients.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_rates(path, NAMES, "upload")


@pytest.mark.parametrize(
    ("method", "compression"),
    [("fedavg", {}), ("fedsparse", {"up": "top-k", "share": 0.1, "down": "bf16"})],
)
def test_a_synchronous_round_lasts_until_the_slowest_report_has_come(method, compression):
    """Bytes are those that passed the engine; FedSparse's are known only once it has trained."""
    found = Weighed(config(method={"name": method}, compression=compression))
    clock, passed, wanted = clock_of(found.simulation), 0.0, []
    for number in range(1, 5):
        passed += max(
            clock.work(client, number)
            + lengths.down / clock._down[client]
            + lengths.up / clock._up[client]
            for (client, start), lengths in found.lengths.items()
            if start == number
        )
        wanted.append(passed)
    assert found.times == pytest.approx(wanted, rel=1e-12)
    assert found.times[-1] > 4 * 2  # of which a second a round is work, or thereabouts


def test_refused_and_lost_clients_take_the_bytes_that_passed():
    """Nothing came of client 0's work; what client 1 sent is no report, and is long."""
    clock = {"speeds": "equal", "seconds": 2.0, "upload": 1000.0}

    class Spoilt(Sequential):
        def train(self, tasks):
            for client, outcome in enumerate(super().train(tasks)):
                spoilt = {0: ClientFailure("gone"), 1: replace(outcome, report=b"x" * 50_000)}
                yield spoilt.get(client, outcome)

    with Simulation(config(rounds=1, cohort=6, clock=clock)) as simulation:
        simulation._engine = Spoilt(simulation.runtime)
        (step,) = list(simulation)
    assert list(step.metrics["refused"]) == ["1"]
    assert list(step.metrics["lost"]) == ["0"]
    assert step.metrics["clock_seconds"] == 2.0 + 50.0


def test_clients_that_are_all_awaited_take_as_long_as_in_a_synchronous_run():
    """Some of them have one sample, so that their reports do not say their weight."""
    few = {"limit": 60, "partition": "dirichlet", "alpha": 1.0, "min_samples": 1}
    data = {**DATA, "clients": 12, **few}
    equal = {"speeds": "equal", "upload": 2000, "download": 5000}
    more = {"data": data, "clock": equal, "cohort": 12, "rounds": 2}
    one = Weighed(config(**more, asynchronous={"buffer": 12, "staleness": "constant"}))
    two = Weighed(config(**more))
    assert len({lengths.up for lengths in two.lengths.values()}) == 2
    assert one.times == pytest.approx(two.times, rel=1e-12)
    assert_identical(pack(one.simulation.server), pack(two.simulation.server))


QUICK = {("scaffold", "top-k"), ("feddrop", "int8"), ("pvi", "none"), ("fedavg", "random-k")}
"""Those that are tried every time."""


def awaited():
    """Methods for asynchronous rounds, each with every compression that it takes."""
    for name, kind in METHODS.items():
        if kind.reports.stale == "refused":
            continue
        for up in (
            ("none",)
            if kind.reports.refusals["compression"]
            else ("none", "bf16", "int8", "top-k", "random-k")
        ):
            slow = () if (name, up) in QUICK else pytest.mark.slow
            yield pytest.param(name, up, marks=slow)


@pytest.mark.parametrize(("method", "up"), [*awaited()])
def test_reports_are_as_long_as_was_foreseen(method, up):
    """By the lengths that passed, known before, the queue goes as it went without knowing them."""
    settings = config(method={"name": method}, compression={"up": up}, asynchronous=WAITING)
    found = Weighed(settings)
    queue, now, under_way = Queue(clock_of(found.simulation), settings.seed, 4), 0.0, ()
    for number, line in enumerate(found.lines, 1):
        # Of those that are still at work at the end nothing came.
        lengths = {c: each for (c, since), each in found.lengths.items() if since == number}
        turn = queue.buffer(
            number, now, under_way, 2, lengths=lambda c, of=lengths: of.get(c, Lengths(10**6))
        )
        now, under_way = turn.now, turn.under_way
        assert line["clock_seconds"] == now
        assert not line["refused"]


def test_reports_of_unknown_length_are_not_for_asynchronous_rounds():
    """Whose entries a client chooses: their length is not known before it has trained."""
    keeping = f"{__name__}:Keeping"
    Weighed(config(method={"name": keeping}))  # in synchronous rounds any length will do
    with pytest.raises(ConfigError, match=r"asynchronous.buffer does not work with keeping"):
        Weighed(config(method={"name": keeping}, asynchronous=WAITING))


def timeless(folder):
    return [{k: v for k, v in line.items() if k != "seconds"} for line in folder.metrics()]


MOST = {
    "method": {"name": "scaffold"},
    "compression": {"up": "top-k", "share": 0.1, "down": "bf16"},
    "asynchronous": WAITING,
    "rounds": 7,
}


def test_a_run_goes_on_to_the_same_times_and_bits(tmp_path):
    whole = Weighed(config(**MOST), tmp_path / "whole").simulation
    with Simulation(config(**MOST), tmp_path / "parts") as broken:
        for step in broken:
            broken.stop = step.number == 4
    with Simulation(None, tmp_path / "parts") as parts:
        list(parts)
    assert timeless(parts.folder) == timeless(whole.folder)
    assert_identical(pack(parts.server), pack(whole.server))
    assert dict(parts.states) == dict(whole.states)


def test_other_rates_are_refused_when_a_run_goes_on(tmp_path):
    table = tmp_path / "clients.csv"
    rows = [f"client-{client},1,{client + 1} kB/s" for client in range(6)]
    table.write_text("\n".join(["client,seconds,upload", *rows]))
    clock = {"speeds": "file", "file": str(table), "upload": "file"}
    with Simulation(config(clock=clock), tmp_path / "run") as simulation:
        for _ in simulation:
            simulation.stop = True
    table.write_text(table.read_text().replace("client-3,1,4", "client-3,1,5"))
    with pytest.raises(RunError, match=r"see clock\.file and clock\.spells\. Restore"):
        Simulation(None, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["workers", "flower-simulation"])
@pytest.mark.parametrize("asynchronous", [{}, WAITING])
def test_every_engine_has_the_same_times(engine, asynchronous):
    if engine == "flower-simulation":
        pytest.importorskip("flwr")
    changes = {**MOST, "asynchronous": asynchronous, "rounds": 4}
    found = []
    for each in ("sequential", engine):
        with Simulation(config(**changes, engine=each)) as simulation:
            found.append([step.metrics["clock_seconds"] for step in simulation])
    assert found[0] == found[1]
