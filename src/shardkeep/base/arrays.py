"""The types of arrays. Types only: modules of kernels import this one, and their fingerprints do not cover it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Rows = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]
Int32s = npt.NDArray[np.int32]
UInt32s = npt.NDArray[np.uint32]
UInt64s = npt.NDArray[np.uint64]
Float64s = npt.NDArray[np.float64]
