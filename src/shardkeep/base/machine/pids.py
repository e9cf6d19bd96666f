"""What a process number means: it names one process, with its start, in a PID namespace of one boot of one machine."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import psutil

_BOOT, _NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


def pid_space() -> str:
    """Names the boot and the PID namespace of this process; the host where the kernel tells neither."""
    try:
        return f"{_BOOT.read_text(encoding='ascii').strip()} {_NAMESPACE.readlink()}"
    except OSError:
        return socket.gethostname()


def start_of(pid: int) -> str:
    """When a process started: a later one of its number has another start. In clock ticks since the boot where the
    kernel says so, as the time of day may be set; "" = there is no such process, or it has ended."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        state, *fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return "" if state in (b"Z", b"X") else fields[18].decode()
    try:
        return f"{psutil.Process(pid).create_time():.2f}"
    except psutil.Error:
        return ""
