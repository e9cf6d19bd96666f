"""The view token of a job: who shows it may read the job's metrics and its page, and may change nothing.

It follows from the job's token, which nobody can compute from it. Both directions of the header that carries it.
"""

from __future__ import annotations

import hmac
from pathlib import Path

from shardkeep.base.errors import UserError
from shardkeep.base.files import atomic_write
from shardkeep.trust.tokens import token_path

_PURPOSE = b"shardkeep view"
SUFFIX = ".view"


def view_token(token: str) -> str:
    """HMAC-SHA256 of a fixed text, with the job's token as the key, in hex."""
    return hmac.new(token.encode(), _PURPOSE, "sha256").hexdigest()


def view_token_path(run: Path) -> Path:
    """The file with the view token of the job in this run folder. Raises ConfigError."""
    return token_path(run).with_suffix(SUFFIX)


def put_view_token(run: Path, token: str) -> Path:
    """Writes the view token of the job with this token beside that token, for this user only; returns the file.

    Raises UserError, and ConfigError for a run folder that cannot be read."""
    path = view_token_path(run)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        atomic_write(path, view_token(token), private=True)  # no line break: Prometheus sends the file's content
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror or error}); set XDG_STATE_HOME to a folder of your own"
        ) from error
    return path


def shows_token(header: bytes | None, token: str) -> bool:
    """Whether the value of an HTTP header `authorization` shows the token. Takes equally long for each wrong one."""
    scheme, _, shown = (header or b"").partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(shown.strip(), token.encode())
