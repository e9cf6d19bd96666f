"""Kernels that every room needs: an address as an array's pointer, and a scan for values that are not finite."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba.core import cgutils, types
from numba.extending import intrinsic

from shardkeep.base.kernels import kernel


def _void_pointer(_typing: Any, _address: Any) -> Any:
    """An integer as a void pointer, for carray()."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


pointer: Any = intrinsic(_void_pointer)


@kernel("boolean(Array(uint32, 1, 'C', readonly=True))")
def all_finite(bits: npt.NDArray[np.uint32]) -> bool:
    """Whether no float32 value, given as its bits, is an infinity or a NaN: all bits of an exponent are set."""
    largest = np.uint32(0)
    for i in range(bits.size):
        largest = max(largest, bits[i] & np.uint32(0x7FFFFFFF))
    return bool(largest < np.uint32(0x7F800000))
