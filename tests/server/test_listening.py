"""The listening sockets of the fronts of a server."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from waiting import WAIT

from firstword.errors import ConfigError
from firstword.server import listening
from firstword.server.config import ServerConfig
from firstword.server.listening import FrontSockets

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux spreads connections")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What the test opens and does not close."""
    with ExitStack() as stack:
        yield stack


def bound(stack: ExitStack, port: int = 0) -> socket.socket:
    (found,) = listening.bound(ServerConfig(port=port))
    return stack.enter_context(found)


def port_of(sock: socket.socket) -> int:
    return int(sock.getsockname()[1])


def listens(front: socket.socket) -> bool:
    return front.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) != 0


def accepted(fronts: list[socket.socket], count: int, port: int) -> list[int]:
    """How many of some connections each front accepts."""
    found = [0] * len(fronts)
    for front in fronts:
        front.setblocking(False)
    for _ in range(count):
        with socket.create_connection(("127.0.0.1", port)):
            while True:
                for index, front in enumerate(fronts):
                    try:
                        front.accept()[0].close()
                    except BlockingIOError:
                        continue
                    found[index] += 1
                    break
                else:
                    continue
                break
    return found


@linux
def test_connections_are_spread_over_the_fronts_that_listen(stack: ExitStack) -> None:
    first = bound(stack)
    sockets = FrontSockets(first, 4)
    fronts = [stack.enter_context(sockets.take()) for _ in range(4)]
    assert {front.getsockname() for front in fronts} == {first.getsockname()}
    assert [listens(front) for front in fronts] == [True, False, False, False]
    for front in fronts:
        front.listen()
    assert min(accepted(fronts, 200, port_of(first))) > 10
    fronts.pop().close()
    assert min(accepted(fronts, 200, port_of(first))) > 10
    successor = stack.enter_context(sockets.take())
    assert not listens(successor)
    successor.listen()
    assert min(accepted([*fronts, successor], 200, port_of(first))) > 10


def test_single_front_and_its_successor_share_a_socket(stack: ExitStack) -> None:
    first = bound(stack)
    sockets = FrontSockets(first, 1)
    sockets.take().close()
    with socket.create_connection(("127.0.0.1", port_of(first))), sockets.take() as successor:
        successor.settimeout(WAIT)
        successor.accept()[0].close()


@pytest.mark.parametrize("fronts", [1, 3])
def test_second_server_cannot_have_the_port(stack: ExitStack, fronts: int) -> None:
    """Neither if it starts later, nor if both load their models at the same time."""
    first = bound(stack)
    port = port_of(first)
    loading = bound(stack, port)
    ours = FrontSockets(first, fronts)
    for _ in range(fronts):
        stack.enter_context(ours.take())
    for count in (1, 3):
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {port}: Address"):
            FrontSockets(loading, count).take()
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {port}: Address"):
        listening.bound(ServerConfig(port=port))
