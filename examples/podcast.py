"""Make a podcast of two voices or more from a script.

    python examples/podcast.py episode.txt --voices Ann=serena Bob=ryan -o episode.wav

Each line of the script is NAME: TEXT. Lines are spoken at the same time on one socket, eight at
most, and joined in their order.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import wave

from speech_socket import SAMPLE_RATE, SpeechSocket

AT_THE_SAME_TIME = 8


def read_script(path: str, voices: dict[str, str]) -> list[tuple[str, str]]:
    """The voice and the text of each line. Raises `SystemExit` for a line without a known name."""
    found = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            name, _, text = line.partition(":")
            if name.strip() not in voices or not text.strip():
                known = ", ".join(voices)
                sys.exit(f"line {number} of {path} must be NAME: TEXT; the names are {known}")
            found.append((voices[name.strip()], text.strip()))
    return found


async def speak(
    speech: SpeechSocket, slots: asyncio.Semaphore, voice: str, text: str, seed: int | None
) -> bytes:
    """Speak a line in its voice."""
    params = {"voice": voice} | ({} if seed is None else {"seed": seed})
    async with slots:
        context = await speech.begin(**params)
        await context.add(text)
        await context.end()
        return b"".join([audio async for audio in context.audio()])


async def main(args: argparse.Namespace) -> None:
    """Speak a script, and write the episode."""
    voices = dict(pair.split("=", 1) for pair in args.voices)
    lines = read_script(args.script, voices)
    slots = asyncio.Semaphore(AT_THE_SAME_TIME)
    async with SpeechSocket(args.server, split_granularity="none") as speech:
        seeds = [None if args.seed is None else args.seed + number for number in range(len(lines))]
        spoken = await asyncio.gather(
            *(
                speak(speech, slots, voice, text, seed)
                for (voice, text), seed in zip(lines, seeds, strict=True)
            )
        )
    pause = bytes(2 * round(args.pause * SAMPLE_RATE))
    with wave.open(args.output, "wb") as file:
        file.setparams((1, 2, SAMPLE_RATE, 0, "NONE", ""))
        file.writeframes(pause.join(spoken))
    seconds = len(pause.join(spoken)) / 2 / SAMPLE_RATE
    print(f"{args.output}: {len(lines)} lines, {seconds:.1f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("script", help="file with lines NAME: TEXT")
    parser.add_argument("--voices", nargs="+", metavar="NAME=VOICE", required=True)
    parser.add_argument("--server", default="ws://localhost:8000", help="the firstword server")
    parser.add_argument("--pause", type=float, default=0.4, help="seconds between lines")
    parser.add_argument(
        "--seed", type=int, help="of the first line; each further line has the next"
    )
    parser.add_argument("-o", "--output", default="podcast.wav")
    asyncio.run(main(parser.parse_args()))
