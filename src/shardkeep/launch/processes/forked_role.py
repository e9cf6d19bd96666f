"""A forked role: it sets up the state that exec would have given it, then runs its main function."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from shardkeep.base.machine.topology import usable_cores
from shardkeep.config.affinity import pin
from shardkeep.launch.processes.children import SHARDKEEP

BLAS_THREADS = "OPENBLAS_NUM_THREADS"
"""Set to 1 for the fork server, so that it loads numpy's OpenBLAS with one thread."""


def become(
    request: Mapping[str, Any], streams: tuple[int, int, int], started: int, *, inherited: Sequence[int]
) -> NoReturn:
    """Turns the forked process into the role of the request, and ends the process with the role.

    Args:
        request: The request to fork; see `fork_server`.
        streams: Descriptors of its stdin, stdout and stderr.
        started: Descriptor to which it writes its pid when it leads its own session.
        inherited: Descriptors of the server, which it closes.
    """
    code = 1
    try:
        os.setsid()
        os.write(started, str(os.getpid()).encode())
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
        for descriptor in (*streams, started, *inherited):
            os.close(descriptor)
        if not os.read(0, 1):
            os._exit(1)  # the launcher does not know this process
        _settle(request)
        sys.argv = [SHARDKEEP[-1], *request["arguments"]]
        module, _, function = request["main"].partition(":")
        getattr(importlib.import_module(module), function)()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:  # ends as Python does
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
            sys.stdout.flush()
        os._exit(code)


def _settle(request: Mapping[str, Any]) -> None:
    """Sets cores, threads and random states.

    Python and numba seed their generators after each fork. torch starts from the same seed in every process."""
    if request["cores"] is not None:
        pin(0, tuple(request["cores"]))  # threads started later inherit this
    if request["blas"] is None:
        del os.environ[BLAS_THREADS]
    else:
        os.environ[BLAS_THREADS] = request["blas"]
        _set_blas_threads(int(request["blas"]))
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    gc.enable()


def _set_blas_threads(count: int) -> None:
    """Does what OPENBLAS_NUM_THREADS does at import."""
    count = min(count, len(usable_cores()))  # as OpenBLAS does
    if count == 1:
        return
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    for path in sorted({line.split(None, 5)[5] for line in maps.splitlines() if "openblas" in line}):
        library = ctypes.CDLL(path)
        for name in ("scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads", "openblas_set_num_threads"):
            if (setter := getattr(library, name, None)) is not None:
                setter(count)
