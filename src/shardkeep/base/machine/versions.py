"""What a run was made on: versions and machine, for summaries and benchmark results. No model quality here."""

from __future__ import annotations

import functools
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import psutil

from shardkeep.base.machine.topology import usable_cores

PACKAGES: Sequence[str] = ("torch", "numpy", "numba", "grpcio", "protobuf", "pyarrow", "pydantic", "shardkeep")

GIT_S = 5.0
"""Seconds that git gets to say which commit this is."""


def versions(packages: Sequence[str] = PACKAGES) -> Mapping[str, str]:
    """Installed versions by package name, Python's among them; imports none of the packages."""
    return {"python": platform.python_version()} | {package: _version(package) for package in packages}


@functools.cache
def _version(package: str) -> str:
    """Read once in a process: each checkpoint notes the versions, and reading them takes 8 ms."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


@functools.cache
def commit(folder: Path | None = None) -> str | None:
    """The commit of the checkout that this code runs from, `-dirty` after it where tracked files differ; None where the
    code is in no checkout, an installed package inside somebody's repository included, or git cannot say.
    `folder`: of the code; None = of this file. Read once in a process: git takes 10 ms."""
    here = folder or Path(__file__).resolve().parent
    if _git(here, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    return _git(here, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")


def machine() -> Mapping[str, str | int | float]:
    """System, processor, cores this process may use, and memory in GB (10^9 bytes)."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": len(usable_cores()),
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


def _git(folder: Path, *arguments: str) -> str | None:
    """What a git command prints; None where it fails or there is no git."""
    command = ("git", "--no-optional-locks", "-C", str(folder), *arguments)
    try:
        done = subprocess.run(command, capture_output=True, timeout=GIT_S, check=False, text=True)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout.strip() or None


def _processor() -> str:
    """The first processor's name; on x86 its family and model besides, since virtual machines hide the name's rest."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or platform.machine()
    first = info.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    known = {key.strip(): value.strip() for key, _, value in pairs}
    name = known.get("model name") or platform.processor() or platform.machine()
    kind = f", family {known['cpu family']} model {known['model']}" if {"cpu family", "model"} <= set(known) else ""
    return f"{name}{kind}{', AVX-512' if 'avx512f' in known.get('flags', '').split() else ''}"
