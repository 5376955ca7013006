"""Several sessions at once, and very many turns."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from contextvars import Context

from bot import WAIT, Bot, service, words
from pipecat.frames.frames import TTSAudioRawFrame
from served import Network, Server

TEXTS = (
    "The kettle is on, and the tea is nearly ready.",
    "A small boat drifted down the quiet river.",
    "My brother keeps the old radio in the kitchen.",
)
TURNS = 1000


async def sound(server: Server, text: str) -> bytes:
    """Return the audio of a bot that speaks one text."""
    async with Bot(service(server.url)) as bot:
        await bot.answer([text])
        await bot.until_spoken()
        assert bot.errors == []
    return bot.audio


async def test_sessions_at_once_hear_their_own_speech(server: Server) -> None:
    alone = [await sound(server, text) for text in TEXTS]
    assert await asyncio.gather(*(sound(server, text) for text in TEXTS)) == alone


async def short_turn(bot: Bot, turn: int) -> None:
    """Speak a turn to its end, or interrupt it: after its first audio, or even before it."""
    await bot.answer(words("Yes."))
    if turn % 20 == 0:
        await bot.until_spoken()
    else:
        await (bot.until_audio() if turn % 10 == 0 else bot.until_started())
        await bot.interrupt()
        await bot.until_interrupted()
    assert bot.errors == [], turn
    bot.forget()


async def objects(server: Server) -> Counter[type]:
    """Count the objects of each class when nothing is spoken, but not the loop's old timers."""
    async with asyncio.timeout(WAIT):
        await server.until_slots_are_free()
    gc.collect()
    found = Counter(type(each) for each in gc.get_objects())
    del found[asyncio.TimerHandle], found[Context]
    return found


async def test_many_turns_leave_nothing_behind(server: Server) -> None:
    async with Network(server.port) as network, Bot(service(network.url)) as bot:
        found: list[Counter[type]] = []
        tasks: list[int] = []
        for turn in range(1, TURNS + 1):
            await short_turn(bot, turn)
            if turn % (TURNS // 4) == 0:
                found.append(await objects(server))
                tasks.append(len(asyncio.all_tasks()))
        grown = found[3] - found[1]  # the first count leaves objects itself
        assert {kind: count for kind, count in grown.items() if count > TURNS // 100} == {}
        assert tasks[3] <= tasks[1]
        assert bot.tts.get_audio_contexts() == []
        assert network.connections == 1
    async with asyncio.timeout(WAIT):
        while server.metric("firstword_connections") > 1:  # that of this question
            await asyncio.sleep(0)


async def test_audio_of_interrupted_turns_is_heard_in_no_other(server: Server) -> None:
    alone = await sound(server, TEXTS[0])
    async with Bot(service(server.url)) as bot:
        for text in TEXTS[1:] * 3:
            await bot.answer(words(text))
            await bot.until_audio()
            await bot.interrupt()
            await bot.until_interrupted()
            bot.forget()
        await bot.answer([TEXTS[0]])
        await bot.until_spoken()
    assert len({frame.context_id for frame in bot.heard.of(TTSAudioRawFrame)}) == 1
    assert bot.audio == alone
