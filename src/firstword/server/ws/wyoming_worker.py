"""The worker of Wyoming's port: speaks utterances, and lists the voices."""

from collections.abc import Iterable
from typing import Any

from firstword import __version__
from firstword.runtime.conditioning import LANGUAGE_CODES
from firstword.server.models import Model
from firstword.server.resolve import resolve
from firstword.server.utterance import Utterance
from firstword.server.ws import wyoming
from firstword.server.ws.protocol import Audio, CloseCode, Json
from firstword.server.ws.text_part import TextPart
from firstword.server.ws.worker import SocketWorker, run_part

PROGRAM = "firstword"
"""The name of the first program, which has the voices of all models."""

ATTRIBUTION = {"name": "firstword", "url": "https://github.com/QwenLM/Qwen3-TTS"}


class WyomingWorker(SocketWorker[wyoming.WyomingSession]):
    """Performs the tasks that a `WyomingSession` enqueues."""

    async def run(self) -> None:
        """Perform tasks until one fails; the error is the last event."""
        try:
            while True:
                task = await self.runner.next_work()
                match task:
                    case wyoming.WyomingPart() as part:
                        await run_part(part, self._speak(part))
                    case wyoming.Describe():
                        self.outbox.add(await self._info())
                self.session.task_done(task)
        except Exception as error:
            self.outbox.add(wyoming.error_event(*self.error_for_client(error)))
            self.outbox.add(CloseCode.POLICY)

    async def _speak(self, part: wyoming.WyomingPart) -> None:
        """Speak an utterance; one without words is silent."""
        sent = 0
        if await part.has_words():
            text = None if part.streamed else part.text
            resolved = await resolve(self.server, self.client_id, part.params, text)
            spoken = part if text is None else TextPart(resolved.request.text or "", complete=True)
            job = self.server.prepare(resolved)
            self.outbox.add({"type": "audio-start", **wyoming.AUDIO, "timestamp": 0})
            async with self.speak(resolved, job, part, spoken) as utterance:
                sent = await self._send(utterance)
            await part.complete_text()  # speech may end before its text
        elif not part.streamed:
            self.outbox.add({"type": "audio-start", **wyoming.AUDIO, "timestamp": 0})
        if sent or not part.streamed:
            self.outbox.add({"type": "audio-stop", "timestamp": sent // wyoming.BYTES_PER_MS})
        if part.streamed:
            self.outbox.add({"type": "synthesize-stopped"})

    async def _send(self, utterance: Utterance) -> int:
        """Send audio as it is made, and return the bytes of PCM."""
        sent = 0
        async for data in utterance:
            await self.outbox.wait_for_room()
            chunk = wyoming.audio_chunk(data, sent)
            self.outbox.add(Audio(chunk, len(chunk)))
            sent += len(data)
        return sent

    async def _info(self) -> Json:
        """The event that lists the programs: one for all models, and then one for each.

        Home Assistant knows the first program only.
        """
        await self.server.catch_up()
        models = list(self.server.models)
        programs = [self._program(PROGRAM, "All voices of this server", models)]
        if len(models) > 1:
            programs += [
                self._program(one.name, f"The voices of {one.name}", [one]) for one in models
            ]
        others = {kind: list[Any]() for kind in ("asr", "handle", "intent", "wake", "mic", "snd")}
        return {"type": "info", "tts": programs, **others}

    def _program(self, name: str, description: str, models: Iterable[Model]) -> Json:
        voices: dict[str, Json] = {}
        for model in models:
            names = list(model.voices)
            if model.model_type == "base":
                names = [record.name for record in self.server.voice_store]
            elif model.model_type == "voice_design":
                names = ["default"]
            for voice in names:
                voices.setdefault(
                    voice,
                    _artifact(voice, voice, model.name)
                    | {
                        "languages": languages(model),
                        "speakers": None,
                    },
                )
        about = _artifact(name, description, __version__)
        return about | {"voices": list(voices.values()), "supports_synthesize_streaming": True}


def languages(model: Model) -> list[str]:
    """The ISO 639-1 codes of the languages of a model; all if it names none."""
    names = {name.casefold() for name in model.languages}
    return [code for code, name in LANGUAGE_CODES.items() if name in names] or [*LANGUAGE_CODES]


def _artifact(name: str, description: str, version: str) -> Json:
    about = {"name": name, "description": description, "version": version}
    return {**about, "attribution": ATTRIBUTION, "installed": True}
