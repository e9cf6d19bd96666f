"""Trial: a plug under test. What is wrong with it is an AssertionError of one line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import numpy as np

from shardkeep.base.errors import CorruptMessage, UserError, first_line
from shardkeep.base.plugging.own import Own, words

T = TypeVar("T")


class Trial(Own):
    """Also refuses a method that raises, and one that changes an array which is no state."""

    where = ""
    """The place in the check, for the end of an error."""
    hostile = False
    """Whether a method gets bytes that no plug has written. It may raise CorruptMessage then."""

    def refuse(self, what: str, kind: type[UserError] = UserError) -> NoReturn:
        raise AssertionError(f"{self.name}: {what}" + (f" ({self.where})" if self.where else ""))

    def require(self, holds: Any, what: str) -> None:
        if not holds:
            self.refuse(what)

    def call(self, method: str, *arguments: Any) -> Any:
        names = [*inspect.signature(getattr(self.protocol, method)).parameters][1:]
        before = [each.tobytes() if isinstance(each, np.ndarray) else None for each in arguments]
        arrays = [words(each) for each in arguments if isinstance(each, np.ndarray)]
        found = self.run(" of ".join([method, *arrays[:1]]), getattr(self.plug, method), *arguments)
        for name, each, bits in zip(names, arguments, before, strict=True):
            reads = bits is None or "state" in name or each.tobytes() == bits
            self.require(reads, f"{method} changes {name}; expected: it only reads them")
        return found

    def run(self, method: str, function: Callable[..., T], *arguments: Any) -> T:
        try:
            return function(*arguments)
        except Exception as error:
            if isinstance(error, StopIteration) or (self.hostile and isinstance(error, CorruptMessage)):
                raise
            expected = "CorruptMessage or a result" if self.hostile else "a result"
            self.refuse(f"{method} raises {type(error).__name__}: {first_line(error)}; expected {expected}")
