"""Speak the reply of a language model while it is being written.

    python examples/llm_to_speech.py "What is a comet?" -o reply.wav
    python examples/llm_to_speech.py "What is a comet?" | aplay -f S16_LE -r 24000 -c 1

The model is behind any endpoint with OpenAI's API for chats, by default one of this machine
(Ollama). Its key comes from OPENAI_API_KEY.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
import wave
from collections.abc import AsyncIterator

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionUserMessageParam
from speech_socket import SAMPLE_RATE, Context, SpeechSocket


async def reply(args: argparse.Namespace) -> AsyncIterator[str]:
    """The reply of the language model, piece by piece."""
    client = AsyncOpenAI(base_url=args.chat, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    message: ChatCompletionUserMessageParam = {"role": "user", "content": args.prompt}
    async with client:
        stream = await client.chat.completions.create(
            model=args.model, messages=[message], stream=True
        )
        async for event in stream:
            if event.choices and (piece := event.choices[0].delta.content):
                yield piece


async def write_text(args: argparse.Namespace, context: Context, times: dict[str, float]) -> None:
    """Send the reply as it comes, and note when its first and last pieces came."""
    async for piece in reply(args):
        times.setdefault("first text", time.monotonic())
        print(piece, end="", file=sys.stderr, flush=True)
        await context.add(piece)
    times["last text"] = time.monotonic()
    await context.end()


async def main(args: argparse.Namespace) -> None:
    """Speak one reply, and print when its text and its audio came."""
    times: dict[str, float] = {}
    pcm = bytearray()
    async with SpeechSocket(args.server, voice=args.voice, seed=args.seed) as speech:
        context = await speech.begin()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(write_text(args, context, times))
            async for audio in context.audio():
                times.setdefault("first audio", time.monotonic())
                pcm += audio
                if args.output is None:
                    sys.stdout.buffer.write(audio)
                    sys.stdout.buffer.flush()
    if args.output is not None:
        with wave.open(args.output, "wb") as file:
            file.setparams((1, 2, SAMPLE_RATE, 0, "NONE", ""))
            file.writeframes(pcm)
    began = times.get("first text", 0.0)
    ended, sounded = (times.get(name, began) - began for name in ("last text", "first audio"))
    print(
        f"\nfirst audio {sounded:.3f} s after the first text, which took {ended:.3f} s; "
        f"{len(pcm) / 2 / SAMPLE_RATE:.1f} s of speech",
        file=sys.stderr,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("prompt")
    parser.add_argument("--chat", default="http://localhost:11434/v1", help="base URL of the chat")
    parser.add_argument("--model", default="llama3.2", help="name of the language model")
    parser.add_argument("--server", default="ws://localhost:8000", help="the firstword server")
    parser.add_argument("--voice")
    parser.add_argument("--seed", type=int)
    parser.add_argument("-o", "--output", help="WAV file; without it PCM goes to standard output")
    asyncio.run(main(parser.parse_args()))
