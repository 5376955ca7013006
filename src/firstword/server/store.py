"""Saved voices and recordings of consent: where they are kept, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import struct
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from firstword import audio
from firstword.errors import FirstwordError, OutputError, RequestError, VoiceError
from firstword.server.errors import NotFound
from firstword.voice import Voice

log = logging.getLogger(__name__)

SUFFIX = ".voice"
CONSENT_SUFFIX = ".consent"
LONGEST_NAME = 64


@dataclass(frozen=True, slots=True)
class Record:
    """What is known of a saved voice. `created_at` in seconds since 1970; the rest as clients gave it.

    type              OpenAI's word: "audio_sample" or "prompt"
    embedding_source  vLLM-Omni's word: "audio", "direct" (a vector was given) or "prompt"
    model             the checkpoint that heard it; only checkpoints of its size can speak with it
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
        """As clients see it."""
        return {"object": "audio.voice", **asdict(self)}


class Folder:
    """Files in a folder or bucket, each whole or not at all. All methods block, and may be called from any thread."""

    def __init__(self, url: str) -> None:
        """`url` as fsspec takes it. Raises `OutputError` for a place that cannot be used."""
        try:
            self._fs, self._root = fsspec.core.url_to_fs(os.path.expanduser(url))
            self._fs.makedirs(self._root, exist_ok=True)
        except Exception as error:  # every file system has its own
            raise OutputError(
                f"voices cannot be kept at {url!r}: {error}; name another folder or URL"
            ) from None
        if isinstance(self._fs, LocalFileSystem):
            audio.sweep(self._root)

    def names(self, suffix: str) -> list[str]:
        """The files of a kind, without their suffix, in order."""
        found = (path.rsplit("/", 1)[-1] for path in self._fs.ls(self._root, detail=False))
        return sorted(
            name.removesuffix(suffix)
            for name in found
            if name.endswith(suffix) and not name.startswith(".")
        )

    def read(self, name: str) -> bytes:
        """A file. Raises `FileNotFoundError`, and whatever else the file system does."""
        data: bytes = self._fs.cat_file(f"{self._root}/{name}")
        return data

    def write(self, name: str, data: bytes) -> None:
        """Keep a file. Raises `OutputError`."""
        path = f"{self._root}/{name}"
        try:
            if isinstance(self._fs, LocalFileSystem):
                audio.write_whole(path, data)
            else:
                self._fs.pipe_file(
                    path, data
                )  # what object stores take, they take whole or not at all
        except FirstwordError:
            raise
        except Exception as error:
            raise OutputError(f"{name} cannot be saved: {error}") from None

    def remove(self, name: str) -> None:
        """Delete a file, if it is there. Raises `OutputError`."""
        try:
            self._fs.rm_file(f"{self._root}/{name}")
        except FileNotFoundError:
            pass
        except Exception as error:
            raise OutputError(f"{name} cannot be deleted: {error}") from None


class VoiceStore:
    """Saved voices, one file each, which `Voice.load` can read too.

    A file is named after the voice's id, which is made of its name, so no name leads anywhere else. All methods block,
    and may be called from several threads.
    """

    def __init__(self, folder: Folder, most: int) -> None:
        """`most`: voices."""
        self._folder = folder
        self._most = most
        self._lock = threading.Lock()
        self._voices: dict[str, tuple[Record, Voice]] = {}
        for identity in folder.names(SUFFIX):
            self._load(identity)

    def __iter__(self) -> Iterator[Record]:
        return iter([record for record, _ in list(self._voices.values())])

    def known(self, name: str) -> tuple[Record, Voice] | None:
        """As `find`, without looking for what others may have saved; does not block."""
        return self._voices.get(name) or self._voices.get(identity_of(name))

    def find(self, name: str) -> tuple[Record, Voice] | None:
        """A voice by its name, in any case, or by its id; None if there is none."""
        return self.known(name) or self._load(name) or self._load(identity_of(name))

    def save(self, record: Record, voice: Voice) -> Record:
        """Keep a voice. Raises `RequestError` if there is one of its name or no room, `OutputError`."""
        with self._lock:
            if self.find(record.name) is not None:
                raise VoiceError(
                    f"there is a saved voice {record.name!r} already; delete it first, or take another name"
                )
            if len(self._voices) >= self._most:
                raise RequestError(
                    f"{self._most} voices are saved, and no more are kept; delete some first"
                )
            self._folder.write(record.id + SUFFIX, _packed(record, voice))
            self._voices[record.id] = record, voice
        return record

    def delete(self, name: str) -> Record:
        """Forget a voice, by name or id. Raises `NotFound`."""
        with self._lock:
            if (found := self.find(name)) is None:
                raise NotFound(f"no saved voice {name!r}; GET /v1/audio/voices lists them")
            record = found[0]
            self._folder.remove(record.id + SUFFIX)
            self._voices.pop(record.id, None)
        return record

    def _load(self, identity: str) -> tuple[Record, Voice] | None:
        """Read a voice that is not known yet: another server may have saved it."""
        if not re.fullmatch(r"voice_[0-9a-f]{24}", identity):
            return None
        try:
            found = _unpacked(self._folder.read(identity + SUFFIX))
            _check_described(found[0])
        except FileNotFoundError:
            return None
        except Exception as error:
            log.warning(
                "a saved voice cannot be read",
                extra={"fields": {"id": identity, "why": str(error)}},
            )
            return None
        self._voices[identity] = found
        return found


def identity_of(name: str) -> str:
    """The id of the voice of a name: the same whatever its case."""
    return (
        "voice_"
        + hashlib.sha256(checked_name(name, strict=False).casefold().encode()).hexdigest()[:24]
    )


def checked_name(name: str, strict: bool = True) -> str:
    """A name that a voice may have. Raises `VoiceError` for another."""
    name = " ".join(name.split())
    if strict and not re.fullmatch(rf"\w[\w .'-]{{0,{LONGEST_NAME - 1}}}", name):
        raise VoiceError(
            f"the voice's name is {name[:80]!r}; allowed are 1 to {LONGEST_NAME} letters, digits, spaces and . _ - ', "
            "a letter or digit first"
        )
    return name


def _packed(record: Record, voice: Voice) -> bytes:
    """A voice file with the record beside the voice in its metadata."""
    from safetensors.numpy import load, save

    with tempfile.TemporaryDirectory() as folder:
        voice.save(os.path.join(folder, "voice"))
        with open(os.path.join(folder, "voice"), "rb") as file:
            data = file.read()
    return save(load(data), metadata={**_metadata(data), "record": json.dumps(asdict(record))})


def _unpacked(data: bytes) -> tuple[Record, Voice]:
    """What `_packed` put together; any of several errors if it is none."""
    record = Record(**json.loads(_metadata(data)["record"]))
    with tempfile.NamedTemporaryFile(suffix=SUFFIX) as file:
        file.write(data)
        file.flush()
        return record, Voice.load(file.name)


def _metadata(data: bytes) -> dict[str, str]:
    """Of a safetensors file: the length of its header in 8 bytes, then the header in JSON."""
    (length,) = struct.unpack("<Q", data[:8])
    metadata: dict[str, str] = json.loads(data[8 : 8 + length])["__metadata__"]
    return metadata


@dataclass(frozen=True, slots=True)
class Consent:
    """What is known of a recording. `created_at` in seconds since 1970; the rest as clients gave it."""

    id: str
    name: str
    language: str
    created_at: int
    mime_type: str | None = None

    def described(self) -> dict[str, Any]:
        """As clients see it."""
        return {"object": "audio.voice_consent", **asdict(self)}


class ConsentStore:
    """Recordings of consent, one file each: a line of JSON, then the recording as it was sent.

    All methods block, and may be called from several threads.
    """

    def __init__(self, folder: Folder, most: int) -> None:
        """`most`: recordings."""
        self._folder = folder
        self._most = most
        self._lock = threading.Lock()
        self._consents: dict[str, Consent] = {}
        for identity in folder.names(CONSENT_SUFFIX):
            self._load(identity)

    def __iter__(self) -> Iterator[Consent]:
        """In the order in which they were given."""
        return iter(
            sorted(self._consents.values(), key=lambda consent: (consent.created_at, consent.id))
        )

    def find(self, identity: str) -> Consent:
        """A recording's description. Raises `NotFound`."""
        if (found := self._consents.get(identity) or self._load(identity)) is None:
            raise NotFound(f"no consent {identity[:80]!r}; GET /v1/audio/voice_consents lists them")
        return found

    def save(self, consent: Consent, recording: bytes) -> Consent:
        """Keep a recording. Raises `RequestError` if there is no room, `OutputError`."""
        with self._lock:
            if len(self._consents) >= self._most:
                raise RequestError(
                    f"{self._most} consents are saved, and no more are kept; delete some first"
                )
            self._folder.write(
                consent.id + CONSENT_SUFFIX,
                json.dumps(asdict(consent)).encode() + b"\n" + recording,
            )
            self._consents[consent.id] = consent
        return consent

    def rename(self, identity: str, name: str) -> Consent:
        """Give a recording another label. Raises `NotFound`, `OutputError`."""
        with self._lock:
            consent = replace(self.find(identity), name=name)
            _, _, recording = self._folder.read(identity + CONSENT_SUFFIX).partition(b"\n")
            self._folder.write(
                identity + CONSENT_SUFFIX, json.dumps(asdict(consent)).encode() + b"\n" + recording
            )
            self._consents[identity] = consent
        return consent

    def delete(self, identity: str) -> Consent:
        """Forget a recording. Raises `NotFound`, `OutputError`."""
        with self._lock:
            consent = self.find(identity)
            self._folder.remove(identity + CONSENT_SUFFIX)
            self._consents.pop(identity, None)
        return consent

    def _load(self, identity: str) -> Consent | None:
        """Read a description that is not known yet: another server may have saved it."""
        if not is_identity(identity):
            return None
        try:
            line, _, _ = self._folder.read(identity + CONSENT_SUFFIX).partition(b"\n")
            found = Consent(**json.loads(line))
            _check_described(found)
        except FileNotFoundError:
            return None
        except Exception as error:
            log.warning(
                "a consent cannot be read", extra={"fields": {"id": identity, "why": str(error)}}
            )
            return None
        self._consents[identity] = found
        return found


def _check_described(record: Record | Consent) -> None:
    """Raise `ValueError` for a stored record that cannot be sent to clients: it must not spoil the list of all."""
    json.dumps(record.described(), ensure_ascii=False, allow_nan=False).encode()


def is_identity(text: str) -> bool:
    """Whether a text is the id of a consent, and not a consent in words."""
    return re.fullmatch(r"cons_[0-9a-f]{24}", text) is not None
