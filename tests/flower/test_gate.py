"""What keeps a hub waiting: heads and bodies that never end, and too many connections."""

import socket
import threading
import time
from contextlib import suppress

import pytest

from tests.helpers.cases import cases

pytest.importorskip("flwr")

import uvicorn

from fedbayes.flower.gate import Gate, Punctual, _place
from tests.helpers.deployment import wait_for


class Hasty(Punctual):
    head_seconds, body_seconds = 2.0, 3.0


async def application(scope, receive, send):
    """Reads a body and says how long it is."""
    length, more = 0, True
    while more:
        part = await receive()
        length, more = length + len(part.get("body", b"")), part.get("more_body", False)
    body = str(length).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
def hub():
    """The port of a server that takes three connections of one address."""
    gate = Gate(socket.create_server(("127.0.0.1", 0), backlog=50), 3, 3)
    port = gate.getsockname()[1]
    config = uvicorn.Config(
        application, http=Hasty, loop="asyncio", lifespan="off", log_level="critical"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([gate],), daemon=True)
    thread.start()
    wait_for(lambda: server.started, 20, "server")
    yield port
    server.should_exit = server.force_exit = True
    thread.join(10)


def connected(port):
    link = socket.create_connection(("127.0.0.1", port), timeout=30)
    link.settimeout(30)
    return link


def ended(link):
    """Whether the other side ends the connection, within seconds."""
    try:
        return link.recv(100) == b""
    except ConnectionError:
        return True


def answer(link):
    """The body of an answer; empty where the connection was ended."""
    told = b""
    while b"\r\n\r\n" not in told or told.endswith(b"\r\n\r\n"):
        try:
            part = link.recv(500)
        except ConnectionError:
            return b""
        if not part:
            return b""
        told += part
    return told.rpartition(b"\r\n\r\n")[2]


HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"
WHOLE = HEAD + b"content-length: 4\r\n\r\nbody"
HALF = HEAD + b"content-length: 9\r\n\r\nhalf"


@pytest.mark.parametrize("first", cases([b"", b"G", HEAD, HALF], slow=(b"G", HEAD)))
def test_a_request_that_does_not_end_is_ended(hub, first):
    with connected(hub) as link:
        began = time.monotonic()
        link.sendall(first)
        assert ended(link)
        assert time.monotonic() - began < 30


def test_nor_does_one_that_comes_byte_by_byte_go_on(hub):
    with connected(hub) as link:
        began = time.monotonic()
        with suppress(ConnectionError):
            for _ in range(400):
                link.sendall(b"x")
                time.sleep(0.1)
        assert time.monotonic() - began < 30


def test_the_second_request_of_a_connection_has_to_end_too(hub):
    with connected(hub) as link:
        link.sendall(WHOLE)
        assert answer(link) == b"4"
        link.sendall(b"POST / HT")
        assert ended(link)


@pytest.mark.slow
def test_a_body_that_goes_on_may_take_its_time(hub):
    with connected(hub) as link:
        link.sendall(HEAD + b"content-length: 12\r\n\r\n")
        for _ in range(12):
            time.sleep(0.3)
            link.sendall(b"x")
        assert answer(link) == b"12"


def test_one_address_has_so_many_connections(hub):
    links = [connected(hub) for _ in range(8)]
    answered = []
    for link in links:
        try:
            link.sendall(WHOLE)
            answered.append(answer(link) == b"4")
        except ConnectionError:
            answered.append(False)
    assert sum(answered) == 3
    for link in links:
        link.close()

    def again():
        with connected(hub) as link:
            try:
                link.sendall(WHOLE)
                return answer(link) == b"4"
            except ConnectionError:
                return False

    assert wait_for(again, 10, "free place")


def test_of_ipv6_a_network_is_one_place():
    assert _place("2001:db8::1") == _place("2001:db8::2:3") != _place("2001:db9::1")
    assert _place("::ffff:10.0.0.1") == _place("10.0.0.1") == "10.0.0.1"
    assert _place("::1") == "::1"
    assert _place("fe80::1%eth0") == "fe80::"
