"""Snapshots of a service, written and read back."""

from __future__ import annotations

import json
from concurrent.futures import Future
from typing import Any

from shardkeep.base.arrays import Bytes
from shardkeep.ps.checkpoints.folder import Checkpoint, Checkpoints, FileRecord
from shardkeep.ps.server.service import ShardService
from shardkeep.ps.server.snapshot.files import load_snapshots
from shardkeep.ps.server.tables import Tables
from shardkeep.ps.wire.message import Kind, text_message
from tests.support.messages import text_of
from tests.support.services import TABLES, answer


def ask(service: ShardService, **question: Any) -> Future[Bytes]:
    return service.handle(text_message(Kind.ASK, json.dumps(question), generation=service.generation))


def told(future: Future[Bytes]) -> tuple[Kind, str]:
    message = answer(future)
    return message.kind, text_of(message)


def saved(service: ShardService, checkpoints: Checkpoints, step: int, base: Checkpoint | None = None) -> Checkpoint:
    checkpoints.begin(step)
    told(ask(service, ask="mark", step=step, base="" if base is None else base.id))
    found = json.loads(told(ask(service, ask="snapshot", step=step))[1])
    assert found["full"] == (base is None)
    done = checkpoints.commit(step, [FileRecord(**file) for file in found["files"]], {}, base=base)
    assert told(ask(service, ask="saved", step=step, id=done.id)) == (Kind.ANSWER, "{}")
    return done


def loaded(checkpoint: Checkpoint) -> Tables:
    read = Tables(TABLES, seed=1)
    load_snapshots(read, checkpoint, shard=0, num_shards=1)
    return read
