"""Plugs of the user's own: a class by `module:Class` with its options, and its object, whose results are checked."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NoReturn, TypeVar

from pydantic import BeforeValidator, Field, field_validator

from shardkeep.base.errors import ConfigError, ShardkeepError, UserError, first_line
from shardkeep.base.plugging.modules import load_named
from shardkeep.base.settings import Named, own_code

if TYPE_CHECKING:
    import numpy.typing as npt

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


def built_in_or_own(*names: str) -> Any:
    """The type of a setting that is a built-in name or an `OwnConfig`. `{name: int4}` becomes `int4`."""

    def plain(value: Any) -> Any:
        value = value["name"] if isinstance(value, dict) and value.keys() == {"name"} else value
        return {"name": value} if isinstance(value, str) and own_code(value, names, OWN) not in names else value

    return Annotated[Literal[names] | OwnConfig, BeforeValidator(plain)]


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
        """Returns what a method of the plug returns. The method can change no array but states."""
        _, *names = inspect.signature(getattr(self.protocol, method)).parameters
        shown = [each if "state" in name else _read_only(each) for name, each in zip(names, arguments, strict=True)]
        return self.run(method, getattr(self.plug, method), *shown)

    def run(self, method: str, function: Callable[..., T], *arguments: Any) -> T:
        """Calls a function that runs a method of the plug. Raises UserError for what it raises."""
        try:
            return function(*arguments)
        except (ShardkeepError, StopIteration):
            raise
        except Exception as error:
            *_, (frame, line) = traceback.walk_tb(error.__traceback__)
            where = f"{Path(frame.f_code.co_filename).name}, line {line}"
            self.refuse(f"{method} raises {type(error).__name__}: {first_line(error)} ({where})")

    def array(
        self, method: str, *arguments: Any, dtype: npt.DTypeLike, shape: tuple[int, ...] | None
    ) -> npt.NDArray[Any]:
        """The array that a method returns, C-contiguous. `shape`: None = any of one dimension."""
        import numpy as np  # here: reading a config does not need it

        found = self.call(method, *arguments)
        fits = isinstance(found, np.ndarray) and found.dtype == dtype
        if not fits or (found.ndim != 1 if shape is None else found.shape != shape):
            self.returned(method, words(found), f"{np.dtype(dtype)} {shape or '(n,)'}")
        return np.require(found, requirements=["C", "W"])

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


def _read_only(value: Any) -> Any:
    """The array that cannot be changed through it, or another value itself."""
    if hasattr(value, "setflags"):
        value = value.view()
        value.setflags(write=False)
    return value


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
