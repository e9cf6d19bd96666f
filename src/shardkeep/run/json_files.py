"""JSON objects in files of a run folder, and the files' names: what only coordinator N writes has N in its name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from shardkeep.base.errors import UserError
from shardkeep.base.net.descriptors import when_free

CLAIM = "coordinator.json"
_NUMBERED = re.compile(r"(.+)\.([1-9]\d*)\.json")


def numbered(run: Path, name: str, number: int) -> Path:
    """The file of coordinator `number`: summary.json and 3 are summary.3.json; 0 = the name as it is."""
    return (run / name).with_suffix(f".{number}.json") if number else run / name


def number_of(entry: str, *names: str) -> int:
    """The number in a file's name, if that is one of `names` with a number; otherwise 0."""
    found = _NUMBERED.fullmatch(entry)
    return int(found[2]) if found is not None and f"{found[1]}.json" in names else 0


def read_json(path: Path) -> dict[str, Any] | None:
    """Returns the JSON object in a file, or None if there is no file. NaN and infinities are null. Raises UserError if
    the file is damaged."""
    try:
        found = json.loads(when_free(lambda: path.read_text(encoding="utf-8")), parse_constant=lambda _: None)
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UserError(f"{path}: is damaged: it does not hold a JSON object; restore the file, or move it away")
    return found
