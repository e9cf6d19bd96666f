"""The command line that `ps` and psutil show of this process. Linux only; changes nothing else."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_FIELDS = ("start_code", "end_code", "start_data", "end_data", "start_brk", "brk", "start_stack",
           "arg_start", "arg_end", "env_start", "env_end")  # fmt: skip
_AT = {"start_code": 26, "end_code": 27, "start_stack": 28, "start_data": 45, "end_data": 46, "start_brk": 47,
       "arg_start": 48, "arg_end": 49, "env_start": 50, "env_end": 51}  # fmt: skip
"""Field numbers in /proc/self/stat (proc_pid_stat(5)), from 1."""
_kept: list[ctypes.Array[ctypes.c_char]] = []
"""The kernel reads the shown command line out of this memory."""


class _MemoryMap(ctypes.Structure):
    """struct prctl_mm_map of linux/prctl.h."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in _FIELDS),
        ("auxv", ctypes.c_uint64),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )


def show_command(command: Sequence[str]) -> bool:
    """Shows `command` as the command line of this process. Returns False where the kernel refuses it."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    try:
        stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return False
    values = {name: int(stat[number - 3]) for name, number in _AT.items()}  # the first field after the name is 3
    text = b"".join(os.fsencode(part) + b"\0" for part in command)
    memory = ctypes.create_string_buffer(text, len(text))
    values |= {"arg_start": ctypes.addressof(memory), "arg_end": ctypes.addressof(memory) + len(text)}
    values["brk"] = libc.sbrk(0) or 0
    changed = _MemoryMap(**values, auxv=0, auxv_size=0, exe_fd=0xFFFFFFFF)
    size = ctypes.c_size_t(ctypes.sizeof(changed))
    if libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(changed), size, 0) != 0:
        return False
    _kept[:] = [memory]
    return True
