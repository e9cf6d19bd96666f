"""What killed jobs of this user left behind on this machine: their tokens, and what members kept for replacements.

Beside each token lies NAME.run: JSON with the run folder (absolute), and the coordinator's host and pid. The next job's
coordinator looks there. It removes nothing that another coordinator could still take over.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from pathlib import Path

from shardkeep.base.errors import ShardkeepError
from shardkeep.base.files import atomic_write
from shardkeep.processes import is_ours, launcher_there, living
from shardkeep.report import RunFolder
from shardkeep.tokens import token_path

_SUFFIX = ".run"


def note_run(run: Path) -> None:
    """Notes that this process, a coordinator, uses the token of this run; a note that cannot be written is left out."""
    with contextlib.suppress(OSError, ShardkeepError):
        facts = {"run": str(run.absolute()), "host": socket.gethostname(), "pid": os.getpid()}
        atomic_write(token_path(run).with_suffix(_SUFFIX), json.dumps(facts) + "\n", private=True)


def clean(tokens: Path) -> None:
    """Removes what killed jobs left, by the notes in the folder of tokens. Raises nothing: it is not this job's."""
    for note in sorted(tokens.glob(f"*{_SUFFIX}")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, ShardkeepError):
            facts = json.loads(note.read_text(encoding="utf-8"))
            here = facts["host"] == socket.gethostname() and not is_ours(int(facts["pid"]))
            if here and _is_dead(Path(facts["run"]), note.with_suffix("")):
                note.with_suffix("").unlink(missing_ok=True)
                note.unlink()


def _is_dead(run: Path, token: Path) -> bool:
    """Whether nobody needs the token any more. Clears recovery/ of a run whose launcher was killed."""
    if not (run / "config.yaml").is_file() or token_path(run) != token or not token.exists():
        return True  # the folder is gone, or another one, or the job ended in order
    folder = RunFolder(run)
    if launcher_there(run) is None:
        return folder.summary() is not None
    if launcher_there(run) or living(folder):
        return False
    folder.forget_recovery()
    return True
