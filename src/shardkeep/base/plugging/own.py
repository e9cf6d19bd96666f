"""Plugs of the user's own: a class by `module:Class` with its options, and its object, which has what is expected."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from shardkeep.base.errors import ConfigError, first_line
from shardkeep.base.plugging.modules import load_named
from shardkeep.base.settings import Settings, own_code

OWN = "module:Class"


class OwnConfig(Settings):
    """A class of your own."""

    name: str
    """Its module:Class."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments."""

    @field_validator("name")
    @classmethod
    def _names_code(cls, value: str) -> str:
        return own_code(value, (), OWN)

    def __str__(self) -> str:
        return self.name


def named(value: Any, built_in: tuple[str, ...]) -> Any:
    """A setting that is a built-in name or an `OwnConfig`, in the form that its type takes: `mine:Class` becomes
    `{name: mine:Class}`, and `{name: int4}` becomes `int4`. Raises ValueError for a name that is neither."""
    if isinstance(value, dict) and value.keys() == {"name"}:
        value = value["name"]
    if not isinstance(value, str):
        return value
    return value if own_code(value, built_in, OWN) in built_in else {"name": value}


def load_own(plug: OwnConfig, protocol: type[Any], *, setting: str, folder: Path | None = None) -> Any:
    """The object of a plug, made with its options.

    Args:
        protocol: Whose public methods it must have.
        setting: Whose value it is, as `compression.push.values`.
        folder: Searched last for its module.

    Raises ConfigError where the plug cannot be imported or made, or lacks a method."""
    made = load_named(plug.name, setting=setting, folder=folder)
    try:
        found = made(**plug.options)
    except Exception as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        raise ConfigError(f"{setting}: {plug.name} cannot be made with options {plug.options}: {why}") from error
    for method, function in vars(protocol).items():
        if inspect.isfunction(function) and not method.startswith("_") and not callable(getattr(found, method, None)):
            signature = str(inspect.signature(function)).replace("self, ", "").replace("'", "")
            raise ConfigError(f"{setting}: {plug.name} has no method {method}; expected {method}{signature}")
    return found
