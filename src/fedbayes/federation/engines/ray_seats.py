"""Seats for actors of Ray: who is lost is replaced, and the work goes to whoever is idle."""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from ray.exceptions import RayError

from fedbayes.errors import EngineError
from fedbayes.federation.client_runtime import Evaluation, Task
from fedbayes.federation.engines.questions import described, question, require_answer
from fedbayes.federation.engines.ray_actor import Answer, Place
from fedbayes.version import __version__

TRIES = 3
"""How often work is given to another actor, and a seat a fresh one, before the engine gives up."""
_LONGEST = 500
"""Letters of what Ray says of a loss."""
_END = 20.0
"""Seconds that actors have to end."""
LOOK = 0.5
"""Seconds between two looks at whether a seat is still wanted."""


@dataclass
class Job:
    """Work for whichever actor is idle."""

    item: Task | Evaluation
    shared: Any
    """What several have in common, in the object store."""
    answer: "Future[Answer]" = field(default_factory=Future)
    losses: int = 0
    """Actors that were lost at work on it."""
    begun: bool = False


class Seats:
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
        self.places: dict[int, Place] = {}
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

    def put(self, job: Job, *, first: bool = False) -> None:
        """Hand a job to the seats."""
        with self._changed:
            if self.failure is not None or self._closed:
                job.answer.set_exception(self.failure or _cut_off(job))
                return
            self._jobs.insert(0 if first else len(self._jobs), job)
            self._changed.notify()

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
                place: Place = self._get(actor.place.remote())
                self._enter(seat, place)
                require_answer(self._get(self._build(actor)), f"{place.words}: ")
                failures = 0
                while job := self._next():
                    self._do(actor, job, place)
            except (RayError, _ClosedError) as error:
                failures += 1
                self._leave(seat, error, failures)
            except Exception as error:  # of ours, or a user's mistake: the same on any actor
                self._fail(error)
            finally:
                self._actors.pop(seat, None)
                _kill(actor)

    def _get(self, reference: Any) -> Any:
        """What an actor says, unless the seat is no longer wanted.

        Raises:
            RayError: the actor is lost.
            _ClosedError: the engine was closed.
        """
        while not self._over:
            if ray.wait([reference], timeout=LOOK)[0]:
                return ray.get(reference)
        raise _ClosedError

    def _next(self) -> Job | None:
        """The next job; None where there will be none."""
        with self._changed:
            while not self._over:
                while self._jobs:
                    job = self._jobs.popleft()
                    if job.begun or job.answer.set_running_or_notify_cancel():
                        job.begun = True
                        return job
                self._changed.wait()
        return None

    def _do(self, actor: Any, job: Job, place: Place) -> None:
        """Have an actor do a job; if it is lost, another one is to.

        Raises:
            RayError: the actor is lost.
        """
        header, blobs = question(job.item)
        client = job.item.client if isinstance(job.item, Task) else None
        if client is not None:
            self.working.add(client)
        try:
            reply, answer = ray.get(actor.ask.remote(header, job.shared, *blobs[1:]))
            require_answer(reply)
        except RayError as error:
            self._again(job, error, place)
            raise
        except Exception as error:
            job.answer.set_exception(error)
            return
        finally:
            if client is not None:
                self.working.discard(client)
        if client is not None:
            self.answered.add(client)
        job.answer.set_result((reply, answer))

    def _again(self, job: Job, error: RayError, place: Place) -> None:
        """Give a job to another actor, if it did not end too many."""
        if self._closed:
            job.answer.set_exception(_cut_off(job))
            return
        job.losses += 1
        what = described(job.item)
        if job.losses >= TRIES:
            job.answer.set_exception(
                EngineError(
                    f"actors were lost {TRIES} times at {what}, the last on {place.words}: "
                    f"{cause(error)}. Out of memory? Try fewer actors on a node (ray.cpus), or "
                    "engine = 'sequential' to see the failure itself; `fedbayes resume` goes on "
                    "after the last complete round"
                )
            )
            return
        self.notes.append(
            f"the actor on {place.words} was lost at {what}, which another one does again: "
            f"{cause(error)}"
        )
        self.put(job, first=True)

    @property
    def _over(self) -> bool:
        return self._closed or self.failure is not None

    def _enter(self, seat: int, place: Place) -> None:
        """Note that a seat is taken.

        Raises:
            EngineError: what is there is of another version.
        """
        if place.version != __version__:
            raise EngineError(
                f"{place.words} has fedbayes {place.version}, and this process {__version__}; "
                "install the same on all nodes"
            )
        if place.torch != torch.__version__:
            self.notes.append(
                f"{place.words} has PyTorch {place.torch}, and this process {torch.__version__}: "
                "numbers may differ by rounding from those of one machine"
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
            self.notes.append(f"{why}. The run goes on with {self.count - self.given_up}")

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
    return EngineError(f"{described(job.item)} was cut off: the engine was closed")


def _kill(actor: Any) -> None:
    """End an actor; of one that is gone there is nothing to be done."""
    if actor is not None:
        with suppress(Exception):
            ray.kill(actor)
