"""What a run was made on: versions and machine, for summaries and benchmark results. No model quality here."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import psutil

PACKAGES: Sequence[str] = ("torch", "numpy", "numba", "grpcio", "protobuf", "pyarrow", "pydantic", "shardkeep")


def versions(packages: Sequence[str] = PACKAGES) -> Mapping[str, str]:
    """Installed versions by package name, Python's among them; imports none of the packages."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def machine() -> Mapping[str, str | int | float]:
    """System, processor, cores this process may use, and memory in GB (10^9 bytes)."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": usable_cores(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
    }


def peak_rss_bytes() -> int:
    """The most memory that this process has had in RAM at once."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage there counts the memory of the process that started this one
        for line in status.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)


def usable_cores() -> int:
    """Cores that this process may run on."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
