"""`shardkeep` as it is where the packages in the variable WITHOUT_PACKAGES, separated by commas, are not installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any


def hide(packages: Iterable[str]) -> None:
    """Lets no finder of this process find these packages, and unloads them."""
    hidden = set(packages)
    for name in [name for name in sys.modules if name.partition(".")[0] in hidden]:
        del sys.modules[name]
    sys.meta_path[:] = [_Without(hidden, finder) for finder in sys.meta_path]


class _Without:
    """A finder that does not find some packages."""

    def __init__(self, hidden: set[str], finder: Any) -> None:
        self._hidden, self._finder = hidden, finder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return None if name.partition(".")[0] in self._hidden else self._finder.find_spec(name, path, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


def main() -> None:
    hide(os.environ["WITHOUT_PACKAGES"].split(","))
    from shardkeep.cli.main import main

    main()
