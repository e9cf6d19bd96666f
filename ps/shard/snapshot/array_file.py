"""ArrayFile: writes a safetensors file array by array and holds none of them in memory."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

HEADER_BYTES = 16 << 10
"""Room for the header. It comes first in the file but is known last; the format allows padding with spaces."""
_MOST_ARRAYS = 122
_KINDS = {"int64": "I64", "float32": "F32", "float16": "F16", "uint16": "U16", "int8": "I8", "uint32": "U32"}


class ArrayFile:
    """A safetensors file of consecutive arrays, each with a name of up to 32 characters. Valid after `finish`.

    Format: https://huggingface.co/docs/safetensors. All methods except `close` raise OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._file = path.open("wb")
        self._file.seek(HEADER_BYTES)
        self._header: dict[str, dict[str, Any]] = {}

    @property
    def has_room(self) -> bool:
        """Whether the header has room for five more arrays."""
        return len(self._header) + 5 <= _MOST_ARRAYS

    def add(self, name: str, array: npt.NDArray[Any]) -> None:
        """Writes a contiguous array, int64, float32, float16, uint16, int8 or uint32."""
        kind = _KINDS[array.dtype.name]
        offsets = [self.size, self.size + array.nbytes]
        self._header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": offsets}
        self._file.write(np.ascontiguousarray(array).reshape(-1).data)
        self.size += array.nbytes

    def extend(self, name: str, array: npt.NDArray[Any]) -> None:
        """Writes an array part by part along its first axis; no other array comes between the parts."""
        rows = self._header[name]["shape"][0] if name in self._header else 0
        first = self._header[name]["data_offsets"][0] if name in self._header else self.size
        self.add(name, array)
        self._header[name]["shape"][0] += rows
        self._header[name]["data_offsets"][0] = first

    def finish(self) -> None:
        """Writes the header and closes the file. Does not sync it to disk."""
        header = json.dumps(self._header, separators=(",", ":")).encode()
        self._file.seek(0)
        self._file.write((HEADER_BYTES - 8).to_bytes(8, "little") + header.ljust(HEADER_BYTES - 8))
        self._file.close()

    def close(self) -> None:
        """Closes the file, even if it is incomplete."""
        with contextlib.suppress(OSError):
            self._file.close()
