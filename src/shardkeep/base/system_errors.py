"""Errors of the system in one line: which path, what happened, what to do. Many of them name no path themselves."""

from __future__ import annotations

import errno
import io
import os
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_WAYS = {
    "its file system cannot do this; use a folder on a local disk": (errno.ENOSYS, errno.EOPNOTSUPP),
    "use a folder that can be written": (errno.EROFS,),
    "free space there, or use another disk": (errno.ENOSPC, errno.EDQUOT),
    "its disk or mount fails; use another": (errno.EIO, errno.ESTALE),
    "raise the limit of open files (ulimit -n)": (errno.EMFILE, errno.ENFILE),
    "use shorter names": (errno.ENAMETOOLONG,),
    "raise the limit of processes (ulimit -u, pids.max)": (errno.EAGAIN,),
}


def in_words(error: BaseException) -> str:
    """An error's text; of the system's errors also the path and the way out, as of an error that one of them caused."""
    if isinstance(error, UnicodeEncodeError | UnicodeDecodeError):
        return _of_text(error)
    text = _of_call(error) if isinstance(error, OSError) else str(error).strip() or type(error).__name__
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__
    number = errno.EAGAIN if "can't start new thread" in text else getattr(cause, "errno", None)
    way = next((way for way, numbers in _WAYS.items() if number in numbers), "")
    way = "set TMPDIR to a folder that can be written" if "No usable temporary directory" in text else way
    return text if way in text else f"{text}; {way}"


def _of_call(error: OSError) -> str:
    own_words = error.strerror != os.strerror(error.errno or 0)  # those of a library
    elsewhere = isinstance(error, ConnectionError | TimeoutError) or own_words
    place = error.filename if isinstance(error.filename, str) else "" if elsewhere else _place(error)
    return f"{place}: {error.strerror or error}" if place else str(error.strerror or error)


def _of_text(error: UnicodeEncodeError | UnicodeDecodeError) -> str:
    if isinstance(error, UnicodeEncodeError):
        name = next(part for part in re.finditer(r"[^\n\"']+", error.object) if part.end() > error.start)[0]
        shown = name.encode("ascii", "backslashreplace").decode("ascii")
        way = "use another name" if _is_broken(name) else "set LC_ALL=C.UTF-8: the name is utf-8, this locale is not"
        return f"{shown}: cannot be written as {error.encoding}; {way}"
    return f"{_place(error)}: byte {error.start} is not {error.encoding}; write the file as UTF-8"


def _is_broken(name: str) -> bool:
    """Whether a file name of the system is utf-8 in no locale."""
    return "\ufffd" in name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _place(error: BaseException) -> str:
    """The path that the innermost function of a traceback holds; "" = there is none."""
    frames = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((path for names in reversed(frames) for path in _paths(names)), "")


def _paths(names: dict[str, Any]) -> Iterator[str]:
    own = getattr(names.get("self"), "__dict__", {})
    for value in (*names.values(), *own.values()):
        if isinstance(value, Path):
            yield str(value)
        elif isinstance(value, io.IOBase) and isinstance(name := getattr(value, "name", None), str):
            yield name
