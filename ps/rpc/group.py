"""One torch RPC group per generation. With `calls.py` and `envelope.py`, the only user of torch.distributed.rpc.

Uses private names of torch. Knows no message's content.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Literal, Self

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore, rpc  # type: ignore[attr-defined]

from shardkeep.base.arrays import Bytes
from shardkeep.base.deadlines import among_all_s, wait_while_moving
from shardkeep.base.errors import DeadlineExceeded, ShardkeepError, TransportError, first_line
from shardkeep.base.machine.topology import usable_cores
from shardkeep.base.net.addresses import join_address
from shardkeep.base.net.interfaces import own_address
from shardkeep.ps.rpc import envelope
from shardkeep.ps.rpc.calls import arrive, handle, handlers, in_flight, listen_filters
from shardkeep.ps.rpc.listen_filter import ListenFilter
from shardkeep.ps.transport.transport import Handler

MIN_THREADS, MAX_THREADS = 4, 16
"""Fewest and most threads that run calls. More pulls can wait: a waiting pull holds a Future, not a thread."""
ARRIVAL_S = 30.0
"""Limit of a worker's first call to a server in a small group. All members are in the group by then."""
STORE_LOOK_S = 0.2
"""How often a worker that waits for it looks whether the generation was given up."""

_installed = threading.Lock()
_process_is_set_up = False


class RpcGroup:
    """One member's part in the RPC group of one generation. A Transport for workers.

    Servers have the RPC ranks 0..num_servers-1, workers the following. After `close`, the same process may join
    another generation.
    """

    def __init__(self, name: str, suffix: str, num_servers: int) -> None:
        self.num_servers = num_servers
        self.server_ports: frozenset[int] = frozenset()
        """The ports on which the group's servers listen."""
        self._name, self._suffix = name + suffix, suffix
        self._open = True

    @classmethod
    def form(
        cls,
        store: Store,
        *,
        generation: int,
        role: str,
        index: int,
        num_servers: int,
        num_workers: int,
        host: str,
        timeout_s: float,
        handler: Handler | None = None,
        same_host: Literal["memory", "sockets"] = "memory",
        moves: Callable[[], int] = int,
    ) -> Self:
        """Joins the generation's group. Blocks until every member has joined; servers pass a handler.

        Raises TransportError, which names who did not join within `timeout_s` seconds since `moves` grew."""
        _set_up_process(own_address(host)[1])
        started, keys = time.monotonic(), PrefixStore(f"rpc/{generation}", store)
        group = cls(f"{role}{index}", _suffix(keys, generation), num_servers)
        listen_filter = ListenFilter(awaited=num_workers if role == "server" else 0)
        listen_filters[group._name] = listen_filter
        if handler is not None:
            handlers[group._name] = handler
        rank = index if role == "server" else num_servers + index
        members = [f"server {i}" for i in range(num_servers)] + [f"worker {i}" for i in range(num_workers)]
        try:
            keys.set(f"{role} {index}", "is here")
            _wait_for_all(keys, members, timeout_s, moves)
            _start_agent(keys, group._name, rank, members, timeout_s, same_host)
            if role == "worker":
                group._arrive_at_all(index, keys, min(timeout_s, among_all_s(ARRIVAL_S, len(members))))
            group._find_ports(keys, listen_filter)
        except RuntimeError as error:
            group.close()
            why = _missing(keys, members) or f": {_hinted(_reason(error))}"
            formed = f"the group of generation {generation} was not formed within {time.monotonic() - started:.1f} s"
            raise TransportError(f"{formed}{why}") from error
        return group

    def server_name(self, server: int) -> str:
        """Returns the name of the server in this group, which is the target of calls to it."""
        return f"server{server}{self._suffix}"

    def send(self, server: int, message: Bytes, then: Bytes | None = None, *, timeout_s: float) -> Future[Bytes]:
        reply: Future[Bytes] = Future()
        started = time.monotonic()

        def finish(done: torch.futures.Future[Bytes]) -> None:
            try:
                value = done.value()
                if isinstance(value, Exception):  # torch returns a server's `set_exception` as a value
                    raise TransportError(f"server {server}: {first_line(value)}")
                reply.set_result(value)
            except Exception as error:
                reply.set_exception(_mapped(error, f"server {server}", time.monotonic() - started))

        try:
            messages = (message,) if then is None else (message, then)
            call = rpc.rpc_async(self.server_name(server), handle, args=messages, timeout=timeout_s)
            call.add_done_callback(finish)
        except Exception as error:
            reply.set_exception(_mapped(error, f"server {server}", time.monotonic() - started))
        return reply

    def _arrive_at_all(self, rank: int, keys: Store, timeout_s: float) -> None:
        """Connects to every server before its port refuses new connections. A tensor travels both ways, because torch
        opens separate connections for tensors."""
        probe = torch.zeros(1, dtype=torch.uint8)
        names = [self.server_name(server) for server in range(self.num_servers)]
        calls = [rpc.rpc_async(name, arrive, args=(rank, probe), timeout=timeout_s) for name in names]
        arrived = threading.Event()
        torch.futures.collect_all(calls).add_done_callback(lambda _: arrived.set())
        while not arrived.wait(STORE_LOOK_S):
            keys.check([names[0]])  # raises once the coordinator has closed the store of a lost generation
        for call in calls:
            call.wait()

    def _find_ports(self, keys: Store, listen_filter: ListenFilter) -> None:
        if (port := _port_in(keys, self._name)) is not None:
            listen_filter.guard(port)
        ports = [_port_in(keys, self.server_name(server)) for server in range(self.num_servers)]
        self.server_ports = frozenset(port for port in ports if port is not None)

    def close(self) -> None:
        """Leaves the group without waiting for other members. Calls in flight raise TransportError. Idempotent."""
        handlers.pop(self._name, None)
        listen_filters.pop(self._name, None)
        if self._open and in_group():
            with in_flight.retained(), _without_native_warnings():
                rpc.shutdown(graceful=False)
        self._open = False  # the process may have joined another generation, whose agent must live on


def rpc_threads(cores: int, members: int) -> int:
    """Threads that run calls: one for each core that members can keep busy."""
    return max(MIN_THREADS, min(cores, members, MAX_THREADS))


def in_group() -> bool:
    """Whether this process is in a group. torch has one per process."""
    return bool(rpc._is_current_rpc_agent_set())  # type: ignore[attr-defined]


def connect_store(host: str, port: int, *, timeout_s: float) -> Store:
    """Connects to the coordinator's TCPStore. Raises TransportError."""
    try:
        return TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=timeout_s))
    except (RuntimeError, ValueError) as error:
        raise TransportError(
            f"the coordinator's store at {join_address(host, port)} cannot be reached: {first_line(error)}"
        ) from error


def _set_up_process(interface: str) -> None:
    """Sets the network interface and, in the first call, the form of calls and the autograd container."""
    global _process_is_set_up
    with _installed:
        # TensorPipe and gloo take the interface from the environment only.
        os.environ["TP_SOCKET_IFNAME"] = interface
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        if not _process_is_set_up:
            envelope.install()
            dist.autograd._init(0)  # type: ignore[attr-defined]  # a second call with another number would raise
            os.register_at_fork(after_in_child=_keep_agent)
            _process_is_set_up = True


def _keep_agent() -> None:
    """Keeps the agent of the parent for good in a fork: its destructor waits for threads that are not there."""
    if in_group():
        agent = rpc.api._get_current_rpc_agent()  # type: ignore[attr-defined]
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(agent))


def _wait_for_all(keys: Store, members: Sequence[str], timeout_s: float, moves: Callable[[], int]) -> None:
    def come(seconds: float) -> bool:
        with contextlib.suppress(dist.DistStoreError):  # a store that is closed raises another error
            keys.wait(list(members), datetime.timedelta(seconds=seconds))
            return True
        return False

    if not wait_while_moving(come, timeout_s, moves):
        raise RuntimeError("time is over")  # `_missing` names who did not come


def _start_agent(
    keys: Store, name: str, rank: int, members: Sequence[str], timeout_s: float, same_host: Literal["memory", "sockets"]
) -> None:
    """Starts torch's RPC agent of this process. Returns when all `members`, which have come, listen.

    `rpc.init_rpc` also makes a gloo group and sends calls round to meet the members: a member that dies in between
    holds up the others until their deadline. Here members meet in the store alone, and its end wakes all of them."""
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=rpc_threads(len(usable_cores()), len(members)),
        rpc_timeout=timeout_s,
        # TensorPipe's shared-memory transport polls: an idle connection uses part of a core. Its "cma" channel does not
        # poll: calls go through sockets, and the receiver copies tensors out of the sender's memory, one copy instead
        # of two. TensorPipe takes "basic" where it detects that it cannot read the peer's memory (another host,
        # container or user, seccomp, Yama). It does not detect a security module that forbids it: the call fails.
        _transports=["uv"],
        _channels=["cma", "basic"] if same_host == "memory" and sys.platform == "linux" else ["basic"],
    )
    agent = rpc.TensorPipeAgent(keys, name, rank, len(members), options, {}, [])  # type: ignore[attr-defined]
    rpc.api._init_rpc_states(agent)  # type: ignore[no-untyped-call]  # starts it


@contextlib.contextmanager
def _without_native_warnings() -> Iterator[None]:
    """Suppresses torch's C++ warning about a connection that this process closes (`respond` in tensorpipe_agent.cpp).

    Does nothing where torch does not export its log level."""
    folder = Path(torch.__file__).parent / "lib"
    try:
        library = ctypes.CDLL(str(folder / ("libc10.dylib" if sys.platform == "darwin" else "libc10.so")))
        level = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        yield
        return
    before, level.value = level.value, max(level.value, 2)  # 2 = errors
    try:
        yield
    finally:
        level.value = before


def _suffix(keys: Store, generation: int) -> str:
    """Returns a suffix for the names of one group, which no other group of this process has.

    torch counts all-gathers per set of names, and a process that joins two jobs in turn is in generation 1 twice."""
    try:
        return f"-g{generation}-{keys.compare_set('incarnation', '', secrets.token_hex(4)).decode()}"
    except RuntimeError as error:
        raise TransportError(f"the coordinator's store was lost: {first_line(error)}") from error


def _port_in(keys: Store, name: str) -> int | None:
    """Returns the port on which a member of the group listens, or None if torch stores it elsewhere.

    torch stores uv://HOST:PORT (`nameToAddressStore_` in tensorpipe_agent.cpp)."""
    addresses = PrefixStore("addrs", keys)
    port = addresses.get(name).decode().rpartition(":")[2] if addresses.check([name]) else ""
    return int(port) if port.isdecimal() else None


def _missing(keys: Store, members: Sequence[str]) -> str:
    """Returns text that names the members that did not join; empty if all did, or if the store was lost."""
    try:
        missing = [member for member in members if not keys.check([member])]
    except RuntimeError:
        return ""
    return f"; did not come: {', '.join(missing)}" if missing else ""


def _mapped(error: Exception, peer: str, elapsed_s: float) -> ShardkeepError:
    if isinstance(error, ShardkeepError):
        return error
    text = _reason(error)
    if "timeout" in text:
        return DeadlineExceeded(f"{peer} did not answer within {elapsed_s:.1f} s (liveness.step_timeout_s)")
    return TransportError(f"{peer} was lost after {elapsed_s:.1f} s: {_hinted(text)}")


def _hinted(text: str) -> str:
    refused = "process_vm_readv" in text and "not permitted" in text
    return f"{text}; this system needs transport.same_host: sockets" if refused else text


def _reason(error: BaseException) -> str:
    return first_line(error).partition(" (this error originated at")[0]
