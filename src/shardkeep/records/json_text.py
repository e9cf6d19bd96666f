"""JSON of files and pages. NaN and infinities, which JSON lacks, become null."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def to_json(value: Any, *, indent: int | None = None, compact: bool = False) -> str:
    """Returns `value` as JSON. NaN and infinities, which JSON lacks, become null. `compact`: without spaces."""
    separators = (",", ":") if compact else None
    return json.dumps(_plain(value), indent=indent, separators=separators, ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    item = getattr(value, "item", None)  # a numpy scalar
    return _plain(item()) if callable(item) else str(value)
