"""How messages reach servers: torch RPC, one group per generation, and its in-process twin.

The only file that touches torch.distributed.rpc, its private names included. Knows no message's content.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import io
import os
import pickle
import secrets
import socket
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import psutil
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore, rpc  # type: ignore[attr-defined]
from torch.distributed.rpc import internal as rpc_internal

from shardkeep.base.errors import DeadlineExceeded, ProtocolError, ShardkeepError, TransportError
from shardkeep.base.log import EventLog
from shardkeep.ps.transport.listen_filter import Door
from shardkeep.ps.transport.unpickler import check_opcodes

_log = EventLog("transport")

Bytes = npt.NDArray[np.uint8]
Handler = Callable[..., "Future[Bytes]"]
"""Called with a message, or with two that came together; ends with the answer."""

# More pulls can be parked than there are threads: a parked pull is a Future, not a thread.
RPC_THREADS = 4
GREETING_S = 30.0
"""What a greeting may take: all members are in the group by then."""


class Transport(Protocol):
    """Carries one packed message to one server and brings the answer."""

    num_servers: int

    def send(self, server: int, message: Bytes, then: Bytes | None = None, *, timeout_s: float) -> Future[Bytes]:
        """Sends at once, never blocks; the messages must not change until the future is done. Two go in one call, and
        the handler says what answers both.

        The future ends with the packed answer, or with DeadlineExceeded or TransportError."""
        ...

    def close(self) -> None: ...


class LocalTransport:
    """The in-process twin: calls the servers' handlers directly. Waits have deadlines here too."""

    def __init__(self, handlers: Sequence[Handler]) -> None:
        self._handlers = list(handlers)
        self.num_servers = len(self._handlers)

    def send(self, server: int, message: Bytes, then: Bytes | None = None, *, timeout_s: float) -> Future[Bytes]:
        if not self._handlers:
            answer: Future[Bytes] = Future()
            answer.set_exception(TransportError(f"server {server} cannot be reached: the transport is closed"))
            return answer
        return self._handlers[server](message) if then is None else self._handlers[server](message, then)

    def close(self) -> None:
        self._handlers = []


def wait(future: Future[Bytes], *, peer: str, timeout_s: float) -> Bytes:
    """The answer. Raises DeadlineExceeded, which names the peer and the elapsed time, or TransportError."""
    started = time.monotonic()
    try:
        return future.result(timeout=timeout_s)
    except TimeoutError:
        elapsed = time.monotonic() - started
        raise DeadlineExceeded(f"{peer} did not answer within {elapsed:.1f} s (liveness.step_timeout_s)") from None


# ---- torch RPC ------------------------------------------------------------------------------------------------------

_installed = threading.Lock()
_process_is_set_up = False
# torch has one RPC agent per process, so the handler it serves is the process's too.
_served: dict[str, Handler] = {}
_doors: dict[str, Door] = {}


class _UnderWay:
    """Arrays that a peer may still be reading out of this process's memory.

    torch lets go of them as soon as a group is left, in the middle of a read too; so those of the last group are kept
    until this process leaves another, when nobody reads them any more."""

    def __init__(self) -> None:
        self._arrays: dict[int, weakref.ref[Bytes]] = {}
        self._kept: list[Bytes] = []
        self._leaving = False

    def add(self, array: Bytes) -> None:
        """Follows an array that is handed to torch; forgets it when torch lets go of it."""
        key = id(array)
        self._arrays[key] = weakref.ref(array, lambda _: self._arrays.pop(key, None))
        if self._leaving:  # asked after it was noted, so that nothing falls between this and `kept`
            self._kept.append(array)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """For the time of leaving a group: keeps what torch has not let go of yet, and what another thread adds."""
        self._kept, self._leaving = [], True
        self._kept += [array for reference in list(self._arrays.values()) if (array := reference()) is not None]
        try:
            yield
        finally:
            self._leaving = False


_under_way = _UnderWay()


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _serve(target: str, *messages: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Runs on the server: hands the messages to the handler of `target`; the answer completes the call later."""
    handler = _served.get(target)
    if handler is None:
        raise ProtocolError(f"{target} serves nothing in this process")
    answer: torch.futures.Future[torch.Tensor] = torch.futures.Future()

    def finish(done: Future[Bytes]) -> None:
        error = done.exception()
        if error is not None:
            answer.set_exception(RuntimeError(str(error)))  # type: ignore[arg-type]
        else:
            _under_way.add(done.result())
            answer.set_result(torch.from_numpy(done.result()))

    handler(*(message.numpy() for message in messages)).add_done_callback(finish)
    return answer


def _greet(target: str, rank: int, sign: torch.Tensor) -> torch.Tensor:
    """Runs on the server: worker `rank` is connected, with all that a message and its answer need."""
    if (door := _doors.get(target)) is not None:
        door.arrived(rank)
    return sign


def _tensor_receiver(owner: object, name: str) -> Any:
    """Stands for `getattr` in a pickle: admits the one attribute that torch's own envelope asks for."""
    if owner is rpc_internal._InternalRPCPickler and name == "_tensor_receiver":
        return rpc_internal._InternalRPCPickler._tensor_receiver
    raise AttributeError(f"shardkeep refuses {name} of {owner!r} in an RPC")


_ADMITTED: dict[tuple[str, str], Any] = {
    (__name__, "_serve"): _serve,
    (__name__, "_greet"): _greet,
    ("builtins", "getattr"): _tensor_receiver,
    ("builtins", "set"): set,
    ("builtins", "RuntimeError"): RuntimeError,
    ("torch.distributed.rpc.internal", "PythonUDF"): rpc_internal.PythonUDF,
    ("torch.distributed.rpc.internal", "RemoteException"): rpc_internal.RemoteException,
    ("torch.distributed.rpc.internal", "_InternalRPCPickler"): rpc_internal._InternalRPCPickler,
    ("torch.distributed.rpc.api", "_gather_to_leader"): rpc.api._gather_to_leader,
    ("torch.distributed.rpc.api", "_broadcast_to_followers"): rpc.api._broadcast_to_followers,
}


def _run(call: Any) -> Any:
    """Stands for torch's `_run_function`, which prints a traceback for every call that fails: runs a call that was
    unpickled, or refuses one that could not be. An exception becomes one line for the caller."""
    try:
        if isinstance(call, AttributeError):
            raise ProtocolError(str(call.__cause__ or call))
        return call.func(*call.args, **call.kwargs)
    except Exception as error:
        _log.warning("call refused", once=type(error).__name__, why=_first_line(error))
        return rpc_internal.RemoteException(_first_line(error), RuntimeError)


class RestrictedUnpickler(pickle.Unpickler):
    """Admits `_serve`, `_greet` and torch's own envelope, nothing else. Defence in depth only: see docs/security.md."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._call = file.getvalue()

    def load(self) -> Any:
        # torch turns an AttributeError into an answer; any other exception makes it print an error of its own.
        try:
            check_opcodes(self._call)
            return super().load()
        except AttributeError:
            raise
        except Exception as error:
            raise AttributeError(f"shardkeep refuses an RPC that cannot be read: {_first_line(error)}") from None

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ADMITTED[module, name]
        except KeyError:
            raise AttributeError(f"shardkeep refuses {module}.{name} in an RPC") from None


def _set_up_process(interface: str) -> None:
    """Once in a process's life: the unpickler, the network interface, the autograd container."""
    global _process_is_set_up
    with _installed:
        # TensorPipe and gloo take the interface from the environment only.
        os.environ["TP_SOCKET_IFNAME"] = interface
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        if not _process_is_set_up:
            rpc_internal._unpickler = RestrictedUnpickler  # type: ignore[assignment]  # torch gives it a BytesIO alone
            rpc_internal._run_function = _run
            dist.autograd._init(0)  # type: ignore[attr-defined]  # a second call with another number would raise
            _process_is_set_up = True


def interface_of(host: str) -> str:
    """The network interface that carries the address `host`; loopback's for 127.0.0.1.

    Raises TransportError when no interface of this machine has the address."""
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        raise TransportError(f"--advertise {host}: this name has no address ({error.strerror or error})") from error
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address == address for a in addresses):
            return name
    if address.startswith("127."):
        return "lo0" if sys.platform == "darwin" else "lo"
    raise TransportError(f"--advertise {host}: no network interface of this machine has the address {address}")


def connect_store(host: str, port: int, *, timeout_s: float) -> Store:
    """A client of the coordinator's TCPStore. Raises TransportError."""
    try:
        return TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=timeout_s))
    except (RuntimeError, ValueError) as error:
        raise TransportError(
            f"the coordinator's store at {host}:{port} cannot be reached: {_first_line(error)}"
        ) from error


class RpcTransport:
    """One member's part in one generation's RPC group.

    Every member of the generation constructs one, servers with a handler; construction blocks until all have.
    Servers have the RPC ranks 0..num_servers-1, workers the following. After `close` the same process may join
    another generation.
    """

    def __init__(
        self,
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
    ) -> None:
        self.num_servers = num_servers
        self.server_ports: frozenset[int] = frozenset()
        """The ports on which the group's servers listen."""
        self._open = True
        _set_up_process(interface_of(host))
        started = time.monotonic()
        group = PrefixStore(f"rpc/{generation}", store)
        self._suffix = _suffix(group, generation)
        self._name = f"{role}{index}{self._suffix}"
        door = Door(awaited=num_workers if role == "server" else 0)
        _doors[self._name] = door
        if handler is not None:
            _served[self._name] = handler
        options = rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=RPC_THREADS,
            rpc_timeout=timeout_s,
            # TensorPipe's shared memory busy-polls: a merely connected process burns a core's share. Its "cma" does
            # not: calls go through sockets, and their tensors are read where they lie, one copy instead of two. Where
            # TensorPipe can tell that the peer's memory cannot be read (another host, container or user, seccomp,
            # Yama) it takes "basic"; a security module that forbids it shows only as a failed call.
            _transports=["uv"],
            _channels=["cma", "basic"] if same_host == "memory" and sys.platform == "linux" else ["basic"],
        )
        # torch waits 24 days for a member that does not come (pytorch/torch/distributed/rpc/constants.py).
        rpc.constants.DEFAULT_PROCESS_GROUP_TIMEOUT = datetime.timedelta(seconds=timeout_s)
        try:
            group.set(f"{role} {index}", "is here")
            with warnings.catch_warnings():  # torch's own use of a deprecated type, in each process of a job
                warnings.filterwarnings("ignore", message="You are using a Backend", category=UserWarning)
                rpc._init_rpc_backend(  # type: ignore[no-untyped-call]
                    rpc.backend_registry.BackendType.TENSORPIPE,  # type: ignore[attr-defined]
                    group,
                    self._name,
                    index if role == "server" else num_servers + index,
                    num_servers + num_workers,
                    options,
                )
            if role == "worker":
                self._greet_all(index, min(timeout_s, GREETING_S))
            if (port := _port_in(group, self._name)) is not None:
                door.guard(port)
            ports = [_port_in(group, self.server_name(server)) for server in range(num_servers)]
            self.server_ports = frozenset(port for port in ports if port is not None)
        except RuntimeError as error:
            self.close()
            elapsed_s = time.monotonic() - started
            missing = _missing(group, [("server", num_servers), ("worker", num_workers)])
            raise TransportError(
                f"the group of generation {generation} was not formed within {elapsed_s:.1f} s"
                f"{missing or ': ' + _hinted(_reason(error))}"
            ) from error

    def server_name(self, server: int) -> str:
        """What the server is called in this group, and what it serves under."""
        return f"server{server}{self._suffix}"

    def send(self, server: int, message: Bytes, then: Bytes | None = None, *, timeout_s: float) -> Future[Bytes]:
        target = self.server_name(server)
        answer: Future[Bytes] = Future()
        started = time.monotonic()

        def finish(done: torch.futures.Future[torch.Tensor]) -> None:
            try:
                value = done.value()
                if isinstance(value, Exception):  # what a server's `set_exception` becomes on the way
                    raise TransportError(f"server {server}: {_first_line(value)}")
                answer.set_result(value.numpy())
            except Exception as error:
                answer.set_exception(_mapped(error, f"server {server}", time.monotonic() - started))

        try:
            parts = [part for part in (message, then) if part is not None]
            for part in parts:
                _under_way.add(part)
            tensors = [torch.from_numpy(part) for part in parts]
            call = rpc.rpc_async(target, _serve, args=(target, *tensors), timeout=timeout_s)
            call.add_done_callback(finish)
        except Exception as error:
            answer.set_exception(_mapped(error, f"server {server}", time.monotonic() - started))
        return answer

    def _greet_all(self, rank: int, timeout_s: float) -> None:
        """Connects to every server before they refuse newcomers. A tensor goes there and back: what carries it has
        connections of its own."""
        sign = torch.zeros(1, dtype=torch.uint8)
        names = [self.server_name(server) for server in range(self.num_servers)]
        for call in [rpc.rpc_async(name, _greet, args=(name, rank, sign), timeout=timeout_s) for name in names]:
            call.wait()

    def close(self) -> None:
        """Leaves the group without waiting for the others; what is under way ends with TransportError. Idempotent."""
        _served.pop(self._name, None)
        _doors.pop(self._name, None)
        if self._open and rpc._is_current_rpc_agent_set():  # type: ignore[attr-defined]
            with _under_way.kept(), _without_native_warnings():
                rpc.shutdown(graceful=False)
        self._open = False  # the process may have joined another generation: its agent is not ours


@contextlib.contextmanager
def _without_native_warnings() -> Iterator[None]:
    """torch prints a C++ warning for a connection that this side closes, unless the shutdown is graceful (`respond`
    in tensorpipe_agent.cpp). Where the log's level cannot be found it prints it still."""
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


def _suffix(group: Store, generation: int) -> str:
    """The end of all names in a group, of which no process has seen another: torch counts all-gathers per set of
    names, and a process that joins two jobs, one after the other, is in generation 1 twice."""
    try:
        return f"-g{generation}-{group.compare_set('incarnation', '', secrets.token_hex(4)).decode()}"
    except RuntimeError as error:
        raise TransportError(f"the coordinator's store was lost: {_first_line(error)}") from error


def _port_in(group: Store, name: str) -> int | None:
    """The port on which a member of the group listens, where torch keeps it (`nameToAddressStore_` in
    tensorpipe_agent.cpp: uv://HOST:PORT); None if it has moved."""
    addresses = PrefixStore("addrs", group)
    port = addresses.get(name).decode().rpartition(":")[2] if addresses.check([name]) else ""
    return int(port) if port.isdecimal() else None


def _missing(group: Store, roles: Sequence[tuple[str, int]]) -> str:
    """Which members never came, in words; nothing when all did or the store is gone."""
    members = [f"{role} {index}" for role, count in roles for index in range(count)]
    try:
        missing = [member for member in members if not group.check([member])]
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
    return _first_line(error).partition(" (this error originated at")[0]


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
