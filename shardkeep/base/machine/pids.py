"""What a process number means: it names a process within one PID namespace of one boot of one machine."""

from __future__ import annotations

import socket
from pathlib import Path

_BOOT, _NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


def pid_space() -> str:
    """Names the boot and the PID namespace of this process; the host where the kernel tells neither."""
    try:
        return f"{_BOOT.read_text(encoding='ascii').strip()} {_NAMESPACE.readlink()}"
    except OSError:
        return socket.gethostname()
