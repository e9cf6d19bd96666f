"""Scores a finished job's test data, once, in a process of its own: the launcher loads no model."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from shardkeep.config import JobConfig
from shardkeep.run.folder import RunFolder
from shardkeep.run.job_view import JobView


def score_test_data(config: JobConfig, folder: RunFolder, screen: JobView) -> dict[str, Any] | None:
    """Adds `test` to summary.json by `shardkeep evaluate`. Returns the summary; None = the job has no test data, or an
    error was shown: the trained model stays."""
    if not config.data.test:
        return None
    model = "last" if config.train.early_stopping is None else "best"
    arguments = ("evaluate", str(folder.path), "--split", "test", "--model", model, "--json")
    done = subprocess.run([sys.executable, "-m", "shardkeep", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        screen.phase("test", f"not scored: {why.removeprefix('error: ')}")
        return None
    return folder.tested(json.loads(done.stdout))
