"""Requests to a shard service in this process, and its replies."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np

from shardkeep.base.arrays import Bytes
from shardkeep.compression.values.registry import tag_of
from shardkeep.ps.config import ConsistencyConfig, TableSpec
from shardkeep.ps.server.service import ShardService
from shardkeep.ps.wire.message import EMPTY, Kind
from tests.support.codecs import codec_of, encoded
from tests.support.messages import Message, Section, pack, unpack

TABLES = (TableSpec(name="user", dim=4), TableSpec(name="item", dim=3, optimizer={"name": "sgd"}))
IDS = np.array([-5, 0, 7, 2**40], dtype=np.int64)
LIMIT_S = 90.0


def make_service(mode: str = "bounded", *, num_workers: int = 1, staleness: int = 2, **settings: Any) -> ShardService:
    consistency = ConsistencyConfig(mode=mode) if mode == "sync" else ConsistencyConfig(mode=mode, staleness=staleness)
    return ShardService(shard=0, tables=TABLES, consistency=consistency, num_workers=num_workers, seed=1, **settings)


def raw(array: np.ndarray) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def gradient(table: int, ids: np.ndarray = IDS, value: float = 1.0, codec: str = "fp32") -> Section:
    grad = np.full((ids.size, TABLES[table].dim), value, np.float32)
    values = encoded(codec_of(codec), grad)
    return Section(table, ids.size, raw(ids), raw(values), value_format=tag_of(codec, None, plug=0))


def wanted(table: int, ids: np.ndarray = IDS) -> Section:
    return Section(table, ids.size, raw(ids), EMPTY)


def push(service: ShardService, step: int, *sections: Section, rank: int = 0, generation: int = 0) -> Future[Bytes]:
    return service.handle(pack(Message(Kind.PUSH, generation, rank, step, sections)))


def pull(service: ShardService, step: int, *sections: Section, rank: int = 0, kind: Kind = Kind.PULL) -> Future[Bytes]:
    return service.handle(pack(Message(kind, 0, rank, step, sections)))


def answer(future: Future[Bytes]) -> Message:
    return unpack(future.result(timeout=LIMIT_S))
