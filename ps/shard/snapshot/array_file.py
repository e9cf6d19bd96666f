"""ArrayFile: a safetensors file that is written array by array, none of them held in memory."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_HEADER_BYTES = 16 << 10
"""Room for the header, which stands first and is known last; the format lets spaces fill it."""
_MOST_ARRAYS = 120
_KINDS = {"int64": "I64", "float32": "F32"}


class ArrayFile:
    """Arrays one behind the other, each under a name of up to 32 letters; a file once it is finished.

    Source: https://huggingface.co/docs/safetensors (format). All but `close` raise OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._file = path.open("wb")
        self._file.seek(_HEADER_BYTES)
        self._header: dict[str, dict[str, Any]] = {}

    @property
    def has_room(self) -> bool:
        """Whether the header has room for three more arrays."""
        return len(self._header) + 3 <= _MOST_ARRAYS

    def add(self, name: str, array: npt.NDArray[Any]) -> None:
        """Writes a contiguous array, int64 or float32."""
        kind = _KINDS[array.dtype.name]
        offsets = [self.size, self.size + array.nbytes]
        self._header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": offsets}
        self._file.write(np.ascontiguousarray(array).reshape(-1).data)
        self.size += array.nbytes

    def finish(self) -> None:
        """Writes the header and closes the file. What is written may not be on disk yet."""
        header = json.dumps(self._header, separators=(",", ":")).encode()
        self._file.seek(0)
        self._file.write((_HEADER_BYTES - 8).to_bytes(8, "little") + header.ljust(_HEADER_BYTES - 8))
        self._file.close()

    def close(self) -> None:
        """Closes a file that need not be whole."""
        with contextlib.suppress(OSError):
            self._file.close()
