"""Categories: values of any type to ids, by the kind of their column and the table of forms in rules.py.

N = values
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from shardkeep.base.arrays import Float64s, Ints
from shardkeep.base.errors import ConfigError, DataError
from shardkeep.workers.data.conversion import times
from shardkeep.workers.data.conversion.chunk import Column, shown_text
from shardkeep.workers.data.conversion.decoding import spans
from shardkeep.workers.data.conversion.hashing import MISSING_ID, Spellings, hash_texts
from shardkeep.workers.data.conversion.rules import ReadingRules, canonical_texts, is_list, is_number, is_text

Kind = Literal["texts", "numbers", "times"]
"""What a column of ids held in training."""
FLOAT_DIGITS = {16: 11, 32: 24, 64: 53}  # bits of a float type -> binary digits it holds


def decode_ids(column: Column, kind: Kind | None, rules: ReadingRules, spellings: Spellings | None = None) -> Ints:
    """A category as int64_N: of numbers the number, of times the microseconds since 1970, of texts a hash.

    Values of another type are read as `kind`: 7 means the text 7 where training saw texts. Missing is an id of its own.
    Raises DataError for what cannot be one.
    """
    values = column.values
    if is_list(values.type):
        raise column.wrong_type("one value per row, as in the rows before")
    if pa.types.is_null(values.type) or kind is None:
        return np.full(len(values), MISSING_ID, np.int64)
    if kind == "texts":
        return hash_texts(_as_texts(column, rules), spellings=spellings)
    if kind == "times":
        micros = times.micros(column, rules, exact=True)
        return np.where(np.array(micros.is_valid()), np.array(pc.fill_null(micros, 0)), MISSING_ID)
    values = _parsed(column, rules.texts(values)) if is_text(values.type) else rules.numbers(values)
    ids_N = _whole(column, values)
    ids_N[np.array(values.is_null())] = MISSING_ID
    return ids_N


def pad_ids(column: Column, kind: Kind | None, pads: Sequence[str], rules: ReadingRules) -> Ints:
    """The ids of `pads` in a column. Raises ConfigError for one that it cannot hold."""
    if not pads or kind is None:
        return np.empty(0, np.int64)
    try:
        return decode_ids(Column("", np.arange(len(pads)), "", pa.array(pads), column.decimal), kind, rules)
    except DataError as error:
        why = f"pad: {', '.join(pads)} is no value of {column.name}, a column of {kind}"
        raise ConfigError(f"data: {why}") from error


def named_ids(column: Column, kind: Kind | None, rules: ReadingRules) -> tuple[Ints, pa.Array]:
    """The ids of a column, and the value that names each: its canonical text, or an integer."""
    ids_N = decode_ids(column, kind, rules)
    if kind == "texts":
        return ids_N, canonical_texts(_as_texts(column, rules))
    if kind == "times":
        return ids_N, column.values.cast(pa.large_string())
    return ids_N, pa.array(ids_N.view(np.uint64) if pa.types.is_uint64(column.values.type) else ids_N)


def _as_texts(column: Column, rules: ReadingRules) -> pa.Array:
    """The values as texts, missing ones null; floats and decimals as whole numbers."""
    values, kind = column.values, column.values.type
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):  # pandas makes floats of whole numbers with a gap
        values = rules.numbers(values)
        values = pa.array(_whole(column, values), mask=np.array(values.is_null()))
    elif pa.types.is_timestamp(kind):
        raise column.wrong_type("texts, as in training: the same time has many texts")
    elif not (is_text(kind) or is_number(kind) or pa.types.is_date(kind)):
        raise column.wrong_type("texts, as in training")
    return rules.texts(values)


def _parsed(column: Column, texts: pa.Array) -> pa.Array:
    """Texts as whole numbers, for a model that was trained on numbers."""
    texts = canonical_texts(texts)
    for kind in (pa.int64(), pa.uint64()):
        try:
            return texts.cast(kind)
        except pa.ArrowInvalid:
            continue
    written = enumerate(texts.cast(pa.binary()).to_pylist())
    whole = re.compile(rb"-?[0-9]{1,18}")
    index, text = next((i, text) for i, text in written if text is not None and not whole.fullmatch(text))
    raise column.error(index, f"{shown_text(text)} is no whole number of 64 bits, and this column holds numbers")


def _whole(column: Column, values: pa.Array) -> Ints:
    """Whole numbers of any Arrow type as int64 (uint64 keeps its bits); nulls become 0."""
    kind = values.type
    if pa.types.is_floating(kind):
        numbers_N = np.array(values.cast(pa.float64()).fill_null(0.0), np.float64)
        return _from_floats(column, numbers_N, exact=float(2 ** FLOAT_DIGITS[kind.bit_width]))
    if pa.types.is_uint64(kind):
        return np.array(pc.fill_null(values, 0), np.uint64).view(np.int64)
    if pa.types.is_decimal(kind):
        values = _parsed(column, values.cast(pa.large_string()))
    elif pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
        values = spans(column)
    elif not is_number(kind):
        raise column.wrong_type("whole numbers, texts, or lists of them")
    return np.array(pc.fill_null(values.cast(pa.int64()), 0), np.int64)


def _from_floats(column: Column, numbers_N: Float64s, exact: float) -> Ints:
    """`exact`: up to here, and not beyond, the column's type holds every whole number."""

    def problem(index: int) -> str:
        number = numbers_N[index]
        if number == np.floor(number) and np.isfinite(number):
            return f"{number:.0f} has lost digits as {column.values.type}; store the column as int64 or text"
        return f"{number:g} is not a whole number; a category is a text or a whole number"

    column.check((numbers_N != np.floor(numbers_N)) | (np.abs(numbers_N) > exact), problem)
    return numbers_N.astype(np.int64)
