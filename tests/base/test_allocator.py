"""The allocator of a process that needs the same buffers again and again."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import numpy as np
from shardkeep.base.machine.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
for step in range(8):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    buffers = [np.ones(int(sys.argv[2]), np.float32) for _ in range(20_000_000 // int(sys.argv[2]))]
    del buffers
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
@pytest.mark.parametrize(
    ("values", "pages"), [(500_000, 5_000), (10_000_000, 100)], ids=["small", "above glibc's own limit, in large pages"]
)
def test_buffers_of_later_steps_are_those_of_earlier_ones(values: int, pages: int) -> None:
    faults = {how: int(_run(how, str(values))) for how in ("kept", "as it is")}
    assert faults["as it is"] > pages  # 80 MB, page by page: else this test shows nothing
    assert faults["kept"] < 50


def _run(*how: str) -> str:
    return subprocess.run([sys.executable, "-c", PROGRAM, *how], capture_output=True, text=True, check=True).stdout


HOLES = """
import ctypes, re
from shardkeep.base.machine.allocator import give_back_freed_memory, keep_freed_memory
def anonymous_mb():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1e3
assert keep_freed_memory()
blocks = [(bytearray(b"x") * 1_000_000, bytearray(b"x") * 100_000) for _ in range(200)]
blocks = [small for _, small in blocks]
holes = anonymous_mb()
assert give_back_freed_memory()
print(holes - anonymous_mb())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
def test_freed_memory_between_blocks_in_use_goes_back() -> None:
    done = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    assert float(done.stdout) > 150.0  # MB of 200
