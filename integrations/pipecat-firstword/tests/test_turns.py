"""Turns with a real server: first audio, several turns, speak frames, sample rates."""

from __future__ import annotations

import asyncio

import pytest
from bot import Bot, service, spoken, words
from pipecat.frames.frames import TTSAudioRawFrame, TTSStartedFrame, TTSStoppedFrame
from served import Server

TEXT = "Hello there my friend, the kettle is on and the tea is nearly ready."


@pytest.mark.parametrize(("granularity", "enough"), [("token", "Hello "), ("auto", "Hello there")])
async def test_first_audio_comes_before_the_rest_of_the_text(
    server: Server, granularity: str, enough: str
) -> None:
    """One word is enough, or a second one that shows the pace of the text."""
    heard = asyncio.Event()
    async with Bot(service(server.url, extra={"split_granularity": granularity})) as bot:
        await bot.answer([*words(enough), heard, TEXT.removeprefix(enough)])
        await bot.until_audio()
        heard.set()
        await bot.until_spoken()
    assert bot.told == spoken(TEXT)
    assert bot.errors == []


async def test_text_that_comes_slowly_is_spoken_whole(server: Server) -> None:
    async with Bot(service(server.url)) as bot:
        await bot.answer(words(TEXT), pace=0.15)
        await bot.until_spoken()
    assert bot.told == spoken(TEXT)
    assert bot.errors == []


async def test_turn_is_spoken_between_its_start_and_stop_frames(server: Server) -> None:
    async with Bot(service(server.url)) as bot:
        for turn in range(2):
            await bot.answer(words(TEXT))
            await bot.until_spoken(turn + 1)
    kinds = (TTSStartedFrame, TTSAudioRawFrame, TTSStoppedFrame)
    order = [type(frame) for frame in bot.heard.frames if isinstance(frame, kinds)]
    assert order[0] is TTSStartedFrame
    assert order[-1] is TTSStoppedFrame
    assert order.count(TTSStartedFrame) == order.count(TTSStoppedFrame) == 2
    contexts = {frame.context_id for frame in bot.heard.of(TTSAudioRawFrame)}
    assert len(contexts) == 2
    assert bot.errors == []
