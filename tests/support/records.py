"""The records in a file of a run folder, as JSON objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardkeep.records.lines import Tail


def records_in(path: Path) -> list[dict[str, Any]]:
    return [record.to_dict() for record in Tail(path)]
