"""Kernels that every room needs: pointers to addresses, fetching ahead, floats as bits, a scan for what is infinite."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic

from shardkeep.base.compiling.kernels import kernel


def _void_pointer(_typing: Any, _address: Any) -> Any:
    """An integer as a void pointer, for carray()."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


def _bits_of(_typing: Any, _value: Any) -> Any:
    """A float32 as the uint32 with the same bits."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


def _float_of(_typing: Any, _bits: Any) -> Any:
    """A uint32 as the float32 with the same bits."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), codegen


pointer: Any = intrinsic(_void_pointer)
bits_of: Any = intrinsic(_bits_of)
float_of: Any = intrinsic(_float_of)


def _prefetch_line(_typing: Any, _address: Any) -> Any:
    """Asks the CPU to fetch the cache line at an address; never faults."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        int32 = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, int32, int32, int32])
        function = builder.module.declare_intrinsic("llvm.prefetch", [cgutils.voidptr_t], kind)
        address = builder.inttoptr(args[0], cgutils.voidptr_t)
        builder.call(function, [address, int32(0), int32(3), int32(1)])  # for reading, keep, data
        return _context.get_dummy_value()

    return types.void(types.int64), codegen


prefetch: Any = intrinsic(_prefetch_line)


@kernel("boolean(Array(uint32, 1, 'C', readonly=True))")
def all_finite(bits: npt.NDArray[np.uint32]) -> bool:
    """Whether no float32 value, given as its bits, is an infinity or a NaN: all bits of an exponent are set."""
    largest = np.uint32(0)
    for i in range(bits.size):
        largest = max(largest, bits[i] & np.uint32(0x7FFFFFFF))
    return bool(largest < np.uint32(0x7F800000))
