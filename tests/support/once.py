"""What the workers of a test run make once, and all of them read."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def once(folders: pytest.TempPathFactory, name: str, make: Callable[[Path], Any]) -> Any:
    """What `make` returns of an empty folder, as JSON gives it back. The first worker that comes here calls it; the
    others wait for it. If it raises, the next one calls it again."""
    base = folders.getbasetemp()
    path = base / f"{name}.json"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_text(json.dumps(make(folders.mktemp(name))), encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))
