"""StoredColumn: the values of one column for all rows, in flat arrays, in memory or in a file. Both ends of the file.

The file has the arrays one after the other, a footer in JSON, its checksum and length, and `MAGIC`. Values take the
narrowest type that holds all: ids a byte or two where few are distinct, numbers float32 where that is exact.
N = rows, V = values: one a row, or the entries of lists
"""

from __future__ import annotations

import ctypes
import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import xxhash
from numpy.typing import NDArray

from shardkeep.base.arrays import Floats, Int32s, Ints
from shardkeep.workers.data.batch import Values
from shardkeep.workers.data.columns.column_kernels import (
    code_ids,
    entry_places,
    list_sizes,
    take_coded,
)

FORMAT = 1
"""Of files and of what is stored in them: columns of another number are not read."""
MAGIC = b"shardcol"
MAX_CODED = 1 << 16
"""Distinct ids of a column that is stored as places of a dictionary."""
_ALIGNMENT, _BLOCK = 64, 1 << 20
Kind = Literal["ids", "numbers", "rows"]


@dataclass(frozen=True, eq=False)
class StoredColumn:
    """Values of all rows.

    Attributes:
        values: uint8 or uint16 (V,), places in `dictionary`; int64 (V,) ids; or numbers, uint8, float32 or float64 of
            shape (V,) or (N, W); nan = missing.
        dictionary: int64, the distinct ids; None = values are no places.
        offsets: int32 or int64 (N + 1,), where the entries of each row begin; None = one value a row.
        weights: float32 (V,), one for each entry.
        facts: What reading the column found, as JSON types.
        checksum: xxh3 of the arrays, 128 bits, as hex; "" in memory.
    """

    values: NDArray[Any]
    dictionary: Ints | None = None
    offsets: NDArray[Any] | None = None
    weights: Floats | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    checksum: str = ""

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    @property
    def num_bytes(self) -> int:
        """Of all arrays."""
        return sum(part.nbytes for part in self._arrays().values())

    def ids(self, places_B: Ints) -> Ints:
        """The ids at some places of `values`, int64 (B,), a fresh array."""
        if self.dictionary is None:
            return self.values[places_B]
        out_B = np.empty(len(places_B), np.int64)
        take_coded(self.values, self.dictionary, places_B, out_B)
        return out_B

    def entries(self, rows_B: Ints, kept: int) -> tuple[Ints, Int32s]:
        """The places in `values` of the entries of rows, and how many each row has. The last `kept` of each row count,
        or below 0 the first `-kept`, from the last of them to the first."""
        assert self.offsets is not None
        lengths_B = np.empty(len(rows_B), np.int32)
        places_V = np.empty(list_sizes(self.offsets, rows_B, abs(kept), lengths_B), np.int64)
        entry_places(self.offsets, rows_B, kept, places_V)
        return places_V, lengths_B

    def check(self) -> None:
        """Raises ValueError where the kernels, which check nothing, would read outside of an array."""
        if self.dictionary is not None and self.values.size and self.values.max() >= len(self.dictionary):
            raise ValueError("a place is outside of the dictionary")
        at = self.offsets
        if at is not None and (not at.size or at[0] or at[-1] != len(self.values) or (at[1:] < at[:-1]).any()):
            raise ValueError("the offsets of the lists go back or lead out of the values")
        if self.weights is not None and len(self.weights) != len(self.values):
            raise ValueError("there are other weights than entries")

    @property
    def content(self) -> str:
        """The checksum, which is equal for equal values; made where the column is in memory."""
        return self.checksum or _checksum(self._arrays())

    def _arrays(self) -> dict[str, NDArray[Any]]:
        named = ("values", "dictionary", "offsets", "weights")
        return {name: part for name in named if (part := getattr(self, name)) is not None}

    @classmethod
    def open(cls, path: Path) -> StoredColumn:
        """Maps a file. Raises OSError, and ValueError where its footer does not fit the file."""
        content = memoryview(_mapped(path))
        size = len(content)
        try:
            end = size - 24 - int.from_bytes(content[-16:-8], "little")
            if bytes(content[-8:]) != MAGIC or end < 0:
                raise ValueError("is no column")
            if xxhash.xxh3_64_digest(content[end:-24]) != bytes(content[-24:-16]):
                raise ValueError("its footer is damaged")
            footer = json.loads(bytes(content[end:-24]))
            parts = {}
            for name, (kind, shape, start) in footer["arrays"].items():
                count = int(np.prod(shape))
                if start + count * np.dtype(kind).itemsize > end:
                    raise ValueError("is shorter than its columns")
                parts[name] = np.frombuffer(content, kind, count, start).reshape(shape)
            return cls(**parts, facts=footer["facts"], checksum=footer["checksum"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path}: {error}") from error

    def verify(self) -> None:
        """Reads all of it. Raises ValueError where it is not what was written."""
        if self.checksum and _checksum(self._arrays()) != self.checksum:
            raise ValueError("its checksum differs")
        self.check()


def _checksum(arrays: Mapping[str, NDArray[Any]]) -> str:
    found = xxhash.xxh3_128()
    for name, part in sorted(arrays.items()):
        found.update(f"{name} {part.dtype.str} {part.shape};".encode())
        found.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


class _Stream:
    """Values of a type that gets wider as they need it, in a file or in memory. Keeps no file open: a table may have
    more columns than a process may open files."""

    def __init__(self, path: Path | None, dtype: type[Any]) -> None:
        self._path, self._parts, self.dtype = path, list[NDArray[Any]](), np.dtype(dtype)
        if path is not None:
            path.write_bytes(b"")

    def add(self, values_V: NDArray[Any]) -> None:
        values_V = np.ascontiguousarray(values_V, self.dtype)
        if self._path is None:
            self._parts.append(values_V)
        elif values_V.size:
            with self._path.open("ab") as file:
                file.write(values_V.data)

    def widen(self, dtype: type[Any], dictionary: Ints | None = None) -> None:
        """Stores all values in another type; with `dictionary` places become ids."""
        before, self.dtype = self.array(), np.dtype(dtype)
        self._parts = []
        if self._path is not None:
            self._path.unlink()  # it stays mapped
            self._path.write_bytes(b"")
        for start in range(0, len(before), _BLOCK):
            block = before[start : start + _BLOCK]
            self.add(block if dictionary is None else dictionary[block])

    def array(self) -> NDArray[Any]:
        """All values; those of a file are mapped."""
        if self._path is None:
            return np.concatenate([np.empty(0, self.dtype), *self._parts]).astype(self.dtype, copy=False)
        return np.frombuffer(_mapped(self._path), self.dtype)


def advise(part: NDArray[Any], advice: int = mmap.MADV_WILLNEED) -> None:
    """Advises the system how a part of a mapped file will be read; of no effect in memory."""
    page, skip = divmod(part.ctypes.data, mmap.PAGESIZE)
    ctypes.CDLL(None).madvise(ctypes.c_void_p(page * mmap.PAGESIZE), ctypes.c_size_t(part.nbytes + skip), advice)


def _mapped(path: Path) -> Any:
    """The content of a file, which needs it open no longer. Raises OSError."""
    if not path.stat().st_size:
        return b""
    with pa.memory_map(str(path)) as file:
        return file.read_buffer()


class _Codes:
    """Distinct ids in the order in which they come, and the place of each."""

    def __init__(self) -> None:
        self._codes_K, self._ids_D, self._count = np.empty(0, np.int32), np.empty(0, np.int64), 0
        self._grow()

    @property
    def ids(self) -> Ints:
        """The distinct ids."""
        return self._ids_D[: self._count]

    def of(self, ids_N: Ints) -> NDArray[np.int32] | None:
        """The place of each id; None = there are more than `MAX_CODED`, and `ids` are those of before."""
        codes_N, before, at = np.empty(len(ids_N), np.int32), self._count, 0
        while (found := code_ids(ids_N, at, self._codes_K, self._ids_D, self._count, codes_N)) < 0:
            at, self._count = -1 - found, len(self._ids_D)
            if self._count >= MAX_CODED:
                self._count = before
                return None
            self._grow()
        self._count = found
        return codes_N

    def _grow(self) -> None:
        ids, size = self.ids, max(256, 16 * len(self._ids_D))
        self._codes_K, self._ids_D = np.full(4 * size, -1, np.int32), np.empty(size, np.int64)
        code_ids(ids, 0, self._codes_K, self._ids_D, 0, np.empty(len(ids), np.int32))


class ColumnWriter:
    """Stores ids, numbers or numbers of rows chunk by chunk: in a file that takes its name when it is complete, or,
    without a path, in memory. Holds a chunk, and up to `MAX_CODED` ids.

    Args:
        width: Numbers of a row; None = one value a row, or lists.
    """

    def __init__(self, kind: Kind, path: Path | None = None, *, width: int | None = None) -> None:
        self._kind, self._path, self._width = kind, path, width
        self._codes = _Codes() if kind == "ids" else None
        self._streams: dict[str, _Stream] = {}
        self._end = 0
        self._stream("values", np.int32 if kind == "rows" else np.uint8)

    def add(self, values: Values) -> None:
        """Appends rows. Raises OSError."""
        self._add_values(values.values_V)
        if values.lengths_N is not None:
            fresh = "offsets" not in self._streams
            offsets = self._stream("offsets", np.int32)
            offsets_N = self._end + np.cumsum(values.lengths_N, dtype=np.int64)
            self._end += len(values.values_V)
            if self._end >= 1 << 31 and offsets.dtype == np.int32:
                offsets.widen(np.int64)
            offsets.add(np.append(0, offsets_N) if fresh else offsets_N)
        if values.weights_V is not None:
            self._stream("weights", np.float32).add(values.weights_V)

    def close(self, facts: Mapping[str, Any]) -> StoredColumn:
        """Completes the column. Raises OSError."""
        arrays: dict[str, Any] = {name: stream.array() for name, stream in self._streams.items()}
        if self._width is not None:
            arrays["values"] = arrays["values"].reshape(-1, self._width)
        if self._codes is not None:
            arrays["dictionary"] = self._codes.ids
        if self._path is None:
            return StoredColumn(**arrays, facts=facts)
        partial = self._name("values")
        with partial.open("ab") as file:
            places = {name: self._append(file, part) if name != "values" else 0 for name, part in arrays.items()}
            described = {name: [part.dtype.str, part.shape, places[name]] for name, part in arrays.items()}
            footer = json.dumps({"arrays": described, "facts": facts, "checksum": _checksum(arrays)}).encode()
            file.write(footer + xxhash.xxh3_64_digest(footer) + len(footer).to_bytes(8, "little") + MAGIC)
        partial.replace(self._path)
        self.discard()
        return StoredColumn.open(self._path)

    def discard(self) -> None:
        """Removes the parts of a file."""
        for name in self._streams if self._path is not None else ():
            self._name(name).unlink(missing_ok=True)

    def _append(self, file: BinaryIO, part: NDArray[Any]) -> int:
        file.write(bytes(-file.tell() % _ALIGNMENT))
        start = file.tell()
        file.write(np.ascontiguousarray(part).data if part.size else b"")
        return start

    def _add_values(self, values_V: NDArray[Any]) -> None:
        stream = self._streams["values"]
        if self._kind == "numbers":
            values_V = values_V.reshape(-1)
            while stream.dtype != np.float64 and not _fits(values_V, stream.dtype):
                stream.widen(np.float32 if stream.dtype == np.uint8 else np.float64)
        elif self._kind == "rows":
            if stream.dtype == np.int32 and len(values_V) and values_V.max() >= 1 << 31:
                stream.widen(np.int64)
        elif self._codes is not None and (codes_V := self._codes.of(values_V)) is not None:
            if stream.dtype == np.uint8 and len(self._codes.ids) > 256:
                stream.widen(np.uint16)
            values_V = codes_V
        elif self._codes is not None:
            stream.widen(np.int64, self._codes.ids)
            self._codes = None
        stream.add(values_V)

    def _stream(self, name: str, dtype: type[Any] = np.uint8) -> _Stream:
        if name not in self._streams:
            self._streams[name] = _Stream(None if self._path is None else self._name(name), dtype)
        return self._streams[name]

    def _name(self, part: str) -> Path:
        assert self._path is not None
        return self._path.with_name(f".{self._path.name}.{part}.partial")


def _fits(values_V: NDArray[Any], dtype: np.dtype[Any]) -> bool:
    """Whether a type holds all numbers exactly."""
    if dtype == np.uint8:
        return bool((((values_V == 0.0) & ~np.signbit(values_V)) | (values_V == 1.0)).all())
    with np.errstate(over="ignore"):
        return bool(((values_V.astype(dtype) == values_V) | np.isnan(values_V)).all())
