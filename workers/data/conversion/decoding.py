"""Raw columns of one chunk to numbers, ids and labels. Names file, row and column in every error.

N = rows of the chunk, V = ids of the chunk
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from numpy.typing import NDArray

from shardkeep.base.arrays import Float64s, Ints
from shardkeep.base.errors import DataError
from shardkeep.workers.data.conversion.hashing import MISSING_ID, hash_texts

FLOAT_DIGITS = {16: 11, 32: 24, 64: 53}  # bits of a float type -> binary digits it holds
COMMA_NUMBER = re.compile(rb"[+-]?[0-9]+,[0-9]+")


@dataclass(frozen=True)
class Chunk:
    """Some rows of one file as Arrow arrays, each of length N; rows_N: int64 numbers of the data rows, from 1.

    `dense` holds the dense columns where they have names of their own, apart from `columns`; `decimal` is the
    decimal point of numbers that are texts.
    """

    path: str
    rows_N: Ints
    columns: Mapping[str, pa.Array]
    dense: Mapping[str, pa.Array] | None = None
    decimal: str = "."

    def __len__(self) -> int:
        return len(self.rows_N)

    def column(self, name: str) -> Column:
        """The column called `name`. Raises DataError, naming the nearest, where there is none."""
        return self._column(name, self.columns)

    def dense_column(self, name: str) -> Column:
        """The dense column called `name`, likewise."""
        return self._column(name, self.columns if self.dense is None else self.dense)

    def filter(self, keep_N: NDArray[np.bool_]) -> Chunk:
        """The rows where `keep_N` is true; itself where that is all of them."""
        if keep_N.all():
            return self
        mask = pa.array(keep_N)
        return self._map(self.rows_N[keep_N], lambda values: values.filter(mask))

    def slice(self, start: int, stop: int) -> Chunk:
        """The chunk's rows [start, stop), counted from 0."""
        return self._map(self.rows_N[start:stop], lambda values: values.slice(start, stop - start))

    def _map(self, rows_N: Ints, part: Callable[[pa.Array], pa.Array]) -> Chunk:
        dense = None if self.dense is None else {k: part(v) for k, v in self.dense.items()}
        return Chunk(self.path, rows_N, {k: part(v) for k, v in self.columns.items()}, dense, self.decimal)

    def _column(self, name: str, columns: Mapping[str, pa.Array]) -> Column:
        if name not in columns:
            raise missing_column(self.path, name, list(columns))
        return Column(self.path, self.rows_N, name, columns[name], self.decimal)


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

    def entries(self, lists: pa.Array, lengths_N: Ints) -> Column:
        """The flattened entries of `lists`, a list array of this column."""
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
        return DataError(f"{self.path}, column {self.name}: holds {self.values.type}; allowed: {allowed}")


class MissingColumn(DataError):
    """A file has no column `name`."""

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text)
        self.name = name


def missing_column(path: str, name: str, known: Sequence[str], hint: str = "") -> MissingColumn:
    """The error for a column that the file does not have."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    nearest = f"did you mean {near[0]}? " if near else ""
    shown = ", ".join(_one_line(each) for each in known[:30]) + (", ..." if len(known) > 30 else "")
    return MissingColumn(f"{path}: has no column {name}; {nearest}it has: {shown}{hint}", name)


def clean_texts(values: pa.Array, missing: Sequence[str]) -> pa.Array:
    """Texts without the spaces around them; those in `missing` become null. Bytes need not be UTF-8."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    large = values.type in (pa.large_string(), pa.large_binary())
    if pa.types.is_binary(values.type) or large or not pa.types.is_string(values.type):
        target = pa.large_string() if large else pa.string()
        values = pc.cast(values, options=pc.CastOptions(target_type=target, allow_invalid_utf8=True))
    values = pc.ascii_trim_whitespace(values)
    if missing:
        values = pc.if_else(pc.is_in(values, value_set=pa.array(missing, values.type)), None, values)
    return values


def decode_numbers(column: Column, missing: Sequence[str]) -> Float64s:
    """A dense column as float64_N; missing is nan. Infinite numbers are refused."""
    kind = column.values.type
    if is_text(kind):
        numbers = _parse(column, clean_texts(column.values, missing))
    elif pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
        numbers = column.values.cast(_storage(kind)).cast(pa.float64(), safe=False)
    elif is_number(kind):
        numbers = column.values.cast(pa.float64(), safe=False)
    elif pa.types.is_null(kind):
        numbers = column.values.cast(pa.float64())
    else:
        raise column.wrong_type("numbers, or texts that are numbers")
    found_N = np.array(pc.fill_null(numbers, float("nan")), np.float64)
    if marks := numbers_of(missing):
        found_N[np.isin(found_N, marks)] = np.nan
    infinite = np.isinf(found_N)
    if infinite.any():
        raise column.error(int(infinite.argmax()), "is infinite; allowed: finite numbers")
    return found_N


def decode_times(column: Column, missing: Sequence[str]) -> Float64s:
    """A column of times as float64_N: numbers as they are, dates and times as seconds since 1970; missing is nan."""
    kind = column.values.type
    if not (pa.types.is_timestamp(kind) or pa.types.is_date(kind)):
        return decode_numbers(column, missing)
    zone = kind.tz if pa.types.is_timestamp(kind) else None
    micros = column.values.cast(pa.timestamp("us", zone), safe=False).cast(pa.int64()).cast(pa.float64(), safe=False)
    return np.array(pc.fill_null(micros, float("nan")), np.float64) / 1e6


def decode_ids(column: Column, missing: Sequence[str]) -> Ints:
    """A single-valued category as int64_N: whole numbers are the ids, texts are hashed, missing is its own id."""
    values = column.values
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    kind = values.type
    if is_list(kind):
        raise column.wrong_type("one value per row, as in the rows before")
    if pa.types.is_null(kind):
        return np.full(len(values), MISSING_ID, np.int64)
    if is_text(kind):
        return hash_texts(clean_texts(values, missing))
    valid_N = np.array(values.is_valid())
    ids_N = _whole(column, values)
    if marks := [int(m) for m in numbers_of(missing) if m.is_integer() and abs(m) < 2.0**63]:
        valid_N &= ~np.isin(ids_N, marks)
    ids_N[~valid_N] = MISSING_ID
    return ids_N


def is_list(kind: pa.DataType) -> bool:
    """Whether a column of this type has several values a row."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def as_lists(column: Column, missing: Sequence[str], separator: str | None) -> pa.Array:
    """The column as list<...>: list columns as they are, texts cut at `separator`, else one entry each.

    A missing field is an empty list.
    """
    values = column.values
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    kind = values.type
    if is_list(kind):
        return values.cast(pa.list_(kind.value_type))
    if is_text(kind):
        values = clean_texts(values, missing)
        if separator is not None:
            return pc.split_pattern(values, separator).cast(pa.list_(values.type))
    elif separator is not None:
        raise column.wrong_type(f"texts with {separator!r} between the ids, or a list column without separator")
    lengths_N = np.array(values.is_valid()).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths_N)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), values.drop_null())


def list_lengths(lists: pa.Array) -> Ints:
    """Entries per row; a null list has none."""
    return np.array(pc.fill_null(pc.list_value_length(lists), 0), np.int64)


def present(entries: pa.Array, missing: Sequence[str]) -> NDArray[np.bool_]:
    """Which entries of the flattened lists are not missing."""
    if is_text(entries.type):
        return np.array(clean_texts(entries, missing).is_valid())
    present_N = np.array(entries.is_valid())
    if is_number(entries.type):
        numbers_N = np.array(entries.cast(pa.float64(), safe=False).fill_null(np.nan), np.float64)
        present_N = ~np.isnan(numbers_N)
        if marks := numbers_of(missing):
            present_N &= ~np.isin(numbers_N, marks)
    return present_N


def _parse(column: Column, texts: pa.Array) -> pa.Array:
    if column.decimal != ".":
        texts = pc.replace_substring(texts, column.decimal, ".", max_replacements=1)
    try:
        return texts.cast(pa.float64())
    except pa.ArrowInvalid as error:
        words = _as_truth(texts)
        if words is None:
            words = _as_dates(texts)
        if words is not None:
            return words
        for index, text in enumerate(texts.cast(pa.binary()).to_pylist()):
            if text is not None and not _parses(text):
                hint = "; see data.decimal" if COMMA_NUMBER.fullmatch(text) else ""
                shown = f"{shown_text(text)} is not a number; allowed: numbers, or data.missing{hint}"
                raise column.error(index, shown) from error
        raise


def _as_truth(texts: pa.Array) -> pa.Array | None:
    """true and false in any case as 1 and 0; None where there is anything else but numbers."""
    lower = pc.ascii_lower(texts)
    texts = pc.if_else(pc.equal(lower, "true"), "1", pc.if_else(pc.equal(lower, "false"), "0", texts))
    try:
        return texts.cast(pa.float64())
    except pa.ArrowInvalid:
        return None


def _as_dates(texts: pa.Array) -> pa.Array | None:
    """Dates and times of ISO 8601 as seconds since 1970; None where there is anything else."""
    for kind in (pa.timestamp("us"), pa.timestamp("us", "UTC")):
        try:
            return pc.divide(texts.cast(kind).cast(pa.int64()).cast(pa.float64(), safe=False), 1e6)
        except pa.ArrowInvalid:
            continue
    return None


def _parses(text: bytes) -> bool:
    try:
        pa.array([text.decode("utf-8")]).cast(pa.float64())
    except (pa.ArrowInvalid, UnicodeDecodeError):
        return False
    return True


def numbers_of(texts: Sequence[str]) -> list[float]:
    """The finite numbers among `texts`."""
    found = []
    for text in texts:
        try:
            found.append(float(text))
        except ValueError:
            continue
    return [number for number in found if np.isfinite(number)]


def _whole(column: Column, values: pa.Array) -> Ints:
    """Whole numbers of any Arrow type as int64 (uint64 keeps its bits); nulls become 0."""
    kind = values.type
    if pa.types.is_floating(kind):
        found_N = np.array(values.cast(pa.float64()).fill_null(0.0), np.float64)
        return _from_floats(column, found_N, exact=float(2 ** FLOAT_DIGITS[kind.bit_width]))
    if pa.types.is_uint64(kind):
        return np.array(pc.fill_null(values, 0), np.uint64).view(np.int64)
    if pa.types.is_decimal(kind):
        return _from_decimals(column, values)
    if pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
        values = values.cast(_storage(kind))
    elif not (pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        raise column.wrong_type("whole numbers, texts, or lists of them")
    return np.array(pc.fill_null(values.cast(pa.int64()), 0), np.int64)


def _from_floats(column: Column, found_N: Float64s, exact: float) -> Ints:
    """`exact`: up to here, and not beyond, the column's type holds every whole number."""
    missing_N = np.isnan(found_N)
    wrong_N = ~missing_N & ((found_N != np.floor(found_N)) | (np.abs(found_N) > exact))
    if wrong_N.any():
        index = int(wrong_N.argmax())
        number = found_N[index]
        if number == np.floor(number) and np.isfinite(number):
            why = f"{number:.0f} has lost digits as {column.values.type}; store the column as int64 or text"
            raise column.error(index, why)
        raise column.error(index, f"{number:g} is not a whole number; a category is a text or a whole number")
    ids_N = np.where(missing_N, 0.0, found_N).astype(np.int64)
    ids_N[missing_N] = MISSING_ID
    return ids_N


def _from_decimals(column: Column, values: pa.Array) -> Ints:
    """Decimals keep all their digits as int64, or are refused."""
    try:
        return np.array(pc.fill_null(values.cast(pa.int64()), 0), np.int64)
    except pa.ArrowInvalid:
        for index, number in enumerate(values.to_pylist()):
            if number is None:
                continue
            if number != number.to_integral_value():
                why = f"{number} is not a whole number; a category is a text or a whole number"
                raise column.error(index, why) from None
            if not -(2**63) <= number < 2**63:
                raise column.error(index, f"{number} is beyond 64 bits; store the column as text") from None
        raise


def _storage(kind: pa.DataType) -> pa.DataType:
    return pa.int32() if kind.bit_width == 32 else pa.int64()


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this type holds texts or bytes, maybe dictionary-encoded."""
    if pa.types.is_dictionary(kind):
        return is_text(kind.value_type)
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    )


def kind_of(kind: pa.DataType) -> str | None:
    """Whether a column of this type, or of lists of it, holds texts or numbers; None where it holds nothing at all."""
    while is_list(kind) or pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_null(kind):
        return None
    return "texts" if is_text(kind) else "numbers"


def is_empty(values: pa.Array) -> bool:
    """Whether all values are null or NaN: such a column often has a numeric type without meaning it."""
    if values.null_count == len(values):
        return True
    return pa.types.is_floating(values.type) and bool(np.isnan(values.to_numpy(zero_copy_only=False)).all())


def is_number(kind: pa.DataType) -> bool:
    """Whether a column of this type holds numbers or truth values."""
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_decimal(kind)
    )


def _one_line(name: str) -> str:
    """A column's name for a message: some have line ends, or are a whole file after a quote that is never closed."""
    name = name if name.isprintable() else repr(name)
    return name if len(name) <= 60 else name[:57] + "..."


def shown_text(text: Any) -> str:
    """Bytes in quotes for a message, in one line of at most 60 characters."""
    shown = repr(text.decode("utf-8", "replace"))
    return shown if len(shown) <= 60 else shown[:57] + "..."
