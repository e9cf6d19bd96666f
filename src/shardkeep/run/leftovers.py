"""What killed jobs of this user left behind on this machine: their tokens, and what members kept for replacements.

Beside each token lies NAME.run: JSON with the run folder (absolute), the coordinator's pid, its start and `pid_space`.
The next job's coordinator looks there, at notes of its own machine, boot and container: homes are shared over
machines. It removes nothing that another coordinator could still take over.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

from shardkeep.base.errors import ShardkeepError
from shardkeep.base.files import atomic_write
from shardkeep.base.machine.pids import pid_space, start_of
from shardkeep.run.folder import RunFolder
from shardkeep.run.processes import is_there, launcher_there, living
from shardkeep.trust.tokens import token_path
from shardkeep.trust.view import SUFFIX as VIEW_SUFFIX

_SUFFIX = ".run"
GONE_S = 7 * 86_400.0
"""Age of the note from which a run folder that is missing counts as deleted."""


def note_run(run: Path) -> None:
    """Notes that this process, a coordinator, uses the token of this run; a note that cannot be written is left out."""
    with contextlib.suppress(OSError, ShardkeepError):
        pid = os.getpid()
        facts = {"run": str(run.absolute()), "pid": pid, "started": start_of(pid), "pid_space": pid_space()}
        atomic_write(token_path(run).with_suffix(_SUFFIX), json.dumps(facts) + "\n", private=True)


def clean(tokens: Path) -> None:
    """Removes what killed jobs left, by the notes in the folder of tokens. Raises nothing: it is not this job's."""
    for note in sorted(tokens.glob(f"*{_SUFFIX}")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, ShardkeepError):
            facts = json.loads(note.read_text(encoding="utf-8"))
            unled = facts["pid_space"] == pid_space() and not is_there(int(facts["pid"]), str(facts.get("started", "")))
            if unled and _is_dead(Path(facts["run"]), note):
                note.with_suffix("").unlink(missing_ok=True)
                note.with_suffix(VIEW_SUFFIX).unlink(missing_ok=True)
                note.unlink()


def _is_dead(run: Path, note: Path) -> bool:
    """Whether nobody needs the token any more. Clears recovery/ of a run whose launcher was killed."""
    token = note.with_suffix("")
    if not token.exists():
        return True  # the job ended in order
    if not (run / "config.yaml").is_file() or token_path(run) != token:  # gone or another, or a volume is not mounted
        return run.parent.is_dir() and time.time() - note.stat().st_mtime > GONE_S
    folder = RunFolder(run)
    if launcher_there(run) is None:
        return folder.summary() is not None
    if launcher_there(run) or living(folder):
        return False
    folder.forget_recovery()
    return True
