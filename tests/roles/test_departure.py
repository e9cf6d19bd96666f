"""How a role leaves on SIGTERM or SIGINT: real processes and signals, because the system is what is tested here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

LIMIT_S = 30.0
ROLE = """
import signal, sys, threading, time
from shardkeep.roles.departure import Departure, Leaving
departure = Departure()
departure.watch()
departure.last_words = lambda text, code: print("told", text, code, flush=True)
def work():
    {work}
try:
    work()
except Leaving as leaving:
    print("in order", leaving, flush=True)
    sys.exit(leaving.code)
"""
READY = "print('ready', flush=True)"
WAITING = f"{READY}; threading.Event().wait()"
STEPS = f"""
    with departure.postponed(60.0):
        {READY}
        while not departure.due: time.sleep(0.01)
        print("step done", flush=True)
        departure.check()
"""
STUCK = f"""
    with departure.postponed(0.3):
        {READY}
        while True:
            try: threading.Event().wait()
            except BaseException: pass
"""


@contextmanager
def role(work: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has come to its work."""
    process = subprocess.Popen([sys.executable, "-c", ROLE.format(work=work)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_role_that_waits_leaves_at_once_with_the_code_of_the_signal(number: signal.Signals) -> None:
    with role(WAITING) as process:
        process.send_signal(number)
        out, _ = process.communicate(timeout=LIMIT_S)
        assert (process.returncode, out) == (128 + number, f"in order left on {number.name}\n")


def test_a_role_in_its_step_leaves_after_it() -> None:
    with role(STEPS) as process:
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=LIMIT_S)
        assert (process.returncode, out) == (143, "step done\nin order left on SIGTERM\n")


def test_a_role_that_is_stuck_ends_at_its_limit_and_says_so() -> None:
    with role(STUCK) as process:
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=LIMIT_S)
        assert (process.returncode, out) == (143, "told left on SIGTERM 143\n")


def test_a_second_signal_ends_a_stuck_role_without_a_word() -> None:
    with role(STUCK.replace("0.3", "600.0")) as process:
        process.send_signal(signal.SIGTERM)
        os.kill(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=LIMIT_S)
        assert (process.returncode, out) == (143, "")
