"""How a role leaves on SIGTERM or SIGINT: real processes and signals, because the system is what is tested here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from shardkeep.launch.processes.children import LEAVE
from tests.support.cases import every

LIMIT_S = 90.0
ROLE = """
import os, threading, time
from shardkeep.member.departure import Departure, Leaving
departure = Departure(sheltered={sheltered})
departure.watch()
{started}
departure.last_words = lambda text, code: print("told", text, code, flush=True)
def work():
    {work}
try:
    work()
except Leaving as leaving:
    print("in order", leaving, flush=True)
    os._exit(leaving.code)  # as roles do: their handlers last until their end
"""
READY = "print('ready', flush=True)"
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
SHELTERED = """
import signal
from shardkeep.launch.processes.children import end_with_parent
def caught(number, frame, handle=signal.getsignal(signal.SIGTERM)):
    handle(number, frame)
    os.write(1, f"caught {departure.asked}\\n".encode())
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, caught)
def admit():
    os.write(1, b"admitted\\n")
    departure.admit()
departure.when_asked = lambda: os.write(1, b"asked\\n")
end_with_parent(patience_s=0, admit=admit)
"""
"""The role says of each signal whether it is asked to leave by now."""


@contextmanager
def role(work: str, *, sheltered: bool = False) -> Iterator[subprocess.Popen[str]]:
    text = ROLE.format(work=work, sheltered=sheltered, started=SHELTERED if sheltered else "")
    process = subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@every(
    ("work", "number", "printed"),
    [
        (f"{READY}; threading.Event().wait()", signal.SIGTERM, "in order left on SIGTERM\n"),
        (f"{READY}; threading.Event().wait()", signal.SIGINT, "in order left on SIGINT\n"),
        (STEPS, signal.SIGTERM, "step done\nin order left on SIGTERM\n"),
        (STUCK, signal.SIGTERM, "told left on SIGTERM 143\n"),
    ],
    ids=["SIGTERM in a wait", "SIGINT in a wait", "in its step", "stuck beyond its limit"],
)
def test_a_role_leaves_in_order_with_the_code_of_the_signal_or_ends_at_its_limit(
    work: str, number: signal.Signals, printed: str
) -> None:
    with role(work) as process:
        process.send_signal(number)
        out, _ = process.communicate(timeout=LIMIT_S)
        assert (process.returncode, out) == (128 + number, printed)


def test_a_second_signal_ends_a_stuck_role_without_a_word() -> None:
    asked = "departure.when_asked = lambda: print('asked', flush=True)"
    with role(f"{asked}{STUCK.replace('0.3', '600.0')}") as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert process.stdout.readline() == "asked\n"  # two at once come by their number, not in the order of sending
        os.kill(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=LIMIT_S)
        assert (process.returncode, out) == (143, "")


@every("asked", [True, False], ids=["asked", "launcher killed"])
def test_a_sheltered_role_heeds_no_signal_before_its_launcher_asks_or_is_gone_and_no_second_one(asked: bool) -> None:
    work = STEPS.replace('print("step done"', 'time.sleep(0.5); print("step done"')
    with role(work, sheltered=True) as process:
        assert process.stdin is not None and process.stdout is not None
        for number in (signal.SIGTERM, signal.SIGINT) * 3:
            process.send_signal(number)
            assert process.stdout.readline() == "caught False\n"
        if asked:
            process.stdin.write(LEAVE.decode())
            process.stdin.flush()
        else:
            process.stdin.close()
            process.stdin = None
        while process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
        lines = [line for line in process.stdout.read().splitlines() if not line.startswith("caught")]
        assert lines == ["admitted", "asked", "step done", "in order left on SIGTERM"]
        assert process.returncode == 143
