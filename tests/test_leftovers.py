"""What a test leaves behind is found, each kind of it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support import leftovers
from tests.support.cases import every
from tests.support.leftovers import none_left


def listens(stack: ExitStack) -> None:
    stack.enter_context(socket.create_server(("127.0.0.1", 0)))


def starts(stack: ExitStack) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    stack.callback(child.communicate)


def writes(stack: ExitStack) -> None:
    number, path = tempfile.mkstemp()
    os.close(number)
    stack.callback(Path(path).unlink)


def sets_a_variable(stack: ExitStack) -> None:
    os.environ["SHARDKEEP_LEFT"] = "1"
    stack.callback(os.environ.pop, "SHARDKEEP_LEFT")


def handles_a_signal(stack: ExitStack) -> None:
    stack.callback(signal.signal, signal.SIGHUP, signal.signal(signal.SIGHUP, lambda *_: None))


def goes_elsewhere(stack: ExitStack) -> None:
    stack.callback(os.chdir, Path.cwd())
    os.chdir("/")


@pytest.mark.skipif(sys.platform != "linux", reason="listeners and children are read from /proc")
@every(
    "leave, words",
    [
        (listens, "listeners: socket:"),
        (starts, "children: "),
        (writes, "temporary_files: tmp"),
        (sets_a_variable, "variables: SHARDKEEP_LEFT = '1'"),
        (handles_a_signal, "process: SIGHUP"),
        (goes_elsewhere, "process: folder"),
    ],
)
def test_each_kind_of_leftover_is_named(
    leave: Callable[[ExitStack], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "END_S", 0.0)
    with ExitStack() as stack:
        with pytest.raises(AssertionError) as caught, none_left():
            leave(stack)
        assert words in str(caught.value)


def test_what_is_closed_again_is_nothing_left() -> None:
    with none_left(), ExitStack() as stack:
        for leave in (listens, starts, writes, sets_a_variable, handles_a_signal, goes_elsewhere):
            leave(stack)
