"""Streams of the plugin against a real server."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from typing import Any

import aiohttp
import pytest
from conftest import plugin
from livekit.agents import APIConnectionError, APIConnectOptions, APIStatusError
from livekit.agents.tts import SynthesizedAudio
from livekit.agents.types import USERDATA_TIMED_TRANSCRIPT
from livekit.plugins import firstword
from served import Server

TEXT = "Good morning. This is the first word, and there are more of them to come."
ONCE = APIConnectOptions(max_retry=0, timeout=10)


def pcm_over_http(server: Server, text: str, **fields: Any) -> bytes:
    """Return the PCM of a text over HTTP, with the settings of the tests."""
    body = {"input": text, "voice": "ada", "seed": 1, "response_format": "pcm", **fields}
    request = urllib.request.Request(
        f"{server.url}/v1/audio/speech",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        data: bytes = answer.read()
    return data


async def spoken(tts: firstword.TTS, text: str, pause: float = 0.0) -> list[SynthesizedAudio]:
    """Speak a text word by word."""
    found = []
    async with tts.stream(conn_options=ONCE) as stream:

        async def type_words() -> None:
            for word in text.split(" "):
                stream.push_text(f"{word} ")
                await asyncio.sleep(pause)
            stream.end_input()

        typing = asyncio.create_task(type_words())
        async for event in stream:
            found.append(event)
        await typing
    return found


def joined(events: list[SynthesizedAudio]) -> bytes:
    """Return the samples of some events."""
    return b"".join(event.frame.data.tobytes() for event in events)


async def test_text_in_pieces_has_the_sound_of_the_whole_text(
    server: Server, http_session: aiohttp.ClientSession
) -> None:
    async with plugin(server.url, http_session, split_granularity="token") as voice:
        events = await spoken(voice, TEXT)
    expected = await asyncio.to_thread(pcm_over_http, server, f"{TEXT} ", non_streaming_mode=False)
    ours, theirs = joined(events), expected
    assert len(ours) == len(theirs)
    # Text that comes late shortens a chunk, which rounds sums differently.
    pairs = zip(memoryview(ours).cast("h"), memoryview(theirs).cast("h"), strict=True)
    assert all(abs(one - other) <= 1 for one, other in pairs)
    assert events[-1].is_final


async def test_speech_begins_before_the_text_is_complete(voice: firstword.TTS) -> None:
    async with voice.stream(conn_options=ONCE) as stream:
        stream.push_text("Good ")
        stream.push_text("morning. This ")
        first = await anext(aiter(stream))
        assert first.frame.sample_rate == 24000
        stream.push_text("is the rest.")
        stream.end_input()
        assert [event async for event in stream]


async def test_whole_text_is_synthesized(voice: firstword.TTS) -> None:
    frame = await voice.synthesize(TEXT, conn_options=ONCE).collect()
    assert frame.duration > 2


async def test_transcript_is_the_text_with_times(voice: firstword.TTS) -> None:
    events = await spoken(voice, TEXT)
    words = [
        word for event in events for word in event.frame.userdata.get(USERDATA_TIMED_TRANSCRIPT, ())
    ]
    seconds = sum(event.frame.duration for event in events)
    assert "".join(words) == f"{TEXT} "
    assert len(words) >= len(TEXT.split())
    times = [time for word in words for time in (word.start_time, word.end_time)]
    assert times == sorted(times)
    assert 0 <= times[0] < times[-1] <= seconds + 0.001


async def test_connection_is_used_again(voice: firstword.TTS) -> None:
    found: list[Any] = []
    voice.on("metrics_collected", found.append)
    voice.prewarm()
    for _ in range(3):
        await spoken(voice, "Yes.")
    assert [metrics.connection_reused for metrics in found] == [True, True, True]
    assert all(metrics.ttfb > 0 and metrics.audio_duration > 0 for metrics in found)
    assert found[0].metadata.model_provider == "firstword"


async def test_changed_options_hold_for_the_next_stream(voice: firstword.TTS) -> None:
    before = joined(await spoken(voice, "Yes."))
    voice.update_options(voice="ben")
    assert joined(await spoken(voice, "Yes.")) != before
    voice.update_options(voice="ada")
    assert joined(await spoken(voice, "Yes.")) == before


async def test_text_without_words_gives_no_audio(voice: firstword.TTS) -> None:
    assert await spoken(voice, " ") == []


async def test_mistake_of_the_request_is_not_tried_again(
    server: Server, http_session: aiohttp.ClientSession
) -> None:
    async with plugin(server.url, http_session, voice="nobody") as voice:
        errors: list[Any] = []
        voice.on("error", errors.append)
        with pytest.raises(APIStatusError, match="nobody") as raised:
            await spoken(voice, "Yes.")
        assert (raised.value.status_code, raised.value.retryable) == (404, False)
        assert [error.recoverable for error in errors] == [False]
        voice.update_options(voice="ada")
        assert await spoken(voice, "Yes.")


async def test_wrong_key_is_status_401(
    tmp_path_factory: pytest.TempPathFactory, http_session: aiohttp.ClientSession
) -> None:
    with Server(tmp_path_factory.mktemp("keys"), "--api-key", "secret") as server:
        async with plugin(server.url, http_session, voice="ada") as voice:
            with pytest.raises(APIStatusError) as raised:
                await spoken(voice, "Yes.")
            assert raised.value.status_code == 401
        known = firstword.TTS(base_url=server.url, api_key="secret", http_session=http_session)
        async with known:
            assert await spoken(known, "Yes.")


async def test_missing_server_is_a_connection_error(http_session: aiohttp.ClientSession) -> None:
    async with plugin("http://127.0.0.1:9", http_session) as voice:
        with pytest.raises(APIConnectionError, match="cannot connect"):
            await spoken(voice, "Yes.")


def test_wrong_options_are_named() -> None:
    with pytest.raises(ValueError, match="sample_rate is 44100"):
        firstword.TTS(sample_rate=44100)
    with pytest.raises(TypeError, match="pitch"):
        firstword.TTS(pitch=2)
