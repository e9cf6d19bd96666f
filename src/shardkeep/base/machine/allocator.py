"""The C allocator of this process: whether memory that was freed goes back to the system. Says nothing of tables."""

from __future__ import annotations

import ctypes

# Parameters of glibc's mallopt (malloc.h).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
LARGEST_KEPT_BYTES = KEPT_BYTES = 1 << 30


def keep_freed_memory(*, largest_bytes: int = LARGEST_KEPT_BYTES, kept_bytes: int = KEPT_BYTES) -> bool:
    """Has malloc keep freed memory, for a process that needs the same buffers in every step.

    glibc gives large blocks back as soon as they are free, and the next step takes them page by page: 500-1,000 page
    faults a step of W1 at D=16 and 2,100 at D=64, which are 1.2 and 2.5 us of system time a sample. Whether it does
    depends on the order of the first allocations, so that two equal jobs differ by it. Of itself it never keeps blocks
    above 32 MB: those of 26 features with 20 ids each cost a trainer 0.4 to 0.5 of its CPU outside of the tower.

    Args:
        largest_bytes: Larger blocks go back when they are freed. Smaller ones leave holes, which are not given back: a
            process that replaces large arrays of many sizes grows by them.
        kept_bytes: At the end of the heap.

    Returns False where the C library is another and nothing was changed.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # macOS, musl, Windows
        return False
    kept = mallopt(_M_MMAP_THRESHOLD, largest_bytes) and mallopt(_M_TRIM_THRESHOLD, kept_bytes)
    return bool(kept)


def give_back_freed_memory() -> bool:
    """Gives all freed memory back to the system, also from the holes between blocks in use. Takes 1 to 25 ms; other
    threads that allocate wait meanwhile.

    Returns False where the C library is another and nothing was given back.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return False
    trim(0)
    return True
