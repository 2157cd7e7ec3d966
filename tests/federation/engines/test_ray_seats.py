"""Work given to actors of Ray, with stand-ins for Ray and its actors."""

import time
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from ray.exceptions import RayError

from fedbayes.errors import EngineError, MessageError
from fedbayes.federation.client_runtime import Evaluation, Task
from fedbayes.federation.engines import ray_seats
from fedbayes.federation.engines.ray_actor import ActorPlace
from fedbayes.federation.engines.ray_seats import ActorPool, Job
from fedbayes.version import __version__

torch_version = ray_seats.torch.__version__


class Actor:
    """Says at once what a real one's reference would give, and notes what it was asked."""

    calls: list[list[int]]
    deadly = -1
    wrong = -1
    seconds = 0.0

    def __init__(self) -> None:
        here = ActorPlace("node", "10.0.0.1", "host", 1, __version__, torch_version)
        self.place = SimpleNamespace(remote=lambda: here)
        self.answer = SimpleNamespace(remote=self._answer)

    def _answer(self, shared, questions: Sequence):
        clients = [header["client"] for header, _ in questions]
        self.calls.append(clients)
        if self.deadly in clients:
            raise RayError("out of memory")
        time.sleep(self.seconds * len(clients))
        failed = {"error": "MessageError", "text": "damaged"}
        return [(failed if c == self.wrong else {"of": c}, [shared, *rest]) for c, (_, rest) in
                zip(clients, questions, strict=True)]  # fmt: skip


@pytest.fixture
def actors(monkeypatch):
    """The kind of the actors; a test may say that a client is deadly to them, or damaged.

    All that is not slept through is short, on however busy a machine.
    """
    monkeypatch.setattr(ray_seats, "TOGETHER", 10.0)
    stand_in = SimpleNamespace(
        get=lambda reference: reference,
        wait=lambda references, timeout: (references, []),
        kill=lambda actor: None,
    )
    monkeypatch.setattr(ray_seats, "ray", stand_in)
    return type("Actors", (Actor,), {"calls": []})


def ask(seats, clients, shared=b"broadcast"):
    """Jobs for these clients, put all at once."""
    jobs = [Job(Task(client, 1, b"", b"%d" % client), shared) for client in clients]
    seats.put(jobs)
    return jobs


def done(jobs):
    """The clients that answers are of, in the order of the jobs."""
    return [job.answer.result(timeout=10)[0]["of"] for job in jobs]


def test_short_work_goes_several_to_a_call(actors, monkeypatch):
    """As many as were done in that time, as far as is known from the first, which goes alone."""
    monkeypatch.setattr(ray_seats, "TOGETHER", 0.1)
    seats = ActorPool(actors, lambda actor: {}, 1)
    actors.seconds = 0.025  # sleeping takes no less
    jobs = ask(seats, range(9))
    assert done(jobs) == [*range(9)]
    assert actors.calls[0] == [0]
    assert all(1 <= len(call) <= 4 for call in actors.calls[1:])
    assert [job.answer.result()[1] for job in jobs] == [
        [b"broadcast", b"%d" % client] for client in range(9)
    ]
    monkeypatch.setattr(ray_seats, "TOGETHER", 10.0)
    ask(seats, range(9))[-1].answer.result(timeout=10)
    assert max(map(len, actors.calls)) > 4
    seats.close()


def test_long_work_goes_alone(actors, monkeypatch):
    monkeypatch.setattr(ray_seats, "TOGETHER", 0.01)
    seats = ActorPool(actors, lambda actor: {}, 1)
    actors.seconds = 0.01
    assert done(ask(seats, range(5))) == [*range(5)]
    assert actors.calls == [[0], [1], [2], [3], [4]]
    seats.close()


def test_two_actors_share_what_waits(actors):
    """Nobody takes more than half of it, so that the other is not idle."""
    seats = ActorPool(actors, lambda actor: {}, 2)
    assert done(ask(seats, range(2))) == [0, 1]
    assert done(ask(seats, range(2, 42))) == [*range(2, 42)]
    assert max(map(len, actors.calls)) <= 20
    assert sorted(client for call in actors.calls for client in call) == [*range(42)]
    seats.close()


def test_what_has_other_first_bytes_goes_apart(actors):
    """Clients of two rounds at once get each its own broadcast."""
    seats = ActorPool(actors, lambda actor: {}, 1)
    done(ask(seats, [0]))
    first, second = b"first", b"second"
    jobs = [Job(Task(c, 1, b"", None), second if c % 2 else first) for c in range(6)]
    seats.put(jobs)
    assert [job.answer.result(timeout=10)[1][0] for job in jobs] == [first, second] * 3
    assert [len(call) for call in actors.calls] == [1] * 7
    seats.close()


def test_a_failure_is_told_of_its_client_alone(actors):
    seats = ActorPool(actors, lambda actor: {}, 1)
    done(ask(seats, [0]))
    actors.wrong = 3
    jobs = ask(seats, range(1, 6))
    with pytest.raises(MessageError, match="damaged"):
        jobs[2].answer.result(timeout=10)
    assert done(jobs[:2] + jobs[3:]) == [1, 2, 4, 5]
    seats.close()


def test_a_deadly_client_ends_the_others_of_its_call_no_more_than_once(actors):
    """What was under way with it is done alone, and only the one to blame is given up."""
    seats = ActorPool(actors, lambda actor: {}, 1)
    done(ask(seats, [0]))
    actors.deadly = 3
    jobs = ask(seats, range(1, 6))
    with pytest.raises(EngineError, match=r"lost 3 times at client 3 in round 1.*out of memory"):
        jobs[2].answer.result(timeout=10)
    assert done(jobs[:2]) == [1, 2]
    after = actors.calls[2:]
    assert actors.calls[1] == [1, 2, 3, 4, 5]
    assert all(len(call) == 1 for call in after[:4])
    assert "client 1 in round 1 and client 2 in round 1" in seats.notes[0]
    seats.close()


def test_evaluations_and_tasks_have_times_of_their_own(actors):
    seats = ActorPool(actors, lambda actor: {}, 1)
    done(ask(seats, [0]))
    assert seats.together(Task(1, 1, b"", None)) > 10
    assert seats.together(Evaluation(b"", 0, 1, ())) == 1
    seats.close()
