"""Memory of a process that needs the same buffers again and again, and memory that the system does not give."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import numpy as np
import pytest
import torch

from shardkeep.base.errors import UserError
from shardkeep.base.machine.memory import memory_errors

PROGRAM = """
import resource, sys
import numpy as np
from shardkeep.base.machine.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
for size in map(int, sys.argv[2:]):
    for step in range(5):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        buffers = [np.ones(size, np.float32) for _ in range(20_000_000 // size)]
        del buffers
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_buffers_of_later_steps_are_those_of_earlier_ones() -> None:
    """The second size is above glibc's own limit, and gets large pages."""
    kept, plain = (_faults(how, "500000", "10000000") for how in ("kept", "as it is"))
    assert plain[0] > 5_000 and plain[1] > 100  # 80 MB, page by page: else this test shows nothing
    assert max(kept) < 50


def _faults(*how: str) -> list[int]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *how], capture_output=True, text=True, check=True)
    return list(map(int, done.stdout.split()))


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


# ---- memory that the system does not give ----


def test_an_allocation_that_fails_says_how_much_was_asked_and_other_errors_stay_what_they_are() -> None:
    with pytest.raises(UserError, match=r"^out of memory: 4,000,000\.0 GB asked at once by us$"), memory_errors("us"):
        torch.empty(10**15, dtype=torch.float32)
    with pytest.raises(UserError, match=r"^out of memory: 3\.55 PiB asked at once by us$"), memory_errors("us"):
        np.empty(10**15, np.float32)
    for error in (RuntimeError("a shape"), ValueError("a value")):
        with pytest.raises(type(error), match=r"^a ") as caught, memory_errors("us"):
            raise error
        assert not isinstance(caught.value, UserError)
