"""The one exception tree of shardkeep.

ShardkeepError
├── UserError            the user's input is wrong (exit code 2)
│   ├── ConfigError      a setting: unknown, of the wrong type, out of range, at odds with another
│   ├── DataError        a file, a row, a column, a label
│   └── PlaceRefused     a process cannot replace the one that died; another may
├── JobError             the job failed (exit code 1)
│   ├── MemberLost       a process died or its lease ended
│   │   └── PlaceLost    this process, as the coordinator sees it; another is to take its place (exit code 143)
│   ├── CheckpointError  a checkpoint cannot be written, is damaged, or does not fit
│   ├── JournalError     a server's log of pushes cannot be written, has another format, or belongs to another process
│   ├── Diverged         too many steps in a row with non-finite gradients
│   └── JobStopped       somebody asked the job to stop before it was done
├── TransportError       a message did not arrive or was not answered (retryable)
│   ├── DeadlineExceeded a wait ran out; names the peer and the elapsed time
│   ├── Superseded       another coordinator leads the job, and answers in place of this one
│   └── RemoteError      the peer answered with an error of its own (not retryable)
├── MissingPackage       a package that only this feature needs is not installed
├── ProtocolError        two sides disagree: versions, generations, tables
└── CorruptMessage       bytes that are not a message of ours
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from shardkeep.base.exit_codes import START_AGAIN


class ShardkeepError(Exception):
    """Base of every error that shardkeep raises on purpose; its text is one line for a person."""

    exit_code = 1
    retryable = False


class UserError(ShardkeepError):
    exit_code = 2


class ConfigError(UserError):
    pass


class DataError(UserError):
    pass


class PlaceRefused(UserError):
    pass


class JobError(ShardkeepError):
    pass


class MemberLost(JobError):
    pass


class PlaceLost(MemberLost):
    exit_code = START_AGAIN


class CheckpointError(JobError):
    pass


class JournalError(JobError):
    pass


class Diverged(JobError):
    pass


class JobStopped(JobError):
    pass


class TransportError(ShardkeepError):
    retryable = True


class DeadlineExceeded(TransportError):
    pass


class Superseded(TransportError):
    pass


class RemoteError(TransportError):
    retryable = False


class MissingPackage(ShardkeepError):
    pass


class ProtocolError(ShardkeepError):
    pass


class CorruptMessage(ShardkeepError):
    pass


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, or the name of its class if it has no text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """The end of a message about a name that is unknown: which of `known` it may stand for; "" = none is near."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""
