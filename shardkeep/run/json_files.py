"""JSON objects in files of a run folder."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardkeep.base.errors import UserError
from shardkeep.base.machine.descriptors import when_free


def read_json(path: Path) -> dict[str, Any] | None:
    """Returns the JSON object in a file, or None if there is no file. Raises UserError if the file is damaged."""
    try:
        found = json.loads(when_free(lambda: path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UserError(f"{path}: is damaged: it does not hold a JSON object; restore the file, or move it away")
    return found


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
