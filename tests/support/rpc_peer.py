"""An embedding server in a process of its own, told over a pipe what to do: the other end of the transport's tests.

No coordinator and no launcher: the test itself hosts the store and is the worker.
"""

from __future__ import annotations

import os
import tempfile
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch

from shardkeep.base.errors import ShardkeepError
from shardkeep.ps.config import ConsistencyConfig, TableSpec
from shardkeep.ps.rpc.group import RpcGroup, connect_store
from shardkeep.ps.server.service import ShardService
from tests.support.forked import fork_context

LIMIT_S = 120.0


class Peer:
    """Server 0 of one server and one worker. `service`: the settings of its ShardService, as plain dicts."""

    def __init__(self, store_port: int, service: dict[str, Any]) -> None:
        self._errors = tempfile.NamedTemporaryFile("r")  # noqa: SIM115 - closed by `kill`
        context = fork_context()
        self._end, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(store_port, service, theirs, self._errors.name))
        self._process.start()
        theirs.close()
        self.killed = False

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def tell(self, do: str, **more: Any) -> None:
        """Sends a command; `answer` brings its result."""
        self._end.send((do, more))

    def answer(self) -> Any:
        """The result of the oldest command that was not answered yet."""
        assert self._end.poll(LIMIT_S), f"the peer gave no answer within {LIMIT_S} s:\n{self.stderr()}"
        try:
            return self._end.recv()
        except EOFError:
            raise AssertionError(f"the peer ended:\n{self.stderr()}") from None

    def ask(self, do: str, **more: Any) -> Any:
        self.tell(do, **more)
        return self.answer()

    def stderr(self) -> str:
        """All that the process printed there so far."""
        self._errors.seek(0)
        return self._errors.read()

    def kill(self) -> None:
        """SIGKILL, and the end of the process seen; nothing is left of it here."""
        self.killed = True
        self._process.kill()
        self._process.join(LIMIT_S)
        self._end.close()
        self._errors.close()

    def close(self) -> int | None:
        """Ends the process by the end of its pipe, else by force; its exit code."""
        self._end.close()
        self._process.join(LIMIT_S)
        code: int | None = self._process.exitcode
        self.kill()
        return code


def footprint() -> dict[str, int]:
    """What this process holds: open descriptors, threads, bytes of memory."""
    process = psutil.Process()
    return {"descriptors": process.num_fds(), "threads": process.num_threads(), "rss": process.memory_info().rss}


def service_of(settings: dict[str, Any], generation: int) -> ShardService:
    tables = [TableSpec(**table) for table in settings["tables"]]
    consistency = ConsistencyConfig(**settings["consistency"])
    more = {"num_workers": settings["num_workers"], "seed": settings["seed"]}
    return ShardService(shard=0, tables=tables, consistency=consistency, generation=generation, **more)


class _Server:
    def __init__(self, store_port: int, settings: dict[str, Any]) -> None:
        self._store = connect_store("127.0.0.1", store_port, timeout_s=LIMIT_S)
        self._settings = settings
        self._transport: RpcGroup | None = None

    def form(self, generation: int, timeout_s: float = LIMIT_S) -> str:
        self._service = service_of(self._settings, generation)
        place: dict[str, Any] = {"role": "server", "index": 0, "num_servers": 1, "num_workers": 1, "host": "127.0.0.1"}
        try:
            self._transport = RpcGroup.form(
                self._store, generation=generation, timeout_s=timeout_s, handler=self._service.handle, **place
            )
        except ShardkeepError as error:
            return f"{type(error).__name__}: {error}"
        return "formed"

    def leave(self) -> None:
        if self._transport is not None:
            self._service.close("the server leaves")
            self._transport.close()

    def close_service(self, reason: str) -> None:
        self._service.close(reason)

    def footprint(self) -> dict[str, int]:
        return footprint()


def _serve(store_port: int, settings: dict[str, Any], commands: Connection, errors: str) -> None:
    torch.set_num_threads(1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_APPEND), 2)
    server = _Server(store_port, settings)
    while True:
        try:
            do, more = commands.recv()
        except EOFError:
            break
        commands.send(getattr(server, do)(**more))
    server.leave()
