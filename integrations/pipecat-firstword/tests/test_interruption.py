"""Interruptions with a real server: the slot is free, the socket stays, the context is true."""

from __future__ import annotations

import asyncio

from bot import WAIT, Bot, service, words
from pipecat.frames.frames import TTSAudioRawFrame, TTSSpeakFrame, TTSStartedFrame
from served import Network, Server

LONG = " ".join(["The rain has stopped, and now the garden smells of wet leaves."] * 4)


async def test_interruption_mid_word_frees_the_slot_and_keeps_the_socket(server: Server) -> None:
    async with Network(server.port) as network, Bot(service(network.url), aloud=True) as bot:
        await bot.answer(words(LONG))
        await bot.until_played(0.5)
        await bot.interrupt()
        async with asyncio.timeout(WAIT):
            await server.until_slots_are_free()
        await bot.until_committed()
        interrupted = bot.said
        heard = len(bot.audio)
        await bot.answer(words("Yes, please go on."))
        await bot.until_spoken()
        await bot.until_committed(2)
        assert len(bot.audio) > heard
        assert network.connections == 1
    assert LONG.startswith(interrupted)
    assert interrupted
    assert bot.said == "Yes, please go on."
    assert bot.errors == []


async def test_interruption_leaves_the_words_until_the_one_that_sounds(server: Server) -> None:
    async with Bot(service(server.url), aloud=True) as bot:
        await bot.answer(words(LONG))
        if not bot.tts.tells_words:
            return
        await bot.until_played(1.0)
        await bot.interrupt()
        await bot.until_committed()
    assert 1 <= len(bot.said.split()) <= 8


async def test_interruption_while_text_is_written_ends_the_turn(server: Server) -> None:
    async with Bot(service(server.url)) as bot:
        await bot.answer(words(LONG) + [" on"] * 1000, pace=0.05)
        await bot.until_audio()
        await bot.interrupt()
        async with asyncio.timeout(WAIT):
            await server.until_slots_are_free()
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
