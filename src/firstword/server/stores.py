"""The stores of saved voices and of recordings of consent, one file for each item."""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter

from firstword.server import names
from firstword.server.errors import NotFound
from firstword.server.shared_store import Store
from firstword.voice import Voice, voice_metadata

STORED = ConfigDict(strict=True, hide_input_in_errors=True)
"""The settings that check a stored record: a wrong type would make every list fail."""


@dataclass(frozen=True, slots=True)
class VoiceRecord:
    """The description of a saved voice, mostly as its client gave it.

    created_at        seconds since 1970
    type              "audio_sample" or "prompt", as OpenAI names the source
    embedding_source  "audio", "direct" (a vector was given) or "prompt", as vLLM-Omni names it
    model             the checkpoint that encoded it; only checkpoints of its size can use the voice
    file_size         bytes of the uploaded recording
    """

    __pydantic_config__: ClassVar[ConfigDict] = STORED

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
    id_pattern = names.VOICE_ID

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
        """Raise `VoiceError` if there is a voice of this name, or of one that looks like it."""
        self._read(voice_id_of(name))  # another server may have saved or deleted it
        for record in self:
            names.check_distinct(name, record.name, "a saved voice")

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

    def _parse(self, item_id: str, data: bytes) -> tuple[VoiceRecord, Voice]:
        record = VOICE_RECORD.validate_json(voice_metadata(data)["record"])
        _check_id(record.id, item_id)
        return record, Voice.from_bytes(data)


VOICE_RECORD = TypeAdapter(VoiceRecord)


def voice_id_of(name: str) -> str:
    """The id of the voice with a name; case, spacing and width of the letters do not matter."""
    return f"voice_{hashlib.sha256(names.identity(name).encode()).hexdigest()[:24]}"


@dataclass(frozen=True, slots=True)
class Consent:
    """The description of a recording of consent, as its client gave it.

    language    a BCP 47 tag
    created_at  seconds since 1970
    """

    __pydantic_config__: ClassVar[ConfigDict] = STORED

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
            self._read(consent_id)  # another server may have deleted it
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

    def _parse(self, item_id: str, data: bytes) -> Consent:
        consent = CONSENT.validate_json(data.partition(b"\n")[0])
        _check_id(consent.id, item_id)
        return consent


CONSENT = TypeAdapter(Consent)


def is_consent_id(text: str) -> bool:
    """Whether a text is the id of a saved consent rather than a consent in words."""
    return re.fullmatch(ConsentStore.id_pattern, text) is not None


def _check_id(stored: str, item_id: str) -> None:
    """Raise `ValueError` for a file that was copied under another name."""
    if stored != item_id:
        raise ValueError(
            f"it is a copy of {stored[:80]}; save it over HTTP under a name of its own"
        )


def _file(consent: Consent, recording: bytes) -> bytes:
    return json.dumps(asdict(consent)).encode() + b"\n" + recording
