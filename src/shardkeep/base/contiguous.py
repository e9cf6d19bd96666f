"""Arrays as kernels take them."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T", bound=np.generic)


def for_kernels(array: npt.NDArray[T], dtype: type[T]) -> npt.NDArray[T]:
    """The array itself where kernels can take it, else a copy: contiguous, aligned, writable."""
    if array.flags.carray and array.dtype == dtype:
        return array
    return np.require(array, dtype=dtype, requirements=["C", "A", "W"])
