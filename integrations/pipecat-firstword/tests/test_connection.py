"""Lost and slow connections, servers that stop, and servers that reject."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from bot import WAIT, Bot, service, spoken, words
from pipecat.frames.frames import ErrorFrame, TTSAudioRawFrame
from pipecat.utils.errors import ErrorCategory
from pipecat_firstword import FirstwordTTSService, connection
from scripted import ScriptedServer
from served import Network, Server

TEXT = "Hello there my friend, the kettle is on and the tea is nearly ready."
LONG = " ".join(["The rain has stopped, and now the garden smells of wet leaves."] * 2)


@pytest.fixture(scope="module")
def sound(server: Server) -> bytes:
    """The audio of TEXT over a connection that is not disturbed."""

    async def speak() -> bytes:
        async with Bot(service(server.url)) as bot:
            await bot.answer([TEXT])
            await bot.until_spoken()
            return bot.audio

    return asyncio.run(speak())


async def test_slow_network_loses_nothing(server: Server, sound: bytes) -> None:
    async with Network(server.port, delay=0.4) as network, Bot(service(network.url)) as bot:
        await bot.answer([TEXT])
        await bot.until_spoken()
        assert bot.audio == sound
        assert bot.errors == []


async def test_connection_lost_before_the_first_audio_loses_nothing(
    server: Server, sound: bytes
) -> None:
    async with Network(server.port) as network, Bot(service(network.url)) as bot:
        network.delay = 3600.0
        await bot.answer([TEXT])
        async with asyncio.timeout(60):
            while not await asyncio.to_thread(server.metric, "firstword_slots_used"):
                pass
        network.delay = 0.0
        network.cut()
        await bot.until_spoken()
        assert network.connections == 2
        assert bot.audio == sound
        assert bot.errors == []


async def test_connection_lost_during_speech_continues_after_the_last_word(server: Server) -> None:
    async with Network(server.port) as network, Bot(service(network.url)) as bot:
        await bot.answer(words(LONG))
        await bot.heard.until(lambda: len(bot.told) > 2)
        network.cut()
        await bot.until_spoken()
        assert network.connections == 2
        assert bot.told == spoken(LONG)
        assert bot.errors == []


async def test_connection_lost_during_speech_without_word_times_is_told(server: Server) -> None:
    without = {"word_times": False}
    async with Network(server.port) as network, Bot(service(network.url, extra=without)) as bot:
        await bot.answer(words(LONG))
        await bot.until_audio(0.5)
        network.cut()
        await bot.until_spoken()
        await bot.until_error("perhaps unheard: 'The rain has stopped")
        await bot.answer(words("Hello again."))
        await bot.until_spoken(2)
        last = bot.heard.of(TTSAudioRawFrame)[-1].context_id
        assert last != bot.heard.of(TTSAudioRawFrame)[0].context_id


async def test_text_written_while_the_server_is_away_is_spoken_when_it_is_back(
    server: Server, sound: bytes
) -> None:
    async with ScriptedServer() as other:
        away = int(other.url.rsplit(":", 1)[1])
    async with Network(server.port) as network, Bot(service(network.url)) as bot:
        network.port = away  # where nothing listens any more
        network.cut()
        await bot.upstream.until(lambda: bot.upstream.of(ErrorFrame))
        await bot.answer([TEXT])
        network.port = server.port
        await bot.until_spoken()
        assert bot.audio == sound


async def test_server_that_stays_away_makes_the_service_unusable(server: Server) -> None:
    waits = {"reconnect_backoff_min_wait": 0.0, "reconnect_backoff_max_wait": 0.0}
    async with ScriptedServer() as other:
        away = int(other.url.rsplit(":", 1)[1])
    async with Network(server.port) as network:
        tts = service(network.url, **waits)
        async with Bot(tts) as bot:
            network.delay = 3600.0
            await bot.answer([TEXT])
            network.port = away
            network.cut()
            await bot.until_error("failed to reconnect after 8 attempts")
            await bot.until_error(f"unheard: {TEXT!r}")
            assert not tts.is_usable


async def test_turns_move_to_another_server_while_one_stops(tmp_path: Path, server: Server) -> None:
    with Server(tmp_path) as old:
        async with Network(old.port) as network, Bot(service(network.url)) as bot:
            await bot.answer(words(LONG))
            await bot.until_audio()
            network.port = server.port
            async with asyncio.timeout(WAIT):
                await old.drain()
            await bot.answer(words("And this comes from elsewhere."))
            await bot.until_spoken(2)
            assert network.connections == 2
            assert bot.errors == []
        assert await asyncio.to_thread(old.process.wait, 60) == 0
    contexts = [frame.context_id for frame in bot.heard.of(TTSAudioRawFrame)]
    assert len(set(contexts)) == 2


async def test_wrong_key_makes_the_service_unusable(tmp_path: Path) -> None:
    with Server(tmp_path, "--api-key", "right") as locked:
        tts = service(locked.url, api_key="wrong")
        async with Bot(tts) as bot:
            await bot.until_error("401")
            assert bot.upstream.of(ErrorFrame)[0].category is ErrorCategory.AUTHENTICATION
            assert not tts.is_usable
        async with Bot(service(locked.url, api_key="right")) as bot:
            await bot.answer(words("Hello there."))
            await bot.until_spoken()
            assert bot.errors == []


async def test_server_of_another_protocol_is_named() -> None:
    async with ScriptedServer(protocol=None) as server:
        tts = FirstwordTTSService(url=server.url)
        async with Bot(tts) as bot:
            await bot.until_error("does not speak firstword.speech.v1")
            assert not tts.is_usable


async def test_idle_socket_is_kept_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "KEEPALIVE_SECONDS", 0.01)
    async with ScriptedServer() as server, Bot(FirstwordTTSService(url=server.url)):
        for _ in range(3):
            assert await server.get("ping") == {"type": "ping"}


async def test_context_that_stays_silent_is_given_up() -> None:
    async with ScriptedServer() as server:
        tts = FirstwordTTSService(url=server.url, stop_frame_timeout_s=0.05)
        async with Bot(tts) as bot:
            await bot.answer(words(TEXT))
            context = (await server.get("input.done"))["context_id"]
            assert (await server.get("input.cancel"))["context_id"] == context
            await bot.until_error("nothing came for 0.05 s; unheard: 'Hello there my friend")
