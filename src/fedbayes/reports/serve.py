"""The page that follows runs, served to browsers on this machine.

Two things can be asked for, the page and what the runs do now, and nothing else of the folders. A
request must name this machine as its host: a page of a stranger, whose name was made to lead here,
names its own (DNS rebinding).
"""

import ipaddress
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from types import FrameType
from typing import Any

import torch

from fedbayes.errors import RunError
from fedbayes.reports.follow import Follower

LOOPBACK = "127.0.0.1"
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class PageServer(ThreadingHTTPServer):
    """Serves the page of a follower, from threads of its own, once `start` is called.

    Args:
        follower: what follows the runs.
        host: address or name of the interface.
        port: 0 for any that is free.

    Raises:
        RunError: the port is taken, or the address is none of this machine.
    """

    daemon_threads = True
    # A page that a killed server left may be asked for again at once.
    allow_reuse_address = True

    def __init__(self, follower: Follower, host: str = LOOPBACK, port: int = 0) -> None:
        self.follower, self._host = follower, host
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            self.address_family = found[0][0]
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise RunError(
                f"cannot serve at {host}, port {port}: {error.strerror or error}. Choose another "
                "--port, or leave it out for a free one"
            ) from None

    def server_bind(self) -> None:
        """Take the port, and look up no name of this machine: that may take long."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self._host, self.server_address[1]

    @property
    def url(self) -> str:
        """Where the page is."""
        port = self.server_address[1]
        shown = LOOPBACK if self._host in ("0.0.0.0", "::") else self._host
        return f"http://{f'[{shown}]' if ':' in shown else shown}:{port}/"

    @property
    def is_local(self) -> bool:
        """Whether this machine alone reaches it."""
        return ipaddress.ip_address(str(self.server_address[0]).partition("%")[0]).is_loopback

    def is_us(self, host: str) -> bool:
        """Whether a request that names this host means this server.

        Numbers always do, since no name leads to them; the port may be that of a tunnel.
        """
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        name = name.removeprefix("[").removesuffix("]").lower().rstrip(".")
        if name in ("localhost", self._host.lower()):
            return True
        if not self.is_local and name == socket.gethostname().lower():
            return True
        try:
            number = ipaddress.ip_address(name)
        except ValueError:
            return False
        return number.is_loopback or not self.is_local

    def start(self) -> None:
        """Begin to serve."""
        threading.Thread(target=self.serve_forever, daemon=True, name="fedbayes-serve").start()

    def close(self) -> None:
        """Stop serving."""
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Browsers that go away are no error of ours."""


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: PageServer
    server_version, sys_version = "fedbayes", ""
    timeout = 30  # seconds that a request may take to be sent

    def do_GET(self) -> None:
        """The page, or what the runs do."""
        self._answer(body=True)

    def do_HEAD(self) -> None:
        """The same without what it says."""
        self._answer(body=False)

    def _answer(self, *, body: bool) -> None:
        if not self.server.is_us(self.headers.get("Host", "")):
            text = "unknown host name; open this page as 127.0.0.1 or localhost\n"
            self._send(HTTPStatus.FORBIDDEN, "text/plain", text, body)
            return
        follower, path = self.server.follower, self.path.partition("?")[0]
        if path == "/":
            self._send(HTTPStatus.OK, "text/html", follower.page(), body)
        elif path == "/state":
            self._send(HTTPStatus.OK, "application/json", json.dumps(follower.state()), body)
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "only / and /state exist\n", body)

    def _send(self, status: HTTPStatus, kind: str, text: str, body: bool = True) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the console is for people."""


def watch(
    folders: Sequence[Path],
    told: Callable[[PageServer], None],
    *,
    host: str = LOOPBACK,
    port: int = 0,
) -> None:
    """Serve the page of runs until Ctrl-C or SIGTERM.

    Args:
        folders: run folders, or folders of several seeds; they need not exist yet.
        told: is called once the page can be asked for.
        host: address or name of the interface; loopback by default.
        port: 0 for any that is free.

    Raises:
        RunError: a folder holds runs and is none, or the port cannot be had.
    """
    with suppress(OSError):
        os.nice(10)  # the runs come first
    torch.set_num_threads(1)
    over = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        over.set()

    before = {name: signal.signal(name, end) for name in (signal.SIGINT, signal.SIGTERM)}
    try:
        follower = Follower(folders)
        try:
            server = PageServer(follower, host, port)
            server.start()
            try:
                told(server)
                while not over.wait(1.0):
                    pass
            finally:
                server.close()
        finally:
            follower.close()
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
