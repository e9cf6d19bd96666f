"""Real processes for tests: a job through the command line, or roles by hand. Every wait has a limit, nothing is left.

A test that fails shows what the processes printed and the tails of their logs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from shardkeep.base.yaml_text import write_yaml
from shardkeep.run.folder import RunFolder
from shardkeep.run.reader import RunReader
from tests.support.forked import SHARDKEEP, Forked, program, started

LIMIT_S = 200.0
STEP_TIMEOUT_S = 120.0  # other tests run beside: 30 s would end jobs that a busy machine only delays
LEASE_S = 150.0
"""No busy machine keeps a member silent for so long. Who is to be declared dead is named: tests/support/hurt.py."""
POLL_S = 0.02


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


class Command:
    """One `shardkeep ...` under way, its own session's leader; what it prints is read as it comes."""

    def __init__(
        self,
        *arguments: str,
        cwd: Path | None = None,
        prefix: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        main: str = SHARDKEEP,
        fresh: bool = False,
    ) -> None:
        """`prefix`: a command that runs it, as `ip netns exec NAME`; its own lines are shown in failures only. `env`:
        in addition to this process's. `main`: what is run in shardkeep's place, `module:function`. `fresh`: by exec,
        not forked from the preloaded process."""
        self.arguments = arguments
        self._prefix = f"{prefix[0]}: " if prefix else None
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        self._process: Forked | subprocess.Popen[str]
        if not (fresh or prefix):
            self._process = started(arguments, cwd=cwd, env=environment, main=main)
            assert self._process.stdin is not None
            self._process.stdin.close()
        else:
            self._process = subprocess.Popen(
                [*prefix, *program(main), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=cwd,
                env=environment,
                start_new_session=True,
            )
        self.process = psutil.Process(self._process.pid)
        self._lines: dict[str, list[str]] = {"out": [], "err": [], "prefix": []}
        self._read = threading.Condition()
        streams = (("out", self._process.stdout), ("err", self._process.stderr))
        self._readers = [threading.Thread(target=self._collect, args=pair, daemon=True) for pair in streams]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def line(self, start: str, *, limit_s: float = LIMIT_S) -> str:
        """The first line of stdout that begins with `start`; waits for it."""
        return self._line("out", start, limit_s)

    def logged(self, start: str, *, limit_s: float = LIMIT_S) -> str:
        """The first line of stderr that begins with `start`; waits for it."""
        return self._line("err", start, limit_s)

    def _line(self, stream: str, start: str, limit_s: float) -> str:
        reader = self._readers[("out", "err").index(stream)]

        def found() -> str | None:
            return next((line for line in self._lines[stream] if line.startswith(start)), None)

        with self._read:
            self._read.wait_for(lambda: found() is not None or not reader.is_alive(), limit_s)
            line = found()
        assert line is not None, f"{self}: no line {start!r} within {limit_s:g} s\n{self.printed()}"
        return line

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self, *, limit_s: float = LIMIT_S) -> Ended:
        """Waits until it has ended and all it printed is read."""
        try:
            code = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self} still runs after {limit_s:g} s\n{self.printed()}") from None
        for reader in self._readers:
            reader.join(limit_s)
        return Ended(code, *("".join(self._lines[name]) for name in ("out", "err")))

    def kill(self) -> None:
        """Ends it and everything it started that is still its own."""
        family = [self.process, *_children(self.process)]
        if self.running:
            kill(family)
        self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def printed(self) -> str:
        return "".join(line for lines in self._lines.values() for line in lines)

    def __str__(self) -> str:
        return " ".join(("shardkeep", *self.arguments))

    def _collect(self, name: str, stream: Iterable[str]) -> None:
        with contextlib.suppress(ValueError):  # closed by kill
            for line in stream:
                by_prefix = self._prefix is not None and line.startswith(self._prefix)
                with self._read:
                    self._lines["prefix" if by_prefix else name].append(line)
                    self._read.notify_all()
        with self._read:
            self._read.notify_all()


class Cluster:
    """Commands and run folders of one test, below one folder. Use in a `with`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._commands: list[Command] = []
        self._members: list[psutil.Process] = []
        self._runs: list[RunFolder] = []

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: object, _error: object, _trace: object) -> None:
        for command in self._commands:
            command.kill()
        kill(self._members)
        if kind is not None:
            self._show()

    def command(self, *arguments: str, **options: Any) -> Command:
        command = Command(*arguments, **options)
        self._commands.append(command)
        return command

    def job(
        self, config: dict[str, Any], *arguments: str, name: str = "run", **options: Any
    ) -> tuple[Command, RunFolder]:
        """`shardkeep train` of `config` into the run folder `name`. Options: as of Command."""
        path = self.write(config, name)
        command = self.command("train", str(path), "--run-dir", str(self._folder / name), *arguments, **options)
        return command, self._run(name)

    def coordinator(
        self, config: dict[str, Any], *, name: str = "run", trust: Sequence[str] = (), **options: Any
    ) -> tuple[Command, str, RunFolder]:
        """`shardkeep coordinator`, with the arguments `trust`; the address it reports. Options: as of Command."""
        path, run = str(self.write(config, name)), str(self._folder / name)
        command = self.command("coordinator", path, "--run-dir", run, *trust, **options)
        return command, json.loads(command.line("{"))["coordinator"], self._run(name)

    def continued(self, config: dict[str, Any], *arguments: str, name: str = "run") -> Command:
        """`shardkeep coordinator --continue` in the run folder `name`, at any free port."""
        place = ("--run-dir", str(self._folder / name), "--continue", *arguments)
        return self.command("coordinator", str(self.write(config, name)), *place)

    def role(self, role: str, index: int, address: str, *arguments: str, **options: Any) -> Command:
        """A role of the job that was started last; what it keeps for its recovery is beside the test's other files.
        Options: as of Command."""
        token, kept = str(self._runs[-1].token_path), str(self._folder)
        place = ("--coordinator", address, "--index", str(index), "--token-file", token, "--run-dir", kept)
        return self.command(role, *place, *arguments, **options)

    def folder(self, name: str) -> Path:
        """An empty folder beside the runs."""
        path = self._folder / name
        path.mkdir()
        return path

    def write(self, config: dict[str, Any], name: str = "run") -> Path:
        path = self._folder / f"{name}.yaml"
        path.write_text(write_yaml(patient(config)))
        return path

    def training(self, folder: RunFolder, *, limit_s: float = LIMIT_S) -> dict[str, psutil.Process]:
        """Waits until a job has trained its first steps; its processes by `role index`."""
        within(limit_s, lambda: "progress" in kinds(folder), f"{folder.path}: no step", self._someone_runs)
        found = {f"{m['role']} {m['index']}": psutil.Process(m["pid"]) for m in folder.member_list()}
        self._members += found.values()
        return found

    def _someone_runs(self) -> bool:
        return any(command.running for command in self._commands)

    def _run(self, name: str) -> RunFolder:
        self._runs.append(RunFolder(self._folder / name))
        return self._runs[-1]

    def _show(self) -> None:
        for command in self._commands:
            print(f"---- {command}\n{command.printed()}")
        for folder in self._runs:
            for log in sorted(folder.logs.glob("*.log")):
                print(f"---- {log}\n{log.read_text(errors='replace')[-4000:]}")


def patient(config: dict[str, Any]) -> dict[str, Any]:
    """A job's config with time for a busy machine, unless its `liveness` says otherwise."""
    return {**config, "liveness": {"step_timeout_s": STEP_TIMEOUT_S, "lease_s": LEASE_S, **config.get("liveness", {})}}


def records(folder: RunFolder) -> list[dict[str, Any]]:
    try:
        text = folder.metrics_path.read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def members_in(folder: RunReader) -> dict[str, psutil.Process]:
    """The processes of the current generation that still run, by `role index`."""
    found = {}
    for member in folder.member_list():
        with contextlib.suppress(psutil.NoSuchProcess):
            found[f"{member['role']} {member['index']}"] = psutil.Process(member["pid"])
    return found


def kinds(folder: RunFolder) -> set[str]:
    return {record["kind"] for record in records(folder)}


def within(limit_s: float, true: Callable[[], bool], otherwise: str, possible: Callable[[], bool]) -> None:
    """Waits until `true()`; fails with `otherwise` after `limit_s` or once it is not `possible()` any more."""
    end = time.monotonic() + limit_s
    while not true():
        assert possible() or true(), f"{otherwise}: everything has ended"
        assert time.monotonic() < end, f"{otherwise} within {limit_s:g} s"
        time.sleep(POLL_S)


def gone(processes: Iterable[psutil.Process], *, limit_s: float) -> list[psutil.Process]:
    """Waits up to `limit_s`; those that still run."""
    return [p for p in psutil.wait_procs(list(processes), timeout=limit_s)[1] if p.status() != psutil.STATUS_ZOMBIE]


def kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()  # checks by its start that the number was not given to another process


def listening(process: psutil.Process) -> list[str]:
    """The hosts on which a process listens; gRPC writes those of IPv4 as IPv6 does."""
    return [
        c.laddr.ip.removeprefix("::ffff:") for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN
    ]


def listening_ports(process: psutil.Process) -> list[int]:
    """The TCP ports on which a process listens."""
    return [c.laddr.port for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]


def _children(process: psutil.Process) -> Sequence[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.children(recursive=True)
    return ()


@contextlib.contextmanager
def stalled(process: psutil.Process) -> Iterator[None]:
    """The process hangs inside the `with`, as on a machine that swaps or hangs."""
    process.suspend()
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
