"""Simulated time: when clients are there, when they end, and whose report comes next."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbayes.errors import ConfigError
from fedbayes.federation.clock.availability import listed, shares
from fedbayes.federation.clock.clock import Clock
from fedbayes.federation.clock.queue import Queue
from fedbayes.federation.clock.settings import ClockSettings
from fedbayes.federation.clock.tables import read_seconds, read_spells
from tests.helpers.toy_clients import Table

NAMES = ("a", "b", "c")


def by_the_second(seconds, size, longest, rounds):
    """All rounds, second by second, where every free client starts at once.

    Returns:
        Of each round its end, its starts, and its reports and those that came too late, each with
        the round of its start.
    """
    told, at_work, waiting, now, number = [], {}, [], 0, 1
    starts, late = [], []
    while len(told) < rounds:
        came = sorted((since, c) for c, (end, since) in at_work.items() if end == now)
        while came and len(waiting) < size:
            since, client = came.pop(0)
            del at_work[client]
            if longest is not None and number - since > longest:
                late.append((client, since))
            else:
                waiting.append((client, since))
        if len(waiting) == size:
            told.append((now, starts, sorted(waiting), late))
            # Whoever came in this second too, and found the buffer full, is first in the next one.
            waiting, starts, late, number = [], [], [], number + 1
            continue
        for client in range(len(seconds)):
            if client not in at_work and client not in [c for c, _ in waiting]:
                at_work[client] = (now + seconds[client], number)
                starts.append(client)
        now += 1
    return told


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=7),
    st.integers(1, 7),
    st.one_of(st.none(), st.integers(0, 3)),
)
def test_the_queue_goes_as_second_by_second(seconds, size, longest):
    size = min(size, len(seconds))
    queue, now, under_way = Queue(Table(seconds), 3, len(seconds)), 0.0, ()
    found = []
    for number in range(1, 9):
        turn = queue.buffer(number, now, under_way, size, longest)
        now, under_way = turn.now, turn.under_way
        reports = sorted((each.client, each.since) for each in turn.reports)
        late = [(each.client, each.since) for each in turn.too_stale]
        found.append((now, sorted(turn.starts), reports, sorted(late)))
    wanted = by_the_second(seconds, size, longest, 8)
    assert found == [(t, sorted(s), r, sorted(late)) for t, s, r, late in wanted]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 99), st.integers(1, 12), st.integers(1, 12), st.floats(0.05, 1.0))
def test_whoever_is_drawn_no_more_are_at_work_and_none_twice(seed, concurrency, size, available):
    table = ClockSettings(
        speeds="log-normal",
        jitter=0.3,
        availability="share",
        available=available,
        wave=0.5,
        period=10.0,
    )
    clock = Clock(table, [str(n) for n in range(12)], np.ones(12), seed)
    queue, now, under_way = Queue(clock, seed, concurrency), 0.0, ()
    for number in range(1, 9):
        turn = queue.buffer(number, now, under_way, size)
        assert turn.now >= now
        clients = [each.client for each in (*turn.reports, *turn.under_way)]
        assert len(set(clients)) == len(clients)
        assert sorted(clients) == sorted([*turn.starts, *(each.client for each in under_way)])
        assert len(turn.reports) == size
        assert len(turn.under_way) <= concurrency
        assert all(each.ends <= turn.now for each in turn.reports)
        assert all(each.ends >= turn.now for each in turn.under_way)
        for each in (*turn.reports, *turn.under_way):  # work is done where a client is there
            assert clock.availability.here(each.client, each.ends - 1e-9)
        now, under_way = turn.now, turn.under_way


def test_free_clients_are_drawn_alike():
    """Of 40 clients 36 are busy: each of the other four is drawn as often."""
    queue = Queue(Table([1] * 40), 0, 1)
    queue._busy = set(range(36))
    counts = np.zeros(40)
    for number in range(4000):
        for client in queue._drawn(np.random.default_rng(number), 2, 0.0):
            counts[client] += 1
    assert counts[:36].sum() == 0
    # Each has a half of the draws: 2000, with a standard deviation of 32.
    assert np.abs(counts[36:] - 2000).max() < 130


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 9), min_size=3, max_size=7), st.integers(1, 2))
def test_one_after_the_other_goes_round(seconds, size):
    """With one client at work at any time, whatever they take."""
    queue, now, under_way, first, starts = Queue(Table(seconds), 3, 1, cyclic=True), 0.0, (), 0, []
    for number in range(1, 12):
        turn = queue.buffer(number, now, under_way, size, first=first)
        now, under_way, first = turn.now, turn.under_way, turn.first
        starts += turn.starts
    assert starts == [place % len(seconds) for place in range(11 * size)]
    assert now == sum(seconds[client] for client in starts)


def test_in_a_cycle_fast_clients_start_no_more_often_than_slow_ones():
    """While nobody takes longer than a cycle: drawn at random, the fast ones report more often."""
    seconds = [1] * 15 + [6] * 15
    counts = {}
    for cyclic in (True, False):
        queue, now, under_way, first, starts = Queue(Table(seconds), 3, 6, cyclic), 0.0, (), 0, []
        for number in range(1, 301):
            turn = queue.buffer(number, now, under_way, 2, first=first)
            now, under_way, first = turn.now, turn.under_way, turn.first
            starts += turn.starts
        counts[cyclic] = np.bincount(starts, minlength=30)
    assert counts[True].max() - counts[True].min() <= 1
    assert counts[False][:15].sum() > 1.1 * counts[False][15:].sum()


def present(spells, period, time):
    inside = time % period
    return any(start <= inside < stop for start, stop in spells)


@settings(deadline=None)
@given(
    st.sets(st.integers(0, 12), min_size=2, max_size=8),
    st.integers(0, 40),
    st.integers(1, 60),
)
def test_work_rests_while_a_client_is_away(edges, start, work):
    """Second by second, in whole seconds."""
    edges = sorted(edges)[: len(edges) // 2 * 2]
    spells = [(edges[i], edges[i + 1]) for i in range(0, len(edges), 2)]
    found = listed(12.0, {0: np.array(spells, dtype=float)})
    comes = next(t for t in range(start, start + 30) if present(spells, 12, t))
    assert found.comes(0, float(start)) == comes
    assert found.here(0, float(start)) == present(spells, 12, start)
    left, now = work, comes
    while left:
        left -= present(spells, 12, now)
        now += 1
    assert found.ends(0, float(comes), float(work)) == now


def test_a_share_of_the_time_is_that_share_of_it():
    phases = np.random.default_rng(0).random(5) * 100.0
    found = shares(100.0, 0.3, phases)
    times = np.arange(0.0, 1000.0, 0.5)
    for client in range(5):
        there = np.mean([found.here(client, time) for time in times])
        assert there == pytest.approx(0.3, abs=0.003)


@pytest.mark.parametrize(
    "changes",
    [
        {"available": 1e-300},
        {"period": 1e-3, "seconds": 1e15},
        {"available": 1e-6, "seconds": 1e17},
    ],
)
def test_spells_that_are_too_short_to_tell_are_refused(changes):
    """In place of a search for their ends that has none."""

    def rounds():
        table = ClockSettings(speeds="equal", availability="share", **changes)
        queue, now, under_way = Queue(Clock(table, NAMES, np.ones(3), 0), 0, 2), 0.0, ()
        for number in range(1, 4):
            turn = queue.buffer(number, now, under_way, 1)
            now, under_way = turn.now, turn.under_way

    with pytest.raises(ConfigError, match=r"cannot resolve a spell of \S+ seconds"):
        rounds()


def test_seconds_are_what_the_settings_say():
    sizes = np.array([10, 20, 60])
    equal = Clock(ClockSettings(speeds="equal", seconds=4.0, by_samples=True), NAMES, sizes, 0)
    assert [equal.work(client, 1) for client in range(3)] == pytest.approx([4 / 3, 8 / 3, 8.0])
    many = [str(n) for n in range(20000)]
    drawn = Clock(
        ClockSettings(speeds="log-normal", seconds=3.0, spread=0.7), many, np.ones(20000), 5
    )
    logs = np.log([drawn.work(client, 1) for client in range(20000)])
    assert logs.mean() == pytest.approx(np.log(3.0), abs=0.02)
    assert logs.std() == pytest.approx(0.7, abs=0.02)
    assert drawn.work(7, 1) == drawn.work(7, 2)
    shaky = Clock(ClockSettings(speeds="equal", jitter=0.4), NAMES, sizes, 5)
    logs = np.log([shaky.work(1, number) for number in range(4000)])
    assert (logs.mean(), logs.std()) == pytest.approx((0.0, 0.4), abs=0.02)
    assert shaky.work(1, 3) == shaky.work(1, 3)


def test_tables_of_seconds_and_spells(tmp_path):
    seconds, spells = tmp_path / "seconds.csv", tmp_path / "spells.csv"
    seconds.write_text("seconds,client\n2.5,b\n1,a\n7,c\n")
    assert read_seconds(seconds, NAMES).tolist() == [1.0, 2.5, 7.0]
    seconds.write_text("\ufeffseconds, client\r\n2.5, b\r\n1, a\r\n7, c\r\n")  # a spreadsheet's
    assert read_seconds(seconds, NAMES).tolist() == [1.0, 2.5, 7.0]
    spells.write_text("client,start,stop\na,5,9\na,0,2\nb,0,10\nc,3,4\n")
    found = read_spells(spells, NAMES, 10.0)
    assert found[0].tolist() == [[0, 2], [5, 9]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("client,seconds\na,1\nb,2\n", "has no row for client c"),
        ("client,seconds\na,1\na,2\n", "line 3: client 'a' occurs twice"),
        ("client,seconds\na,0\n", "line 2: seconds is '0'; a time must be above 0"),
        ("client,seconds\na,fast\n", "line 2: seconds is 'fast'; it must be a number"),
        ("client,seconds\na,nan\n", "line 2: seconds is 'nan'; it must be a number"),
        ("client,seconds\na,1e16\n", "line 2: seconds is '1e16'; .* at most 1e\\+15"),
        ("client,seconds\na,-1\n", "line 2: seconds is '-1'; a time must be above 0"),
        ("client,seconds\na\n", "line 2: seconds is missing"),
        ("client,seconds\nd,1\n", "line 2: unknown client 'd'. The clients"),
        ("client,time\na,1\n", "has no column seconds"),
        ("", "has no column client, seconds"),
    ],
)
def test_a_wrong_table_is_named_with_its_line(tmp_path, text, words):
    path = tmp_path / "seconds.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_seconds(path, NAMES)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("a,3,3", r"from 3 to 3\. It must begin before it ends, in \[0, 10\]"),
        ("a,3,11", r"from 3 to 11"),
        ("a,0,4\na,3,5\nb,0,1\nc,0,1", "client 'a' overlap at 3"),
    ],
)
def test_wrong_spells_are_named(tmp_path, rows, words):
    path = tmp_path / "spells.csv"
    path.write_text(f"client,start,stop\n{rows}\n")
    with pytest.raises(ConfigError, match=words):
        read_spells(path, NAMES, 10.0)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read clock.file = .*absent.csv"):
        read_seconds(tmp_path / "absent.csv", NAMES)
