"""The fork server: one process that imports the modules of all roles, then starts each role by fork. Linux only.

The server only imports. It has one thread and runs no operator, no RPC and no gRPC, so a forked role equals a role
started by exec. A role is forked twice and becomes a child of the launcher. The launcher therefore reads its exit code
directly, and no role is lost when the server dies. A role starts when the launcher knows its pid.

A role may be a launcher itself: a trial of an experiment. Its server is a fork of it, which has the imports already.

Requests and replies are packets of JSON:

| request | descriptors | reply |
|---|---|---|
| {"import": [MODULE...]} | none | {"threads": N} |
| {"main", "arguments", "cores", "blas"} | stdout, stderr, the parent pipe's read end | {"pid": N} or {"error": TEXT} |
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from shardkeep.base.deadlines import Deadline
from shardkeep.base.machine.topology import Cores
from shardkeep.launch.processes.children import SHARDKEEP, Death, ForkedProcess, last_words
from shardkeep.launch.processes.forked_role import BLAS_THREADS, become

LIBRARIES = ("torch", "torch._dynamo", "numba", "shardkeep.ps.control.grpc.client", "shardkeep.ps.control.grpc.server")
"""Imported while the launcher prepares data and kernels. Without `pyarrow`, because importing it starts a thread."""
ROLES = ("shardkeep.roles.server", "shardkeep.roles.worker")
"""Imported once the kernels are compiled, because importing them loads the kernels."""
FORK_S = 10.0
"""Seconds that the server gets to fork a role."""
READY_S = 120.0
"""Seconds that the server gets to import, on a busy machine."""
_PACKET_BYTES = 1 << 20
_adopter = threading.Lock()
"""Held while this process adopts a role: several threads may start jobs, and to adopt is a state of the process."""
_serving = False
"""Whether this process serves, or was forked from one that does and has its imports."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 36, 37


class NoFork(Exception):
    """The server did not fork; the text says why."""


class ForkServer:
    """The launcher's end. Call it from one thread: the server ends when the thread that started it ends."""

    def __init__(self, env: Mapping[str, str], *, main: str = "shardkeep.cli.main:main") -> None:
        """Starts the server.

        Args:
            env: The environment of all roles that it can start.
            main: The roles' main function, `module:function`; it reads its arguments from `sys.argv`.
        """
        self._env, self._main = dict(env), main
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors = os.fdopen(os.memfd_create("fork-server"), "w+b")  # in memory, because the disk may be full
        self._loading, self._imports_due = 0, Deadline(READY_S)
        number = theirs.fileno()
        self._process: subprocess.Popen[bytes] | ForkedProcess
        if _serving and self._env == dict(os.environ):  # libraries read it at import
            self._process = _forked_server(theirs, self._errors.fileno())
        else:
            self._process = subprocess.Popen(
                [*SHARDKEEP, "fork-server", str(number)],
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                env=self._env | {BLAS_THREADS: "1"},
                pass_fds=[number],
                start_new_session=True,
            )
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def load(self, modules: Sequence[str]) -> None:
        """Makes the server import modules, after the modules of earlier calls. Does not wait."""
        with contextlib.suppress(OSError):  # `ready` raises
            self._control.send(json.dumps({"import": modules}).encode())
        self._loading += 1
        self._imports_due = Deadline(READY_S)

    def ready(self, wait_s: float = READY_S) -> bool:
        """Waits up to `wait_s` for the imports; returns whether all modules are imported. Raises NoFork."""
        deadline = Deadline(wait_s)
        while self._loading:
            try:
                self._reply(deadline.remaining_s)
            except TimeoutError:
                if self._imports_due.over:
                    raise NoFork(f"the fork server did not finish its imports within {READY_S:g} s") from None
                return False
            self._loading -= 1
        return True

    def fork(
        self,
        arguments: Sequence[str],
        *,
        log: int,
        env: Mapping[str, str],
        cores: Cores | None = None,
        limit_s: float = FORK_S,
        errors: int | None = None,
    ) -> ForkedProcess:
        """Forks a role. Waits up to `limit_s` for `ready`, then up to `limit_s` for the fork.

        Raises NoFork. No process is left then, and the server must not be used again.

        Args:
            arguments: The arguments after `shardkeep` on its command line.
            log: Descriptor of its stdout, and of its stderr unless there is another.
            env: Its environment.
            cores: The cores it runs on; None = the system chooses.
            errors: Descriptor of its stderr; None = `log`.
        """
        if env != self._env:
            raise NoFork("the role's environment is not that of the fork server")
        if not self.ready(limit_s):
            raise NoFork("the fork server is still importing")
        request = {"main": self._main, "arguments": list(arguments), "cores": cores, "blas": env.get(BLAS_THREADS)}
        source, target = os.pipe()
        try:
            pid = self._send(json.dumps(request).encode(), [log, log if errors is None else errors, source], limit_s)
            os.write(target, b"\n")
        except BaseException:
            os.close(target)  # a role that was forked ends when its pipe closes
            raise
        finally:
            os.close(source)
        return ForkedProcess(pid, target)

    def _send(self, request: bytes, descriptors: list[int], limit_s: float) -> int:
        """Sends a request to fork; returns the role's pid."""
        with _adopter, _adopting():
            try:
                socket.send_fds(self._control, [request], descriptors)
            except OSError as error:
                raise NoFork(self._why(error)) from error
            try:
                return int(self._reply(limit_s)["pid"])
            except TimeoutError:
                raise NoFork("the fork server does not answer") from None

    def close(self) -> None:
        """Ends the server. The roles that it forked keep running."""
        self._control.close()
        self._process.kill()
        self._process.wait()
        self._errors.close()

    def _reply(self, limit_s: float) -> dict[str, Any]:
        """The next reply. Raises TimeoutError, NoFork."""
        self._control.settimeout(max(limit_s, 0.001))  # 0 would mean non-blocking
        try:
            packet = self._control.recv(_PACKET_BYTES)
        except TimeoutError:
            raise
        except OSError as error:
            raise NoFork(self._why(error)) from error
        reply: dict[str, Any] = json.loads(packet) if packet else {"error": self._why(None)}
        if "error" in reply:
            raise NoFork(reply["error"])
        return reply

    def _why(self, error: OSError | None) -> str:
        """The reason for a missing reply."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(10.0)
            said = last_words(Path(f"/proc/self/fd/{self._errors.fileno()}"))
            return Death("fork server", 0, self.pid, code, said).text()
        return f"the fork server closed the connection ({error})"


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Inside the block, a descendant of this process becomes its child when its own parent ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int()
    if libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0) or _subreaper(libc, 1):
        raise NoFork(f"this process cannot adopt roles ({os.strerror(ctypes.get_errno())})")
    try:
        yield
    finally:
        _subreaper(libc, before.value)


def _subreaper(libc: ctypes.CDLL, on: int) -> int:
    return int(libc.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(on), 0, 0, 0))


def _forked_server(control: socket.socket, errors: int) -> ForkedProcess:
    """A server with the imports of this process. Its only thread is the one that calls this."""
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return ForkedProcess(pid)
    try:
        os.setsid()
        for number, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), errors, errors)):
            os.dup2(descriptor, number)
        kept = control.fileno()
        os.closerange(3, kept)
        os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
        serve(control)
    finally:
        os._exit(0)


def serve(control: socket.socket) -> None:
    """Runs the server: answers requests until the launcher closes the connection."""
    global _serving
    _serving = True
    _end_with_launcher()
    gc.disable()  # imported objects stay; a collection would copy the pages that roles share
    while True:
        packet, descriptors, _, _ = socket.recv_fds(control, _PACKET_BYTES, 3)
        if not packet:
            return
        request = json.loads(packet)
        if "import" in request:
            reply: dict[str, Any] = {"threads": _import(request["import"], control)}
        else:
            reply = _fork(request, descriptors, control)
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(BrokenPipeError):
            control.send(json.dumps(reply).encode())


def _end_with_launcher() -> None:
    """Makes the system kill this process when the launcher ends, because it reads no socket during an import.

    A forked role does not inherit this."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)


def _import(modules: Sequence[str], control: socket.socket) -> int:
    """Imports modules until the launcher closes the connection. Returns the number of threads afterwards."""
    for module in modules:
        if _hung_up(control):
            break
        importlib.import_module(module)
    gc.freeze()
    return _threads()


def _hung_up(control: socket.socket) -> bool:
    with contextlib.suppress(BlockingIOError):
        return not control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    return False


def _threads() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def _fork(request: Mapping[str, Any], descriptors: Sequence[int], control: socket.socket) -> dict[str, Any]:
    """Forks a role through a process that ends at once, so that the launcher adopts the role."""
    if (threads := _threads()) != 1:
        return {"error": f"the fork server has {threads} threads; only a process with one can be forked"}
    out, errors, parent_pipe = descriptors
    source, target = os.pipe()
    try:
        between = os.fork()
        if not between:
            _in_between(
                lambda: become(request, (parent_pipe, out, errors), target, inherited=[source, control.detach()])
            )
    except OSError as error:
        os.close(target)
        os.close(source)
        return {"error": f"the fork server cannot fork ({error.strerror})"}
    os.close(target)
    pid = os.read(source, 32)
    os.close(source)
    os.waitpid(between, 0)
    return {"pid": int(pid)} if pid else {"error": "the fork server cannot fork twice"}


def _in_between(role: Callable[[], NoReturn]) -> NoReturn:
    """Forks the role in the process between server and role, then ends."""
    try:
        if not os.fork():
            role()
    finally:
        os._exit(0)
