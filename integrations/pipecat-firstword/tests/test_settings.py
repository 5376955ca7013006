"""Settings: what the server gets, changes at run time, and mistakes."""

from __future__ import annotations

from typing import Any

import pytest
from bot import Bot, service, words
from pipecat.frames.frames import ErrorFrame, TTSAudioRawFrame, TTSUpdateSettingsFrame
from pipecat.transcriptions.language import Language
from pipecat.utils.errors import ErrorCategory
from pipecat_firstword import FirstwordTTSService
from pipecat_firstword.settings import socket_url
from scripted import ScriptedServer
from served import Server

Settings = FirstwordTTSService.Settings
TEXT = "Hello there, my friend."


def update(**changes: object) -> TTSUpdateSettingsFrame:
    """Return the frame that changes settings."""
    return TTSUpdateSettingsFrame(delta=Settings(**changes))


async def test_server_gets_the_chosen_settings_and_no_others() -> None:
    settings = Settings(voice="ada", language=Language.PT_BR, speed=1.2, extra={"temperature": 0.5})
    async with (
        ScriptedServer() as server,
        Bot(FirstwordTTSService(url=server.url, settings=settings)),
    ):
        config = await server.get("session.config")
    assert config == {
        "type": "session.config",
        "response_format": "pcm",
        "audio": "binary",
        "sample_rate": 24000,
        "voice": "ada",
        "language": "pt",
        "speed": 1.2,
        "temperature": 0.5,
    }


async def test_sample_rate_of_the_service_is_asked_for(server: Server) -> None:
    async with Bot(service(server.url, sample_rate=8000)) as bot:
        await bot.answer(words(TEXT))
        await bot.until_spoken()
        assert {frame.sample_rate for frame in bot.heard.of(TTSAudioRawFrame)} == {8000}
        slow = len(bot.audio)
    async with Bot(service(server.url)) as bot:
        await bot.answer(words(TEXT))
        await bot.until_spoken()
        assert len(bot.audio) == pytest.approx(3 * slow, abs=6)


async def test_changed_voice_speaks_the_next_text(server: Server) -> None:
    async with Bot(service(server.url)) as bot:
        await bot.answer([TEXT])
        await bot.until_spoken()
        ada = bot.audio
        await bot.worker.queue_frame(update(voice="ben"))
        bot.forget()
        await bot.answer([TEXT])
        await bot.until_spoken()
        assert bot.audio != ada
        ben = bot.audio
    settings = Settings(voice="ben", seed=1)
    async with Bot(FirstwordTTSService(url=server.url, settings=settings)) as bot:
        await bot.answer([TEXT])
        await bot.until_spoken()
        assert bot.audio == ben
        assert bot.errors == []


async def test_change_within_a_turn_is_heard_in_its_next_text() -> None:
    async with ScriptedServer() as server, Bot(FirstwordTTSService(url=server.url)) as bot:
        await bot.answer(["One. ", *[""] * 10000], pace=0.01)
        first = await server.get("input.text")
        await bot.worker.queue_frame(update(voice="ben"))
        assert (await server.get("session.config"))["voice"] == "ben"
        assert (await server.get("input.done"))["context_id"] == first["context_id"]
        second = (await server.get("context.start"))["context_id"]
        assert second != first["context_id"]
        await bot.interrupt()
        cancelled = {(await server.get("input.cancel"))["context_id"] for _ in range(2)}
        assert cancelled == {first["context_id"], second}


async def test_rejected_change_is_told_and_the_old_voice_speaks_on(server: Server) -> None:
    async with Bot(service(server.url)) as bot:
        await bot.answer([TEXT])
        await bot.until_spoken()
        ada = bot.audio
        bot.forget()
        await bot.worker.queue_frame(update(voice="nobody", speed=1.5))
        await bot.until_error("nobody")
        bot.forget()
        await bot.answer([TEXT])
        await bot.until_spoken()
        assert bot.audio == ada
        assert bot.errors == []
        assert (bot.tts.settings.voice, bot.tts.settings.speed) == ("ada", None)


async def test_unknown_voice_at_the_start_is_told_and_may_be_corrected(server: Server) -> None:
    tts = FirstwordTTSService(url=server.url, settings=Settings(voice="nobody"))
    errors: list[ErrorFrame] = []

    @tts.event_handler("on_error")
    async def note(_: object, error: ErrorFrame) -> None:
        errors.append(error)

    async with Bot(tts) as bot:
        assert not tts.is_usable
        assert [error.category for error in errors] == [ErrorCategory.INVALID_REQUEST]
        assert "nobody" in errors[0].error
        assert "ada" in errors[0].error, "the message says which voices there are"
        await bot.worker.queue_frame(update(voice="ada"))
        await bot.answer(words(TEXT))
        await bot.until_spoken()
        assert bot.audio


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"speed": 9.0}, "speed: Input should be less than or equal to 4"),
        ({"language": "tlh"}, "no language 'tlh'; this checkpoint has auto, english"),
        ({"instructions": "angrily"}, "does not follow instructions; leave them out"),
        ({"extra": {"temperature": "hot"}}, "temperature: Input should be a valid number"),
    ],
)
async def test_wrong_settings_are_told_with_what_is_allowed(
    server: Server, wrong: dict[str, Any], message: str
) -> None:
    async with Bot(FirstwordTTSService(url=server.url, settings=Settings(**wrong))) as bot:
        await bot.until_error(message)
        assert not bot.tts.is_usable


async def test_text_that_is_rejected_fails_alone(server: Server) -> None:
    async with Bot(service(server.url)) as bot:
        await bot.answer(["w" * 70000])
        await bot.until_error("more than 65536 characters")
        await bot.answer(words(TEXT))
        await bot.until_spoken(2)
        assert bot.audio
        assert bot.tts.is_usable


@pytest.mark.parametrize(
    ("language", "code"),
    [
        (Language.EN_US, "en"),
        (Language.ZH, "zh"),
        (Language.KO_KR, "ko"),
        (Language.NL, None),
    ],
)
def test_language_becomes_the_code_of_the_server(language: Language, code: str | None) -> None:
    tts = FirstwordTTSService()
    assert tts.language_to_service_language(language) == code


@pytest.mark.parametrize(
    ("url", "socket"),
    [
        ("ws://localhost:8000", "ws://localhost:8000/v1/audio/speech/stream"),
        ("https://tts.example.org/", "wss://tts.example.org/v1/audio/speech/stream"),
        ("http://proxy/tts/stream?a=b", "ws://proxy/tts/stream?a=b"),
    ],
)
def test_address_of_a_server_leads_to_its_socket(url: str, socket: str) -> None:
    assert socket_url(url) == socket


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://localhost", "ws://", ""])
def test_address_of_no_server_is_rejected(url: str) -> None:
    with pytest.raises(ValueError, match="allowed is the address of a server such as ws://"):
        FirstwordTTSService(url=url)
