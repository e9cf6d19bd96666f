"""Where a job's token lies: in a file of the user's own, never in the run folder, which people share and copy.

$XDG_STATE_HOME/shardkeep/tokens/NAME, where that is unset ~/.local/state (XDG Base Directory Specification 0.8). NAME
follows from the run folder's path and inode: another folder that claims to be this one gets another token.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from shardkeep.base.errors import ConfigError, UserError
from shardkeep.base.files import atomic_write, check_writable, make_folder, sync_folder
from shardkeep.trust.endpoint import make_token, read_token


def token_path(run: Path) -> Path:
    """The file with the token of the job in this run folder, which exists. Raises ConfigError."""
    try:
        name = hashlib.sha256(f"{run.resolve()}\n{run.stat().st_ino}".encode()).hexdigest()[:32]
    except OSError as error:
        raise ConfigError(f"{run}: cannot be read ({error.strerror or error})") from error
    return _state() / "tokens" / name


def keep_token(run: Path) -> str:
    """The token of the job in this run folder: that of a coordinator that was here before, for its members still have
    it, else a new one, kept for those who ask by the folder.

    Raises ConfigError where the one that is there is not this user's own, UserError where none can be written."""
    path = token_path(run)
    if _is_there(path):
        return read_token(path)
    token = make_token()
    put_token(run, token)
    return token


def put_token(run: Path, token: str) -> None:
    """Has those who ask by the folder find this token. Raises UserError."""
    path = token_path(run)
    with _writing(path):
        make_folder(path.parent, mode=0o700)
        atomic_write(path, token + "\n", private=True)
        sync_folder(path.parent)


def check_token_folder() -> None:
    """Raises UserError where this user can keep no token: before data and kernels are prepared."""
    folder = _state() / "tokens"
    with _writing(folder):
        make_folder(folder, mode=0o700)
        check_writable(folder)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror or error}); give --token-file FILE, or set XDG_STATE_HOME to "
            "a folder of your own"
        ) from error


def token_of(run: Path) -> str:
    """The token of the job in this run folder.

    Raises ConfigError: it is not here (another machine's or another user's job, or one that is over), or not fit."""
    path = token_path(run)
    if not _is_there(path):
        raise ConfigError(
            f"{run}: the token of its job is not here ({path}): the job is over, or runs on another machine or for "
            "another user; there it is a --token-file"
        )
    return read_token(path)


def _is_there(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror or error}); set XDG_STATE_HOME to a folder of your own"
        ) from error
    return True


def _state() -> Path:
    named = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not named.is_absolute():  # such a value is to be ignored
        named = Path(os.path.expanduser("~")) / ".local" / "state"  # noqa: PTH111 - Path.home() raises without a home
    if not named.is_absolute():
        raise ConfigError("this user has no home for the job's token; set XDG_STATE_HOME to a folder of your own")
    return named / "shardkeep"
