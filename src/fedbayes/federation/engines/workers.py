"""The `workers` engine: processes that stay up and get only encoded messages."""

import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import psutil
from joblib import cpu_count

from fedbayes.core import portable
from fedbayes.core.devices import CUBLAS, find_devices
from fedbayes.core.here import variables
from fedbayes.core.messages import decode_file
from fedbayes.core.tensors import Tensors
from fedbayes.errors import EngineError, warn
from fedbayes.federation.client_runtime import ClientResult, Evaluation, Task
from fedbayes.federation.engines import AtWork
from fedbayes.federation.engines.questions import (
    Header,
    described,
    outcome,
    question,
    require_answer,
)
from fedbayes.federation.engines.worker import read, write

Item = TypeVar("Item")
Result = TypeVar("Result")

TRIES = 3
"""How often a task is given to a fresh worker before the engine gives up."""


_PIPE = 1 << 20
"""Bytes that a pipe holds, so that a report is handed over at once (Linux; else ignored)."""


WORKER_BYTES = 512 << 20
"""Memory that a worker needs at least: PyTorch, a network, a client's data."""
MOST = 16
"""Workers at most, where no number is set; a machine with more cores is probably shared."""


def affordable(asked: int, threads: int = 1) -> int:
    """How many worker processes of those asked for this machine can bear; a note if fewer.

    As many as there are cores for their threads (two at least) and memory for `WORKER_BYTES` each.
    """
    cores: int = cpu_count()
    by_cores = max(2, cores // threads)
    by_memory: int = max(1, psutil.virtual_memory().available // WORKER_BYTES)
    count = min(asked, by_cores, by_memory)
    if count < asked:
        reason = (
            f"this machine has {cores} cores for {threads} thread{'s' * (threads > 1)} each"
            if by_cores <= by_memory
            else f"this machine has no memory for more, at {WORKER_BYTES >> 20} MiB each"
        )
        warn(f"{count} of {asked} workers are started: {reason}")
    return count


def environment(threads: int, cores: int | None = None) -> dict[str, str]:
    """Variables of a worker process: its modules are found where those of this one are.

    Args:
        threads: that it computes with.
        cores: that it and its own processes may use; None: one for each thread.
    """
    return {
        **CUBLAS,
        **os.environ,
        **variables(),
        "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
        "OMP_NUM_THREADS": str(threads),
        "LOKY_MAX_CPU_COUNT": str(cores or threads),  # for `joblib.cpu_count`
        **portable.inherited(),
    }


class DiedError(Exception):
    """The process ended before it answered."""


class Process:
    """A process that works for this one, and the pipes to it.

    Args:
        module: that it runs: one that reads frames from `worker.pipes` until they end.
        threads: that it computes with.
        cores: that it and its own processes may use; None: one for each thread.
    """

    def __init__(self, module: str, threads: int, cores: int | None = None) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the process)
        self.process = subprocess.Popen(
            # -P: modules are found where this process finds them, in the same order.
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=environment(threads, cores),
            pipesize=_PIPE,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._requests, self._replies = self.process.stdin, self.process.stdout

    def tell(self, header: Header, blobs: Sequence[bytes] = ()) -> None:
        """Send a request. Raises a DiedError if the process has ended."""
        try:
            write(self._requests, header, blobs)
        except (OSError, ValueError):
            raise DiedError from None

    def hear(self) -> tuple[Header, list[bytes]]:
        """Wait for the next reply. Raises a DiedError if the process ended first."""
        try:
            return read(self._replies)
        except (EOFError, OSError, ValueError):
            raise DiedError from None

    def last_words(self) -> str:
        """How the process ended and the end of what it printed."""
        self._said.seek(0)
        text = self._said.read().decode(errors="replace").strip()
        return f"exit status {self.process.wait()}" + (
            f". Its output: {text[-2000:]}" if text else ""
        )

    def close(self) -> None:
        """Close the pipes and end the process."""
        self.process.kill()
        self.process.wait()
        for stream in (self._requests, self._replies, self._said):
            with suppress(OSError):  # unsent bytes to a dead process
                stream.close()


P = TypeVar("P", bound=Process)


class ProcessPool(Generic[P]):
    """Processes that threads ask in turn; one that died is replaced."""

    def __init__(self, processes: list[P], name: str) -> None:
        self.all = processes
        self.idle: SimpleQueue[P] = SimpleQueue()
        for process in processes:
            self.idle.put(process)
        self.threads = ThreadPoolExecutor(len(processes), thread_name_prefix=name)
        self.closed = False
        self.replaced = 0
        """How many processes died and were replaced."""

    def replace(self, died: P, fresh: Callable[[], P]) -> P:
        """Put a fresh process in the place of one that died."""
        died.close()
        process = fresh()
        self.all[self.all.index(died)] = process
        self.replaced += 1
        return process

    def close(self) -> None:
        """End the processes, those at work too; no further work is begun."""
        self.closed = True
        self.threads.shutdown(wait=False, cancel_futures=True)
        for process in self.all:
            process.process.kill()
        self.threads.shutdown(wait=True)
        for process in self.all:
            process.close()


class _Worker(Process):
    """A process that has the clients of a run."""

    def __init__(self, factory: str, argument: str, threads: int, device: str) -> None:
        super().__init__("fedbayes.federation.engines.worker", threads)
        self.device = device
        self._last: bytes | None = None
        greeting = {"factory": factory, "argument": argument, "threads": threads, "device": device}
        self._greeting: Header | None = greeting

    def call(self, header: Header, blobs: Sequence[bytes]) -> tuple[Header, list[bytes]]:
        """Send a request and wait for the reply.

        The first blob is not sent again while it is the very same object: a broadcast to many
        clients of one worker travels once.
        """
        if self._greeting is not None:
            self.tell(self._greeting)
            require_answer(self.hear()[0])
            self._greeting = None
        same = blobs[0] is self._last
        self._last = blobs[0]
        self.tell({**header, "same": same}, [b"" if same else blobs[0], *blobs[1:]])
        reply, answer = self.hear()
        require_answer(reply)
        return reply, answer


class Workers:
    """The cohort spread over worker processes.

    Args:
        factory: "package.module:function" that builds the `ClientRuntime` in the worker.
        argument: its argument, a string; the other one is the name of the worker's device.
        workers: number of processes.
        threads: threads of each.
        devices: names of devices, which workers take in turn: worker i the one at i modulo their
            number. More workers than devices are several on each.
    """

    def __init__(
        self,
        factory: str,
        argument: str,
        *,
        workers: int,
        threads: int = 1,
        devices: Sequence[str] = ("cpu",),
    ) -> None:
        def make(device: str) -> _Worker:
            return _Worker(factory, argument, threads, device)

        self._make = make
        started = [make(devices[place % len(devices)]) for place in range(workers)]
        self._pool = ProcessPool(started, "fedbayes-worker")
        self._working: set[int] = set()  # clients; changed by the threads of the workers
        self._answered: set[int] = set()  # clients of the round under way

    @property
    def replaced(self) -> int:
        """How many workers died and were replaced."""
        return self._pool.replaced

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.process.pid for worker in self._pool.all]

    @property
    def devices(self) -> list[str]:
        """The device of each worker."""
        return [worker.device for worker in self._pool.all]

    def train(self, tasks: Iterable[Task]) -> Iterator[ClientResult]:
        """Run the tasks on whichever worker is idle."""
        self._answered.clear()
        yield from self._spread(self._train, tasks)
        self._answered.clear()

    def evaluate(self, evaluations: Iterable[Evaluation]) -> Iterator[Tensors]:
        """Run the evaluations on whichever worker is idle."""
        return self._spread(self._evaluate, evaluations)

    def at_work(self) -> AtWork:
        """The clients that processes are at work for."""
        return AtWork(tuple(sorted(self._working.copy())), len(self._answered))

    def close(self) -> None:
        """End the processes, those at work too."""
        self._pool.close()

    def _spread(self, work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Results in order, with so few items under way that they need little memory."""
        under_way: deque[Future[Result]] = deque()
        for item in items:
            under_way.append(self._pool.threads.submit(work, item))
            if len(under_way) >= 4 * len(self._pool.all):
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()

    def _train(self, task: Task) -> ClientResult:
        self._working.add(task.client)
        try:
            answer = self._call(described(task), *question(task))
        finally:
            self._working.discard(task.client)
        self._answered.add(task.client)
        return outcome(*answer)

    def _evaluate(self, evaluation: Evaluation) -> Tensors:
        _, blobs = self._call(described(evaluation), *question(evaluation))
        return decode_file(blobs[0])

    def _call(
        self, what: str, header: Header, blobs: Sequence[bytes]
    ) -> tuple[Header, list[bytes]]:
        """One request, on as many fresh workers as `TRIES` allows."""
        worker = self._pool.idle.get()
        try:
            for _ in range(TRIES):
                try:
                    return worker.call(header, blobs)
                except DiedError:
                    if self._pool.closed:
                        raise EngineError(
                            f"{what} was interrupted: the engine was closed"
                        ) from None
                    words = worker.last_words()
                    worker = self._pool.replace(worker, partial(self._make, worker.device))
            raise EngineError(
                f"the worker of {what} died {TRIES} times, last with {words}. Out of memory? Try "
                "fewer workers, or engine = 'sequential' to see the failure"
            )
        finally:
            self._pool.idle.put(worker)


def start(simulation: Any) -> Workers:
    """The engine for a `Simulation`."""
    config = simulation.config
    usual = max(len(config.devices), min(MOST, cpu_count() // config.threads), 1)
    return started(simulation, affordable(config.workers or usual, config.threads))


def started(simulation: Any, count: int) -> Workers:
    """Start workers for a `Simulation`; each reads the settings in the run folder."""
    config = simulation.config
    return Workers(
        "fedbayes.runs.build:runtime",
        str(simulation.folder.path.resolve()),
        workers=count,
        threads=config.threads,
        devices=[str(device) for device in find_devices(config.devices)],
    )
