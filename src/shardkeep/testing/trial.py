"""Trial: a plug under test. What is wrong with it is an AssertionError of one line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np

from shardkeep.base.errors import CorruptMessage, UserError, first_line
from shardkeep.base.plugging.own import Own, words

T = TypeVar("T")


class Trial(Own):
    """Also refuses CorruptMessage for sound bytes. Its errors name the place in the check."""

    where = ""
    """The place in the check, for the end of an error."""
    hostile = False
    """Whether a method gets bytes that no plug has written. It may raise CorruptMessage then."""
    _of: Sequence[str] = ()

    def refuse(self, what: str, kind: type[UserError] = UserError) -> NoReturn:
        raise AssertionError(f"{self.name}: {what}" + (f" ({self.where})" if self.where else ""))

    def require(self, holds: Any, what: str) -> None:
        if not holds:
            self.refuse(what)

    def call(self, method: str, *arguments: Any) -> Any:
        self._of = [words(each) for each in arguments if isinstance(each, np.ndarray)][:1]
        return super().call(method, *arguments)

    def run(self, method: str, function: Callable[..., T], *arguments: Any) -> T:
        try:
            return function(*arguments)
        except Exception as error:
            if isinstance(error, StopIteration) or (self.hostile and isinstance(error, CorruptMessage)):
                raise
            expected = "CorruptMessage or a result" if self.hostile else "a result"
            method = " of ".join([method, *self._of])
            self.refuse(f"{method} raises {type(error).__name__}: {first_line(error)}; expected {expected}")
