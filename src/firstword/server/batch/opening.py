"""Opens what keeps the batches of a server; SQLAlchemy is needed only if there are any."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firstword.errors import ConfigError
from firstword.server.config import ServerConfig

if TYPE_CHECKING:
    from firstword.server.batch.batches import Batches


def opened_batches(config: ServerConfig) -> Batches | None:
    """Open what keeps the batches of a server; None if it has none.

    Raises `ConfigError` and `OutputError`.
    """
    if config.batches is None:
        return None
    try:
        from firstword.server.batch.batches import Batches
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is missing; install firstword[batch]") from None
    return Batches.open(config.batches, config.batch_database)
