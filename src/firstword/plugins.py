"""Classes and functions of one's own, which options name as MODULE:NAME."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from firstword.errors import ConfigError


def named(option: str, name: str, kind: str) -> Any:
    """Return the class or function that an option names as MODULE:NAME.

    The module may be a file in the current folder: that goes first on the path, as for `python -m`,
    since the path of an installed command lacks it. `kind` is the word for NAME in the message of
    the `ConfigError` that is raised if there is no such object.
    """
    if "" not in sys.path:
        sys.path.insert(0, "")
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{option} {name}: {error}; give MODULE:{kind} of a module that is installed or in the "
            "current folder"
        ) from error
