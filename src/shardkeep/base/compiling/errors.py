"""Errors of the folder that holds compiled kernels."""

from __future__ import annotations

from pathlib import Path

from shardkeep.base.errors import UserError


def unwritable_cache(folder: Path, error: OSError) -> UserError:
    """Returns the error that a user reads when compiled kernels cannot be written."""
    return UserError(
        f"{folder}: compiled kernels cannot be kept ({error.strerror or error}); "
        "free space there, or set XDG_CACHE_HOME to another folder"
    )
