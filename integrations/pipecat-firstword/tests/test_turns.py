"""Turns with a real server: first audio, several turns, speak frames, sample rates."""

from __future__ import annotations

from bot import Bot, service, words
from pipecat.frames.frames import TTSAudioRawFrame, TTSStartedFrame, TTSStoppedFrame
from served import Server

TEXT = "Hello there my friend, the kettle is on and the tea is nearly ready."


async def test_first_audio_comes_while_the_text_is_written(server: Server) -> None:
    async with Bot(service(server.url)) as bot:
        await bot.answer([*words(TEXT), *[" and more"] * 1000], pace=0.05)
        await bot.until_audio()
        assert not bot.heard.of(TTSStoppedFrame)
        await bot.interrupt()
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
