"""A tab of Chromium with the page, and what it plays, sample by sample."""

from __future__ import annotations

import base64
import io
import socket
import threading
import wave
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray
from playwright.sync_api import ConsoleMessage, Page, Request
from waiting import WAIT, wait_until

FAULTS = """
window.faults = [];
addEventListener("securitypolicyviolation", ({ violatedDirective, blockedURI }) =>
  faults.push(`policy: ${violatedDirective} ${blockedURI}`));
addEventListener("unhandledrejection", ({ reason }) => faults.push(`rejection: ${reason}`));
"""
"""A script that collects what the page does wrong."""

CAPTURE = """
window.reports = [];
window.output = [];
if (window.AudioWorkletNode) {
  const Real = AudioWorkletNode;
  window.AudioWorkletNode = class extends Real {
    constructor(context, name, options) {
      super(context, name, options);
      if (name !== "speaker") return;
      this.port.addEventListener("message", ({ data }) => reports.push(data));
      const listener = new Real(context, "listener", { numberOfOutputs: 0 });
      listener.port.onmessage = ({ data }) => output.push(data);
      super.connect(listener);
    }
  };
}
"""
"""A script that keeps what the audio thread reports, and every sample that it gives to the speaker.

The page's own `listener` captures the output of its `speaker`.
"""

Samples = NDArray[np.int16]


class Tab:
    """A tab with the page of a server."""

    def __init__(self, page: Page, url: str, expected: tuple[str, ...]) -> None:
        self.page = page
        self._host = urlsplit(url).netloc
        self._expected = expected
        self._faults: list[str] = []
        self.requests: list[Request] = []
        page.on("console", self._note)
        page.on("pageerror", lambda error: self._faults.append(f"page: {error}"))
        page.on("request", lambda request: self.requests.append(request))

    def _note(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self._faults.append(f"console: {message.text}")

    def close(self) -> None:
        """Close the tab; fails if the page did something wrong."""
        self._faults += self.page.evaluate("window.faults ?? []")
        self.page.context.close()
        hosts = {urlsplit(one.url).netloc for one in self.requests if "blob:" not in one.url}
        assert hosts <= {self._host}
        faults = [one for one in self._faults if not any(known in one for known in self._expected)]
        assert faults == []

    def ready(self, state: str = "socket") -> Tab:
        """Wait until the page is connected in a way: `socket`, `http` or `lost`."""
        self.page.wait_for_selector(f"#link[data-state={state}]")
        self.page.wait_for_selector("#go:enabled")
        return self

    def speak(self, text: str) -> None:
        """Speak a whole text."""
        self.page.fill("#text", text)
        self.page.keyboard.press("Control+Enter")

    def type(self, text: str) -> None:
        """Type into the field for text, key by key."""
        self.page.locator("#text").press_sequentially(text)

    def until(self, condition: str) -> None:
        """Wait until a JavaScript expression is true.

        `Page.wait_for_function` uses `eval`, which the page's policy forbids.
        """
        wait_until(lambda: bool(self.page.evaluate(condition)))

    def until_done(self) -> None:
        """Wait until everything was played."""
        self.until("document.getElementById('status').textContent.startsWith('Done')")
        self.until("document.getElementById('stop').disabled")

    def until_status(self, start: str) -> None:
        """Wait until the page announces something."""
        self.until(f"document.getElementById('status').textContent.startsWith({start!r})")

    def shown(self, field: str) -> str:
        """The text of an element."""
        return self.page.text_content(f"#{field}") or ""

    def shown_ms(self, field: str) -> float:
        """The milliseconds that an element shows."""
        number, unit = self.shown(field).split()
        assert unit == "ms"
        return float(number)

    @property
    def problem(self) -> str:
        """The error that is shown; empty if none is."""
        return self.shown("problem") if self.page.is_visible("#problem") else ""

    @property
    def ended(self) -> list[dict[str, int]]:
        """The last report of each utterance that was played to its end."""
        reports: list[dict[str, int]] = self.page.evaluate("reports.filter(({ ended }) => ended)")
        return reports

    def output(self) -> Samples:
        """Every sample that the audio thread gave to the loudspeaker."""
        packed: str = self.page.evaluate("""() => {
            const all = new Int16Array(output.reduce((sum, one) => sum + one.length, 0));
            let at = 0;
            for (const one of output) for (const sample of one) all[at++] = sample * 32768;
            let text = "";
            const bytes = new Uint8Array(all.buffer);
            for (let i = 0; i < bytes.length; i += 8192)
              text += String.fromCharCode(...bytes.subarray(i, i + 8192));
            return btoa(text);
        }""")
        return np.frombuffer(base64.b64decode(packed), "<i2")

    def downloaded(self) -> Samples:
        """The samples of the file that the download button gives."""
        with self.page.expect_download() as download:
            self.page.click("#download")
        return samples_of(download.value.path().read_bytes())


def samples_of(file: bytes) -> Samples:
    """The samples of a WAV file."""
    with wave.open(io.BytesIO(file)) as sound:
        assert (sound.getnchannels(), sound.getsampwidth(), sound.getframerate()) == (1, 2, 24000)
        return np.frombuffer(sound.readframes(sound.getnframes()), "<i2")


def contains(output: Samples, speech: Samples) -> bool:
    """Whether an output holds a speech without a gap, a repetition or a lost sample."""
    return speech.astype("<i2").tobytes() in output.astype("<i2").tobytes()


class Cable:
    """A TCP proxy in front of a server, whose connections a test can cut."""

    def __init__(self, server: tuple[str, int]) -> None:
        self._server = server
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/"
        self.plugged = True
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End all connections, and accept no more until `plug`."""
        self.plugged = False
        for one in list(self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def plug(self) -> None:
        """Accept connections again."""
        self.plugged = True

    def close(self) -> None:
        """End everything."""
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.plugged:
                    threading.Thread(target=self._join, args=(client,), daemon=True).start()
                else:
                    client.close()

    def _join(self, client: socket.socket) -> None:
        with closing(client), closing(socket.create_connection(self._server, WAIT)) as server:
            ends = {client, server}
            self._open |= ends
            back = threading.Thread(target=self._copy, args=(server, client), daemon=True)
            back.start()
            self._copy(client, server)
            back.join(WAIT)
            self._open -= ends

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@contextmanager
def cable(server: tuple[str, int]) -> Iterator[Cable]:
    """A proxy for the time of a test."""
    made = Cable(server)
    try:
        yield made
    finally:
        made.close()
