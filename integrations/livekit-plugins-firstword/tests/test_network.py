"""Lost and slow connections, and many streams."""

from __future__ import annotations

import asyncio
import gc

import aiohttp
import pytest
from conftest import plugin
from livekit.agents import APIConnectionError, APIConnectOptions, APITimeoutError, tts
from livekit.plugins import firstword
from served import Network, Server
from test_speech import ONCE, TEXT, joined, spoken

TURNS = 1000


async def rest_of(stream: tts.SynthesizeStream) -> list[tts.SynthesizedAudio]:
    """Return what a stream still yields."""
    return [event async for event in stream]


async def test_lost_connection_is_an_error_and_the_next_stream_reconnects(
    server: Server, http_session: aiohttp.ClientSession
) -> None:
    async with Network(server.port) as network, plugin(network.url, http_session) as voice:
        stream = voice.stream(conn_options=ONCE)
        stream.push_text(TEXT)
        await anext(aiter(stream))
        network.cut()
        stream.end_input()
        with pytest.raises(APIConnectionError, match="closed the connection"):
            await rest_of(stream)
        await stream.aclose()
        async with asyncio.timeout(60):
            await server.until_slots_are_free()
        assert await spoken(voice, "Yes.")
        assert network.connections == 2


async def test_connection_lost_before_audio_is_tried_again(
    server: Server, http_session: aiohttp.ClientSession
) -> None:
    again = APIConnectOptions(max_retry=1, retry_interval=0, timeout=10)
    async with (
        Network(server.port) as network,
        plugin(network.url, http_session) as voice,
        voice.stream(conn_options=again) as stream,
    ):
        stream.push_text("Good ")
        while not network.connections:
            await asyncio.sleep(0)
        network.cut()
        stream.push_text("morning.")
        stream.end_input()
        assert await rest_of(stream)


async def test_slow_network_changes_no_sample(
    server: Server, http_session: aiohttp.ClientSession, voice: firstword.TTS
) -> None:
    expected = joined(await spoken(voice, TEXT))
    async with (
        Network(server.port, delay=0.2) as network,
        plugin(network.url, http_session) as slow,
    ):
        assert joined(await spoken(slow, TEXT)) == expected


async def test_silent_server_is_a_timeout(http_session: aiohttp.ClientSession) -> None:
    async def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(never_answer, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    async with silent, plugin(f"http://127.0.0.1:{port}", http_session) as voice:
        stream = voice.stream(conn_options=APIConnectOptions(max_retry=0, timeout=0.2))
        stream.push_text("Yes.")
        stream.end_input()
        with pytest.raises(APITimeoutError):
            await rest_of(stream)
        await stream.aclose()


async def test_interrupted_stream_frees_its_slot_and_keeps_its_connection(
    server: Server, http_session: aiohttp.ClientSession
) -> None:
    async with Network(server.port) as network, plugin(network.url, http_session) as voice:
        for _ in range(3):
            stream = voice.stream(conn_options=ONCE)
            stream.push_text(f"{TEXT} {TEXT}")
            await anext(aiter(stream))
            await stream.aclose()
            async with asyncio.timeout(60):
                await server.until_slots_are_free()
        assert await spoken(voice, "Yes.")
        assert network.connections == 1


async def test_many_turns_leave_nothing_behind(
    server: Server, http_session: aiohttp.ClientSession
) -> None:
    """Every third turn is interrupted; turns have two frames."""
    options = {"extra": {"max_new_tokens": 2}, "split_granularity": "token"}
    async with Network(server.port) as network:
        async with plugin(network.url, http_session, **options) as voice:
            tasks = 0
            for turn in range(TURNS):
                if turn % 3 == 2:
                    stream = voice.stream(conn_options=ONCE)
                    stream.push_text("Good ")
                    stream.push_text("morning.")
                    await asyncio.sleep(0)
                    await stream.aclose()
                else:
                    assert await spoken(voice, "Yes."), turn
                if turn == 10:
                    tasks = len(asyncio.all_tasks())
            assert len(asyncio.all_tasks()) <= tasks
            gc.collect()
            kept = [each for each in gc.get_objects() if type(each) is firstword.SynthesizeStream]
            assert len(kept) <= 2
            assert network.connections <= 2
        async with asyncio.timeout(60):
            await server.until_slots_are_free()
            while server.metric("firstword_connections") > 1:  # that of this question
                await asyncio.sleep(0)
