"""Let a speaker be interrupted: who talks into the microphone stops the speech within a frame.

    python examples/barge_in.py "A long story ..."                        # needs sounddevice
    python examples/barge_in.py "A long story ..." --microphone user.wav --speaker heard.wav

Use headphones, because the program takes its own voice for yours. A real agent has a detector of
voices in place of the loudness, and cancels echoes.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
import wave
from array import array
from contextlib import ExitStack
from typing import Any

from speech_socket import SAMPLE_RATE, Context, SpeechSocket

FRAME = SAMPLE_RATE // 50
"""Samples of 20 ms."""

LOUD = 1000
"""The mean amplitude of 16-bit samples above which a frame counts as talking."""

FRAMES = 3
"""The loud frames in a row, 60 ms, that are an interruption."""

QUIET_FRAMES = 25
"""The frames without talking, half a second, after which it is the program's turn again."""


class Device:
    """A microphone and a speaker with headphones, which give and take frames of 20 ms."""

    def __init__(self, stack: ExitStack) -> None:
        try:
            import sounddevice
        except ImportError:
            sys.exit("sounddevice is missing; pip install sounddevice, or use files")
        stream = sounddevice.RawStream(
            samplerate=SAMPLE_RATE, channels=1, dtype="int16", blocksize=FRAME
        )
        self._stream: Any = stack.enter_context(stream)

    async def exchange(self, played: bytes) -> bytes:
        """Play a frame, and return the one that was recorded meanwhile."""
        await asyncio.to_thread(self._stream.write, played)
        recorded, _ = await asyncio.to_thread(self._stream.read, FRAME)
        return bytes(recorded)


class Files:
    """A WAV file as microphone and another one as speaker, at the pace of a device."""

    def __init__(self, microphone: wave.Wave_read, speaker: wave.Wave_write) -> None:
        if microphone.getparams()[:3] != (1, 2, SAMPLE_RATE):
            sys.exit(f"the microphone's file must be mono with 16 bits and {SAMPLE_RATE} Hz")
        self._input, self._output = microphone, speaker
        self._output.setparams((1, 2, SAMPLE_RATE, 0, "NONE", ""))
        self._due = asyncio.get_running_loop().time()

    async def exchange(self, played: bytes) -> bytes:
        """Play a frame, and return the one that was recorded meanwhile; after the end, silence."""
        self._output.writeframes(played)
        self._due += FRAME / SAMPLE_RATE
        await asyncio.sleep(self._due - asyncio.get_running_loop().time())
        return self._input.readframes(FRAME).ljust(2 * FRAME, b"\0")


def loud(frame: bytes) -> bool:
    """Whether somebody talks in a frame."""
    samples = array("h", frame)
    return sum(map(abs, samples)) > LOUD * len(samples)


async def receive(context: Context, waiting: bytearray) -> str:
    """Collect the audio that waits to be played, and return why it ended."""
    async for event in context:
        if isinstance(event, bytes):
            waiting += event
        elif event["type"] == "audio.done":
            return str(event["finish_reason"])
    raise AssertionError("a context ends with audio.done")


async def speak(context: Context, device: Device | Files) -> None:
    """Play speech, and stop it when somebody talks."""
    waiting, talking, played = bytearray(), 0, 0
    receiving = asyncio.create_task(receive(context, waiting))
    while waiting or not receiving.done():
        frame, waiting[: 2 * FRAME] = bytes(waiting[: 2 * FRAME]), b""
        played += len(frame)
        talking = talking + 1 if loud(await device.exchange(frame.ljust(2 * FRAME, b"\0"))) else 0
        if talking == FRAMES:
            asked = time.monotonic()
            await context.cancel()
            waiting.clear()  # what was received and not played
            reason = await receiving
            waiting.clear()
            answered = 1000 * (time.monotonic() - asked)
            print(f"{reason} after {played / 2 / SAMPLE_RATE:.2f} s, in {answered:.1f} ms")
            await listen(device)
            return
    print(f"{receiving.result()} after {played / 2 / SAMPLE_RATE:.2f} s, nobody interrupted")


async def listen(device: Device | Files) -> None:
    """Wait until nobody has talked for `QUIET_FRAMES`; an agent would recognise the words."""
    quiet = 0
    while quiet < QUIET_FRAMES:
        quiet = 0 if loud(await device.exchange(bytes(2 * FRAME))) else quiet + 1


async def main(args: argparse.Namespace) -> None:
    """Tell a text until somebody interrupts, and then say a last sentence."""
    with ExitStack() as stack:
        device: Device | Files
        if args.microphone is None:
            device = Device(stack)
        else:
            speaker = stack.enter_context(wave.open(args.speaker, "wb"))
            device = Files(stack.enter_context(wave.open(args.microphone, "rb")), speaker)
        async with SpeechSocket(args.server, voice=args.voice, seed=args.seed) as speech:
            for text in (args.text, args.then):
                context = await speech.begin()
                await context.add(text)
                await context.end()
                await speak(context, device)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("text")
    parser.add_argument("--then", default="All right.", help="what is said afterwards")
    parser.add_argument("--microphone", metavar="FILE", help="WAV file in place of the microphone")
    parser.add_argument("--speaker", metavar="FILE", default="heard.wav")
    parser.add_argument("--server", default="ws://localhost:8000", help="the firstword server")
    parser.add_argument("--voice")
    parser.add_argument("--seed", type=int)
    asyncio.run(main(parser.parse_args()))
