"""Chunk and Column: some rows of an input as Arrow arrays, which know their file and rows for every error.

N = rows of the chunk
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from numpy.typing import NDArray

from shardkeep.base.arrays import Ints
from shardkeep.base.errors import DataError
from shardkeep.workers.data.conversion.rules import is_list

MOST_ROWS = 1 << 16
"""What bounds the memory of a conversion."""
_VIEWS = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}


@dataclass(frozen=True)
class Chunk:
    """Some rows of one file as Arrow arrays, each of length N; rows_N: int64 numbers of the data rows, from 1.

    `decimal` is the decimal point of numbers that are texts.
    """

    path: str
    rows_N: Ints
    columns: Mapping[str, pa.Array]
    decimal: str = "."

    def __len__(self) -> int:
        return len(self.rows_N)

    @property
    def schema(self) -> pa.Schema:
        """The types of the columns."""
        return pa.schema({name: values.type for name, values in self.columns.items()})

    def column(self, name: str) -> Column:
        """The column called `name`. Raises DataError, naming the nearest, where there is none."""
        if name not in self.columns:
            raise missing_column(self.path, name, list(self.columns))
        return Column(self.path, self.rows_N, name, self.columns[name], self.decimal)

    def filter(self, keep_N: NDArray[np.bool_]) -> Chunk:
        """The rows where `keep_N` is true; itself where that is all of them."""
        if keep_N.all():
            return self
        mask = pa.array(keep_N)
        return self._map(self.rows_N[keep_N], lambda values: values.filter(mask))

    def slice(self, start: int, stop: int) -> Chunk:
        """The chunk's rows [start, stop), counted from 0."""
        return self._map(self.rows_N[start:stop], lambda values: values.slice(start, stop - start))

    def parts(self) -> Iterator[Chunk]:
        """The same rows in chunks of at most `MOST_ROWS`."""
        for start in range(0, len(self), MOST_ROWS):
            yield self.slice(start, min(start + MOST_ROWS, len(self)))

    def _map(self, rows_N: Ints, part: Callable[[pa.Array], pa.Array]) -> Chunk:
        return Chunk(self.path, rows_N, {k: part(v) for k, v in self.columns.items()}, self.decimal)


@dataclass(frozen=True)
class Column:
    """One column of a chunk, and the number of the row that each value is in."""

    path: str
    rows_N: Ints
    name: str
    values: pa.Array
    decimal: str = "."

    def error(self, index: int, problem: str) -> DataError:
        """`problem` with its place in front; `index` is that of the value."""
        return DataError(f"{self.path}, row {self.rows_N[index]}, column {self.name}: {problem}")

    def check(self, wrong_N: NDArray[np.bool_], problem: str | Callable[[int], str]) -> None:
        """Raises DataError for the first value that is wrong. `problem`: what is wrong, or says it of an index."""
        if wrong_N.any():
            index = int(wrong_N.argmax())
            raise self.error(index, problem if isinstance(problem, str) else problem(index))

    def filter(self, keep_N: NDArray[np.bool_]) -> Column:
        """The values where `keep_N` is true."""
        return replace(self, rows_N=self.rows_N[keep_N], values=self.values.filter(pa.array(keep_N)))

    def entries(self, lists: pa.Array, lengths_N: Ints) -> Column:
        """The flattened entries of `lists`, a list array of this column. Raises DataError where they are structs."""
        if error := _struct_error(self.path, self.name, lists.type):
            raise error
        return Column(self.path, np.repeat(self.rows_N, lengths_N), self.name, lists.flatten(), self.decimal)

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Puts the column's name before what pyarrow says of its values."""
        try:
            yield
        except pa.ArrowException as error:
            why = str(error).splitlines()[0]
            raise DataError(f"{self.path}, column {self.name}: holds {self.values.type}: {why}") from error

    def wrong_type(self, allowed: str) -> DataError:
        """The column's type cannot be read as what it is used for."""
        kind = self.values.type
        error = DataError(f"{self.path}, column {self.name}: holds {kind}; allowed: {allowed}")
        return _struct_error(self.path, self.name, kind) or error


def check_columns(path: str, columns: Sequence[str], schema: pa.Schema, hint: str = "") -> None:
    """Raises DataError for a column that is not there, is there more than once, or is a field of a struct."""
    names = schema.names
    for name in columns:
        if (times := names.count(name)) > 1:
            raise DataError(
                f"{path}: {times} columns are called {name}; give each its own name (of a CSV by data.columns)"
            )
        if not times:
            owner = name.partition(".")[0]
            error = _struct_error(path, owner, schema.field(owner).type) if names.count(owner) == 1 else None
            raise error or missing_column(path, name, names, hint)


def _struct_error(path: str, name: str, kind: pa.DataType) -> DataError | None:
    """The error for a column of structs, or of lists of them; None for one of another type."""
    entry = kind.value_type if is_list(kind) else kind
    if not pa.types.is_struct(entry) or not entry.num_fields:
        return None
    what, way = "a struct", f"flatten it (pyarrow's table.flatten() makes columns such as {name}.{entry.field(0).name})"
    if is_list(kind):
        what, way = "a list of structs", "make a list column of each field"
    fields = ", ".join(entry.field(i).name for i in range(entry.num_fields))
    return DataError(f"{path}, column {name}: is {what} with the fields {fields}; {way}")


def missing_column(path: str, name: str, known: Sequence[str], hint: str = "") -> DataError:
    """The error for a column that the file does not have."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    nearest = f"did you mean {near[0]}? " if near else ""
    shown = ", ".join(_one_line(each) for each in known[:30]) + (", ..." if len(known) > 30 else "")
    return DataError(f"{path}: has no column {name}; {nearest}it has: {shown}{hint}")


def _one_line(name: str) -> str:
    """A column's name for a message: some have line ends, or are a whole file after a quote that is never closed."""
    name = name if name.isprintable() else repr(name)
    return name if len(name) <= 60 else name[:57] + "..."


def shown_text(text: Any) -> str:
    """Bytes in quotes for a message, in one line of at most 60 characters."""
    shown = repr(text.decode("utf-8", "replace"))
    return shown if len(shown) <= 60 else shown[:57] + "..."


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type of a column as `plain` returns it."""
    return plain(pa.chunked_array([], kind)).type


def plain(values: pa.Array | pa.ChunkedArray) -> pa.Array:
    """The same values in a type that pyarrow has all its functions for: no views, extensions, dictionaries or run ends,
    in lists neither. 16 bytes of a fixed size are a UUID, and become its text."""
    kind = values.type
    if isinstance(values, pa.ChunkedArray):
        return pa.concat_arrays(map(plain, values.chunks or [values.combine_chunks()]))
    if isinstance(kind, pa.BaseExtensionType):
        return plain(values.storage)
    if kind == pa.binary(16):
        return _uuid_texts(values)
    if pa.types.is_dictionary(kind):
        return plain(values.dictionary).take(values.indices)
    if pa.types.is_run_end_encoded(kind):
        run_N = np.searchsorted(values.run_ends, np.arange(len(values)) + values.offset, side="right")
        return plain(values.values).take(pa.array(run_N))
    if is_list(kind) and plain(values.values.slice(0, 0)).type == kind.value_type:
        return values
    if is_list(kind) or pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        lengths_N = np.where(values.is_valid(), pc.fill_null(pc.list_value_length(values), 0), 0)
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths_N)]), pa.int64())
        return pa.LargeListArray.from_arrays(offsets, plain(values.flatten()), mask=values.is_null())
    if pa.types.is_decimal32(kind) or pa.types.is_decimal64(kind):
        return values.cast(pa.decimal128(kind.precision, kind.scale))
    return values.cast(_VIEWS[kind]) if kind in _VIEWS else values


def _uuid_texts(values: pa.Array) -> pa.Array:
    """UUIDs of 16 bytes as lower-case texts with hyphens."""
    digits_N32 = np.frombuffer(b"".join(values.fill_null(bytes(16)).to_pylist()).hex().encode(), np.uint8).reshape(
        -1, 32
    )
    texts_N36 = np.insert(digits_N32, [8, 12, 16, 20], ord("-"), axis=1)
    texts = pa.Array.from_buffers(pa.binary(36), len(values), [None, pa.py_buffer(texts_N36.tobytes())])
    return pc.if_else(values.is_valid(), texts.cast(pa.binary()).cast(pa.string()), None)
