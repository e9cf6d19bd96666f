"""Files of other users, for tests that run as root or as anybody."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

STRANGER = 54_321


def make_foreign(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on `path`, and all below it, belongs to another user: given away by root, or else we become another."""
    if os.geteuid() == 0:
        for part in (path, *path.rglob("*")):
            os.chown(part, STRANGER, STRANGER, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
