"""A process that opens data, and may die meanwhile."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.data_config import DataConfig


def open_in_process(config: DataConfig, result: Path, start: Any = None, dies_at: int = 0) -> None:
    """Opens data, and writes the fingerprint and the reports. `start`: a barrier that is passed first. `dies_at`: the
    report at which the process is killed."""
    reports: list[str] = []

    def report(text: str, _share: float) -> None:
        reports.append(text)
        if len(reports) == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    if start is not None:
        start.wait(60.0)
    data = open_data(config, seed=3, progress=report)
    result.write_text(json.dumps([data.fingerprint, reports]))
