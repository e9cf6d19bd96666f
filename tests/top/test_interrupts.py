"""Ctrl-C and SIGTERM in a process that may go on for a while. In a process of its own, for the signals are real."""

from __future__ import annotations

import subprocess
import sys

import pytest

JOB = """
import os, signal, threading
from shardkeep.interrupts import Interrupts
with Interrupts() as interrupts:
    interrupts.tolerated, interrupts.grace_s = 1, {grace_s}
    try:
        os.kill(os.getpid(), signal.{number})
        threading.Event().wait({wait_s})
        print("in time", interrupts.count, interrupts.terminated, interrupts.late)
    except KeyboardInterrupt:
        print("interrupted", interrupts.count, interrupts.terminated, interrupts.late)
"""


@pytest.mark.parametrize(
    ("number", "grace_s", "wait_s", "told"),
    [
        ("SIGTERM", 0.1, 60.0, "interrupted 2 True True"),
        ("SIGTERM", 60.0, 0.0, "in time 1 True False"),
        ("SIGTERM", None, 0.2, "in time 1 True False"),
        ("SIGINT", 0.1, 0.4, "in time 1 False False"),
    ],
    ids=["late", "in time", "without a limit", "Ctrl-C has none"],
)
def test_sigterm_interrupts_once_its_grace_is_over(number: str, grace_s: float, wait_s: float, told: str) -> None:
    script = JOB.format(number=number, grace_s=grace_s, wait_s=wait_s)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.stderr) == (told, "")
