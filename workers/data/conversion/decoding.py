"""Raw columns of one chunk to numbers and lists. Names file, row and column in every error.

N = rows of the chunk, V = ids of the chunk
"""

from __future__ import annotations

import bisect
import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from numpy.typing import NDArray

from shardkeep.base.arrays import Float64s, Ints
from shardkeep.workers.data.conversion import times
from shardkeep.workers.data.conversion.chunk import Column, shown_text
from shardkeep.workers.data.conversion.rules import (
    ReadingRules,
    canonical_texts,
    is_list,
    is_number,
    is_text,
    is_time,
    number_of,
)

_CODES = rb"(?<![A-Za-z])(?:EUR|Euro|USD|GBP|CHF|JPY|CNY|PLN|SEK|INR|BRL)(?![A-Za-z])"
CURRENCY = re.compile(rb"\$|\xe2\x82\xac|\xc2[\xa3\xa5]|(?<![\x80-\x9f\xa1-\xff])[\x80\xa3-\xa5]|" + _CODES)
_SPACES = r"(?:\s|\xc2?\xa0|\xe2\x80\xaf)*"
VECTORS = "; of a list of N numbers, each a dense input: {column: NAME, width: N}"
_BRACKETS = re.compile(rb"\[(.*)\]|\{(.*)\}|\(([^()]*)\)", re.DOTALL)
_WORD = re.compile(rb"\[([^\s'\"\[\]{},;|]+)\]")
_NULLS = (b"None", b"NULL", b"null")
_ESCAPE = re.compile(rb"\\(.)")


def decode_numbers(column: Column, rules: ReadingRules) -> Float64s:
    """A column of numbers as float64_N; missing is nan. A duration or a time of the day is in seconds. Infinite numbers
    are refused, and dates: they are a column of times."""
    kind = column.values.type
    if is_text(kind):
        numbers = rules.numbers(_parse(column, rules))
    elif pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
        numbers = rules.numbers(pc.divide(spans(column).cast(pa.float64(), safe=False), 1e6))
    elif is_number(kind):
        numbers = rules.numbers(column.values)
        if pa.types.is_decimal(kind):
            numbers = numbers.cast(pa.string())  # Arrow's cast is wrong in the last bit of some
        numbers = numbers.cast(pa.float64(), safe=False)
    elif pa.types.is_null(kind):
        numbers = column.values.cast(pa.float64())
    else:
        raise column.wrong_type(f"numbers, or texts that are numbers{VECTORS if is_list(kind) else ''}")
    numbers_N = np.array(pc.fill_null(numbers, float("nan")), np.float64)
    infinite = "is infinite; allowed: finite numbers, or inf and -inf in data.missing"
    column.check(np.isinf(numbers_N), infinite)
    return numbers_N


def spans(column: Column) -> pa.Array:
    """Durations and times of the day as int64 microseconds. Raises DataError for dates."""
    kind = column.values.type
    if is_time(kind):
        raise column.wrong_type("numbers, as in the rows before")
    to = pa.duration("us") if pa.types.is_duration(kind) else pa.time64("us")
    return column.values.cast(to, safe=False).cast(pa.int64())


def decode_vectors(column: Column, rules: ReadingRules, width: int) -> Float64s:
    """A column of lists of `width` numbers as float64 (N, width), contiguous by column; an entry that is missing, and
    all of a list that is missing or empty, is nan. Texts are cut at commas, semicolons, bars and spaces."""
    values = column.values
    if is_text(values.type):
        texts = pc.ascii_trim(rules.texts(values), characters="[](){} \n")
        texts = pc.if_else(pc.equal(texts, ""), None, texts)
        lists = pc.split_pattern_regex(texts, rf"\s*[{'' if column.decimal == ',' else ','};|]\s*|\s+")
    elif is_list(values.type) or pa.types.is_null(values.type):
        lists = values.cast(pa.list_(values.type.value_type if is_list(values.type) else pa.float64()))
    else:
        raise column.wrong_type(f"lists of {width} numbers, or texts of such lists")
    lengths_N = list_lengths(lists)
    column.check(
        (lengths_N != width) & (lengths_N != 0),
        lambda index: f"has {lengths_N[index]} numbers; allowed: {width}, the column's width",
    )
    vectors_NW = np.full((len(values), width), np.nan, order="F")
    vectors_NW[lengths_N > 0] = decode_numbers(column.entries(lists, lengths_N), rules).reshape(-1, width)
    return vectors_NW


def holds_times(column: Column, rules: ReadingRules) -> bool | None:
    """Whether a dense column holds times, not numbers; None = it holds nothing. Texts go by the first one."""
    present = replace(rules).texts(column.values) if is_text(column.values.type) else column.values
    present = pc.drop_null(present).slice(0, 1)
    if not len(present):
        return None
    if is_text(present.type):
        return _numbers_of_texts(present) is None and times.parse(present, rules.time_format) is not None
    return is_time(present.type)


def in_brackets(column: Column, rules: ReadingRules, separator: str | None) -> bool | None:
    """Whether texts are lists in brackets, as Python, JSON and databases write them; None = there is no text."""
    if separator is None or not is_text(column.values.type):
        return None
    texts = replace(rules).texts(column.values)
    if texts.null_count == len(texts):
        return None
    return next(_bracketed(texts, separator), None) is not None


def as_lists(
    column: Column, rules: ReadingRules, separator: str | None, *, brackets: bool = False, single: bool = True
) -> pa.Array:
    """The column as list<...>: list columns as they are, texts cut at `separator`, else one entry each.

    A missing field is an empty list. `single`: texts without a separator may be one entry each. `brackets`: all texts
    are lists in brackets, or none is. Raises DataError.
    """
    values = column.values
    kind = values.type
    if is_list(kind):
        return values.cast(pa.list_(kind.value_type))
    if pa.types.is_null(kind):
        return pa.nulls(len(values), pa.list_(kind))
    if is_text(kind):
        values = rules.texts(values)
        if separator is not None:
            if brackets:
                return _cut_brackets(column, values, separator)
            for index in _bracketed(values, separator):
                text = shown_text(values.cast(pa.binary())[index].as_py())
                raise column.error(
                    index, f"{text} is a list in brackets, the rows before are none; write all in one way"
                )
            return pc.split_pattern(values, separator).cast(pa.list_(values.type))
        if not single:
            raise column.wrong_type("lists, as in training; texts of several values need a separator there")
    elif separator is not None:
        raise column.wrong_type(f"texts with {separator!r} between the ids, or a list column without separator")
    lengths_N = np.array(values.is_valid()).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths_N)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), values.drop_null())


def list_lengths(lists: pa.Array) -> Ints:
    """Entries per row; a null list has none."""
    return np.array(pc.fill_null(pc.list_value_length(lists), 0), np.int64)


def count_kept(lengths_N: Ints, kept_V: NDArray[np.bool_]) -> Ints:
    """How many entries of each list are kept, of lists of these lengths."""
    return np.bincount(np.repeat(np.arange(len(lengths_N)), lengths_N)[kept_V], minlength=len(lengths_N))


def _bracketed(texts: pa.Array, separator: str) -> Iterator[int]:
    """The rows that are lists in brackets: `[18, 25]`, `{a,NULL}`."""
    if pc.any(pc.match_substring_regex(texts, r"^[\[({]")).as_py():
        for index, field in enumerate(texts.cast(pa.binary()).to_pylist()):
            if _inner(field, separator) is not None and not _is_words(field, separator):
                yield index


def _cut_brackets(column: Column, texts: pa.Array, separator: str) -> pa.Array:
    entry, rows = _entry(separator), []
    for index, field in enumerate(texts.cast(pa.binary()).to_pylist()):
        text = _inner(field, separator)
        row = None if text is None else _entries(text, entry)
        if row is None and field is not None:
            why = "has no brackets, others have; write all in one way"
            if text is not None:
                why = f"is no list of numbers or quoted texts with {separator!r} between them"
            raise column.error(index, f"{shown_text(field)} {why}")
        rows.append(row)
    return pa.array(rows, pa.list_(pa.binary())).cast(pa.list_(texts.type))


def _inner(field: bytes | None, separator: str) -> bytes | None:
    """What is in the brackets of a field; None = it is no list. `(none)` is a text, unless the separator is in it."""
    match = _BRACKETS.fullmatch(field or b"")
    if match is None:
        return None
    text = next(each for each in match.groups() if each is not None)
    return text.strip() if match[3] is None or not text or separator.encode() in text else None


def _is_words(field: bytes, separator: str) -> bool:
    """Whether all that is in brackets are words such as `[UNK]`: texts, unless another row is a list."""
    parts = [part.strip() for part in field.split(separator.encode()) if b"[" in part or b"]" in part]
    words = [_WORD.fullmatch(part) for part in parts]
    return field[:1] == b"[" and all(w and w[1] not in _NULLS and number_of(w[1]) is None for w in words)


def _entry(separator: str) -> re.Pattern[bytes]:
    """Matches an entry, bare or in quotes, and the separator behind it."""
    mark = re.escape(separator.strip().encode())
    bare = rb"[^\s'\"\[\]{},;|]" + (rb"[^\[\]{},;|]*?" if mark else rb"[^\s\[\]{},;|]*")
    quoted = [rb"%b((?:[^%b\\]|\\['\"\\/])*)%b" % (quote, quote, quote) for quote in (b"'", b'"')]
    return re.compile(rb"\s*(?:%b|%b|(%b))\s*(?:%b|$)" % (*quoted, bare, mark or rb"(?<=\s)"))


def _entries(text: bytes, entry: re.Pattern[bytes]) -> list[bytes | None] | None:
    """The entries between brackets, None for a missing one; None where it is no such list."""
    entries, at = list[bytes | None](), 0
    while at < len(text):
        match = entry.match(text, at)
        if match is None:
            return None
        one, other, bare = match.groups()
        if bare is None:
            entries.append(_ESCAPE.sub(rb"\1", one if other is None else other))
        elif b"..." in (parts := bare.split()) or (len(parts) > 1 and None not in map(number_of, parts)):
            return None  # as numpy shortens or separates
        else:
            entries.append(None if bare in _NULLS else bare)
        at = match.end()
    return entries


def _parse(column: Column, rules: ReadingRules) -> pa.Array:
    texts, point = rules.texts(column.values), column.decimal
    if (amounts := _without_currency(texts)) is not None or point != ".":
        texts, group = texts if amounts is None else amounts, "." if point == "," else ","
        decimals = rf"\{point}\d+" if amounts is None else rf"(\{point}\d+)?"  # 1.234 EUR is 1234
        grouped = pc.match_substring_regex(texts, rf"^[+-]?\d{{1,3}}(\{group}\d{{3}})+{decimals}$")
        texts = pc.if_else(grouped, pc.replace_substring(texts, group, ""), texts)  # 1.234,50
        texts = pc.replace_substring(texts, point, ".", max_replacements=1)
    numbers = _numbers_of_texts(texts)
    if numbers is not None:
        return numbers
    lengths = range(1, len(texts))
    index = bisect.bisect_left(lengths, True, key=lambda n: _numbers_of_texts(texts.slice(0, n)) is None)
    text = texts.cast(pa.binary())[index].as_py()
    hint = "; see data.decimal" if number_of(text, ",") is not None else f"; times that are read: {times.READ}"
    if text[:1] in (b"[", b"("):
        hint = VECTORS
    elif CURRENCY.search(text):
        hint = "; amounts in one column have one currency, in its first row, too"
    elif times.parse(texts.slice(index, 1), rules.time_format) is not None:
        hint = "; the rows before hold numbers, and one column holds either"
    raise column.error(index, f"{shown_text(text)} is not a number; allowed: numbers, or data.missing{hint}")


def _without_currency(texts: pa.Array) -> pa.Array | None:
    """Amounts such as `84,50 EUR`, `$1,234` or `-€ 5` as texts of numbers; None = the first text has no currency. Texts
    of another one stay as they are."""
    first = next((text.as_py() for text in pc.drop_null(texts).slice(0, 1).cast(pa.binary())), b"")
    if (mark := CURRENCY.search(first)) is None:
        return None
    sign = "".join(rf"\x{byte:02x}" for byte in mark[0])
    pattern = rf"^([+-]?)(?:{sign})?{_SPACES}([+-]?[0-9.,]+){_SPACES}(?:{sign})?$"
    return ReadingRules().texts(pc.replace_substring_regex(texts.cast(pa.binary()), pattern, r"\1\2"))


def _numbers_of_texts(texts: pa.Array) -> pa.Array | None:
    """Numbers and truth values as float64; None where there is anything else."""
    with contextlib.suppress(pa.ArrowInvalid):
        return texts.cast(pa.float64())
    try:
        return canonical_texts(texts).cast(pa.float64())
    except pa.ArrowInvalid:
        return None
