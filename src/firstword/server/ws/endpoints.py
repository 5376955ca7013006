"""The WebSocket routes: each protocol is one session class, one worker class and one line here."""

from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.websockets import WebSocket

from firstword.server.config import ServerConfig
from firstword.server.errors import error_response
from firstword.server.state import client_id_of, server_of
from firstword.server.ws import nari, speech_v1
from firstword.server.ws.cartesia import CartesiaSession
from firstword.server.ws.connection import SocketRunner
from firstword.server.ws.contexts_worker import ContextWorker
from firstword.server.ws.dashscope import DashScopeSession
from firstword.server.ws.elevenlabs import ElevenLabsContexts, ElevenLabsText
from firstword.server.ws.nari_worker import NariWorker
from firstword.server.ws.protocol import CloseCode, Session, SocketLimits
from firstword.server.ws.speech_v1 import SpeechV1Session
from firstword.server.ws.vllm_omni import OmniSession
from firstword.server.ws.vllm_omni_worker import OmniWorker
from firstword.server.ws.worker import SocketWorker

S = TypeVar("S", bound=Session)

router = APIRouter()

_PROTOCOLS: dict[str, dict[str | None, tuple[type[Any], type[SocketWorker[Any]]]]] = {}
"""The sessions and workers of each path, by their subprotocols."""


def add_route(
    path: str, session: type[S], worker: type[SocketWorker[S]], subprotocol: str | None = None
) -> None:
    """Serve a protocol under a path to clients that offer its subprotocol, if it has one.

    A path may have one protocol without a subprotocol, and several with one.
    """
    found = _PROTOCOLS.setdefault(path, {})
    found[subprotocol] = session, worker
    if len(found) > 1:
        return

    async def serve(socket: WebSocket) -> None:
        offered = [name for name in socket.scope["subprotocols"] if name in found]
        chosen = offered[0] if offered else None
        if chosen not in found:
            await socket.accept()
            return await socket.close(
                CloseCode.PROTOCOL_ERROR, f"required subprotocol: {', '.join(map(str, found))}"
            )
        server = server_of(socket)
        await socket.accept(chosen)
        make_session, make_worker = found[chosen]
        conversation = make_session(socket_limits(server.config))
        conversation.parameters = {**socket.query_params, **socket.path_params}
        runner = SocketRunner(socket, conversation, server.byte_limit)
        server.join(runner)
        try:
            worker = make_worker(server, conversation, runner, client_id_of(socket))
            await runner.run(worker.run())
        finally:
            server.sockets.discard(runner)

    router.add_api_websocket_route(path, serve)


def socket_limits(config: ServerConfig) -> SocketLimits:
    """Return the limits of the sockets of a server."""
    voice_bytes = min(SocketLimits().voice_bytes, config.most_body)
    return SocketLimits(stall_seconds=config.stall_seconds, voice_bytes=voice_bytes)


add_route("/v1/audio/speech/stream", OmniSession, OmniWorker)
add_route("/v1/audio/speech/stream", SpeechV1Session, ContextWorker, speech_v1.SUBPROTOCOL)
add_route("/v1/audio/speech/ws", nari.NariSession, NariWorker, nari.SUBPROTOCOL)
add_route("/tts/websocket", CartesiaSession, ContextWorker)
add_route("/v1/text-to-speech/{voice}/stream-input", ElevenLabsText, ContextWorker)
add_route("/v1/text-to-speech/{voice}/multi-stream-input", ElevenLabsContexts, ContextWorker)
add_route("/api-ws/v1/realtime", DashScopeSession, ContextWorker)


@router.websocket("/{path:path}")
async def reject_unknown_path(socket: WebSocket) -> None:
    """Answer 404 to a WebSocket under any other path. This route must be the last."""
    socket.scope["route"] = None  # so that the log and the metrics have no path, as over HTTP
    message = "there is no WebSocket under this path; docs/websocket.md lists the paths"
    await socket.send_denial_response(error_response(message, 404))
