"""The SuperLink of a federation: Flower's own, of which other machines reach the nodes' part alone.

Flower serves three APIs at one address: the one of nodes, the one of runs, and the one that admits
keys and starts runs, which is code that nodes execute, and asks for no password. Here Flower's
application listens twice: whole on loopback, and elsewhere with nothing but the paths of nodes.
"""

import math
import os
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import ExitStack, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import uvicorn
from flwr.superlink.main import create_app
from sqlalchemy.exc import DatabaseError

from fedbayes.errors import EngineError, RunError, told_as
from fedbayes.flower.gate import Gate, Punctual, many_connections, shorten_handshakes
from fedbayes.flower.wire import LONGEST_REQUEST

OPEN = "/v1/fleet/"
"""The paths that nodes need."""
_NEEDED = ("ca.crt", "server.pem", "server.key", "superexec.key")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def only_nodes_from_outside(app: App, inside: int) -> App:
    """An application of which other ports than one serve the paths of nodes alone.

    Args:
        app: the application, as ASGI has it.
        inside: the port at which it is whole.
    """

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        whole = scope["type"] == "lifespan" or (scope.get("server") or ("", 0))[1] == inside
        if whole:
            await app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close"})
        elif not scope["path"].startswith(OPEN):
            await _refuse(send, 404)
        elif _length(scope) > LONGEST_REQUEST:
            await _refuse(send, 413)  # Flower reads a request before it asks whose it is
        else:
            await app(scope, receive, send)

    return guarded


def _length(scope: Scope) -> float:
    """Bytes of a request, as its header says and the server holds it to."""
    given = dict(scope["headers"])
    if b"transfer-encoding" in given:
        return math.inf
    return int(given.get(b"content-length", b"0"))


async def _refuse(send: Send, status: int) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def serve(
    folder: Path, nodes: tuple[str, int], port: int, ready: Callable[[], object] = lambda: None
) -> None:
    """Run a SuperLink until a signal ends it.

    Nodes need an admitted key, runs the secret in `superexec.key`. The SuperLink keeps its state in
    `superlink.db`, which the owner alone can read.

    Args:
        folder: the folder of `federate keys`.
        nodes: host and port at which nodes come.
        port: at which everything else is, on loopback.
        ready: is called when both addresses are had and the keys are read.

    Raises:
        RunError: the folder lacks keys.
        EngineError: an address cannot be had, or Flower cannot be started.
    """
    folder = folder.expanduser()
    for name in _NEEDED:
        if not (folder / name).is_file():
            way_out = f"fedbayes federate keys {folder} --host NAME"
            raise RunError(f"{folder} has no {name}. Create keys with: {way_out}")
    if nodes[1] == port:
        raise EngineError(f"port {port} is already used for nodes. Give another --port")
    os.umask(0o077)
    with ExitStack() as stack:
        sockets = [stack.enter_context(Gate(_listen(*at))) for at in (("127.0.0.1", port), nodes)]
        config = uvicorn.Config(
            only_nodes_from_outside(_flower(folder, port), port),
            lifespan="on",
            http=Punctual,
            loop="asyncio",
            proxy_headers=False,
            access_log=False,
            log_level="warning",
            ssl_certfile=folder / "server.pem",
            ssl_keyfile=folder / "server.key",
        )
        try:
            config.load()
        except ssl.SSLError as error:
            raise RunError(
                f"{folder / 'server.pem'} and {folder / 'server.key'} are not a certificate and "
                f"its key: {error.reason}"
            ) from None
        shorten_handshakes()
        many_connections()
        ready()
        with suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(list(sockets))


def _flower(folder: Path, port: int) -> App:
    """Flower's SuperLink, as its command with these options would have it."""
    database = folder / "superlink.db"
    database.touch(mode=0o600)
    database.chmod(0o600)
    options = {
        "--host": "127.0.0.1",
        "--port": str(port),
        "--isolation": "process",
        "--ssl-ca-certfile": str(folder / "ca.crt"),
        "--ssl-certfile": str(folder / "server.pem"),
        "--ssl-keyfile": str(folder / "server.key"),
        "--superexec-auth-secret-file": str(folder / "superexec.key"),
        "--database": str(database),
    }
    flower = import_module("flwr.superlink.cli.flower_superlink")
    before = sys.argv
    sys.argv = ["flower-superlink", "--enable-supernode-auth"]
    sys.argv += [word for option in options.items() for word in option]
    try:
        config = flower._parse_superlink_lifespan_config()
        app: App = create_app(config, flower.SuperLinkLifespan)
    except (AttributeError, TypeError) as error:
        raise EngineError(
            f"the SuperLink of this Flower version differs from 1.41 and 1.42 ({error}). Install "
            "one of these: pip install 'flwr>=1.41,<1.43'"
        ) from None
    except DatabaseError as error:
        raise RunError(
            f"{database} is not a database of this Flower's SuperLink ({error.orig}). Move it "
            "away, and register the clients again"
        ) from None
    finally:
        sys.argv = before
    return app


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with told_as(EngineError, f"cannot listen at {host}:{port}", OSError):
        return socket.create_server((host, port), family=family, backlog=2048)
