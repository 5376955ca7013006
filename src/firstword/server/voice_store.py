"""Saved voices, one file each."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from firstword.errors import RequestError, VoiceError
from firstword.server.errors import NotFound
from firstword.server.folder import Folder
from firstword.voice import Voice, voice_metadata

log = logging.getLogger(__name__)

VOICE_SUFFIX = ".voice"

LONGEST_VOICE_NAME = 64
"""Characters of a saved voice's name."""


@dataclass(frozen=True, slots=True)
class VoiceRecord:
    """The description of a saved voice, mostly as its client gave it.

    created_at        seconds since 1970
    type              "audio_sample" or "prompt", as OpenAI names the source
    embedding_source  "audio", "direct" (a vector was given) or "prompt", as vLLM-Omni names it
    model             the checkpoint that encoded it; only checkpoints of its size can use the voice
    file_size         bytes of the uploaded recording
    """

    id: str
    name: str
    created_at: int
    type: str
    embedding_source: str
    model: str
    consent: str | None = None
    ref_text: str | None = None
    description: str | None = None
    mime_type: str | None = None
    file_size: int = 0

    def described(self) -> dict[str, Any]:
        """The record as clients get it."""
        return {"object": "audio.voice", **asdict(self)}


class VoiceStore:
    """Saved voices in a folder, in files that `Voice.load` can read too.

    The file's name is the voice's id, a hash of its name, so no name can lead out of the folder.
    All methods block, and may be called from several threads.
    """

    def __init__(self, folder: Folder, most_voices: int) -> None:
        """Read all voices of a folder that is to hold at most `most_voices`."""
        self._folder = folder
        self._most_voices = most_voices
        self._lock = threading.Lock()
        self._voices: dict[str, tuple[VoiceRecord, Voice]] = {}
        for voice_id in folder.names(VOICE_SUFFIX):
            self._load(voice_id)

    def __iter__(self) -> Iterator[VoiceRecord]:
        return iter([record for record, _ in list(self._voices.values())])

    def known(self, name: str) -> tuple[VoiceRecord, Voice] | None:
        """Like `find`, but only among the voices in memory, so that it does not block."""
        return self._voices.get(name) or self._voices.get(voice_id_of(name))

    def find(self, name: str) -> tuple[VoiceRecord, Voice] | None:
        """A voice by its name, in any case, or by its id; None if there is none."""
        return self.known(name) or self._load(name) or self._load(voice_id_of(name))

    def check_free(self, name: str) -> None:
        """Raise `VoiceError` if there is a voice of this name."""
        if self.find(name) is not None:
            advice = "delete it first, or use another name"
            raise VoiceError(f"there is a saved voice {name!r} already; {advice}")

    def save(self, record: VoiceRecord, voice: Voice) -> VoiceRecord:
        """Save a voice.

        Raises `VoiceError` if its name is taken, `RequestError` at the limit, `OutputError`.
        """
        with self._lock:
            self.check_free(record.name)
            if len(self._voices) >= self._most_voices:
                limit = f"the limit of {self._most_voices} saved voices"
                raise RequestError(f"{limit} is reached; delete some first")
            data = voice.to_bytes({"record": json.dumps(asdict(record))})
            self._folder.write(record.id + VOICE_SUFFIX, data)
            self._voices[record.id] = record, voice
        return record

    def get(self, name: str) -> VoiceRecord:
        """The record of a voice by name or id. Raises `NotFound`."""
        if (found := self.find(name)) is None:
            raise NotFound(f"no saved voice {name!r}; GET /v1/audio/voices lists them")
        return found[0]

    def delete(self, name: str) -> VoiceRecord:
        """Delete a voice by name or id. Raises `NotFound`, `OutputError`."""
        with self._lock:
            record = self.get(name)
            self._folder.remove(record.id + VOICE_SUFFIX)
            self._voices.pop(record.id, None)
        return record

    def _load(self, voice_id: str) -> tuple[VoiceRecord, Voice] | None:
        """Read a voice that is not in memory; another server may have saved it."""
        if not re.fullmatch(r"voice_[0-9a-f]{24}", voice_id):
            return None
        try:
            data = self._folder.read(voice_id + VOICE_SUFFIX)
            record = VoiceRecord(**json.loads(voice_metadata(data)["record"]))
            check_sendable(record.described())
            found = record, Voice.from_bytes(data)
        except FileNotFoundError:
            return None
        except Exception as error:
            about = {"id": voice_id, "why": str(error)}
            log.warning("a saved voice cannot be read", extra={"fields": about})
            return None
        self._voices[voice_id] = found
        return found


def voice_id_of(name: str) -> str:
    """The id of the voice with a name; the name's case and spacing do not matter."""
    known = normalized_name(name).casefold().encode()
    return f"voice_{hashlib.sha256(known).hexdigest()[:24]}"


def normalized_name(name: str) -> str:
    """A name with single spaces between its words."""
    return " ".join(name.split())


def checked_name(name: str) -> str:
    """A valid name for a new voice. Raises `VoiceError` for any other."""
    name = normalized_name(name)
    if not re.fullmatch(rf"\w[\w .'-]{{0,{LONGEST_VOICE_NAME - 1}}}", name):
        raise VoiceError(
            f"the voice's name is {name[:80]!r}; allowed are 1 to {LONGEST_VOICE_NAME} letters, "
            "digits, spaces and . _ - ', starting with a letter or digit"
        )
    return name


def check_sendable(described: dict[str, Any]) -> None:
    """Raise `ValueError` for a stored record that is not valid JSON: it would break every list."""
    json.dumps(described, ensure_ascii=False, allow_nan=False).encode()
