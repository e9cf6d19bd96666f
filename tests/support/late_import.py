"""Heavy libraries of a test module, imported by their first use: each worker of a test run collects every module."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest


class Late:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


def late_import(name: str) -> Any:
    """The module `name`, imported when a name of it is used. Skips the test module where it is not installed."""
    library = name.partition(".")[0]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library} (scripts/install-all)", allow_module_level=True)
    return Late(name)
