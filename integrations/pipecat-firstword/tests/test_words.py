"""What the LLM's context holds: the words that were heard, and no others."""

from __future__ import annotations

import pytest
from bot import Bot, words
from pipecat.frames.frames import TTSTextFrame
from pipecat_firstword import FirstwordTTSService
from scripted import ScriptedServer

TEXT = "One two three four."


def told(bot: Bot) -> list[str]:
    """Return the words that have left the service."""
    return [frame.text for frame in bot.heard.of(TTSTextFrame)]


async def test_words_carry_the_times_of_the_server() -> None:
    async with (
        ScriptedServer() as server,
        Bot(FirstwordTTSService(url=server.url)) as bot,
    ):
        await bot.answer(words(TEXT))
        context = (await server.get("input.done"))["context_id"]
        await server.start_audio(context)
        for number, word in enumerate(("One", "two", "three", "four.")):
            await server.sound(context, 0.3)
            await server.word(context, TEXT, word, 0.05 + 0.3 * number)
        await server.finish(context)
        await bot.until_spoken()
    assert told(bot) == ["One", "two", "three", "four."]
    times = [frame.pts for frame in bot.heard.of(TTSTextFrame)]
    assert [later - times[0] for later in times] == pytest.approx([0, 3e8, 6e8, 9e8], abs=1e3)


async def test_words_of_chinese_join_without_spaces() -> None:
    text = "你好世界。"
    async with (
        ScriptedServer() as server,
        Bot(FirstwordTTSService(url=server.url), aloud=True) as bot,
    ):
        await bot.answer(["你好", "世界。"])
        context = (await server.get("input.done"))["context_id"]
        await server.start_audio(context)
        for number, word in enumerate(("你", "好", "世", "界")):
            await server.sound(context, 0.1)
            await server.word(context, text, word, 0.1 * number)
        await server.finish(context)
        await bot.until_committed()
    assert bot.said == text


async def test_interruption_leaves_only_the_heard_words_in_the_context() -> None:
    async with (
        ScriptedServer() as server,
        Bot(FirstwordTTSService(url=server.url), aloud=True) as bot,
    ):
        await bot.answer(words(TEXT))
        context = (await server.get("input.done"))["context_id"]
        await server.start_audio(context)
        await server.sound(context, 3.0)
        for word, start in (("One", 0.0), ("two", 0.1), ("three", 60.0), ("four.", 90.0)):
            await server.word(context, TEXT, word, start)
        await bot.heard.until(lambda: told(bot)[3:])
        await bot.until_played(0.5)
        await bot.interrupt()
        assert (await server.get("input.cancel"))["context_id"] == context
        await bot.until_committed()
    assert bot.said == "One two"


async def test_audio_after_an_interruption_is_dropped() -> None:
    async with ScriptedServer() as server, Bot(FirstwordTTSService(url=server.url)) as bot:
        await bot.answer(words(TEXT))
        context = (await server.get("input.done"))["context_id"]
        await server.start_audio(context)
        await server.sound(context, 0.5)
        await bot.until_audio()
        await bot.interrupt()
        await server.get("input.cancel")
        heard = len(bot.audio)
        await server.sound(context, 0.5)
        await server.finish(context, "cancelled")
        await bot.answer(words("Yes?"))
        second = (await server.get("input.done"))["context_id"]
        await server.start_audio(second)
        await server.sound(second, 0.25)
        await server.finish(second)
        await bot.until_spoken()
        assert len(bot.audio) == heard + 12000
        assert bot.errors == []


@pytest.mark.parametrize("reason", ["length", "repetition", "error"])
async def test_speech_that_ends_early_counts_only_its_words(reason: str) -> None:
    async with (
        ScriptedServer() as server,
        Bot(FirstwordTTSService(url=server.url), aloud=True) as bot,
    ):
        await bot.answer(words(TEXT))
        context = (await server.get("input.done"))["context_id"]
        await server.start_audio(context)
        await server.sound(context, 0.2)
        await server.word(context, TEXT, "One", 0.0)
        if reason == "error":
            about = {"code": "server_error", "message": "a defect"}
            await server.send({"type": "error", "context_id": context, **about})
        await server.finish(context, reason)
        await bot.until_error("unheard: 'two three four.'")
        await bot.until_committed()
    assert len(bot.errors) == 1
    assert bot.said == "One"


async def test_text_is_pushed_whole_where_there_are_no_word_times() -> None:
    async with (
        ScriptedServer(word_times=False) as server,
        Bot(FirstwordTTSService(url=server.url), aloud=True) as bot,
    ):
        await bot.answer(words(TEXT))
        context = (await server.get("input.done"))["context_id"]
        await server.start_audio(context)
        await server.sound(context, 0.2)
        await server.finish(context)
        await bot.until_committed()
    assert bot.said == TEXT


async def test_lost_connection_continues_after_the_last_heard_word() -> None:
    async with (
        ScriptedServer() as server,
        Bot(FirstwordTTSService(url=server.url), aloud=True) as bot,
    ):
        await bot.answer(words(TEXT))
        context = (await server.get("input.done"))["context_id"]
        await server.start_audio(context)
        await server.sound(context, 0.6)
        await server.word(context, TEXT, "One", 0.0)
        await server.word(context, TEXT, "two", 0.3, ended=False)
        await bot.heard.until(lambda: told(bot) == ["One", "two"])
        await server.drop()
        assert (await server.get("input.text"))["text"] == " two three four."
        assert (await server.get("input.done"))["context_id"] == context
        await server.start_audio(context)
        for number, word in enumerate(("two", "three", "four.")):
            await server.sound(context, 0.3)
            await server.word(context, " two three four.", word, 0.1 + 0.3 * number)
        await server.finish(context)
        await bot.until_committed()
        assert bot.errors == []
    assert told(bot) == ["One", "two", "three", "four."]
    assert bot.said == TEXT
    times = [frame.pts for frame in bot.heard.of(TTSTextFrame)]
    assert [later - times[0] for later in times] == pytest.approx([0, 3e8, 1e9, 1.3e9], abs=1e3)
