"""Proves that a folder can keep what a job writes, and that processes on different hosts see the same folder.

One process writes a random number to a file of the folder and sends the number to the others, which compare.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import re
import secrets
import shutil
import tempfile
from pathlib import Path

from shardkeep.base.errors import CheckpointError
from shardkeep.base.files import atomic_write, make_folder
from shardkeep.base.sizes import size_text

LITTLE_BYTES = 32_000_000
"""Free space below which a job warns before its first step."""
_PROBE = ".shared-folder-probe"
_TOKEN = re.compile("[0-9a-f]{16}")


def check_keeps_checkpoints(folder: Path) -> None:
    """Raises CheckpointError if a checkpoint could never be complete: its folder gets its name when all is written."""
    try:
        make_folder(folder, mode=0o777)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".renamed-") as place:
            (Path(place) / "a").mkdir()
            (Path(place) / "a").rename(Path(place) / "b")
    except OSError as error:
        raise CheckpointError(
            f"{folder}: cannot keep checkpoints: folders cannot be made and renamed there ({error.strerror or error})"
        ) from error


def unable(folder: Path) -> list[str]:
    """What is lost because of what the file system of a folder cannot do, in words; [] = nothing."""
    lost = []
    with tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(mmap.PAGESIZE)
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lost.append(
                f"no file locks ({error.strerror}): nothing is kept for replacements, and no other launcher is kept out"
            )
        try:
            mmap.mmap(file.fileno(), mmap.PAGESIZE).close()
        except OSError as error:
            lost.append(f"no shared mappings ({error.strerror}): a worker's replacement lacks its dense state")
    if (free := shutil.disk_usage(folder).free) < LITTLE_BYTES:
        lost.append(f"{size_text(free)} free: checkpoints and records may be lost")
    return lost


def write_token(folder: Path, *, again: bool = False) -> str:
    """Writes a random number to the folder and returns it. The number is no secret.

    `again` keeps the number of the folder, which other processes may know. Raises CheckpointError if the folder cannot
    be written, or cannot keep checkpoints."""
    token = (_token_in(folder) if again else "") or secrets.token_hex(8)
    check_keeps_checkpoints(folder)
    try:
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
