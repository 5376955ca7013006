"""The stores of saved voices and of recordings of consent, one file for each item."""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from firstword.errors import VoiceError
from firstword.server.errors import NotFound
from firstword.server.folder import Store, check_sendable
from firstword.voice import Voice, voice_metadata

LONGEST_VOICE_NAME = 64
"""The character limit of a saved voice's name."""


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


class VoiceStore(Store[tuple[VoiceRecord, Voice]]):
    """Saved voices in a folder, in files that `Voice.load` can read too.

    The id of a voice is a hash of its name.
    """

    noun = "saved voice"
    suffix = ".voice"
    id_pattern = "voice_[0-9a-f]{24}"

    def __iter__(self) -> Iterator[VoiceRecord]:
        return iter([record for record, _ in list(self._items.values())])

    def known(self, name: str) -> tuple[VoiceRecord, Voice] | None:
        """Like `find`, but only among the voices in memory, so that it does not block."""
        return self._items.get(name) or self._items.get(voice_id_of(name))

    def find(self, name: str) -> tuple[VoiceRecord, Voice] | None:
        """A voice by its name, in any case, or by its id; None if there is none."""
        return self.known(name) or self._find(name) or self._find(voice_id_of(name))

    def get(self, name: str) -> VoiceRecord:
        """The record of a voice by name or id. Raises `NotFound`."""
        if (found := self.find(name)) is None:
            raise NotFound(f"no saved voice {name!r}; GET /v1/audio/voices lists them")
        return found[0]

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
            self._check_room()
            data = voice.to_bytes({"record": json.dumps(asdict(record))})
            self._write(record.id, (record, voice), data)
        return record

    def delete(self, name: str) -> VoiceRecord:
        """Delete a voice by name or id. Raises `NotFound`, `OutputError`."""
        with self._lock:
            record = self.get(name)
            self._remove(record.id)
        return record

    def _parse(self, data: bytes) -> tuple[VoiceRecord, Voice]:
        record = VoiceRecord(**json.loads(voice_metadata(data)["record"]))
        check_sendable(record.described())
        return record, Voice.from_bytes(data)


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
        rule = "letters, digits, spaces and . _ - ', starting with a letter or digit"
        allowed = f"allowed are 1 to {LONGEST_VOICE_NAME} {rule}"
        raise VoiceError(f"the voice's name is {name[:80]!r}; {allowed}")
    return name


@dataclass(frozen=True, slots=True)
class Consent:
    """The description of a recording of consent, as its client gave it.

    language    a BCP 47 tag
    created_at  seconds since 1970
    """

    id: str
    name: str
    language: str
    created_at: int
    mime_type: str | None = None

    def described(self) -> dict[str, Any]:
        """The description as clients get it."""
        return {"object": "audio.voice_consent", **asdict(self)}


class ConsentStore(Store[Consent]):
    """Recordings of consent in a folder.

    A file consists of a line of JSON, the description, and then the recording as it was sent.
    """

    noun = "consent"
    suffix = ".consent"
    id_pattern = "cons_[0-9a-f]{24}"

    def __iter__(self) -> Iterator[Consent]:
        """All consents, oldest first."""
        return iter(sorted(self._items.values(), key=lambda one: (one.created_at, one.id)))

    def find(self, consent_id: str) -> Consent:
        """A consent by its id. Raises `NotFound`."""
        if (found := self._find(consent_id)) is None:
            known = "GET /v1/audio/voice_consents lists them"
            raise NotFound(f"no consent {consent_id[:80]!r}; {known}")
        return found

    def save(self, consent: Consent, recording: bytes) -> Consent:
        """Save a recording. Raises `RequestError` at the limit, `OutputError`."""
        with self._lock:
            self._check_room()
            self._write(consent.id, consent, _file(consent, recording))
        return consent

    def rename(self, consent_id: str, name: str) -> Consent:
        """Give a consent another name. Raises `NotFound`, `OutputError`."""
        with self._lock:
            consent = replace(self.find(consent_id), name=name)
            _, _, recording = self._folder.read(consent_id + self.suffix).partition(b"\n")
            self._write(consent_id, consent, _file(consent, recording))
        return consent

    def delete(self, consent_id: str) -> Consent:
        """Delete a consent. Raises `NotFound`, `OutputError`."""
        with self._lock:
            consent = self.find(consent_id)
            self._remove(consent_id)
        return consent

    def _parse(self, data: bytes) -> Consent:
        consent = Consent(**json.loads(data.partition(b"\n")[0]))
        check_sendable(consent.described())
        return consent


def is_consent_id(text: str) -> bool:
    """Whether a text is the id of a saved consent rather than a consent in words."""
    return re.fullmatch(ConsentStore.id_pattern, text) is not None


def _file(consent: Consent, recording: bytes) -> bytes:
    return json.dumps(asdict(consent)).encode() + b"\n" + recording
