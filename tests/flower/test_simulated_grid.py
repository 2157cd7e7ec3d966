"""Nodes in this process: each has its own of every message, once, and the end does not wait."""

import time

import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import PARTITION_ID_KEY

from fedbayes.flower.simulated import simulated_grid

NODES = 5


@pytest.fixture
def grid_of():
    closing = []

    def open_grid(answer):
        app = ClientApp()
        app.train()(answer)
        grid, close = simulated_grid(app, NODES)
        closing.append(close)
        return grid, close

    yield open_grid
    for close in closing:
        close()


def asked(grid):
    shared = ConfigRecord({"stage": "setup", "list": [1, 2, 3]})
    return [
        Message(RecordDict({"about": shared}), node, "train", ttl=60.0, group_id="1")
        for node in grid.get_node_ids()
    ]


def answers(grid, numbers, seconds=20.0):
    until, found, open_ones = time.monotonic() + seconds, [], set(numbers)
    while open_ones and time.monotonic() < until:
        some = list(grid.pull_messages(open_ones))
        open_ones -= {message.metadata.reply_to_message_id for message in some}
        found += some
        time.sleep(0.001)
    return found


def test_a_node_takes_apart_its_own_copy_alone_and_gets_it_once(grid_of):
    worked = []

    def answer(message, context):
        about = message.content.config_records["about"]
        worked.append((context.node_config[PARTITION_ID_KEY], about.pop("stage")))
        return Message(RecordDict({"n": ConfigRecord({"n": 1})}), reply_to=message)

    grid, _ = grid_of(answer)
    for _ in range(20):
        worked.clear()
        messages = asked(grid)
        numbers = list(grid.push_messages(messages))
        found = answers(grid, numbers)
        assert {m.metadata.reply_to_message_id for m in found} == set(numbers)
        assert [m.error for m in found if m.has_error()] == []
        assert sorted(worked) == [(node, "setup") for node in range(NODES)]
        for message in messages:
            assert dict(message.content["about"]) == {"stage": "setup", "list": [1, 2, 3]}


def test_the_end_waits_for_the_work_under_way_and_nothing_is_answered_after_it(grid_of):
    begun, ended = [], []

    def answer(message, context):
        begun.append(message.metadata.message_id)
        time.sleep(0.3)
        ended.append(message.metadata.message_id)
        return Message(RecordDict(), reply_to=message)

    grid, close = grid_of(answer)
    list(grid.push_messages(asked(grid)))
    while not begun:
        time.sleep(0.001)
    close()
    assert ended == begun
    assert len(begun) < NODES
    time.sleep(1.5)  # longer than Flower's threads take to notice
    assert ended == begun


def test_an_end_without_work_is_at_once(grid_of):
    grid, close = grid_of(lambda message, context: Message(RecordDict(), reply_to=message))
    answers(grid, list(grid.push_messages(asked(grid))))
    before = time.monotonic()
    close()
    assert time.monotonic() - before < 0.5
