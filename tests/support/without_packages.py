"""`shardkeep` as it is where the packages in the variable WITHOUT_PACKAGES, separated by commas, are not installed."""

from __future__ import annotations

import json
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


def several() -> None:
    """Several commands one after another. `sys.argv` has their arguments as JSON; prints the exit code, the output
    and the error output of each."""
    hide(os.environ["WITHOUT_PACKAGES"].split(","))
    from typer.testing import CliRunner

    from shardkeep.cli.main import app

    ends = []
    for arguments in json.loads(sys.argv[1]):
        done = CliRunner().invoke(app, arguments)
        expected = done.exception is None or isinstance(done.exception, SystemExit)
        ends.append((done.exit_code if expected else repr(done.exception), done.stdout, done.stderr))
    print(json.dumps(ends))


def script() -> None:
    """A script: `sys.argv` has its text."""
    hide(os.environ["WITHOUT_PACKAGES"].split(","))
    exec(sys.argv[1], {})
