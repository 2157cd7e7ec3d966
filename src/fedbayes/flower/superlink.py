"""The way to a SuperLink: a run is submitted, and this process is its ServerApp.

A SuperLink that was started with `--isolation process` leaves the ServerApp of a run to whoever
takes the task. `fedbayes federate` submits a run and takes it, so the display, the run folder
and Ctrl-C are where the user is. (A SuperLink without that flag runs ServerApps itself; for it
there is `flwr run` on the project that `fedbayes federate init` writes.)
"""

import hashlib
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

import httpx
from flwr.cli.build import build_fab_from_files
from flwr.common.constant import SUPERLINK_NODE_ID, SubStatus
from flwr.common.serde import fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
)
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.serverapp import Grid
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.protobuf.client import ProtobufClientInterceptor
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supercore.retry import RetryInvoker, exponential
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid
from psutil import net_if_addrs

from fedbayes.errors import EngineError, told_as
from fedbayes.flower.poller import LinkError
from fedbayes.flower.wire import one_line

_ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
_PATIENCE = 10.0
"""Seconds that a run waits to be handed out."""
_BUSY = 60.0
"""Seconds that one call is tried again while the SuperLink is there, but does not answer it."""

_INTERNET = (socket.AF_INET, socket.AF_INET6)
_ADDRESSES = 8
"""Of this machine's addresses, how many are tried."""
_MOMENT = 2.0
"""Seconds that such a try may take."""


def _loopback(address: str) -> bool:
    return ip_address(address.partition("%")[0]).is_loopback


def patient(errors: type[httpx.HTTPError] = httpx.HTTPError) -> RetryInvoker:
    """Tries again if a connection breaks, or the SuperLink cannot answer now, as where its database
    is busy with a large message. Flower's own would send this process SIGINT.

    Args:
        errors: after which to try again.
    """
    # Not if there is no server: a SuperLink that restarts may have lost what it was passing on, so
    # the run is submitted again (`LinkError`), and with it all that was not answered.
    return RetryInvoker(
        lambda: exponential(max_delay=2),
        errors,
        None,
        _BUSY,
        should_giveup=_final,
    )


def _final(error: Exception) -> bool:
    """Whether to try again is of no use."""
    if isinstance(error, httpx.HTTPStatusError):
        return not error.response.is_server_error
    return isinstance(error, httpx.ConnectError)


@dataclass(frozen=True)
class SuperLink:
    """Where a SuperLink is and what opens it.

    Args:
        address: host:port.
        certificates: PEM file of the CA that signed its certificate; None for no TLS.
        secret: file with the secret of its `--superexec-auth-secret-file`, if it has one.
    """

    address: str
    certificates: Path | None = None
    secret: Path | None = None

    @property
    def options(self) -> list[str]:
        """The options of a command that reaches it."""
        files = {"--root-certificates": self.certificates, "--superexec-secret": self.secret}
        given = [word for name, path in files.items() if path for word in (name, str(path))]
        return ["--superlink", self.address, *given, *([] if self.certificates else ["--insecure"])]

    def _read(self, path: Path | None) -> bytes | None:
        with told_as(EngineError, f"cannot read {path}", OSError):
            return None if path is None else path.expanduser().read_bytes()

    def submit(self, files: dict[str, bytes]) -> int:
        """Submit a Flower app; the id of its run. A LinkError if the SuperLink does not take it."""
        content, _ = build_fab_from_files(files)
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        with self._control() as client:
            run_id = client.StartRun(StartRunRequest(fab=fab_to_proto(fab))).run_id
        if not run_id:
            raise LinkError(f"the SuperLink at {self.address} did not take the run")
        return run_id

    def admit(self, public_key: bytes, name: str) -> int:
        """Let the node with this key (PEM) in; its id, also if it was let in before.

        Raises:
            LinkError: the SuperLink cannot be reached, does not want the key, or has it under
                another name.
        """
        for node in self.nodes():
            if node.public_key == public_key:
                if node.name == name:
                    return node.node_id
                raise LinkError(
                    f"the key is already registered at {self.address}, as {one_line(node.name)}, "
                    f"not as {one_line(name)}. Use another key of `fedbayes federate keys`"
                )
        with self._control() as client:
            return client.RegisterNode(
                RegisterNodeRequest(public_key=public_key, name=name)
            ).node_id

    def check(self) -> None:
        """See that the SuperLink is there, or raise a LinkError."""
        with self._control() as client:
            client.ListRuns(ListRunsRequest(limit=1))

    def nodes(self) -> list[NodeInfo]:
        """The nodes that it knows, as Flower tells of them. A LinkError if it cannot be reached."""
        with self._control() as client:
            return list(client.ListNodes(ListNodesRequest()).nodes_info)

    def open_to_others(self) -> str:
        """Where others than this machine can start runs and admit keys; empty if nowhere.

        This machine's own addresses on networks are tried, and nothing is changed.
        """
        host, _, port = self.address.rpartition(":")
        here = {
            a.address for all_ in net_if_addrs().values() for a in all_ if a.family in _INTERNET
        }
        try:
            aimed = {str(info[4][0]) for info in socket.getaddrinfo(host.strip("[]"), None)}
        except OSError:
            return ""
        outside = [a for a in sorted(here | aimed) if not _loopback(a) and "%" not in a]
        if not aimed & here and not all(map(_loopback, aimed)):
            outside = sorted(aimed)  # it is another machine's
        for address in outside[:_ADDRESSES]:
            shown = f"[{address}]" if ":" in address else address
            if self._answers(f"{shown}:{port}"):
                return f"{shown}:{port}"
        return ""

    def _answers(self, address: str) -> bool:
        """Whether whoever reaches this address can list runs there."""
        scheme = "http" if self.certificates is None else "https"
        trust = ssl.create_default_context()
        if self.certificates is not None:
            trust = ssl.create_default_context(cafile=self.certificates.expanduser())
            trust.check_hostname = False  # the certificate may be for another name
        try:
            with httpx.Client(verify=trust, timeout=_MOMENT, trust_env=False) as client:
                answer = client.post(
                    f"{scheme}://{address}/v1/control/list-runs",
                    headers={"content-type": PROTOBUF_MEDIA_TYPE},
                    content=ListRunsRequest(limit=1).SerializeToString(),
                )
        except httpx.HTTPError:
            return False
        return answer.status_code == httpx.codes.OK

    @contextmanager
    def _control(self) -> Iterator[ControlHttpClient]:
        client = ControlHttpClient.from_server_address(
            self.address,
            self.certificates is None,
            self._read(self.certificates),
            [RuntimeVersionHttpInterceptor(component_name="flwr-cli")],
        )
        try:
            yield client
        except httpx.HTTPError as error:
            raise LinkError(self._trouble(error)) from None
        finally:
            client.close()

    def take(self, run_id: int) -> "Session":
        """Become the ServerApp of a run.

        Raises:
            LinkError: the SuperLink cannot be reached, or someone else took the run.
        """
        interceptors: list[ProtobufClientInterceptor] = [
            RuntimeVersionHttpInterceptor(component_name="SuperExec")
        ]
        if (secret := self._read(self.secret)) is not None:
            interceptors.append(
                SuperExecAuthHttpInterceptor(
                    master_secret=secret, protected_methods=frozenset({_ACQUIRE})
                )
            )
        client = RuntimeHttpClient.from_server_address(
            self.address,
            self.certificates is None,
            self._read(self.certificates),
            interceptors,
        )
        wanted = AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
        try:
            deadline = time.monotonic() + _PATIENCE
            while time.monotonic() < deadline:
                given = client.AcquireTask(wanted)
                if given.HasField("task") and given.task.run_id == run_id:
                    return Session(self, given.token)
                time.sleep(0.2)
        except httpx.HTTPError as error:
            raise LinkError(self._trouble(error)) from None
        finally:
            client.close()
        raise EngineError(
            f"the SuperLink at {self.address} gave run {run_id} to another process. Start it with "
            "`fedbayes federate superlink` or --isolation process, or use `flwr run` on a project "
            "of `fedbayes federate init`"
        )

    def grid(self, token: str) -> HttpGrid:
        """The grid of a run that was taken."""
        grid = HttpGrid(
            self.address, self.certificates is None, self._read(self.certificates), token=token
        )
        grid._retry_invoker = patient()
        return grid

    def _trouble(self, error: httpx.HTTPError) -> str:
        if isinstance(error, httpx.HTTPStatusError):
            said = error.response.text[:300] or error.response.reason_phrase
            if error.response.status_code == httpx.codes.NOT_FOUND:
                said += (
                    ". Check that this is not the port for nodes; use the SuperLink's "
                    "localhost:8000"
                )
            elif error.response.status_code == httpx.codes.UNAUTHORIZED:
                said += ". Give the file with its secret: --superexec-secret"
            return f"the SuperLink at {self.address} answered {error.response.status_code}: {said}"
        hint = ". Check that it is running, and uses TLS (--root-certificates) or not (--insecure)"
        return f"cannot reach a SuperLink at {self.address}: {error}{hint}"


class Session:
    """One run at a SuperLink, of which this process is the ServerApp."""

    def __init__(self, link: SuperLink, token: str) -> None:
        self.grid: HttpGrid = link.grid(token)
        try:
            task = self.grid._runtime_client.PullTaskInput(PullTaskInputRequest())
        except httpx.HTTPError as error:
            self.grid.close()
            raise LinkError(link._trouble(error)) from None
        TaskIdentity.task_id = task.task_id
        TaskIdentity.run_id = task.run.run_id
        TaskIdentity.node_id = SUPERLINK_NODE_ID
        self.grid.set_run(run_from_proto(task.run))
        self._heartbeat = HeartbeatSender(self._beat)
        self._heartbeat.start()

    def _beat(self) -> bool:
        """Tell the SuperLink that the ServerApp lives; its answer is found out elsewhere."""
        try:
            self.grid._runtime_client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
        except httpx.TransportError:
            return False
        except httpx.HTTPError:
            pass
        return True

    def close(self, *, completed: bool) -> None:
        """End the run at the SuperLink."""
        self._heartbeat.stop()
        self.grid._retry_invoker.max_tries = 1
        status = SubStatus.COMPLETED if completed else SubStatus.STOPPED
        try:
            self.grid._runtime_client.PushTaskOutput(PushTaskOutputRequest(sub_status=status))
        except (httpx.HTTPError, RuntimeError):
            pass
        finally:
            self.grid.close()


class Submission:
    """A run of ours at a SuperLink, submitted again whenever the SuperLink lost it."""

    def __init__(self, link: SuperLink, files: dict[str, bytes]) -> None:
        self._link, self._files = link, files
        self._session: Session | None = None

    def connect(self) -> Grid:
        """Submit, and take the run. Raises an EngineError if that is not possible."""
        # The run before ends when the SuperLink is there again: a node may wait for the rest of its
        # last message, and for nothing else.
        before, self._session = self._session, self._link.take(self._link.submit(self._files))
        if before is not None:
            before.close(completed=False)
        return self._session.grid

    def close(self, *, completed: bool = False) -> None:
        """End the run at the SuperLink, if there is one."""
        if self._session is not None:
            self._session.close(completed=completed)
            self._session = None
