"""Admin calls: the JSON text of an ASK and of its ANSWER. Each call is one class; its reply type is in `reply`.

The words on the wire ("mark", "saved", ...) are older than the names of the classes and do not change.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from shardkeep.base.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class Done:
    """The reply without facts."""


@dataclass(frozen=True, slots=True)
class CpuTime:
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
Reply = Done | CpuTime | JournalSize | SnapshotFiles | ServerReport
R = TypeVar("R", Done, CpuTime, JournalSize, SnapshotFiles, ServerReport)


@dataclass(frozen=True, slots=True)
class GetReport:
    """Reports on a server; `digest`: scans all rows for the digest of each table."""

    word: ClassVar[str] = "report"
    reply: ClassVar[type[ServerReport]] = dict
    digest: bool = True


@dataclass(frozen=True, slots=True)
class GetCpuTime:
    """Reads the CPU time of a server."""

    word: ClassVar[str] = "cpu"
    reply: ClassVar[type[CpuTime]] = CpuTime


@dataclass(frozen=True, slots=True)
class CheckFolder:
    """Checks that a server sees the checkpoint folder of worker 0, by the token in a file there."""

    word: ClassVar[str] = "see"
    reply: ClassVar[type[Done]] = Done
    token: str
    folder: str = ""
    """Of checkpoints; "" = the job's."""


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Fixes the rows of a step boundary. The next pushes may come as soon as the reply is here."""

    word: ClassVar[str] = "mark"
    reply: ClassVar[type[Done]] = Done
    step: int
    base: str
    """The id of the checkpoint since which changed rows suffice; "" = all rows."""


@dataclass(frozen=True, slots=True)
class WriteSnapshot:
    """Writes the rows that `TakeSnapshot` fixed. The reply comes when the files are on disk."""

    word: ClassVar[str] = "snapshot"
    reply: ClassVar[type[SnapshotFiles]] = SnapshotFiles
    step: int
    folder: str = ""
    """Of checkpoints; "" = the job's."""


@dataclass(frozen=True, slots=True)
class DropSnapshot:
    """Drops the snapshot, also while it is written."""

    word: ClassVar[str] = "unmark"
    reply: ClassVar[type[Done]] = Done


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """Reports that the checkpoint of a step is complete. The journal may drop its records of earlier steps."""

    word: ClassVar[str] = "saved"
    reply: ClassVar[type[Done]] = Done
    step: int
    id: str


@dataclass(frozen=True, slots=True)
class LoadRows:
    """Fills empty tables with the rows of a checkpoint; the next step is the checkpoint's."""

    word: ClassVar[str] = "load"
    reply: ClassVar[type[Done]] = Done
    folder: str
    """Of checkpoints."""
    step: int
    servers: int
    """The job's."""


@dataclass(frozen=True, slots=True)
class GetJournalSize:
    """Reads the size of a server's journal."""

    word: ClassVar[str] = "journal"
    reply: ClassVar[type[JournalSize]] = JournalSize


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


def encode_call(call: Call) -> str:
    """The text of an ASK, without arguments that have their default."""
    usual = {field.name: field.default for field in fields(call)}
    given = {name: value for name, value in _facts(call).items() if value != usual[name]}
    return json.dumps({"ask": call.word, **given})


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
    return call(**{field.name: _ARGUMENTS[field.name](field.name, question) for field in fields(call)})


def encode_reply(reply: Reply) -> str:
    """The text of an ANSWER."""
    return json.dumps(reply if isinstance(reply, dict) else _facts(reply))


def decode_reply(text: str, kind: type[R]) -> R:
    """The reply in the text of an ANSWER. Raises ProtocolError when it is not a `kind`."""
    try:
        return kind(**json.loads(text))
    except (TypeError, ValueError, RecursionError) as error:  # RecursionError: as above
        raise ProtocolError(f"answer {text[:80]!r} is not a {kind.__name__}") from error


def _facts(of: Call | Done | CpuTime | JournalSize | SnapshotFiles) -> dict[str, Any]:
    return {field.name: getattr(of, field.name) for field in fields(of)}


def _step(name: str, question: dict[str, Any]) -> int:
    step = question.get(name)
    if not isinstance(step, int):
        raise ProtocolError(f"{name} {step!r}; allowed: a whole number")
    return step


def _checkpoint(name: str, question: dict[str, Any]) -> str:
    """The id of a checkpoint; "" where there is none."""
    checkpoint = question.get(name, "")
    if not isinstance(checkpoint, str):
        raise ProtocolError(f"{name} {checkpoint!r}; allowed: the id of a checkpoint")
    return checkpoint


def _token(name: str, question: dict[str, Any]) -> str:
    return str(question.get(name))


def _folder(name: str, question: dict[str, Any]) -> str:
    folder = question.get(name, "")
    if not isinstance(folder, str) or "\0" in folder:
        raise ProtocolError(f"{name} {folder!r}; allowed: a path")
    return folder


def _truth(name: str, question: dict[str, Any]) -> bool:
    truth = question.get(name, True)
    if not isinstance(truth, bool):
        raise ProtocolError(f"{name} {truth!r}; allowed: true or false")
    return truth


_ARGUMENTS: dict[str, Callable[[str, dict[str, Any]], Any]] = {
    "step": _step,
    "base": _checkpoint,
    "id": _checkpoint,
    "token": _token,
    "digest": _truth,
    "folder": _folder,
    "servers": _step,
}
