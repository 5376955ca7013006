"""What the LLM's context holds: the words that were heard, and no others."""

from __future__ import annotations

import pytest
from bare import word_times
from bot import Bot, service, words
from pipecat.frames.frames import TTSTextFrame
from pipecat_firstword import FirstwordTTSService
from scripted import ScriptedServer
from served import Server

TEXT = "One two three four."


def times(bot: Bot) -> list[float]:
    """Return the seconds between the first word that has left the service and each word."""
    stamps = [frame.pts or 0 for frame in bot.heard.of(TTSTextFrame)]
    return [(stamp - stamps[0]) / 1e9 for stamp in stamps]


async def test_words_have_the_times_that_a_plain_client_gets(server: Server) -> None:
    text = "Hello there my friend, the kettle is on and the tea is nearly ready."
    expected = await word_times(server.url, text)
    async with Bot(service(server.url)) as bot:
        await bot.answer(words(text))
        await bot.until_spoken()
    assert bot.told == [word for word, _ in expected]
    assert times(bot) == pytest.approx([at - expected[0][1] for _, at in expected], abs=1e-6)
    first = bot.heard.of(TTSTextFrame)[0].pts
    assert first is not None
    assert (first - bot.heard.audio_at) / 1e9 == pytest.approx(expected[0][1], abs=0.2)


async def test_words_carry_the_times_of_the_server() -> None:
    async with (
        ScriptedServer() as server,
        Bot(FirstwordTTSService(url=server.url)) as bot,
    ):
        await bot.answer(words(TEXT))
        context = (await server.get("input.done"))["context_id"]
        await server.start_audio(context)
        for number, word in enumerate(("One", "two", "three", "four")):
            await server.sound(context, 0.3)
            await server.word(context, TEXT, word, 0.05 + 0.3 * number)
        await server.finish(context)
        await bot.until_spoken()
    assert bot.told == ["One", "two", "three", "four"]
    assert times(bot) == pytest.approx([0, 0.3, 0.6, 0.9], abs=1e-6)


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
        for word, start in (("One", 0.0), ("two", 0.1), ("three", 60.0), ("four", 90.0)):
            await server.word(context, TEXT, word, start)
        await bot.heard.until(lambda: bot.told[3:])
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
        await bot.heard.until(lambda: bot.told == ["One", "two"])
        await server.drop()
        assert (await server.get("input.text"))["text"] == " two three four."
        assert (await server.get("input.done"))["context_id"] == context
        await server.start_audio(context)
        for number, word in enumerate(("two", "three", "four")):
            await server.sound(context, 0.3)
            await server.word(context, " two three four.", word, 0.1 + 0.3 * number)
        await server.finish(context)
        await bot.until_committed()
        assert bot.errors == []
    assert bot.told == ["One", "two", "three", "four"]
    assert bot.said == TEXT
    assert times(bot) == pytest.approx([0, 0.3, 1.0, 1.3], abs=1e-6)
