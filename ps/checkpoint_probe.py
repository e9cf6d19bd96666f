"""Proves that processes on different hosts see the same folder of checkpoints.

One process writes a random number to a file of the folder and sends the number to the others, which compare.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import tempfile
from pathlib import Path

from shardkeep.base.errors import CheckpointError
from shardkeep.base.files import atomic_write

_PROBE = ".shared-folder-probe"
_TOKEN = re.compile("[0-9a-f]{16}")


def write_token(folder: Path, *, again: bool = False) -> str:
    """Writes a random number to the folder and returns it. The number is no secret.

    `again` keeps the number of the folder, which other processes may know. Raises CheckpointError if the folder cannot
    be written."""
    token = (_token_in(folder) if again else "") or secrets.token_hex(8)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(folder / _PROBE, token)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written ({error.strerror or error})") from error
    return token


def check_token(folder: Path, token: str) -> None:
    """Raises CheckpointError if the folder, as this process sees it, does not hold the token of worker 0."""
    with contextlib.suppress(OSError):
        if (folder / _PROBE).read_text(encoding="utf-8", errors="replace") == token:
            return
    raise CheckpointError(
        f"{folder} is not the folder that worker 0 writes checkpoints to; "
        "checkpoint.dir must be storage that all members share"
    )


def check_shared(folder: Path, token: str, *, writes: bool) -> None:
    """Raises CheckpointError if this process does not see the folder with the token or, if it `writes`, cannot write
    there."""
    try:
        if (folder / _PROBE).read_text(encoding="utf-8", errors="replace") != token:
            raise CheckpointError(f"{folder} is another folder")
        if writes:
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".written-"):
                pass
    except OSError as error:
        raise CheckpointError(f"{folder}: {(error.strerror or str(error)).lower()}") from error


def _token_in(folder: Path) -> str:
    """Returns the number in the folder; "" if there is none or the file is damaged."""
    with contextlib.suppress(OSError, ValueError):
        token = (folder / _PROBE).read_text(encoding="ascii")
        return token if _TOKEN.fullmatch(token) else ""
    return ""
