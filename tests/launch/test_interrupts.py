"""Ctrl-C and SIGTERM in a process that may continue for a while. In a process of its own, for the signals are real."""

from __future__ import annotations

import signal
import subprocess
import sys

from shardkeep.launch.stopping.interrupts import Interrupts
from tests.support.cases import every

JOB = """
import os, signal, threading
from shardkeep.launch.stopping.interrupts import Interrupts
with Interrupts() as interrupts:
    interrupts.tolerated, interrupts.grace_s = 1, {grace_s}
    try:
        for number in "{numbers}".split():
            os.kill(os.getpid(), signal.Signals[number])
        threading.Event().wait({wait_s})
        print("in time", interrupts.count, interrupts.terminated, interrupts.late)
    except KeyboardInterrupt:
        print("interrupted", interrupts.count, interrupts.terminated, interrupts.late)
"""


@every(
    ("numbers", "grace_s", "wait_s", "told"),
    [
        ("SIGTERM", 0.1, 60.0, "interrupted 2 True True"),
        ("SIGTERM", 60.0, 0.0, "in time 1 True False"),
        ("SIGTERM", None, 0.2, "in time 1 True False"),
        ("SIGINT", 0.1, 0.4, "in time 1 False False"),
        ("SIGINT SIGTERM", 60.0, 0.0, "in time 2 True False"),
        ("SIGINT SIGTERM", 0.1, 60.0, "interrupted 3 True True"),
        ("SIGTERM SIGTERM", 60.0, 0.0, "in time 2 True False"),
        ("SIGINT SIGINT", 60.0, 60.0, "interrupted 2 False False"),
        ("SIGTERM SIGINT", 60.0, 60.0, "interrupted 2 True False"),
    ],
    ids=[
        "late",
        "in time",
        "without a limit",
        "Ctrl-C has none",
        "SIGTERM after Ctrl-C",
        "late after Ctrl-C",
        "two SIGTERM",
        "two Ctrl-C",
        "Ctrl-C after SIGTERM",
    ],
)
def test_sigterm_interrupts_once_its_grace_is_over(numbers: str, grace_s: float, wait_s: float, told: str) -> None:
    script = JOB.format(numbers=numbers, grace_s=grace_s, wait_s=wait_s)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.stderr) == (told, "")


@every(
    ("numbers", "at_once"),
    [("SIGINT SIGTERM", False), ("SIGTERM SIGTERM", False), ("SIGINT SIGINT", True), ("SIGTERM SIGINT", True)],
)
def test_only_a_second_ctrl_c_asks_for_the_end_at_once(numbers: str, at_once: bool) -> None:
    with Interrupts() as interrupts:
        interrupts.tolerated = 10
        for number in numbers.split():
            signal.raise_signal(signal.Signals[number])
        assert (interrupts.count, interrupts.at_once) == (2, at_once)
