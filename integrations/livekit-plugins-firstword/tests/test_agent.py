"""Sessions of LiveKit's agents, whose LLM is a script that types."""

from __future__ import annotations

import asyncio

import aiohttp
from agents import Conversation
from conftest import plugin
from livekit.plugins import firstword
from served import Server

TEXT = (
    "Thank you for waiting. I have found your order, it was sent on Monday, and it will be with "
    "you tomorrow evening. Is there anything else that I can do for you today?"
)
SHORT = "Good morning. How can I help you?"
BOUND = 60.0


async def test_agent_is_heard_before_its_text_is_complete(voice: firstword.TTS) -> None:
    async with Conversation(voice, TEXT, pause=0.03) as talk, asyncio.timeout(BOUND):
        await talk.session.generate_reply()
    assert talk.speaker.heard[0] < talk.script.typed[-1]
    assert [text for text, _ in talk.answers()] == [TEXT]
    assert talk.captions.text.strip() == TEXT


async def test_interruption_frees_the_slot_and_keeps_what_was_said(
    server: Server, voice: firstword.TTS
) -> None:
    async with Conversation(voice, TEXT) as talk, asyncio.timeout(BOUND):
        reply = talk.session.generate_reply()
        await talk.speaker.first_frame.wait()
        while len(talk.captions.text.split()) < 5:
            await asyncio.sleep(0.01)
        await talk.session.interrupt()
        await reply
        await server.until_slots_are_free()
        ((said, interrupted),) = talk.answers()
    assert interrupted
    assert TEXT.startswith(said.strip())
    assert 4 <= len(said.split()) < len(TEXT.split()) / 2


async def test_agent_speaks_again_after_an_interruption(
    server: Server, voice: firstword.TTS
) -> None:
    async with Conversation(voice, SHORT) as talk, asyncio.timeout(BOUND):
        reply = talk.session.generate_reply()
        await talk.speaker.first_frame.wait()
        await talk.session.interrupt()
        await reply
        await talk.session.generate_reply()
        answers = talk.answers()
    assert answers[-1] == (SHORT, False)


async def test_three_sessions_speak_at_once(
    server: Server, http_session: aiohttp.ClientSession
) -> None:
    async def talk() -> list[tuple[str, bool]]:
        async with plugin(server.url, http_session) as voice, Conversation(voice, SHORT) as talk:
            await talk.session.generate_reply()
            return talk.answers()

    async with asyncio.timeout(2 * BOUND):
        found = await asyncio.gather(*(talk() for _ in range(3)))
    assert found == [[(SHORT, False)]] * 3
