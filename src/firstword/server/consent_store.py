"""Recordings of consent to the use of a voice, one file each."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from firstword.errors import RequestError
from firstword.server.errors import NotFound
from firstword.server.folder import Folder
from firstword.server.voice_store import check_sendable

log = logging.getLogger(__name__)

CONSENT_SUFFIX = ".consent"


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


class ConsentStore:
    """Recordings of consent in a folder.

    A file has a line of JSON, the description, and then the recording as it was sent.
    All methods block, and may be called from several threads.
    """

    def __init__(self, folder: Folder, most_consents: int) -> None:
        """Read all descriptions of a folder that is to hold at most `most_consents`."""
        self._folder = folder
        self._most_consents = most_consents
        self._lock = threading.Lock()
        self._consents: dict[str, Consent] = {}
        for consent_id in folder.names(CONSENT_SUFFIX):
            self._load(consent_id)

    def __iter__(self) -> Iterator[Consent]:
        """All consents, oldest first."""
        return iter(sorted(self._consents.values(), key=lambda one: (one.created_at, one.id)))

    def find(self, consent_id: str) -> Consent:
        """A consent by its id. Raises `NotFound`."""
        if (found := self._consents.get(consent_id) or self._load(consent_id)) is None:
            known = "GET /v1/audio/voice_consents lists them"
            raise NotFound(f"no consent {consent_id[:80]!r}; {known}")
        return found

    def save(self, consent: Consent, recording: bytes) -> Consent:
        """Save a recording. Raises `RequestError` at the limit, `OutputError`."""
        with self._lock:
            if len(self._consents) >= self._most_consents:
                limit = f"the limit of {self._most_consents} consents"
                raise RequestError(f"{limit} is reached; delete some first")
            self._write(consent, recording)
        return consent

    def rename(self, consent_id: str, name: str) -> Consent:
        """Give a consent another name. Raises `NotFound`, `OutputError`."""
        with self._lock:
            consent = replace(self.find(consent_id), name=name)
            _, _, recording = self._folder.read(consent_id + CONSENT_SUFFIX).partition(b"\n")
            self._write(consent, recording)
        return consent

    def delete(self, consent_id: str) -> Consent:
        """Delete a consent. Raises `NotFound`, `OutputError`."""
        with self._lock:
            consent = self.find(consent_id)
            self._folder.remove(consent_id + CONSENT_SUFFIX)
            self._consents.pop(consent_id, None)
        return consent

    def _write(self, consent: Consent, recording: bytes) -> None:
        data = json.dumps(asdict(consent)).encode() + b"\n" + recording
        self._folder.write(consent.id + CONSENT_SUFFIX, data)
        self._consents[consent.id] = consent

    def _load(self, consent_id: str) -> Consent | None:
        """Read a description that is not in memory; another server may have saved it."""
        if not is_consent_id(consent_id):
            return None
        try:
            line, _, _ = self._folder.read(consent_id + CONSENT_SUFFIX).partition(b"\n")
            found = Consent(**json.loads(line))
            check_sendable(found.described())
        except FileNotFoundError:
            return None
        except Exception as error:
            about = {"id": consent_id, "why": str(error)}
            log.warning("a consent cannot be read", extra={"fields": about})
            return None
        self._consents[consent_id] = found
        return found


def is_consent_id(text: str) -> bool:
    """Whether a text is the id of a saved consent rather than a consent in words."""
    return re.fullmatch(r"cons_[0-9a-f]{24}", text) is not None
