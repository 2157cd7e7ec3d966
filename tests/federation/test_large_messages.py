"""Large messages: what is read is let go of, so that few copies of one are in memory at once."""

import weakref
from dataclasses import replace

import pytest
import torch

from fedbayes import Config, Simulation
from fedbayes.contracts.reports import Sum
from fedbayes.core import memory
from fedbayes.federation.broadcast import ServerMessages
from fedbayes.federation.client_runtime import ClientResult
from fedbayes.federation.engines.sequential import Sequential
from fedbayes.federation.round import run_round

COHORT = [0, 1, 2]


class Watched(Sequential):
    """Notes the results that it gave, and what the server still had of the message then."""

    def __init__(self, runtime):
        super().__init__(runtime)
        self.given, self.more = [], 0

    def train(self, tasks):
        tasks = [replace(task) for task in tasks]
        for task in tasks[: len(tasks) + min(self.more, 0)]:
            result = next(super().train([task]))
            self.given.append(weakref.ref(result))
            holder = [result]
            del result
            yield holder.pop()
        yield from [ClientResult(b"", b"", {}, {})] * self.more


@pytest.fixture
def begun():
    config = Config.published(
        data={"clients": 3, "partition": "iid", "limit": 120}, model={"hidden": [4]}
    )
    with Simulation(config) as simulation:
        yield simulation.runtime, Watched(simulation.runtime)


def run(runtime, engine):
    server = runtime.method.init(runtime.run)
    given = {"number": 1, "cohort": COHORT}
    return run_round(runtime.run, runtime.method, server, engine, {}, **given)


def test_bytes_and_tensors_of_a_report_are_gone_when_they_are_not_needed(begun, monkeypatch):
    runtime, engine = begun
    add, tensors = Sum.add, []

    def added(self, client, report):
        assert all(result() is None for result in engine.given)
        add(self, client, report)
        assert len(engine.given) == client + 1
        tensors.append([weakref.ref(tensor) for tensor in report.tensors.values()])
        assert all(one() is None for each in tensors[:-1] for one in each)

    monkeypatch.setattr(Sum, "add", added)
    assert run(runtime, engine).ledger.up.keys() == set(COHORT)
    assert len(tensors) == 3


def test_the_encoded_message_is_forgotten_with_the_last_task(begun, monkeypatch):
    runtime, engine = begun
    train, had = engine.train, []

    def asked(tasks):
        owner = tasks.gi_frame.f_locals["sent"]
        tasks = list(tasks)
        had.append((len(tasks), owner._data))
        return train(tasks)

    monkeypatch.setattr(engine, "train", asked)
    result = run(runtime, engine)
    assert had == [(3, b"")]
    assert result.bytes_down > 0


@pytest.mark.parametrize(("more", "words"), [(2, "2 outcomes more than"), (-2, "2 outcomes fewer")])
def test_an_engine_has_an_outcome_for_every_task(begun, more, words):
    runtime, engine = begun
    engine.more = more
    with pytest.raises(ValueError, match=words):
        run(runtime, engine)


def test_memory_is_given_back_after_much_alone(monkeypatch):
    calls = []
    monkeypatch.setattr(memory, "_trim", lambda: calls.append)
    memory.give_back(2**20)
    assert not calls
    memory.give_back(2**30)
    assert calls == [0]
    monkeypatch.setattr(memory, "_trim", lambda: None)  # another C library
    memory.give_back(2**30)


def test_a_message_may_be_decoded_by_the_caller(begun):
    runtime, _ = begun
    sent = ServerMessages(runtime.run, runtime.method, runtime.method.init(runtime.run), 1)
    (task,) = sent.tasks([1], {})
    received = runtime.received(task)
    found, wanted = runtime.train(replace(task, message=b""), received), runtime.train(task)
    assert found == wanted
    assert torch.equal(received["1.weight"], runtime.received(task)["1.weight"])
