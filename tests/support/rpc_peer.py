"""An embedding server in a process of its own, told over a pipe what to do: the other end of the transport's tests.

No coordinator and no launcher: the test itself hosts the store and is the worker.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import psutil

from tests.support.forked import started

LIMIT_S = 120.0
ROOT = Path(__file__).resolve().parent.parent.parent


class Peer:
    """Server 0 of one server and one worker. `service`: the settings of its ShardService, as plain dicts."""

    def __init__(self, store_port: int, service: dict[str, Any]) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `kill`
        settings = json.dumps({"store_port": store_port, "service": service})
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = started([settings], env=environment, cwd=ROOT, main=f"{__name__}:main", stderr=self._errors)
        self.killed = False
        self._answers: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, do: str, **more: Any) -> None:
        """Sends a command; `answer` brings its result."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """The result of the oldest command that was not answered yet."""
        try:
            text = self._answers.get(timeout=LIMIT_S)
        except queue.Empty:
            text = ""
        assert text, f"the peer gave no answer within {LIMIT_S} s or ended:\n{self.stderr()}"
        return json.loads(text)

    def ask(self, do: str, **more: Any) -> Any:
        self.tell(do, **more)
        return self.answer()

    def stderr(self) -> str:
        """All that the process printed there so far."""
        self._errors.seek(0)
        return self._errors.read()

    def kill(self) -> None:
        """SIGKILL, and the end of the process seen; nothing is left of it here."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self.killed = True
        self._process.kill()
        self._process.wait(LIMIT_S)
        self._process.stdin.close()
        self._reader.join(LIMIT_S)
        self._process.stdout.close()
        self._errors.close()

    def close(self) -> int:
        """Ends the process by the end of its pipe, else by force; its exit code."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            return self._process.wait(LIMIT_S)
        finally:
            self.kill()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")


def footprint() -> dict[str, int]:
    """What this process holds: open descriptors, threads, bytes of memory."""
    process = psutil.Process()
    return {"descriptors": process.num_fds(), "threads": process.num_threads(), "rss": process.memory_info().rss}


def service_of(settings: dict[str, Any], generation: int) -> Any:
    """The ShardService of plain settings."""
    from shardkeep.ps.config import ConsistencyConfig, TableSpec
    from shardkeep.ps.server.service import ShardService

    tables = [TableSpec(**table) for table in settings["tables"]]
    consistency = ConsistencyConfig(**settings["consistency"])
    more = {"num_workers": settings["num_workers"], "seed": settings["seed"]}
    return ShardService(shard=0, tables=tables, consistency=consistency, generation=generation, **more)


def main() -> None:
    """The peer's life: one JSON command a line on stdin, one JSON result a line on stdout."""
    from shardkeep.base.errors import ShardkeepError
    from shardkeep.ps.rpc.group import RpcGroup, connect_store

    settings = json.loads(sys.argv[1])
    store = connect_store("127.0.0.1", settings["store_port"], timeout_s=LIMIT_S)
    service: Any = None
    transport: RpcGroup | None = None

    def form(generation: int, timeout_s: float = LIMIT_S) -> str:
        nonlocal service, transport
        service = service_of(settings["service"], generation)
        place: dict[str, Any] = {"role": "server", "index": 0, "num_servers": 1, "num_workers": 1, "host": "127.0.0.1"}
        try:
            transport = RpcGroup.form(
                store, generation=generation, timeout_s=timeout_s, handler=service.handle, **place
            )
        except ShardkeepError as error:
            return f"{type(error).__name__}: {error}"
        return "formed"

    def leave() -> None:
        assert transport is not None
        service.close("the server leaves")
        transport.close()

    def close_service(reason: str) -> None:
        service.close(reason)

    commands = {"form": form, "leave": leave, "close_service": close_service, "footprint": footprint}
    for line in sys.stdin:
        command = json.loads(line)
        result = commands[command.pop("do")](**command)
        print(json.dumps(result), flush=True)
    if transport is not None:
        leave()


if __name__ == "__main__":
    main()
