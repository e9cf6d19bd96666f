"""How far a run is, from the files of its folder: whether it has ended, its last step, its indexes at the end."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path

from shardkeep.run.reader import RunReader

_TAIL_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class RunProgress:
    """The state of a run."""

    ended: bool
    step: int | None
    """The last step that was reported; None = none was."""
    load_factors: dict[str, float]
    """Of each table's index on the servers at the end; empty before."""

    def text(self, shown: int) -> str:
        """One line for the user. `shown`: the step of the checkpoint that is looked at."""
        if self.ended:
            return f"step {shown:,}"
        if self.step is None or self.step <= shown:
            return f"step {shown:,}, of a job that has not ended"
        return f"step {shown:,}, of a job that was at step {self.step:,} and has not ended"


def progress_of(run: Path) -> RunProgress:
    """Reads the summary, or the end of metrics.jsonl of a job that has none. Raises UserError for damaged files."""
    reader = RunReader(run)
    summary = reader.summary()
    if summary is not None:
        tables = summary.get("tables") or ()
        loads = {str(table["name"]): float(table["load_factor"]) for table in tables if "load_factor" in table}
        return RunProgress(True, int(summary.get("steps") or 0), loads)
    step = None
    with contextlib.suppress(OSError), reader.metrics_path.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
        for line in file.read().splitlines():
            with contextlib.suppress(ValueError, TypeError, AttributeError):  # the first and the last may be cut
                step = max(step or 0, int(json.loads(line).get("step") or 0))
    return RunProgress(False, step, {})
