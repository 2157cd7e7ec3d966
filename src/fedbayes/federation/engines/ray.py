"""The `ray` engine: clients in actors of a cluster, or of a Ray of the run's own."""

import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import wait
from itertools import chain, islice
from pathlib import Path
from typing import Any

import ray

from fedbayes.core import here, portable
from fedbayes.core.devices import CUBLAS
from fedbayes.core.messages import decode_file
from fedbayes.core.tensors import Tensors
from fedbayes.errors import EngineError, warn
from fedbayes.federation.client_runtime import ClientResult, Evaluation, Task
from fedbayes.federation.engines import AtWork
from fedbayes.federation.engines.questions import outcome
from fedbayes.federation.engines.ray_actor import ActorClients, ActorPlace, Answer
from fedbayes.federation.engines.ray_cluster import INLINE, connect
from fedbayes.federation.engines.ray_room import free_words, how_many, room, spare, there_is
from fedbayes.federation.engines.ray_seats import ActorPool, Job
from fedbayes.federation.ray_settings import RaySettings

AHEAD = 4
"""Calls for each actor that are handed out before the first of them is done."""
STORED = 4
"""Messages that stay in the object store until others come; those under way stay anyway."""
SHORT = 1_000_000
"""Bytes of a message that goes with each call at most; a longer one is stored once for all."""
LOOK = 5.0
"""Seconds between two looks at whether there is still a cluster, while an answer is waited for."""
_HANDED_ON = ("FEDBAYES_DATA", "HF_HOME", "HF_HUB_OFFLINE")
"""Variables of the environment that actors get where their node has none."""


class OnRay:
    """The cohort spread over actors of Ray.

    Args:
        factory: "package.module:function" of files and device that builds the clients.
        files: of the run folder, from which they are built, by name.
        settings: of Ray.
        clients: that are at work at a time at most.
        threads: of each actor.

    Raises:
        EngineError: there is no cluster, or no room for the actors, or none came up in time.
    """

    def __init__(
        self,
        factory: str,
        files: Mapping[str, bytes],
        settings: RaySettings,
        *,
        clients: int,
        threads: int = 1,
    ) -> None:
        self._settings = settings
        self._began = self._looked = time.monotonic()
        self._cluster = connect(settings.address, settings.start_timeout)
        self._seats: ActorPool | None = None
        self._stored = deque[tuple[bytes, Any]](maxlen=STORED)
        try:
            self._needs = needs = settings.needs(threads)
            self._clients = clients
            count = how_many(self._cluster, settings, needs, clients)
            actor = ray.remote(ActorClients).options(**_options(needs, threads))
            variables = {name: os.environ[name] for name in _HANDED_ON if name in os.environ}
            carried = ray.put(files)
            device = "cuda" if settings.gpus else None
            self._seats = ActorPool(
                lambda: actor.remote(variables, str(Path.cwd())),
                lambda one: one.build.remote(factory, carried, device, threads),
                count,
            )
            self._wait()
        except BaseException:
            self.close()
            raise

    @property
    def places(self) -> list[ActorPlace]:
        """Where the actors are that are up."""
        return list(self._running.places.values())

    @property
    def lost(self) -> int:
        """How many actors were lost."""
        return self._running.lost

    def train(self, tasks: Iterable[Task]) -> Iterator[ClientResult]:
        """Run the tasks on whichever actor is idle."""
        seats = self._running
        self._make_use_of_nodes(seats)
        seats.answered.clear()
        yield from (outcome(*answer) for answer in self._spread(tasks))
        seats.answered.clear()

    def evaluate(self, evaluations: Iterable[Evaluation]) -> Iterator[Tensors]:
        """Run the evaluations on whichever actor is idle."""
        return (decode_file(blobs[0]) for _, blobs in self._spread(evaluations))

    def at_work(self) -> AtWork:
        """The clients that actors are at work for."""
        if self._seats is None:
            return AtWork()
        return AtWork(tuple(sorted(self._seats.working.copy())), len(self._seats.answered))

    def close(self) -> None:
        """End the actors, and a Ray of the run's own with them."""
        seats, self._seats = self._seats, None
        self._stored.clear()
        if seats is not None:
            seats.close()
        self._cluster.close()

    @property
    def _running(self) -> ActorPool:
        if self._seats is None:
            raise EngineError("the engine was closed")
        return self._seats

    def _spread(self, items: Iterable[Task | Evaluation]) -> Iterator[Answer]:
        """Answers in order, with so few items under way that they need little memory."""
        seats, under_way, coming = self._running, deque[Job](), iter(items)
        try:
            for item in coming:
                more = AHEAD * seats.count * seats.together(item) - len(under_way) - 1
                fresh = chain([item], islice(coming, max(more, 0)))
                jobs = [Job(one, self._shared(one)) for one in fresh]
                under_way.extend(jobs)
                seats.put(jobs)
                yield self._answer(under_way.popleft())
            while under_way:
                yield self._answer(under_way.popleft())
        finally:
            for job in under_way:
                job.answer.cancel()

    def _make_use_of_nodes(self, seats: ActorPool) -> None:
        """Have more actors where nodes have joined, unless a number was asked for."""
        if self._settings.actors or self._cluster.own or seats.count >= self._clients:
            return
        most = min(room(self._cluster, self._needs), self._clients)
        more = min(most - seats.count, spare(self._needs))
        if more > 0:
            seats.grow(more)

    def _shared(self, item: Task | Evaluation) -> Any:
        """What several items share: long tensors once in the object store, short ones inline."""
        # A Ray that the user started may send no more than 100 KB with a call. Where clients start
        # in several rounds, the messages of these take turns.
        data = item.message if isinstance(item, Task) else item.model
        if len(data) <= SHORT and not self._cluster.borrowed:
            return data
        for kept, reference in self._stored:
            if kept is data:
                return reference
        reference = ray.put(data)
        self._stored.append((data, reference))
        return reference

    def _answer(self, job: Job) -> Answer:
        """Wait for an answer, and tell what there is to tell meanwhile."""
        while True:
            done, _ = wait([job.answer], timeout=1.0)
            self._tell()
            if done:
                return job.answer.result()
            if time.monotonic() - self._looked > LOOK:
                self._looked = time.monotonic()
                self._cluster.require_head()
                self._require_actors()

    def _tell(self) -> None:
        notes = self._running.notes
        while notes:
            warn(notes.popleft())

    def _require_actors(self) -> None:
        """See that an actor is up, or was until a short while ago."""
        seats, patience = self._running, self._settings.start_timeout
        if seats.empty_since and time.monotonic() - seats.empty_since > patience:
            raise EngineError(
                f"all actors of Ray were lost, and no new one started within {patience:g} seconds "
                f"(ray.start_timeout): {there_is(self._cluster)}. Run `fedbayes resume` to "
                "continue after the last complete round"
            )

    def _wait(self) -> None:
        """Wait for the actors, and go on with those that came."""
        seats, patience = self._running, self._settings.start_timeout
        seats.wait(max(patience - (time.monotonic() - self._began), 1.0))
        if seats.failure is not None:
            raise seats.failure
        if not seats.places:
            raise EngineError(
                f"no actor started within {patience:g} seconds (ray.start_timeout): "
                f"{there_is(self._cluster)}, of which {free_words()} is free"
            )
        if len(seats.places) < seats.count:
            seats.notes.append(
                f"{len(seats.places)} of {seats.count} actors have started; the others join when "
                "the cluster has room"
            )
        self._tell()


def _options(needs: Mapping[str, float], threads: int) -> dict[str, Any]:
    """How Ray is to start an actor: what it needs, and the variables of its process."""
    apart = {name: amount for name, amount in needs.items() if name not in ("CPU", "GPU")}
    return {
        "num_cpus": needs["CPU"],
        "num_gpus": needs.get("GPU", 0),
        "resources": apart,
        "max_restarts": 0,
        "max_task_retries": 0,
        "runtime_env": {
            "env_vars": {
                **CUBLAS,
                **INLINE,
                **here.variables(),
                "OMP_NUM_THREADS": str(threads),
                **portable.inherited(),
                "PYTHONPATH": os.pathsep.join(_own_places()),
            }
        },
    }


def _own_places() -> list[str]:
    """Where this process looks modules up, but for those that come with its Python."""
    shipped = {Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)}
    places = [Path(path).absolute() for path in sys.path if path]
    return [str(p) for p in places if shipped.isdisjoint(p.resolve().parents)]


def start(simulation: Any) -> OnRay:
    """The engine for a `Simulation`: what a run folder says of the clients goes to the actors."""
    config = simulation.config
    settings: RaySettings = config.ray
    if not settings.gpus and simulation.network.device.type != "cpu":
        raise EngineError(
            f"devices lists {config.device!r}, but actors have no GPU. Set ray.gpus (0.5: two "
            "actors share one GPU) instead of devices"
        )
    if settings.cpus is not None and settings.cpus < config.threads:
        warn(
            f"ray.cpus = {settings.cpus:g} and threads = {config.threads}: actors may share cores "
            "with one another"
        )
    return OnRay(
        "fedbayes.runs.build:elsewhere",
        simulation.folder.fixed_files(),
        settings,
        clients=simulation.cohort,
        threads=config.threads,
    )
