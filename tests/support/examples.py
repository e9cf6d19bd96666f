"""How many examples a property test draws: a quarter in the default run, all in `make test-long`."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings

LONG = bool(os.environ.get("SHARDKEEP_LONG_TESTS"))


def examples(count: int = 100, **more: Any) -> settings:
    """Decorates a property test with its full number of examples. A machine that does other things may be slow."""
    slow = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    return settings(**slow | more, max_examples=count if LONG else max(count // 4, 10))
