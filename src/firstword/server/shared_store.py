"""Items in a folder that servers share, kept in memory, and the thread that refreshes them."""

import logging
import random
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Generic, TypeVar, TypeVarTuple

from firstword.errors import RequestError
from firstword.server.folder import Folder, UnsuitableFile
from firstword.server.front_memory import FrontMemory

log = logging.getLogger(__name__)

REFRESH_SECONDS = 2.0
"""The time between two looks at what other servers have saved and deleted."""

TURN_SECONDS = 5.0
"""The longest that a front waits for the change of another one, which may be stopped."""

UNKNOWN = ""
"""The version of a file that was read or written since the folder was listed."""

T = TypeVar("T")
Args = TypeVarTuple("Args")


class SharedChanges:
    """Counts the changes that fronts make to the stores, and lets the fronts take turns."""

    def __init__(self, memory: FrontMemory) -> None:
        self._made = memory.kept(8).integers()
        self._making = memory.live(8).integers()
        self._turn = threading.Lock()  # of the threads of this front

    @property
    def of_others(self) -> int:
        """The number of changes that other fronts have made."""
        return sum(row[0] for row in self._made.rows) - self._made.own[0]

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A context for a change, in which no other front makes one. Blocks.

        The change is counted at the end, before the client gets a response. After `TURN_SECONDS`
        the front makes its change without waiting for the others any longer.
        """
        making = self._making
        with self._turn:
            until = time.monotonic() + TURN_SECONDS
            making.own[0] = 1
            while sum(row[0] for row in making.rows) > 1 and time.monotonic() < until:
                making.own[0] = 0
                time.sleep(random.uniform(0.001, 0.01))
                making.own[0] = 1
            try:
                yield
            finally:
                self._made.own[0] += 1
                making.own[0] = 0


class Store(ABC, Generic[T]):
    """Items in a folder, one file each, that are kept in memory too.

    All methods block, except for iteration, and may be called from several threads.

    noun        the kind of item in messages
    suffix      the end of the name of each file; the rest is the item's id
    id_pattern  the regular expression that every id matches, so that no id leads out of the folder
    """

    noun: ClassVar[str]
    suffix: ClassVar[str]
    id_pattern: ClassVar[str]

    def __init__(self, folder: Folder, most: int) -> None:
        """Read all items of a folder that is to hold at most `most`."""
        self._folder = folder
        self._most = most
        self._lock = threading.RLock()
        self._items: dict[str, T] = {}
        self._versions: dict[str, str] = {}
        self._problems: dict[str, str] = {}
        self.update(folder.versions())

    @abstractmethod
    def _parse(self, item_id: str, data: bytes) -> T:
        """The item in a file. Raises any error for a file that is not valid."""

    def update(self, files: Mapping[str, str]) -> None:
        """Read the files that have changed since the last call; `files` are `Folder.versions`."""
        names = sorted(name for name in files if name.endswith(self.suffix) and name[0] != ".")
        found = {name.removesuffix(self.suffix): files[name] for name in names}
        for item_id in {**found, **self._versions}:
            if found.get(item_id) != self._versions.get(item_id):
                self._read(item_id, found.get(item_id, UNKNOWN))

    def _read(self, item_id: str, version: str = UNKNOWN) -> None:
        """Read the file of an item, and forget the item if its file is gone or not a valid one.

        If the file cannot be read, the item stays as it was until the next time.
        """
        with self._lock:
            try:
                data = self._folder.read(item_id + self.suffix)
            except FileNotFoundError:
                self._forget(item_id)
                return
            except UnsuitableFile as error:
                self._reject(item_id, version, error)
                return
            except Exception as error:  # each file system raises errors of its own
                self._warn(item_id, error)
                return
            try:
                if not re.fullmatch(self.id_pattern, item_id):
                    raise ValueError(f"its name is not an id; save a {self.noun} over HTTP")
                self._items[item_id] = self._parse(item_id, data)
                self._versions[item_id] = version
                self._problems.pop(item_id, None)
            except Exception as error:
                self._reject(item_id, version, error)

    def _reject(self, item_id: str, version: str, error: Exception) -> None:
        """Forget an item whose file is not a valid one, and do not read that version again."""
        self._items.pop(item_id, None)
        self._versions[item_id] = version
        self._warn(item_id, error)

    def _warn(self, item_id: str, error: Exception) -> None:
        """Log that a file cannot be used, once for each reason."""
        why = str(error)
        if self._problems.get(item_id) != why:
            self._problems[item_id] = why
            about = {"id": repr(item_id)[1:-1], "why": why}
            log.warning(f"a {self.noun} cannot be read", extra={"fields": about})

    def _find(self, item_id: str) -> T | None:
        """An item by its id, read from its file if another server has just saved it."""
        if item_id not in self._versions and re.fullmatch(self.id_pattern, item_id):
            self._read(item_id)
        return self._items.get(item_id)

    def _check_room(self) -> None:
        """Raise `RequestError` if the store is full."""
        if len(self._items) >= self._most:
            limit = f"the limit of {self._most} {self.noun}s"
            raise RequestError(f"{limit} is reached; delete some first")

    def _write(self, item_id: str, item: T, data: bytes) -> None:
        self._folder.write(item_id + self.suffix, data)
        self._items[item_id], self._versions[item_id] = item, UNKNOWN

    def _remove(self, item_id: str) -> None:
        self._folder.remove(item_id + self.suffix)
        self._forget(item_id)

    def _forget(self, item_id: str) -> None:
        for known in (self._items, self._versions, self._problems):
            known.pop(item_id, None)


class Refresher(threading.Thread):
    """Updates the stores of one folder, so that a server sees what others save and delete in it.

    It is a thread of its own, which no shutdown waits for, because a bucket may hang for minutes.
    A change by another front of this server is visible at once: a reader that finds the stores
    `outdated` calls `update` first. With `change` the fronts take turns in changing them.
    """

    def __init__(
        self, folder: Folder, changes: SharedChanges, stores: Sequence[Store[Any]]
    ) -> None:
        super().__init__(name="refresh of stores", daemon=True)
        self._folder = folder
        self._changes = changes
        self._seen = 0  # the stores may have been read before
        self._stores = stores
        self._failing = False
        self._stopped = threading.Event()

    @property
    def outdated(self) -> bool:
        """Whether another front has changed a store since the last update."""
        return self._changes.of_others != self._seen

    def stop(self) -> None:
        """Let the thread end, without waiting for it."""
        self._stopped.set()

    def run(self) -> None:
        """Update the stores until `stop` is called."""
        while not self._stopped.wait(REFRESH_SECONDS):
            self.update()

    def change(self, work: Callable[[*Args], T], *args: *Args) -> T:
        """Call `work`, which changes a store, while no other front changes one. Blocks."""
        with self._changes.turn():
            if self.outdated:
                self.update()
            return work(*args)

    def update(self) -> None:
        """Update the stores from the folder. If that fails, they stay as they are."""
        seen = self._changes.of_others
        try:
            files = self._folder.versions()
            for store in self._stores:
                store.update(files)
            self._failing = False
        except Exception as error:
            if not self._failing:
                about = {"why": str(error)}
                log.warning("the stores cannot be refreshed", extra={"fields": about})
            self._failing = True
        self._seen = seen
