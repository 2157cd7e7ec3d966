"""The command that tries everything: counts, seeds, status; what it tries has tests of its own."""

import pytest

from fedbayes.methods import METHODS
from tests.hostile import __main__ as command
from tests.hostile.attacks import CASES, KINDS
from tests.hostile.trying import Part, run

SOUND = Part("sound", "tests.helpers.toy_parts:sound", 10, 4, 3)
THIRD = Part("a third", "tests.helpers.toy_parts:one_in_three", 9, 2, 4)
BROKEN = Part("broken", "tests.helpers.toy_parts:broken", 2, 0, 2)


@pytest.mark.slow
def test_each_part_is_tried_as_often_as_asked_and_in_pieces():
    told = []
    parts = {SOUND: 10, THIRD: 9, BROKEN: 2}
    found = run(parts, jobs=2, seed=0, minutes=5, tell=lambda accounts: told.append(len(accounts)))
    assert (found["sound"].tried, found["sound"].survived) == (10, 10)
    assert found["sound"].worst == {"ms": 9.0}  # the seed of the last piece, 0 + 9
    assert sorted(found["a third"].failures) == ["number 0", "number 3", "number 6"]
    assert found["a third"].survived == 6
    assert (found["broken"].tried, found["broken"].survived) == (2, 0)
    assert "it cannot begin" in found["broken"].failures[0]
    assert len(told) == 4 + 3 + 1


def test_nothing_is_begun_after_the_time():
    found = run({SOUND: 10}, jobs=1, seed=0, minutes=0, tell=print)
    assert found["sound"].tried == 0


@pytest.mark.parametrize(
    ("parts", "arguments", "status", "words"),
    [
        ([SOUND], ["--quick"], 0, ["sound", "4"]),
        ([SOUND, THIRD], ["--only", "sound"], 0, ["sound", "10"]),
        ([SOUND, THIRD], [], 1, ["a third: number 6"]),
        ([SOUND], ["--minutes", "0"], 1, ["not all was tried"]),
    ],
)
def test_the_status_says_whether_all_survived(parts, arguments, status, words, monkeypatch, capsys):
    monkeypatch.setattr(command, "PARTS", parts)
    assert command.main([*arguments, "--jobs", "1"]) == status
    printed = capsys.readouterr().out
    assert all(word in printed for word in words)
    assert "absent" not in printed
    assert "needy" not in printed


def test_attacks_are_on_every_method_that_has_reports():
    assert len(CASES) == len(set(CASES)) == len(METHODS) - 2
    assert {"huge", "sign-flip:scale=20", "stretch"} <= set(KINDS)
