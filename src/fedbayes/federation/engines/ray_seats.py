"""Seats for actors of Ray: who is lost is replaced, and the work goes to whoever is idle.

Every seat is a thread with one actor: it takes the next job and waits for the answer. Where the
actor is lost, it puts the job back in front and asks Ray for another one. Answers are taken in the
order of the cohort.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import ray
import torch
from ray.exceptions import RayError

from fedbayes.errors import EngineError
from fedbayes.federation.client_runtime import Evaluation, Task
from fedbayes.federation.engines.questions import described, question, require_answer
from fedbayes.federation.engines.ray_actor import ActorPlace, Answer
from fedbayes.version import __version__

TRIES = 3
"""How often work is given to another actor, and a seat a fresh one, before the engine gives up."""
_LONGEST = 500
"""Letters of what Ray says of a loss."""
_END = 20.0
"""Seconds that actors have to end."""
LOOK = 0.5
"""Seconds between two looks at whether a seat is still wanted."""
TOGETHER = 0.04
"""Seconds of work that an actor is given at once: a call of Ray takes some milliseconds."""


@dataclass
class Job:
    """Work for whichever actor is idle."""

    item: Task | Evaluation
    shared: Any
    """What several have in common: bytes, or where they are in the object store."""
    answer: "Future[Answer]" = field(default_factory=Future)
    losses: int = 0
    """Actors that were lost at work on it."""
    begun: bool = False


class ActorPool:
    """Threads, each with an actor in its seat, that take jobs in turn.

    Args:
        create: asks Ray for an actor.
        build: has it build the clients, and gives Ray's reference to what it says.
        count: how many seats there are.
    """

    def __init__(self, create: Callable[[], Any], build: Callable[[Any], Any], count: int) -> None:
        self._create, self._build = create, build
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self.count = 0
        self.places: dict[int, ActorPlace] = {}
        """Where the actors are that are up, by seat."""
        self.working: set[int] = set()
        """Clients that are at work."""
        self.answered: set[int] = set()
        """Clients of the round under way that are done."""
        self.notes: deque[str] = deque()
        """What the user is to be told."""
        self.lost = 0
        """How many actors were lost."""
        self.given_up = 0
        """Seats that stay empty."""
        self.failure: Exception | None = None
        """Why no seat can be taken; None as long as some can."""
        self.empty_since: float | None = time.monotonic()
        """Since when no actor is up; None while there is one."""
        self._seconds = dict[type, float]()  # that an item of a kind took when last looked
        self._actors: dict[int, Any] = {}
        self._threads: list[threading.Thread] = []
        self.grow(count)

    def grow(self, more: int) -> None:
        """Add so many seats."""
        for seat in range(self.count, self.count + more):
            name = f"fedbayes-ray-{seat}"
            thread = threading.Thread(target=self._serve, args=(seat,), name=name, daemon=True)
            self._threads.append(thread)
        self.count += more
        for thread in self._threads[self.count - more :]:
            thread.start()

    def together(self, item: Task | Evaluation) -> int:
        """How many jobs like this an actor does in one call at most: several if they are short."""
        return max(1, int(TOGETHER / self._seconds.get(type(item), TOGETHER)))

    def put(self, jobs: Sequence[Job], *, first: bool = False) -> None:
        """Hand jobs to the seats."""
        with self._changed:
            if not self._over:
                self._jobs = deque([*jobs, *self._jobs] if first else [*self._jobs, *jobs])
                self._changed.notify(len(jobs))
                return
        for job in jobs:
            job.answer.set_exception(self.failure or _cut_off(job))

    def wait(self, seconds: float) -> None:
        """Wait until every seat is taken, or no more can be, for so many seconds at most."""

        def settled() -> bool:
            return self.failure is not None or len(self.places) == self.count - self.given_up

        with self._changed:
            self._changed.wait_for(settled, seconds)

    def close(self) -> None:
        """End the actors, those at work too."""
        with self._changed:
            self._closed = True
            jobs, self._jobs = [*self._jobs], deque()
            self._changed.notify_all()
        for job in jobs:
            if not job.answer.cancel():
                job.answer.set_exception(_cut_off(job))
        for actor in [*self._actors.values()]:
            _kill(actor)
        end = time.monotonic() + _END
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0.0))

    def _serve(self, seat: int) -> None:
        """Take jobs as long as there are any to come, on one actor after the other."""
        failures = 0
        while not self._over and failures < TRIES:
            actor = None
            try:
                actor = self._actors[seat] = self._create()
                place: ActorPlace = self._get(actor.place.remote())
                self._enter(seat, place)
                require_answer(self._get(self._build(actor)), f"{place.words}: ")
                failures = 0
                while jobs := self._next():
                    self._do(actor, jobs, place)
            except (RayError, _ClosedError) as error:
                failures += 1
                self._leave(seat, error, failures)
            except Exception as error:  # of ours, or a user's mistake: the same on any actor
                self._fail(error)
            finally:
                self._actors.pop(seat, None)
                _kill(actor)

    def _get(self, reference: Any) -> Any:
        """What an actor says, unless the seat is no longer wanted."""
        while not self._over:
            if ray.wait([reference], timeout=LOOK)[0]:
                return ray.get(reference)
        raise _ClosedError

    def _next(self) -> list[Job]:
        """The next job, and with it those that wait and are as short; none where none will come."""
        with self._changed:
            while not self._over:
                jobs, share = list[Job](), ceil(len(self._jobs) / self.count)
                while self._jobs and (not jobs or self._together(jobs, self._jobs[0], share)):
                    job = self._jobs.popleft()
                    if job.begun or job.answer.set_running_or_notify_cancel():
                        job.begun = True
                        jobs.append(job)
                if jobs:
                    return jobs
                self._changed.wait()
        return []

    def _together(self, jobs: Sequence[Job], other: Job, share: int) -> bool:
        """Whether an actor is to do another job in the same call: a short one, of its share."""
        # A job at which an actor was lost is done alone, so that it ends no others.
        return (
            jobs[0].shared is other.shared
            and not jobs[0].losses + other.losses
            and len(jobs) < min(share, self.together(other.item))
        )

    def _do(self, actor: Any, jobs: Sequence[Job], place: ActorPlace) -> None:
        """Have an actor do jobs that share their first bytes; if it is lost, others are to."""
        clients = {job.item.client for job in jobs if isinstance(job.item, Task)}
        self.working |= clients
        began = time.monotonic()
        try:
            asked = [(header, blobs[1:]) for header, blobs in (question(job.item) for job in jobs)]
            answers = ray.get(actor.answer.remote(jobs[0].shared, asked))
        except RayError as error:
            self._again(jobs, error, place)
            raise
        except Exception as error:
            for job in jobs:
                job.answer.set_exception(error)
            return
        finally:
            self.working -= clients
        self._seconds[type(jobs[0].item)] = (time.monotonic() - began) / len(jobs)
        self.answered |= clients
        for job, (reply, blobs) in zip(jobs, answers, strict=True):
            try:
                require_answer(reply)
            except Exception as error:
                job.answer.set_exception(error)
            else:
                job.answer.set_result((reply, blobs))

    def _again(self, jobs: Sequence[Job], error: RayError, place: ActorPlace) -> None:
        """Give jobs to another actor, those that did not end too many."""
        if self._closed:
            for job in jobs:
                job.answer.set_exception(_cut_off(job))
            return
        for job in jobs:
            job.losses += 1
        what = " and ".join(described(job.item) for job in jobs)
        if jobs[0].losses >= TRIES:
            jobs[0].answer.set_exception(
                EngineError(
                    f"actors were lost {TRIES} times at {what}, the last on {place.words}: "
                    f"{cause(error)}. Out of memory? Try fewer actors on a node (ray.cpus), or "
                    "engine = 'sequential' to see the failure. Run `fedbayes resume` to continue "
                    "after the last complete round"
                )
            )
            return
        self.notes.append(
            f"the actor on {place.words} was lost at {what}, which another one repeats: "
            f"{cause(error)}"
        )
        self.put(jobs, first=True)

    @property
    def _over(self) -> bool:
        return self._closed or self.failure is not None

    def _enter(self, seat: int, place: ActorPlace) -> None:
        """Note that a seat is taken."""
        if place.version != __version__:
            raise EngineError(
                f"{place.words} has fedbayes {place.version}, but this process has {__version__}. "
                "Install the same version on all nodes"
            )
        if place.torch != torch.__version__:
            self.notes.append(
                f"{place.words} has PyTorch {place.torch}, but this process has "
                f"{torch.__version__}: numbers may differ by rounding"
            )
        with self._changed:
            self.places[seat] = place
            self.empty_since = None
            self._changed.notify_all()

    def _leave(self, seat: int, error: Exception, failures: int) -> None:
        """Note that a seat is empty; after too many failures in a row it stays so."""
        with self._changed:
            if self.places.pop(seat, None):
                self.lost += not self._closed
            if not self.places and self.empty_since is None:
                self.empty_since = time.monotonic()
            if failures < TRIES or self._closed:
                return
            self.given_up += 1
        why = f"an actor could not be started {TRIES} times: {cause(error)}"
        if self.given_up == self.count:
            self._fail(EngineError(why))
        else:
            self.notes.append(f"{why}. The run continues with {self.count - self.given_up}")

    def _fail(self, error: Exception) -> None:
        """End all that is to be done with an error."""
        with self._changed:
            self.failure = self.failure or error
            jobs, self._jobs = [*self._jobs], deque()
            self._changed.notify_all()
        for job in jobs:
            if not job.answer.cancelled():
                job.answer.set_exception(error)


class _ClosedError(Exception):
    """The engine was closed."""


def cause(error: BaseException) -> str:
    """What Ray says of a loss, in a line."""
    lines = [line for line in str(error).splitlines() if line.strip() and line[0] != "\t"]
    if getattr(error, "actor_init_failed", False) and lines:
        words = lines[-1]
        if "'fedbayes'" in words:
            words += " (fedbayes must be installed on every node)"
    else:
        words = next((line for line in lines if "finishing this task" not in line), "")
    return words.strip()[:_LONGEST] or type(error).__name__


def _cut_off(job: Job) -> EngineError:
    return EngineError(f"{described(job.item)} was interrupted: the engine was closed")


def _kill(actor: Any) -> None:
    """End an actor; of one that is gone there is nothing to be done."""
    if actor is not None:
        with suppress(Exception):
            ray.kill(actor)
