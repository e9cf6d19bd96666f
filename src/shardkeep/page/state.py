"""State: all that the page shows of one run, as JSON types, in sections that change on their own."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from shardkeep.base.errors import ShardkeepError, UserError
from shardkeep.base.yaml_text import YamlError, read_yaml, write_yaml
from shardkeep.config.overrides import flat
from shardkeep.page import members, sections
from shardkeep.page.checkpoints import CheckpointFolder
from shardkeep.page.records import Json, RunRecords
from shardkeep.page.warnings.checks import warnings_of
from shardkeep.page.warnings.warning import Sight
from shardkeep.records.telemetry import ROLES
from shardkeep.run.processes import launcher_there, living

IDLE_S = 15.0
"""A job without a record for so many seconds may be dead: its processes are looked for."""
SKEW_S = 60.0
"""By which the clock of the job may be ahead of ours."""
MOST_LOG_BYTES = 64 << 10
MOST_CONFIG_BYTES = 256 << 10


class RunState:
    """The state of one run folder, read again at each `sections`. Not thread safe.

    `serving`: this process runs the job, so it is alive."""

    def __init__(self, path: str | Path, *, serving: bool = False, clock: Callable[[], float] = time.time) -> None:
        self.records = RunRecords(path)
        self._serving, self._clock = serving, clock
        text = _read(self.records.reader.config_path, MOST_CONFIG_BYTES)
        if not text and not self.records.reader.config_path.exists():
            there = Path(path).is_dir()
            raise UserError(f"{path}: {'is not a run folder (no config.yaml)' if there else 'there is no such folder'}")
        self._config: Mapping[str, Any] = {}
        with contextlib.suppress(YamlError):
            found = read_yaml(text)
            self._config = found if isinstance(found, Mapping) else {}
        self._config_section = {"text": text, "changed": changed_settings(self._config) if self._config else None}
        self._checkpoints = CheckpointFolder(self.records.reader.path, self._config)
        self._looked_at, self._there = 0.0, True

    @property
    def name(self) -> str:
        return self.records.reader.path.name

    @cached_property
    def settings(self) -> dict[str, str]:
        """Every setting with its value, of defaults too, as texts; of another version those of config.yaml."""
        from shardkeep.config import JobConfig

        found = flat(self._config)
        with contextlib.suppress(ValueError, ShardkeepError):
            found = JobConfig.stored(self._config).all_settings()
        return _texts(found)

    def sections(self) -> Json:
        """Reads what is new and returns the sections of the page by name."""
        records = self.records
        records.refresh()
        now = self._clock()
        state = self._state(now)
        checkpoints = self._checkpoints.rows(records)
        ended = state not in ("starting", "forming", "training", "recovering", "stopping")
        sight = Sight(records, state, records.newest if ended else now, self._config, checkpoints)
        return {
            "overview": sections.overview(records, state, self._config),
            "warnings": [dataclasses.asdict(warning) for warning in warnings_of(sight)],
            "curves": sections.curves(records),
            "steps": sections.worker_steps(records),
            "dense": sections.dense(records),
            "tables": sections.tables(records),
            "bytes": sections.bytes_of(records),
            "staleness": sections.staleness(records, self._config),
            "members": members.members(records),
            "timeline": members.time_line(records, state),
            "checkpoints": checkpoints,
            "config": self._config_section,
        }

    def log(self, role: str, index: int) -> str | None:
        """The end of a process's log; None = there is none."""
        if role not in ROLES or not 0 <= index < 100_000:
            return None
        path = self.records.reader.log_path(role, index)
        return _read(path, MOST_LOG_BYTES, end=True) if path.is_file() else None

    def _state(self, now: float) -> str:
        records = self.records
        if records.summary is not None:
            return str(records.summary.get("status") or "ended")
        if not self._alive(now):
            return "gone"
        return records.view.state

    def _alive(self, now: float) -> bool:
        """Whether a process of the job may be there. Looks for processes only if the job has been quiet."""
        last = self.records.newest
        with contextlib.suppress(OSError):
            last = last or self.records.reader.config_path.stat().st_mtime
        if self._serving or -SKEW_S < now - last < IDLE_S:
            return True
        if now - self._looked_at > IDLE_S:
            self._looked_at = now
            with contextlib.suppress(OSError, ValueError, ShardkeepError):
                self._there = bool(launcher_there(self.records.reader.path))
                self._there = self._there or bool(living(self.records.reader))
        return self._there


def changed_settings(resolved: Mapping[str, Any]) -> list[list[str]] | None:
    """Settings of a resolved config that differ from the defaults, as pairs of key and value; None = the config is of
    another version."""
    from shardkeep.config import JobConfig

    try:
        config = JobConfig.stored(resolved)
    except (ValueError, ShardkeepError):
        return None
    found = config.model_dump(mode="json", exclude_defaults=True, exclude={"data": {"root"}})
    return [[key, text] for key, text in _texts(flat(found)).items()]


def _texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """The values as YAML on one line."""
    texts = {key: write_yaml(value, default_flow_style=True, width=10_000) for key, value in settings.items()}
    return {key: text.removesuffix("...\n").strip() for key, text in texts.items()}


def _read(path: Path, most_bytes: int, *, end: bool = False) -> str:
    """The first bytes of a text file, or its last lines. Empty where it cannot be read."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - most_bytes) if end else 0)
        text = file.read(most_bytes).decode("utf-8", "replace")
        return text.partition("\n")[2] if end and size > most_bytes else text
    return ""
