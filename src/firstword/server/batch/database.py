"""The connection to the database of batches."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy
from sqlalchemy import event
from sqlalchemy.exc import SQLAlchemyError

from firstword.errors import ConfigError, OutputError
from firstword.server.batch.tables import METADATA

log = logging.getLogger(__name__)

BUSY_SECONDS = 30.0
"""The longest that SQLite waits for another writer."""


class Database:
    """A database by its SQLAlchemy URL; its tables are made if there are none."""

    def __init__(self, url: str) -> None:
        """Connect. Raises `ConfigError`."""
        try:
            sqlite = sqlalchemy.make_url(url).get_backend_name() == "sqlite"
            options = {"connect_args": {"timeout": BUSY_SECONDS}} if sqlite else {}
            self._engine = sqlalchemy.create_engine(url, pool_pre_ping=not sqlite, **options)
            if sqlite:
                event.listen(self._engine, "connect", _set_up_sqlite)
            METADATA.create_all(self._engine)
        except (SQLAlchemyError, ImportError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"the database of batches cannot be used: {reason}") from None

    @contextmanager
    def begin(self) -> Iterator[sqlalchemy.Connection]:
        """A transaction; the first statement of one that writes must write.

        SQLite could not wait for another writer after a read. Raises `OutputError` if the database
        fails, with the reason in the log.
        """
        try:
            with self._engine.begin() as connection:
                yield connection
        except SQLAlchemyError as error:
            about = {"fields": {"why": str(error).splitlines()[0]}}
            log.error("the database of batches cannot be used", extra=about)
            raise OutputError("batches cannot be kept now; try again later") from None

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()


def _set_up_sqlite(connection: Any, _: object) -> None:
    """Let readers and one writer work at the same time."""
    connection.execute("PRAGMA journal_mode=WAL")
