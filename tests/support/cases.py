"""One cheap check over many cases in one test. `pytest.mark.parametrize` makes a test of each case; that is for cases
that share nothing, need fixtures of their own, or take long."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

Check = Callable[..., None]


def every(names: str | tuple[str, ...], cases: Iterable[Any], ids: Any = None) -> Callable[[Check], Check]:
    """Decorates a test with a loop over its cases, which are written as for `parametrize`. A failure names its case.

    Cases share the test's fixtures, but each has a folder of its own in `tmp_path`. It stands on itself for a product,
    and below `@given` in a property test, where each example is checked for all cases.
    """
    arguments = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    rows = list(cases)
    labels = rows if ids is None or callable(ids) else list(ids)
    if not rows:
        raise ValueError(f"there are no cases of {names}")

    def decorate(check: Check) -> Check:
        parameters = inspect.signature(check).parameters

        @functools.wraps(check)
        def over_all(**fixtures: Any) -> None:
            for number, (row, label) in enumerate(zip(rows, labels, strict=True)):
                values = row if len(arguments) > 1 else (row,)
                try:
                    check(**_own(fixtures, number), **dict(zip(arguments, values, strict=True)))
                except BaseException as error:
                    error.add_note(f"case: {label!r:.300}")
                    raise

        rest = [each.replace(kind=each.KEYWORD_ONLY) for name, each in parameters.items() if name not in arguments]
        over_all.__signature__ = inspect.Signature(rest)  # type: ignore[attr-defined]
        return over_all

    return decorate


def _own(fixtures: dict[str, Any], number: int) -> dict[str, Any]:
    if "tmp_path" not in fixtures:
        return fixtures
    folder = fixtures["tmp_path"] / str(number)
    folder.mkdir()
    return fixtures | {"tmp_path": folder}
