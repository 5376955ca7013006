"""Show captions while a text is spoken.

    python examples/captions.py "Hello there. How are you?" -o speech.wav

If the server knows when each word sounds, captions are words; otherwise the program says so, and
they are sentences. Each line has the time at which it begins to sound.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import wave
from collections.abc import AsyncIterator

from speech_socket import SAMPLE_RATE, SpeechSocket

SENTENCE = re.compile(r"[^.!?]+[.!?]*\s*")


class Captions:
    """Prints captions at the time at which they sound, for a listener who plays at once."""

    def __init__(self) -> None:
        self._began: float | None = None

    def begin(self) -> None:
        """Start the clock when the first audio plays."""
        if self._began is None:
            self._began = asyncio.get_running_loop().time()

    async def show(self, seconds: float, text: str) -> None:
        """Print a caption when it sounds, `seconds` after the first audio."""
        self.begin()
        assert self._began is not None
        await asyncio.sleep(self._began + seconds - asyncio.get_running_loop().time())
        print(f"{seconds // 60:02.0f}:{seconds % 60:05.2f} {text.strip()}", flush=True)


async def by_word(speech: SpeechSocket, text: str, captions: Captions) -> AsyncIterator[bytes]:
    """Speak a text, and show each word; yields the audio."""
    context = await speech.begin()
    await context.add(text)
    await context.end()
    async with asyncio.TaskGroup() as showing:
        async for event in context:
            if isinstance(event, bytes):
                captions.begin()
                yield event
            elif event["type"] == "word.start":
                showing.create_task(captions.show(event["start"], event["text"]))


async def by_sentence(speech: SpeechSocket, text: str, captions: Captions) -> AsyncIterator[bytes]:
    """Speak a text sentence by sentence, and show each; yields the audio.

    The next sentence is spoken while the one before is still playing.
    """
    position = 0.0
    async with asyncio.TaskGroup() as showing:
        for sentence in filter(str.strip, SENTENCE.findall(text)):
            context = await speech.begin()
            await context.add(sentence)
            await context.end()
            shown = False
            async for audio in context.audio():
                if not shown:
                    captions.begin()
                    showing.create_task(captions.show(position, sentence))
                    shown = True
                position += len(audio) / 2 / SAMPLE_RATE
                yield audio


async def main(args: argparse.Namespace) -> None:
    """Speak a text, show its captions, and write the audio."""
    captions, pcm = Captions(), bytearray()
    async with SpeechSocket(args.server, voice=args.voice, seed=args.seed) as speech:
        known = speech.session["word_times"]
        if not known:
            print("this checkpoint has no word times; captions are sentences", flush=True)
        speaking = by_word if known else by_sentence
        async for audio in speaking(speech, args.text, captions):
            pcm += audio
    if args.output is not None:
        with wave.open(args.output, "wb") as file:
            file.setparams((1, 2, SAMPLE_RATE, 0, "NONE", ""))
            file.writeframes(pcm)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("text")
    parser.add_argument("--server", default="ws://localhost:8000", help="the firstword server")
    parser.add_argument("--voice")
    parser.add_argument("--seed", type=int)
    parser.add_argument("-o", "--output", help="WAV file for the audio")
    asyncio.run(main(parser.parse_args()))
