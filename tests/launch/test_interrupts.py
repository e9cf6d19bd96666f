"""Ctrl-C and SIGTERM in a process that may continue for a while. In a process of its own, for the signals are real."""

from __future__ import annotations

import json
import subprocess
import sys

CASES = {
    "late": ("SIGTERM", 0.1, 60.0, "interrupted 2 True True False"),
    "in time": ("SIGTERM", 60.0, 0.0, "in time 1 True False False"),
    "without a limit": ("SIGTERM", None, 0.2, "in time 1 True False False"),
    "Ctrl-C has none": ("SIGINT", 0.1, 0.4, "in time 1 False False False"),
    "SIGTERM after Ctrl-C": ("SIGINT SIGTERM", 60.0, 0.0, "in time 2 True False False"),
    "late after Ctrl-C": ("SIGINT SIGTERM", 0.1, 60.0, "interrupted 3 True True False"),
    "two SIGTERM": ("SIGTERM SIGTERM", 60.0, 0.0, "in time 2 True False False"),
    "two Ctrl-C": ("SIGINT SIGINT", 60.0, 60.0, "interrupted 2 False False True"),
    "Ctrl-C after SIGTERM": ("SIGTERM SIGINT", 60.0, 60.0, "interrupted 2 True False True"),
}
JOB = """
import json, os, signal, sys, threading
from shardkeep.launch.stopping.interrupts import Interrupts

def job(numbers, grace_s, wait_s):
    with Interrupts() as interrupts:
        interrupts.tolerated, interrupts.grace_s = 1, grace_s
        try:
            for number in numbers.split():
                os.kill(os.getpid(), signal.Signals[number])
            threading.Event().wait(wait_s)
            end = "in time"
        except KeyboardInterrupt:
            end = "interrupted"
        print(end, interrupts.count, interrupts.terminated, interrupts.late, interrupts.at_once)

for numbers, grace_s, wait_s in json.loads(sys.argv[1]):
    job(numbers, grace_s, wait_s)
"""


def test_sigterm_interrupts_once_its_grace_is_over_and_a_second_ctrl_c_at_once() -> None:
    command = [sys.executable, "-c", JOB, json.dumps([case[:3] for case in CASES.values()])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert dict(zip(CASES, done.stdout.splitlines(), strict=True)) == {name: case[3] for name, case in CASES.items()}
    assert done.stderr == ""
