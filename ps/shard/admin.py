"""Questions: what a server may be asked in JSON: its report, and the parts it has in a checkpoint."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

from shardkeep.base.errors import ProtocolError, TransportError
from shardkeep.ps.checkpoint_probe import check_token
from shardkeep.ps.shard.futures import done, promised
from shardkeep.ps.shard.journal.journal import Journal
from shardkeep.ps.shard.serving import Serving
from shardkeep.ps.shard.snapshot.writer import SnapshotWriter
from shardkeep.ps.wire.message import Bytes, Kind, Packed, text_of, unpack

Question = dict[str, Any]
Answer = dict[str, Any]


class Questions:
    """Answers at once, or by a future where it takes its time.

    Args:
        journal: Of the server's pushes; None = there is none.
        frozen: Inside, no push is applied and all steps before a step are; raises where the server is not there.
        report: The facts that a server reports about itself.
    """

    def __init__(
        self,
        serving: Serving,
        snapshots: SnapshotWriter,
        journal: Journal | None,
        *,
        frozen: Callable[[int], AbstractContextManager[None]],
        report: Callable[[], Answer],
    ) -> None:
        self._serving, self._snapshots, self._journal, self._frozen = serving, snapshots, journal, frozen
        self._known: dict[str, Callable[[Question], Answer | Future[Answer]]] = {
            "report": lambda _: report(),
            "cpu": lambda _: {"pid": os.getpid(), "cpu_s": time.process_time()},
            "see": self._see,
            "mark": self._mark,
            "snapshot": lambda question: snapshots.write(_step_of(question)),
            "unmark": self._unmark,
            "saved": self._saved,
            "journal": lambda _: {"bytes": 0 if journal is None else journal.size_bytes},
        }

    def read(self, text: str) -> Question:
        """The question in a message. Raises ProtocolError when it is none of ours."""
        try:
            question = json.loads(text)
        except (ValueError, RecursionError):  # the second: brackets in brackets
            question = None
        if not isinstance(question, dict) or question.get("ask") not in self._known:
            raise ProtocolError(f'question {text[:80]!r} is unknown; allowed: {{"ask": {"|".join(self._known)}}}')
        return question

    def handle(self, message: Packed) -> Future[Bytes]:
        """The ANSWER to an ASK. Raises ProtocolError, CheckpointError or TransportError."""
        question = self.read(text_of(unpack(message.buffer)))
        with self._serving.lock:
            self._serving.check_open(message.generation)
        found = self.answer(question)
        if isinstance(found, Future):
            return self._later(found, message.rank)
        return done(self._packed(found, message.rank))

    def _packed(self, answer: Answer, rank: int) -> Bytes:
        return self._serving.text(Kind.ANSWER, json.dumps(answer), rank)

    def _later(self, found: Future[Answer], rank: int) -> Future[Bytes]:
        """The message of an answer that takes its time."""
        message = promised()

        def finish(found: Future[Answer]) -> None:
            error = found.exception()
            if isinstance(error, TransportError):
                message.set_exception(error)
            elif isinstance(error, Exception):
                message.set_result(self._serving.error(error))
            else:
                message.set_result(self._packed(found.result(), rank))

        found.add_done_callback(finish)
        return message

    def answer(self, question: Question) -> Answer | Future[Answer]:
        """Raises ProtocolError or CheckpointError."""
        return self._known[question["ask"]](question)

    def _see(self, question: Question) -> Answer:
        """Whether this server sees the folder that worker 0 writes checkpoints to."""
        check_token(self._snapshots.folder().folder, str(question.get("token")))
        return {}

    def _mark(self, question: Question) -> Answer:
        """Notes the rows of a step boundary for a snapshot: just after it the next pushes may come."""
        step = _step_of(question)
        with self._frozen(step):
            self._snapshots.mark(step, _id_of(question, "base"))
        if self._journal is not None:
            self._journal.roll()
        return {}

    def _unmark(self, _question: Question) -> Answer:
        """Gives up a mark, and its snapshot if one is being written."""
        self._snapshots.drop()
        return {}

    def _saved(self, question: Question) -> Answer:
        """The checkpoint of a step is complete: the journal need not hold what came before it, nor the next one the
        rows that do not change from there on."""
        self._snapshots.saved(_step_of(question), _id_of(question, "id"))
        if self._journal is not None:
            self._journal.forget_before(_step_of(question))
        return {}


def _step_of(question: Question) -> int:
    step = question.get("step")
    if not isinstance(step, int):
        raise ProtocolError(f"step {step!r}; allowed: a whole number")
    return step


def _id_of(question: Question, key: str) -> str:
    """The id of a checkpoint; "" where there is none."""
    checkpoint = question.get(key, "")
    if not isinstance(checkpoint, str):
        raise ProtocolError(f"{key} {checkpoint!r}; allowed: the id of a checkpoint")
    return checkpoint
