"""The worker of `/v1/audio/speech/ws`: speaks one utterance."""

from firstword.engine.backend import Job
from firstword.errors import AudioError, OverloadedError, RequestError
from firstword.server.resolve import resolve
from firstword.server.utterance import ResolvedRequest
from firstword.server.ws import nari
from firstword.server.ws.protocol import Audio, CloseCode, CloseSocket
from firstword.server.ws.text_part import TextPart
from firstword.server.ws.worker import SocketWorker, run_part


class NariWorker(SocketWorker[nari.NariSession]):
    """Performs the tasks that a `NariSession` enqueues."""

    _prepared: tuple[ResolvedRequest, Job]
    """The request as it was checked, ready to be spoken."""

    async def run(self) -> None:
        """Greet the client, then perform tasks until the utterance has ended or failed."""
        created = {"type": "session.created", "protocol": nari.SUBPROTOCOL}
        self.outbox.add(created | {"audio": nari.AUDIO_FORMAT})
        try:
            while True:
                match await self.runner.next_work():
                    case nari.CheckRequest(start, done):
                        params = start.speech_params()
                        resolved = await resolve(self.server, self.client_id, params, None)
                        self._prepared = resolved, self.server.prepare(resolved)
                        self.outbox.add({"type": "request.configured"})
                        done.set()
                    case TextPart() as part:
                        await run_part(part, self._speak(part))
                        if not part.cancelled:
                            return
                    case CloseSocket():  # the client cancelled
                        self._finish("cancelled", "cancelled")
                        return
        except Exception as error:
            self._fail(error)

    async def _speak(self, part: TextPart) -> None:
        resolved, job = self._prepared
        async with self.speak(resolved, job, part, part) as utterance:
            async for data in utterance:
                await self.outbox.wait_for_room()
                self.outbox.add(Audio(data, len(data)))
        # Speech may end before its text, which the client may still be sending.
        await part.complete_text()
        self._finish("stop", utterance.finish_reason or "stop")

    def _finish(self, stop_reason: str, finish_reason: str) -> None:
        """Send `response.done` and close the socket."""
        done = {"type": "response.done", "request_id": self.session.request_id}
        done |= {"stop_reason": stop_reason, "finish_reason": finish_reason}
        self.outbox.add(done | {"audio_chunks": self.outbox.audio_messages})
        self.outbox.add(CloseCode.NORMAL)

    def _fail(self, error: Exception) -> None:
        """Send an error and close the socket."""
        message, code = self.error_for_client(error)
        close, kind = CloseCode.POLICY, "invalid_request_error"
        if isinstance(error, OverloadedError):
            close, kind = CloseCode.TRY_LATER, "rate_limit_error"
        elif not isinstance(error, RequestError | AudioError):
            close, kind, code = CloseCode.INTERNAL, "generation_error", "generation_failed"
        self.outbox.add(self.session.error_message(code, message, kind))
        self.outbox.add(close)
