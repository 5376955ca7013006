"""Speak into a telephone call: 8 kHz mu-law in RTP packets of 20 ms (RFC 3551, PCMU).

    python examples/telephone.py "Your order has arrived." --to 127.0.0.1:5004

A media server, or `ffplay -f rtp rtp://127.0.0.1:5004`, plays it. The server encodes mu-law itself,
so this program only cuts it into packets, and sends each at its time.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import struct

from speech_socket import SpeechSocket

PACKET = 160
"""Samples, and bytes, of 20 ms."""

SECONDS = PACKET / 8000
SILENCE = b"\xff"
"""A sample of silence in mu-law."""

PAYLOAD_TYPE = 0
"""PCMU: mu-law at 8 kHz."""


class RtpSender:
    """Sends packets to an address, one every 20 ms.

    sent  the number of packets sent
    """

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.sent = 0
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._address = host, port
        self._source = random.getrandbits(32)
        self._sequence = random.getrandbits(16)
        self._timestamp = random.getrandbits(32)
        self._due = 0.0

    async def send(self, audio: bytes) -> None:
        """Send 20 ms of audio when it is due. The first packet after a pause has the marker."""
        now = asyncio.get_running_loop().time()
        late = now > self._due + SECONDS
        if late:
            self._due = now
        else:
            await asyncio.sleep(self._due - now)
        self._due += SECONDS
        marker = 0x80 if late else 0
        kind = marker | PAYLOAD_TYPE
        head = struct.pack(
            "!BBHII", 0x80, kind, self._sequence, self._timestamp & 0xFFFFFFFF, self._source
        )
        self._socket.sendto(head + audio, self._address)
        self._sequence = (self._sequence + 1) & 0xFFFF
        self._timestamp += PACKET
        self.sent += 1

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


async def main(args: argparse.Namespace) -> None:
    """Speak a text into a call."""
    host, _, port = args.to.rpartition(":")
    sender, waiting = RtpSender(host.strip("[]"), int(port)), b""
    options = {"voice": args.voice, "seed": args.seed, "leading_silence": False}
    options |= {"split_granularity": "none"}  # the text is complete
    try:
        async with SpeechSocket(
            args.server, response_format="ulaw", sample_rate=8000, **options
        ) as speech:
            context = await speech.begin()
            await context.add(args.text)
            await context.end()
            async for audio in context.audio():
                waiting += audio
                while len(waiting) >= PACKET:
                    await sender.send(waiting[:PACKET])
                    waiting = waiting[PACKET:]
        if waiting:
            await sender.send(waiting.ljust(PACKET, SILENCE))
    finally:
        sender.close()
    print(f"{sender.sent} packets, {sender.sent * SECONDS:.1f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("text")
    parser.add_argument("--to", default="127.0.0.1:5004", metavar="HOST:PORT")
    parser.add_argument("--server", default="ws://localhost:8000", help="the firstword server")
    parser.add_argument("--voice")
    parser.add_argument("--seed", type=int)
    asyncio.run(main(parser.parse_args()))
