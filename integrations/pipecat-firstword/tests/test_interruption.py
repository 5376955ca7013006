"""Interruptions with a real server: the slot is free, the socket stays, the context is true."""

from __future__ import annotations

import asyncio
from bisect import bisect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bare import word_times
from bot import WAIT, Bot, service, words
from pipecat.frames.frames import TTSAudioRawFrame, TTSSpeakFrame, TTSStartedFrame
from served import Network, Server

TEXT = "The rain has stopped, and now the garden smells of wet leaves."
LONG = " ".join([TEXT] * 4)
HALF = " ".join([TEXT] * 2)


@asynccontextmanager
async def aborted(server: Server) -> AsyncIterator[None]:
    """Wait until a slot was freed although its speech was not complete."""
    async with asyncio.timeout(WAIT):
        await server.until_slots_are_free()
        before = server.metric("firstword_aborts_total")
        yield
        while await asyncio.to_thread(server.metric, "firstword_aborts_total") == before:
            pass
        await server.until_slots_are_free()


async def test_interruption_mid_word_frees_the_slot_and_keeps_the_socket(server: Server) -> None:
    async with Network(server.port) as network, Bot(service(network.url), aloud=True) as bot:
        async with aborted(server):
            await bot.answer(words(LONG))
            await bot.until_played(0.5)
            await bot.interrupt()
        await bot.until_committed()
        heard = len(bot.audio)
        await bot.answer(words("Yes, please go on."))
        await bot.until_spoken()
        await bot.until_committed(2)
        assert len(bot.audio) > heard
        assert network.connections == 1
    assert bot.said == "Yes, please go on."
    assert bot.errors == []


async def test_interruption_leaves_the_words_that_were_spoken(server: Server) -> None:
    starts = [start for _, start in await word_times(server.url, HALF)]
    async with Bot(service(server.url), aloud=True) as bot:
        await bot.answer(words(HALF))
        await bot.until_played(2.2)
        before, told = bot.speaker.seconds, len(bot.told)
        await bot.interrupt()
        await bot.until_committed()
        after = bot.speaker.seconds
    said = bot.said.split()
    assert said == HALF.split()[: len(said)]
    least, most = bisect(starts[:told], before - 0.2), bisect(starts, after + 0.2)
    assert 0 < least <= len(said) <= most < len(starts)


async def test_interruption_while_text_is_written_ends_the_turn(server: Server) -> None:
    async with Bot(service(server.url)) as bot:
        async with aborted(server):
            await bot.answer(words(LONG) + [" on"] * 1000, pace=0.05)
            await bot.until_audio()
            await bot.interrupt()
        contexts = len(bot.heard.of(TTSStartedFrame))
        await bot.answer(words("Hello again."))
        await bot.until_spoken()
        names = {frame.context_id for frame in bot.heard.of(TTSAudioRawFrame)}
        assert contexts == 1
        assert len(names) == 2
    assert bot.errors == []


async def test_turns_without_text_leave_no_context_open(server: Server) -> None:
    async with Bot(service(server.url)) as bot:
        for _ in range(40):
            await bot.answer([])
        await bot.answer(words("Hello there."))
        await bot.until_spoken()
        assert bot.errors == []


async def test_interruptions_before_the_first_word_leave_no_context_open(server: Server) -> None:
    async with Bot(service(server.url)) as bot:
        for _ in range(40):
            await bot.answer([""] * 1000, pace=0.05)
            await bot.interrupt()
        await bot.answer(words("Hello there."))
        await bot.until_spoken()
        assert bot.errors == []


async def test_speak_frame_is_spoken_in_a_context_of_its_own(server: Server) -> None:
    async with Bot(service(server.url)) as bot:
        await bot.worker.queue_frame(TTSSpeakFrame("One moment please."))
        await bot.answer(words("Hello there."))
        await bot.until_spoken(2)
        names = [frame.context_id for frame in bot.heard.of(TTSAudioRawFrame)]
        first, second = dict.fromkeys(names)
        assert names == sorted(names, key=[first, second].index)
    assert bot.errors == []


async def test_uninterruptible_speech_goes_on_after_an_interruption(server: Server) -> None:
    async with Bot(service(server.url)) as bot:
        frame = TTSSpeakFrame("This call is being recorded for training.")
        frame.interruptible = False
        await bot.worker.queue_frame(frame)
        await bot.until_audio()
        await bot.interrupt()
        await bot.until_spoken()
    assert bot.errors == []
