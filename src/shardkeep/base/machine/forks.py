"""Forks of a process that has run operators of torch."""

from __future__ import annotations

import ctypes
import functools
import os

_SOFT = 1  # omp_pause_soft in omp.h


@functools.cache
def outlive_forks() -> None:
    """Makes forks of this process work with torch, and end. Call it once torch is imported.

    A fork copies one thread. libgomp, which torch has on Linux, would wait in the child for its other threads for ever:
    so idle OpenMP threads end before each fork, and both processes start new ones when they need them.
    `torch.set_num_threads` makes threads of another pool (caffe2's), for which the child would wait at its exit. torch
    replaces that pool in the child when the number is set again."""
    import torch  # here: the base needs no torch

    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)  # torch loads libgomp for all to see
    if pause is not None:
        os.register_at_fork(before=lambda: pause(_SOFT))
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))
