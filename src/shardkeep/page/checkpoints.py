"""The section of the checkpoints, from their folder and from what the job said of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardkeep.page.records import Json, RunRecords
from shardkeep.ps.checkpoints.folder import Checkpoints
from shardkeep.records.events import CheckpointEvent
from shardkeep.records.record import number


class CheckpointFolder:
    """Lists the complete checkpoints of a run; a manifest is read once."""

    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        given = (config.get("checkpoint") or {}).get("dir")
        self._folder = run / "checkpoints" if not given else Path(str(given)).expanduser()
        self._names: list[str] = []
        self._known: list[Json] = []

    def rows(self, records: RunRecords) -> list[Json]:
        """Step, time, size and duration of each checkpoint, newest first."""
        names: list[str] = []
        with contextlib.suppress(OSError):
            names = sorted(path.name for path in self._folder.iterdir() if path.name.startswith("step-"))
        if names != self._names:
            self._names, self._known = names, self._read()
        told = {e.step: e for e in records.events if isinstance(e, CheckpointEvent) and e.bytes is not None}
        unknown = CheckpointEvent()
        return [
            {**row, "seconds": (said := told.get(row["step"], unknown)).seconds, "held_s": said.held_s}
            for row in reversed(self._known)
        ]

    def _read(self) -> list[Json]:
        rows = []
        with contextlib.suppress(Exception):  # a damaged checkpoint must not take the page away
            for step, folder in Checkpoints(self._folder).complete():
                with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
                    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
                    size = sum(int(file.get("size") or 0) for file in manifest.get("files") or ())
                    at = (folder / "manifest.json").stat().st_mtime
                    increment = (manifest.get("base") or {}).get("step")
                    samples = number((manifest.get("facts") or {}).get("samples"))
                    rows.append(
                        {"step": step, "name": folder.name, "at": at, "bytes": size, "samples": samples,
                         "base": increment}
                    )  # fmt: skip
        return rows
