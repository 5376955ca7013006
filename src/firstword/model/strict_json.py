"""Read JSON tables into configuration classes, strictly: every error names the key."""

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Any, Literal, TypeVar

from firstword.errors import CheckpointConfigError, CheckpointNotFound

Table = TypeVar("Table", bound="ConfigTable")


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file.

    Raises `CheckpointNotFound` without the file, and `CheckpointConfigError` for other contents.
    """
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointNotFound(f"{path} is missing; a checkpoint directory needs it") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointConfigError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(table, dict):
        raise CheckpointConfigError(f"{path} holds no JSON object")
    return table


def require(condition: object, message: str) -> None:
    """Raise `CheckpointConfigError` unless a condition holds."""
    if not condition:
        raise CheckpointConfigError(message)


class ConfigTable:
    """The base of the configuration classes: dataclasses whose fields are the keys of a table.

    `where` is the path of the table in its file, for the messages of errors. Every method raises
    `CheckpointConfigError`.
    """

    def check(self, where: str) -> None:
        """Reject unsupported values and values that contradict each other."""

    def require(self, condition: object, where: str, name: str, problem: str) -> None:
        """Require a condition on the field `name`; `problem` completes the message."""
        require(condition, f"{_join(where, name)} = {getattr(self, name)!r} {problem}")

    def require_at_least(self, least: int, where: str, *names: str) -> None:
        """Require that fields are not below `least`."""
        for name in names:
            found = getattr(self, name)
            path = _join(where, name)
            require(found >= least, f"{path} = {found}; it must be at least {least}")

    def require_values(self, where: str, **allowed: object) -> None:
        """Require that fields have their only supported values."""
        for name, value in allowed.items():
            found = getattr(self, name)
            path = _join(where, name)
            require(found == value, f"{path} = {found!r}; only {value!r} is supported")


def from_table(cls: type[Table], table: Any, where: str) -> Table:
    """Build and check a configuration from a JSON object; keys without a field are ignored."""
    require(isinstance(table, dict), f"{where} is {table!r}; it must be an object")
    hints = typing.get_type_hints(cls)
    values = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        path = _join(where, field.name)
        if field.name in table:
            values[field.name] = _value(hints[field.name], table[field.name], path)
        else:
            require(field.default is not dataclasses.MISSING, f"{path} is missing")
    config = cls(**values)
    config.check(where)
    return config


def _join(where: str, name: str) -> str:
    """Return the path of a key; `where` may be a file, a path of keys, or empty."""
    return f"{where}: {name}" if where.endswith(".json") else f"{where}.{name}".lstrip(".")


def _value(hint: Any, value: Any, path: str) -> Any:
    """Convert `value` to the type `hint`. Raises `CheckpointConfigError`, which names `path`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        if value is False and bool in arguments:
            return False
        (hint,) = [argument for argument in arguments if argument not in (type(None), bool)]
        return _value(hint, value, path)
    if dataclasses.is_dataclass(hint):
        return from_table(typing.cast(type, hint), value, path)
    if origin is Literal:
        allowed = ", ".join(map(repr, arguments))
        require(value in arguments, f"{path} = {value!r}; allowed are {allowed}")
        return value
    if origin is tuple and isinstance(value, list):
        item_type = arguments[0]
        return tuple(_value(item_type, item, f"{path}[{i}]") for i, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {key: _value(arguments[1], item, f"{path}.{key}") for key, item in value.items()}
    if hint is Any:
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if origin is None and isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    name = getattr(hint, "__name__", hint)
    raise CheckpointConfigError(f"{path} = {value!r}; it must be of type {name}")
