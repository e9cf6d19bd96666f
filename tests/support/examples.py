"""How many examples a property test draws: an eighth in the default run, half with the long tests, all in `make chaos`.

`make chaos` draws them at random and prints what repeats a failure. The others draw the same each time, so that a
change is refused for its own faults alone (tests/conftest.py).
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings

LONG = bool(os.environ.get("SHARDKEEP_LONG_TESTS"))
CHAOS = bool(os.environ.get("SHARDKEEP_CHAOS"))
_SHARE = 1 if CHAOS else 2 if LONG else 8


def examples(count: int = 100, **more: Any) -> settings:
    """Decorates a property test with its full number of examples. A machine that does other things may be slow."""
    slow = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    return settings(**slow | more, max_examples=max(count // _SHARE, min(count, 10)))


def draw_alike() -> None:
    """Makes all property tests that are decorated from now on draw the same examples in each run."""
    settings.register_profile("alike", derandomize=not CHAOS, print_blob=CHAOS)
    settings.load_profile("alike")
