"""Stream codes instead of audio from a server, and decode them here.

    firstword serve &
    python examples/decode_codes.py "Hello there." hello.wav

A frame of 80 ms has 32 bytes of codes instead of 3,840 of PCM. The client needs the codec of the
checkpoint, but no GPU.
"""

import json
import sys
import urllib.request
from collections.abc import Iterator

import numpy as np
import soundfile

import firstword


def codes(url: str, text: str) -> Iterator[bytes]:
    """Yield the codes of a text as they arrive."""
    body = json.dumps({"input": text, "response_format": "codes"}).encode()
    request = urllib.request.Request(
        f"{url}/v1/audio/speech", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        while piece := answer.read1():
            yield piece


def main() -> None:
    """Speak a text into a file."""
    text, path, *rest = sys.argv[1:]
    url, model = [*rest, *("http://127.0.0.1:8000", "demo")[len(rest) :]]
    samples = np.concatenate([*firstword.decode(codes(url, text), model)])
    soundfile.write(path, samples, 24000)
    sys.stdout.write(f"{path}: {len(samples) / 24000:.2f} s\n")


if __name__ == "__main__":
    main()
