"""The way to a cluster of Ray, or to one of this run's own, and what there is room for.

What is not Ray's public interface is used in this file alone.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import ray
from joblib import cpu_count
from ray.job_config import JobConfig

from fedbayes.core import here
from fedbayes.errors import EngineError, told_as

LOCAL, AUTO = "local", "auto"
_OWN = "fedbayes-ray-"
"""Begins the name of the folder of a Ray of a run's own; the process follows."""
_TOKEN = secrets.token_hex(32)
"""Without which nobody on this machine has anything to say to a Ray of this process's own."""
_PROBE = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"
"""Ray itself takes two minutes to tell that nobody answers."""

INLINE = {"RAY_max_direct_call_object_size": "8000000"}
"""Has what is no longer than so many bytes come with a call itself. The object store, through which
Ray sends 100 KB and more, takes milliseconds each time, and more from node to node."""
_AGAIN = 10.0
"""Seconds that a head which has answered before has to answer again."""

Node = Mapping[str, Any]


@dataclass
class Cluster:
    """A connection of this process to Ray.

    Where this process is connected already, that connection is used, and left as it is.
    """

    address: str
    """As it was asked for: `local`, or `HOST:PORT` of the head."""
    folder: Path | None = None
    """Of a Ray of this run's own."""
    borrowed: bool = False
    """Whether this process was connected before."""
    variables: dict[str, str | None] = field(default_factory=dict)
    """Of the environment, as they were."""
    speak: Callable[[], None] = lambda: None
    """Lets Ray print again."""

    @property
    def own(self) -> bool:
        """Whether it was started for this run, and ends with it."""
        return self.folder is not None

    @property
    def nodes(self) -> list[Node]:
        """Nodes that are up."""
        return [node for node in ray.nodes() if node["Alive"]]

    def require_head(self) -> None:
        """See that the head is there, or raise an EngineError."""
        # Ray itself ends this process a minute after it is gone.
        if self.own or self.borrowed:
            return
        after = (
            ". Start a cluster, and run `fedbayes resume` to continue after the last complete "
            "round (set ray.address in the run's config.toml for another one)"
        )
        lost = f"the head of Ray at {self.address} was lost"
        with told_as(EngineError, lost, OSError, after=after):
            _reach(self.address, _AGAIN)

    def close(self) -> None:
        """Leave it; a Ray of this run's own ends."""
        if not self.borrowed:
            with _handlers_kept():
                ray.shutdown()
            self.speak()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        for name, value in self.variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if self.variables:
            _refresh()  # or a `ray.init` of the user's would still go by these


def connect(address: str | None, seconds: float) -> Cluster:
    """Connect this process to Ray at `ray.address`, or raise an error after these seconds.

    Raises:
        EngineError: nobody answers, or it is no cluster that this process can join.
    """
    asked = address or os.environ.get("RAY_ADDRESS") or LOCAL
    if ray.is_initialized():
        here = ray.get_runtime_context().gcs_address
        if address in (None, AUTO) or _resolved(asked) == here:
            return Cluster(here, borrowed=True)
        raise EngineError(
            f"this process is already connected to the Ray at {here}, but ray.address is "
            f"{asked!r}. Leave ray.address out, or call ray.shutdown() first"
        )
    if asked == LOCAL:
        return _start_own()
    found = _resolved(asked)
    variables = _set({"RAY_USAGE_STATS_ENABLED": "0", **INLINE})
    _refresh()
    cluster = Cluster(found, variables=variables, speak=_silenced())
    try:
        _require_answer(asked, found, seconds)
        _init(asked, address=found)
    except BaseException:
        cluster.close()
        raise
    return cluster


def _resolved(address: str) -> str:
    """`HOST:PORT` of the head of a cluster."""
    if address.startswith("ray://"):
        raise EngineError(
            f"ray.address is {address!r}: Ray Client is not supported. Start the run on a node of "
            "the cluster (`ray start --address=HEAD:6379` makes this machine one), and give auto "
            "or HOST:PORT of the head, 6379 by default"
        )
    if address != AUTO and not address.rpartition(":")[2].isdigit():
        raise EngineError(
            f"ray.address is {address!r}. Write local, auto, or HOST:PORT, as in 10.0.0.1:6379"
        )
    from ray._private.services import canonicalize_bootstrap_address

    try:
        found = canonicalize_bootstrap_address(address)
    except ConnectionError:
        found = None
    except (ValueError, OSError) as error:
        raise EngineError(f"ray.address is {address!r}: {error}") from None
    if found is None:
        raise EngineError(
            f"ray.address is {address!r}, but no Ray is running on this machine. Start one with "
            "`ray start --head`, give HOST:PORT, or set ray.address to local"
        )
    return str(found)


def _require_answer(asked: str, address: str, seconds: float) -> None:
    """See that the head of a cluster answers."""
    nobody = f"no Ray answers at {address} (ray.address = {asked!r})"
    after = ". Is `ray start --head` running there, and its port open?"
    with told_as(EngineError, nobody, OSError, OverflowError, after=after):
        _reach(address, min(seconds, 10))
    try:
        said = subprocess.run(
            [sys.executable, "-P", "-c", _PROBE, address],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise EngineError(
            f"{nobody} within {seconds:g} seconds (ray.start_timeout), although its port is open. "
            "Check that it is the port of the head"
        ) from None
    if said.returncode:
        reason = (said.stderr.strip().splitlines() or ["it closed the connection"])[-1]
        if "AuthToken" in reason:
            raise EngineError(
                f"the Ray at {address} needs a token. Set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN "
                "to that of the cluster (or put it into ~/.ray/auth_token)"
            )
        raise EngineError(f"{nobody}: {reason}")


def _reach(address: str, seconds: float) -> None:
    """See that something listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()


def _start_own() -> Cluster:
    """Start a Ray of this run's own on this machine, known to nobody else."""
    _sweep()
    # Its sockets are in there, and their names may have a hundred letters.
    folder = Path(tempfile.mkdtemp(prefix=f"{_OWN}{os.getpid()}-", dir="/tmp"))
    cluster = Cluster(LOCAL, folder, speak=_silenced())
    cluster.variables = _set(
        {
            "RAY_USAGE_STATS_ENABLED": "0",
            **INLINE,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": _TOKEN,
            "RAY_prestart_worker_first_driver": "0",
            "RAY_enable_worker_prestart": "0",
        }
    )
    _refresh()
    try:
        own = {"num_cpus": cpu_count(), "include_dashboard": False, "_temp_dir": str(folder)}
        _init(LOCAL, address=LOCAL, **own)
    except BaseException:
        cluster.close()
        raise
    return cluster


class _Places(list[str]):
    """Where Ray has actors look modules up, without the current directory that it adds."""

    def extend(self, places: Iterable[str]) -> None:
        """Add places, but not that one."""
        super().extend(place for place in places if place not in here.variables().values())


def _init(asked: str, **arguments: Any) -> None:
    """`ray.init`, which says nothing, and takes no signal."""
    try:
        with _handlers_kept():
            config = JobConfig()
            config._py_driver_sys_path = _Places()
            ray.init(log_to_driver=False, logging_level="ERROR", job_config=config, **arguments)
    except (Exception, SystemExit) as error:
        ray.shutdown()
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise EngineError(f"Ray does not start (ray.address = {asked!r}): {reason}") from None


def _silenced() -> Callable[[], None]:
    """Keep what Ray says of other processes from standard output; what ends that."""
    from ray._private import worker

    before = worker.print_to_stdstream

    def nothing(*_: object, **__: object) -> None:
        pass

    worker.print_to_stdstream = nothing
    return lambda: setattr(worker, "print_to_stdstream", before)


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Take back the handlers of signals that Ray sets."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {name: signal.getsignal(name) for name in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def _set(variables: Mapping[str, str]) -> dict[str, str | None]:
    """Set variables of the environment that are not; all of them as they were."""
    before = {name: os.environ.get(name) for name in variables}
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    return before


def _refresh() -> None:
    """Have Ray read its variables again, also in a process that was connected before."""
    with suppress(ImportError, AttributeError):
        inner: Any = import_module("ray._raylet")
        inner.AuthenticationTokenLoader.instance().reset_cache()
        inner.Config.initialize("")


def _sweep() -> None:
    """Remove what processes that were killed left of a Ray of their own."""
    for path in Path("/tmp").glob(f"{_OWN}*"):
        process = path.name.removeprefix(_OWN).partition("-")[0]
        with suppress(OSError):
            mine = path.stat().st_uid == os.getuid()
            if mine and process.isdigit() and not psutil.pid_exists(int(process)):
                shutil.rmtree(path, ignore_errors=True)
