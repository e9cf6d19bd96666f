"""Servers around a command: a coordinator and servers start before it and end with it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from shardkeep.base.errors import JobError, UserError
from shardkeep.config import JobConfig
from shardkeep.launch.supervision import POLL_S
from shardkeep.loop.server_processes import CLOSE_S, Serving, addresses, server_processes

RUN_VARIABLE = "SHARDKEEP_RUN"
"""Holds the run folder, for `connect()`."""
GRACE_S = 15.0
"""Seconds the command gets to end after a signal."""
_PROCESSES = re.compile(r"--nproc[-_]per[-_]node(?:=(.*))?")


def trainers_of(command: Sequence[str]) -> int | None:
    """The number of processes that torchrun starts; None = the command does not say."""
    for place, word in enumerate(command):
        if found := _PROCESSES.fullmatch(word):
            number = found[1] or (command[place + 1] if place + 1 < len(command) else "")
            return int(number) if number.isdecimal() and int(number) else None
    return None


def run_around(command: Sequence[str], config: JobConfig, run_dir: Path, say: Callable[[str], None]) -> int:
    """Runs a command while a coordinator and servers run; returns its exit status, 128 + N for signal N.

    Raises UserError (the command cannot be started) and JobError (a server or the coordinator died: the command is
    ended).
    """
    tables = [config.table(name) for name in config.tables if name != "default"]
    with server_processes(config, tables, run_dir) as serving:
        say(f"servers: {config.servers}, trainers: {config.workers}, run folder: {serving.run}")
        for name, text in addresses(config, serving.run):
            say(f"{name}: {text}")
        environment = {**os.environ, RUN_VARIABLE: str(serving.run.absolute())}
        try:
            process = subprocess.Popen(command, env=environment)
        except OSError as error:
            raise UserError(f"{command[0]}: cannot be started ({error.strerror or error})") from error
        with _signals_to(process):
            died = _wait(process, serving)
        if process.returncode == 0 and not serving.wait(CLOSE_S):
            say("warning: no trainer has left the servers by closing its client; is there a `with connect()`?")
    if died:
        raise JobError(f"{died}; logs: {serving.run / 'logs'}")
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _wait(process: subprocess.Popen[bytes], serving: Serving) -> str:
    """Waits for the command; "" or, if a server died before, how. Then the command is ended."""
    while process.poll() is None:
        if died := serving.died():
            with suppress(subprocess.TimeoutExpired):
                process.wait(POLL_S * 20)  # its own error comes first
            _end(process)
            return died
        time.sleep(POLL_S)
    return serving.died() if process.returncode else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    if process.poll() is None:
        process.kill()
        process.wait()


@contextmanager
def _signals_to(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Hands SIGTERM and SIGINT on to the command. A terminal's Ctrl-C has reached it already."""

    def hand_on(number: int, _frame: object) -> None:
        late = threading.Timer(0.5 if number == signal.SIGINT else 0.0, lambda: _send(process, number))
        late.daemon = True
        late.start()

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _send(process: subprocess.Popen[bytes], number: int) -> None:
    if process.poll() is None:
        process.send_signal(number)
