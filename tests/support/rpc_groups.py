"""A worker in this process and a server in another, in one RPC group after the other."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Literal

import numpy as np

from shardkeep.base.arrays import Bytes
from shardkeep.base.deadlines import wait_for_reply
from shardkeep.ps.control.grpc.server import StoreHost
from shardkeep.ps.rpc.group import RpcGroup, connect_store
from shardkeep.ps.transport.transport import Transport
from shardkeep.ps.wire.message import EMPTY, Kind, text_message
from tests.support.messages import Message, Section, pack, unpack
from tests.support.rpc_peer import Peer

LIMIT_S = 90.0  # a peer imports torch on a busy machine
WORKERS = 2  # as the service counts them; the test speaks for both
TABLES = [{"name": "user", "dim": 4}, {"name": "item", "dim": 16, "optimizer": {"name": "sgd"}}]
SERVICE: dict[str, Any] = {"tables": TABLES, "consistency": {"mode": "sync"}, "num_workers": WORKERS, "seed": 5}
IDS = np.array([-7, 0, 3, 2**50], dtype=np.int64)


def raw(array: np.ndarray) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def push(step: int, rank: int = 0, *, ids: np.ndarray = IDS, table: int = 0, generation: int = 0) -> Bytes:
    grad = np.linspace(-1, 1, ids.size * TABLES[table]["dim"], dtype=np.float32) * (1 + rank)
    return pack(Message(Kind.PUSH, generation, rank, step, (Section(table, ids.size, raw(ids), raw(grad)),)))


def pull(
    step: int, rank: int = 0, *, ids: np.ndarray = IDS, table: int = 0, kind: Kind = Kind.PULL, generation: int = 0
) -> Bytes:
    return pack(Message(kind, generation, rank, step, (Section(table, ids.size, raw(ids), EMPTY),)))


def question(generation: int = 0) -> Bytes:
    return text_message(Kind.ASK, '{"ask": "report"}', generation=generation)


def reply(future: Future[Bytes]) -> Bytes:
    return wait_for_reply(future, peer="server 0", timeout_s=LIMIT_S)


def answer(transport: Transport, message: Bytes) -> Message:
    return unpack(reply(transport.send(0, message, timeout_s=LIMIT_S)))


class Pair:
    """This process, which is a worker and hosts the store, and a server in another process."""

    def __init__(self, service: dict[str, Any] = SERVICE) -> None:
        """`service`: as for Peer."""
        self._host, self._service, self._generation = StoreHost(), service, 0
        self.store_port = self._host.open(0)[1]
        self.store = connect_store(*self._host.open(0), timeout_s=LIMIT_S)
        self._peers: list[Peer] = []
        self._groups: list[Group] = []
        self.peer = self.another_peer()

    def another_peer(self) -> Peer:
        self._peers.append(Peer(self.store_port, self._service))
        self.peer = self._peers[-1]
        return self.peer

    def next_generation(self) -> int:
        self._generation += 1
        return self._generation

    def form(self, same_host: Literal["memory", "sockets"] = "memory") -> Group:
        self._groups.append(Group(self.peer, self.store, self.next_generation(), same_host))
        return self._groups[-1]

    def close(self) -> None:
        for group in self._groups:
            group.leave()
        codes = [peer.close() for peer in self._peers if not peer.killed]
        self._host.close()
        assert not any(codes), codes


class Group:
    """One generation with the peer: a fresh service there, a transport here."""

    def __init__(self, peer: Peer, store: Any, generation: int, same_host: Literal["memory", "sockets"]) -> None:
        self.peer, self.generation, self._left = peer, generation, False
        peer.tell("form", generation=generation)
        self.transport = RpcGroup.form(
            store, generation=generation, role="worker", index=0, num_servers=1, num_workers=1, host="127.0.0.1",
            timeout_s=LIMIT_S, same_host=same_host,
        )  # fmt: skip
        assert peer.answer() == "formed"

    def leave(self) -> None:
        if not self._left:
            self._left = True
            self.transport.close()
            if not self.peer.killed:
                self.peer.ask("leave")

    def send(self, message: Bytes) -> Future[Bytes]:
        return self.transport.send(0, message, timeout_s=LIMIT_S)

    def is_alive(self) -> bool:
        return answer(self.transport, question(self.generation)).kind is Kind.ANSWER
