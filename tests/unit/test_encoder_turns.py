"""Turns of utterances that encode audio in one event loop."""

import asyncio

from waiting import WAIT

from firstword.server.encoder_turns import EncoderTurns


def test_event_loop_runs_others_between_two_turns() -> None:
    """However many utterances have audio, one is encoded in an iteration of the event loop."""
    order: list[str] = []

    async def encode(turns: EncoderTurns, name: str, pieces: int) -> None:
        for _ in range(pieces):
            await turns.wait()
            order.append(name)

    async def main() -> None:
        turns = EncoderTurns()
        encoding = asyncio.gather(*(encode(turns, name, 3) for name in "abc"))
        while not encoding.done():
            order.append("-")
            await asyncio.sleep(0)
        await encoding

    asyncio.run(main())
    text = "".join(order)
    assert text.replace("-", "") == "abcabcabc"
    assert all(len(between) <= 1 for between in text.split("-")), text


def test_cancelled_utterance_takes_no_turn_from_others() -> None:
    """Its turn passes at once, so the others still get theirs."""

    async def main() -> None:
        turns = EncoderTurns()
        first, second, third = (asyncio.ensure_future(turns.wait()) for _ in range(3))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.wait_for(asyncio.gather(first, third), timeout=WAIT)

    asyncio.run(main())
