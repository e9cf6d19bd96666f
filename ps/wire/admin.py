"""Admin calls: the JSON text of an ASK and of its ANSWER. Each call is one class."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from shardkeep.base.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class Done:
    """The reply without facts."""


@dataclass(frozen=True, slots=True)
class ServerCpuTime:
    """The process id of a server and its CPU seconds so far."""

    pid: int
    cpu_s: float


@dataclass(frozen=True, slots=True)
class JournalSize:
    """Bytes of a server's journal; 0 where there is none."""

    bytes: int


@dataclass(frozen=True, slots=True)
class SnapshotFiles:
    """The files that one server wrote, and whether they hold all rows or only changed rows.

    `removes`: whether they may say that rows of the base were removed."""

    files: list[dict[str, Any]]
    """The fields of each FileRecord."""
    full: bool
    removes: bool = False


ServerReport = dict[str, Any]
"""Tables, digests and counts of one server, as JSON types; `summary.json` is made of them."""
Reply = Done | ServerCpuTime | JournalSize | SnapshotFiles | ServerReport
R = TypeVar("R", Done, ServerCpuTime, JournalSize, SnapshotFiles, ServerReport)


@dataclass(frozen=True, slots=True)
class GetReport:
    """Reports on a server; `digest`: scans all rows for the digest of each table."""

    digest: bool = True


@dataclass(frozen=True, slots=True)
class GetCpuTime:
    """Reads the CPU time of a server."""


@dataclass(frozen=True, slots=True)
class CheckFolder:
    """Checks that a server sees the checkpoint folder of worker 0, by the token in a file there."""

    token: str
    folder: str = ""
    """Of checkpoints; "" = the job's."""


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Fixes the rows of a step boundary. The next pushes may come as soon as the reply is here."""

    step: int
    base: str
    """The id of the checkpoint since which changed rows suffice; "" = all rows."""


@dataclass(frozen=True, slots=True)
class WriteSnapshot:
    """Writes the rows that `TakeSnapshot` fixed. The reply comes when the files are on disk."""

    step: int
    folder: str = ""
    """Of checkpoints; "" = the job's."""


@dataclass(frozen=True, slots=True)
class DropSnapshot:
    """Drops the snapshot, also while it is written."""


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """Reports that the checkpoint of a step is complete. The journal may drop its records of earlier steps."""

    step: int
    id: str


@dataclass(frozen=True, slots=True)
class LoadRows:
    """Fills empty tables with the rows of a checkpoint; the next step is the checkpoint's."""

    folder: str
    """Of checkpoints."""
    step: int
    servers: int
    """The job's."""


@dataclass(frozen=True, slots=True)
class GetJournalSize:
    """Reads the size of a server's journal."""


Call = (
    GetReport
    | GetCpuTime
    | CheckFolder
    | TakeSnapshot
    | WriteSnapshot
    | DropSnapshot
    | CheckpointSaved
    | LoadRows
    | GetJournalSize
)
CALLS: dict[str, type[Call]] = {
    "report": GetReport,
    "cpu": GetCpuTime,
    "see": CheckFolder,
    "mark": TakeSnapshot,
    "snapshot": WriteSnapshot,
    "unmark": DropSnapshot,
    "saved": CheckpointSaved,
    "load": LoadRows,
    "journal": GetJournalSize,
}
"""By their word on the wire. The words are older than the names of the classes and do not change."""
_WORDS = {call: word for word, call in CALLS.items()}
_ARGUMENTS: dict[str, tuple[type, object, str]] = {
    "step": (int, None, "a whole number"),
    "servers": (int, None, "a whole number"),
    "base": (str, "", "the id of a checkpoint"),
    "id": (str, "", "the id of a checkpoint"),
    "token": (str, "", "the text in a folder of checkpoints"),
    "folder": (str, "", "a path"),
    "digest": (bool, True, "true or false"),
}
"""Of each argument: its type, what it is where it is left out, and what is allowed, in words."""


def encode_call(call: Call) -> str:
    """The text of an ASK, without arguments that have their default."""
    usual = {field.name: field.default for field in fields(call)}
    arguments = {name: value for name, value in _facts(call).items() if value != usual[name]}
    return json.dumps({"ask": _WORDS[type(call)], **arguments})


def decode_call(text: str) -> Call:
    """The call in the text of an ASK. Raises ProtocolError for an unknown call or a wrong argument."""
    try:
        question = json.loads(text)
    except (ValueError, RecursionError):  # RecursionError: deeply nested brackets
        question = None
    word = question.get("ask") if isinstance(question, dict) else None
    call = CALLS.get(word) if isinstance(word, str) else None
    if call is None:
        raise ProtocolError(f'question {text[:80]!r} is unknown; allowed: {{"ask": {"|".join(CALLS)}}}')
    return call(**{field.name: _argument(field.name, question) for field in fields(call)})


def encode_reply(reply: Reply) -> str:
    """The text of an ANSWER."""
    return json.dumps(reply if isinstance(reply, dict) else _facts(reply))


def decode_reply(text: str, kind: type[R]) -> R:
    """The reply in the text of an ANSWER. Raises ProtocolError when it is not a `kind`."""
    try:
        return kind(**json.loads(text))
    except (TypeError, ValueError, RecursionError) as error:  # RecursionError: as above
        raise ProtocolError(f"answer {text[:80]!r} is not a {kind.__name__}") from error


def _facts(of: Call | Done | ServerCpuTime | JournalSize | SnapshotFiles) -> dict[str, Any]:
    return {field.name: getattr(of, field.name) for field in fields(of)}


def _argument(name: str, question: dict[str, Any]) -> Any:
    kind, default, allowed = _ARGUMENTS[name]
    value = question.get(name, default)
    if not isinstance(value, kind) or (isinstance(value, str) and "\0" in value):
        raise ProtocolError(f"{name} {value!r}; allowed: {allowed}")
    return value
