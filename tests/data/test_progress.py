"""Progress without a terminal: lines in the log of a command, nothing in a Python program."""

import io

import pytest
from rich.console import Console

from fedbayes.data import progress as module
from fedbayes.data.progress import ProgressLines, progress


@pytest.fixture
def clock(monkeypatch):
    time = [100.0]
    monkeypatch.setattr(module, "monotonic", lambda: time[0])
    return time


@pytest.fixture
def log(monkeypatch):
    console = Console(stderr=True, width=40)
    console.file = io.StringIO()
    monkeypatch.setattr("rich.get_console", lambda: console)
    return console


def test_lines_come_after_four_seconds_and_then_every_thirty(clock, log):
    with progress("asking the clients", 40) as advance:
        for _ in range(40):
            clock[0] += 2.0
            advance(1)
    assert log.file.getvalue().splitlines() == [
        "asking the clients: 2 of 40, 76 s left",
        "asking the clients: 17 of 40, 46 s left",
        "asking the clients: 32 of 40, 16 s left",
    ]


def test_of_an_unknown_total_there_is_no_time_left(clock, log):
    with progress("reading", None) as advance:
        clock[0] += 5.0
        advance(1500)
    assert log.file.getvalue() == "reading: 1,500\n"


def test_long_lines_stay_whole_and_brackets_are_no_markup(clock, log):
    say = ProgressLines(log)
    say("too soon")
    clock[0] += 4.0
    say("[bold] " * 20)
    assert log.file.getvalue().splitlines() == ["[bold] " * 20]


def test_a_python_program_is_told_nothing(clock, log):
    log.stderr = False
    with progress("reading", 2) as advance:
        clock[0] += 60.0
        advance(1)
    assert not log.file.getvalue()
