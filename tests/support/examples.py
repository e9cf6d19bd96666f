"""How many examples a property test draws: a quarter in the default run, all in `make test-long`."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

LONG = bool(os.environ.get("SHARDKEEP_LONG_TESTS"))


def examples(count: int = 100, **more: Any) -> settings:
    """Decorates a property test with its full number of examples."""
    return settings(deadline=None, max_examples=count if LONG else max(count // 4, 10), **more)
