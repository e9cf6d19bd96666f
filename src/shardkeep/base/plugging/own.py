"""Plugs of the user's own: a class by `module:Class` with its options, and its object, whose results are checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import Field, field_validator

from shardkeep.base.errors import ConfigError, UserError, first_line
from shardkeep.base.plugging.modules import load_named
from shardkeep.base.settings import Named, own_code

OWN = "module:Class"
T = TypeVar("T")


class OwnConfig(Named):
    """A class of your own."""

    built_in: ClassVar[tuple[str, ...]] = ()
    """Names that are allowed, too."""
    name: str
    """Its module:Class."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments."""

    @field_validator("name")
    @classmethod
    def _names_code(cls, value: str) -> str:
        return own_code(value, cls.built_in, OWN)

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


class Own:
    """A plug, and the name that begins its errors: one line with the method, what it returned, and what is expected.

    Args:
        kind: The user's class; called with `arguments` and `options`.
        protocol: Whose public methods the plug must have.

    Raises ConfigError where the call fails, or a method is missing."""

    def __init__(
        self, kind: Callable[..., Any], name: str, protocol: type[Any], /, *arguments: Any, **options: Any
    ) -> None:
        self.name, self.protocol = name, protocol
        try:
            self.plug = kind(*arguments, **options)
        except Exception as error:
            why = f"{type(error).__name__}: {first_line(error)}"
            self.refuse(f"cannot be made with options {options}: {why}", ConfigError)
        for method, function in vars(protocol).items():
            lacks = inspect.isfunction(function) and not callable(getattr(self.plug, method, None))
            if lacks and not method.startswith("_"):
                signature = str(inspect.signature(function)).replace("self, ", "").replace("'", "")
                self.refuse(f"has no method {method}; expected {method}{signature}", ConfigError)

    def call(self, method: str, *arguments: Any) -> Any:
        """Returns what a method of the plug returns."""
        return self.run(method, getattr(self.plug, method), *arguments)

    def run(self, method: str, function: Callable[..., T], *arguments: Any) -> T:
        """Calls a function that runs a method of the plug."""
        return function(*arguments)

    def array(
        self, method: str, *arguments: Any, dtype: npt.DTypeLike, shape: tuple[int, ...] | None
    ) -> npt.NDArray[Any]:
        """The array that a method returns, C-contiguous. `shape`: None = any of one dimension."""
        found = self.call(method, *arguments)
        fits = isinstance(found, np.ndarray) and found.dtype == dtype
        if not fits or (found.ndim != 1 if shape is None else found.shape != shape):
            self.returned(method, words(found), f"{np.dtype(dtype)} {shape or '(n,)'}")
        return np.ascontiguousarray(found)

    def whole(self, method: str, *arguments: Any, at_least: int) -> int:
        """The whole number that a method returns."""
        found = self.call(method, *arguments)
        if not isinstance(found, int) or found < at_least:
            self.returned(method, repr(found), f"a whole number of at least {at_least}")
        return found

    def returned(self, method: str, found: str, expected: str) -> NoReturn:
        """Raises UserError for a result of another form."""
        self.refuse(f"{method} returned {found}; expected {expected}")

    def refuse(self, what: str, kind: type[UserError] = UserError) -> NoReturn:
        raise kind(f"{self.name}: {what}")


def words(value: Any) -> str:
    """Type and shape of an array or a tensor, in an error."""
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        return type(value).__name__
    kind, shape = str(value.dtype), tuple(value.shape)
    return f"{kind[6:]} {shape} on {value.device}" if kind.startswith("torch.") else f"{kind} {shape}"


def load_own(
    plug: OwnConfig, protocol: type[Any], *arguments: Any, setting: str, import_from: Path | None = None
) -> Own:
    """The object of a plug, made with its options.

    Args:
        protocol: Whose public methods it must have.
        arguments: Of the class, before the options.
        setting: Whose value it is, as `compression.push.values`.
        import_from: Folder that is searched last for its module.

    Raises ConfigError where the plug cannot be imported or made, or lacks a method."""
    kind = load_named(plug.name, setting=setting, folder=import_from)
    return Own(kind, f"{setting}: {plug.name}", protocol, *arguments, **plug.options)
