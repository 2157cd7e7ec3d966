"""The engine `auto`: workers start where they pay, and the bits stay those of `sequential`."""

import warnings
from types import SimpleNamespace

import pytest

import fedbayes
from fedbayes import Config
from fedbayes.errors import FedbayesWarning
from fedbayes.federation.engines import auto
from fedbayes.federation.engines.auto import Auto
from fedbayes.federation.engines.sequential import Sequential
from fedbayes.testing import assert_identical
from fedbayes.workflows.running import run


class Clock:
    """Seconds that pass only when a client is at work."""

    def __init__(self, seconds):
        self.now, self.seconds = 0.0, seconds

    def perf_counter(self):
        return self.now


class Counted(Sequential):
    """Says which tasks it had."""

    def __init__(self, clock, speed=1.0):
        self.clock, self.speed, self.had, self.closed = clock, speed, [], False

    def train(self, tasks):
        for task in tasks:
            self.had.append((task.round, task.client))
            self.clock.now += self.clock.seconds / self.speed
            yield task.client


class Fast(Counted):
    """Stands for workers."""


def rounds_of(engine, rounds, clients):
    for number in range(1, rounds + 1):
        tasks = (SimpleNamespace(round=number, client=client) for client in range(clients))
        assert list(engine.train(tasks)) == list(range(clients))


def built(monkeypatch, seconds, rounds, clients, most=2):
    clock = Clock(seconds)
    monkeypatch.setattr(auto, "time", clock)
    here, workers = Counted(clock), []

    def start(count):
        workers.append((count, Fast(clock, 0.8 * count)))
        return SimpleNamespace(train=workers[-1][1].train, close=lambda: None)

    return Auto(here, start, most, clients, rounds), here, workers


def test_a_short_run_stays_in_this_process(monkeypatch):
    engine, here, workers = built(monkeypatch, 0.1, 10, 10)
    rounds_of(engine, 10, 10)
    assert len(here.had) == 100
    assert not workers


def test_the_time_of_the_server_is_not_that_of_clients(monkeypatch):
    engine, here, workers = built(monkeypatch, 0.1, 10, 10)
    for number in range(1, 11):
        tasks = [SimpleNamespace(round=number, client=client) for client in range(10)]
        for _ in engine.train(tasks):
            here.clock.now += 100.0
    assert not workers


def test_workers_take_the_rest_of_the_first_round_of_a_long_run(monkeypatch):
    # After the second client 3 x 10 - 2 tasks of 20 s are left, of which two workers save 37.5 %.
    engine, here, workers = built(monkeypatch, 20.0, 3, 10, most=4)
    with pytest.warns(FedbayesWarning, match=r"4 worker processes .* 6\.4 minutes"):
        rounds_of(engine, 3, 10)
    assert here.had == [(1, 0), (1, 1)]
    [(count, started)] = workers
    assert count == 4
    assert len(started.had) == 28


@pytest.mark.parametrize("seconds", [0.0, 0.3, 1.0, 3.0, 10.0])
def test_workers_are_started_where_they_save_20_seconds(monkeypatch, seconds):
    engine, _, workers = built(monkeypatch, seconds, 5, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedbayesWarning)
        rounds_of(engine, 5, 4)
    assert bool(workers) == ((20 - 2) * seconds * (1 - 1 / 1.6) >= 20)


def test_no_workers_without_memory_for_two(monkeypatch):
    engine, _, workers = built(monkeypatch, 20.0, 3, 10)
    monkeypatch.setattr(auto.psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 30))
    rounds_of(engine, 3, 10)
    assert not workers


def config(**more):
    return Config.create(rounds=2, data={"clients": 4}, model={"hidden": [8]}, **more)


@pytest.mark.slow
def test_a_run_that_starts_workers_has_the_bits_of_one_that_does_not(monkeypatch, tmp_path):
    expected = run(config(engine="sequential"), tmp_path / "sequential")
    monkeypatch.setattr(auto, "_LEAST", 1e-9)
    monkeypatch.setattr(auto, "cpu_count", lambda: 2)
    with pytest.warns(FedbayesWarning, match="2 worker processes"):
        ended = run(config(), tmp_path / "auto")
    assert_identical(ended.model, expected.model)
    drop = "seconds"
    lines = [
        [{k: v for k, v in line.items() if k != drop} for line in each.metrics]
        for each in (expected, ended)
    ]
    assert lines[0] == lines[1]


def test_objects_of_this_process_and_one_core_keep_to_one_process(monkeypatch, tmp_path):
    def started(**more):
        with fedbayes.Simulation(config(**more)) as simulation:
            return type(simulation.engine)

    monkeypatch.setattr(auto, "cpu_count", lambda: 2)
    assert started() is Auto
    assert started(asynchronous={"buffer": 2}, clock={"speeds": "log-normal"}) is Sequential
    monkeypatch.setattr(auto, "cpu_count", lambda: 1)
    assert started() is Sequential
