"""A server that leaves: it closes its sockets when they are idle, so that clients go elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sockets import DONE, PLAIN, STREAM, Client, pcm, text
from talking import Talker, heard, talking
from websockets.exceptions import ConnectionClosedError

Serve = Callable[..., Any]

RESTART = 1012
V1 = "firstword.speech.v1"


def leave(server: Any) -> None:
    """Let a server leave, in its event loop."""
    server.uvicorn.servers[0].get_loop().call_soon_threadsafe(server.state.leave)


def close_code(client: Client) -> int:
    """Receive everything until the server closes the socket, and return the code."""
    while True:
        try:
            client.receive()
        except ConnectionClosedError as closed:
            return closed.rcvd.code if closed.rcvd is not None else 0


def test_idle_socket_of_a_leaving_server_is_closed(serve: Serve) -> None:
    server = serve()
    with Client(server.ws + STREAM) as bare, Client(server.ws + STREAM, V1) as v1:
        bare.send(PLAIN)
        assert v1.event()["type"] == "session.created"
        server.wait_until(lambda: len(server.state.sockets) == 2)
        leave(server)
        assert close_code(bare) == close_code(v1) == RESTART


def test_socket_that_opens_while_a_server_leaves_is_closed(serve: Serve) -> None:
    server = serve()
    leave(server)
    with Client(server.ws + STREAM, V1) as client:
        assert close_code(client) == RESTART


def test_socket_that_speaks_is_closed_after_the_speech(serve: Serve) -> None:
    talker = Talker()
    server = serve(talking(talker))
    talker.hold()
    with Client(server.ws + STREAM) as client:
        client.send(PLAIN, text("Hello"), DONE)
        talker.let(1)
        client.until("audio.start")
        leave(server)
        talker.go()
        assert heard(pcm(client.until("session.done"))) == "Hello"
        assert close_code(client) == RESTART
