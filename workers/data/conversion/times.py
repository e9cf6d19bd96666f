"""Times: dates and times in any writing as microseconds since 1970, UTC. The unit of a column never matters.

N = values
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from shardkeep.base.arrays import Float64s
from shardkeep.workers.data.conversion.chunk import Column, shown_text
from shardkeep.workers.data.conversion.rules import ReadingRules, is_text, is_time

READ = (
    "2024-05-01, 2024-05-01 13:45, with T, seconds and up to 9 digits of a second, and with Z, UTC, GMT or +02:00 in "
    "all rows or in none; 01.05.2024 in place of 2024-05-01; what data.time_format reads, as in %m/%d/%Y %H:%M; or "
    "seconds, milliseconds, microseconds or nanoseconds since 1970, from 1973 to 2286"
)
"""The writings of times, for error messages."""
_ZONE = r"(?i)\s*(utc|gmt)$"
_DAY_FIRST = r"^(\d\d)\.(\d\d)\.(\d{4})( |$)"
"""As in Germany. With points nobody writes the month first; with strokes both do, and `time_format` decides."""
_BANDS = np.array([1e8, 1e10, 1e11, 1e13, 1e14, 1e16, 1e17, 1e19])
"""From 1973 to 2286 in seconds, milliseconds, microseconds and nanoseconds: none reaches into another."""
_PER_MICRO = np.array([1e-6, 1e-3, 1.0, 1e3])
"""Of each of the four units, how many a microsecond has."""


def micros(column: Column, rules: ReadingRules, *, exact: bool = False) -> pa.Array:
    """A column of times as int64; missing is null. Raises DataError for what is no time; with `exact` also for a time
    of a type that holds nanoseconds.

    A time without a zone is one of UTC. Whole numbers and float64 are counts since 1970, in the unit that their size
    shows."""
    values = column.values
    if is_text(values.type):
        values = _of_texts(column, rules.texts(values), rules)
    if is_time(values.type):
        zone = values.type.tz if pa.types.is_timestamp(values.type) else None
        _check_zone(column, values, rules, has_zone=zone is not None)
        options = pc.CastOptions(target_type=pa.timestamp("us", zone), allow_time_truncate=not exact)
        return pc.cast(values, options=options).cast(pa.int64())
    if pa.types.is_integer(values.type) or pa.types.is_float64(values.type):
        return _of_numbers(column, rules.numbers(values))
    if pa.types.is_null(values.type):
        return values.cast(pa.int64())
    raise column.wrong_type(f"times; {READ}")


def _check_zone(column: Column, values: pa.Array, rules: ReadingRules, *, has_zone: bool) -> None:
    """The first time decides for all rows of all files. Raises DataError."""
    if values.null_count == len(values):
        return
    if rules.zone not in (None, has_zone):
        here, before = ("a", "none") if has_zone else ("no", "one")
        why = f"the time has {here} zone, and the times before or in training have {before}; write all in one way"
        raise column.error(int(np.array(values.is_valid()).argmax()), why)
    rules.zone = has_zone


def seconds(column: Column, rules: ReadingRules) -> Float64s:
    """A column of times as float64_N seconds since 1970; missing is nan. Raises DataError."""
    micros_N = micros(column, rules).cast(pa.float64(), safe=False)
    return np.array(pc.fill_null(micros_N, float("nan")), np.float64) / 1e6


def parse(texts: pa.Array, formats: Sequence[str] = ()) -> pa.Array | None:
    """Texts of dates or times as timestamps in microseconds, with or without a zone; None where one is anything else.
    `formats`: of strptime; the one that reads all values counts, and where two read them differently, none does."""
    moments = {each: read_as(texts, each) for each in formats}
    if any(each.null_count < len(each) for each in moments.values()):
        fitting = [each for each in moments if moments[each].null_count == texts.null_count]
        if not fitting or any(moments[each] != moments[fitting[0]] for each in fitting):
            return None
        return moments[fitting[0]].cast(pa.timestamp("us", "UTC" if "%z" in fitting[0] else None))
    dates = pc.replace_substring_regex(texts, _DAY_FIRST, r"\3-\2-\1\4")
    zoned = pc.replace_substring_regex(dates, _ZONE, "Z")
    for kind in (pa.timestamp("us"), pa.timestamp("ns")):  # years 1 to 9999, or nine digits of a second
        for zone in (None, "UTC"):
            try:
                zoned.slice(0, 8).cast(pa.timestamp(kind.unit, zone))  # a cast that fails takes 2 us for each value
                return zoned.cast(pa.timestamp(kind.unit, zone)).cast(pa.timestamp("us", zone), safe=False)
            except pa.ArrowInvalid:
                continue
    return None


def read_as(texts: pa.Array, form: str) -> pa.Array:
    """Times in this form of strptime as int64 microseconds; null = another form, or no day from the year 1000 on."""
    try:
        times = pc.strptime(texts.cast(pa.string()), format=form, unit="s", error_is_null=True)
    except pa.ArrowInvalid:  # no UTF-8
        times = pa.nulls(len(texts), pa.timestamp("s"))
    if times.null_count < len(times):
        times = pc.if_else(pc.greater_equal(pc.year(times), 1000), times, None)  # %Y reads 17 as the year 17
        early = pc.and_(pc.less_equal(pc.day(times), 3), pc.is_in(pc.month(times), pa.array([3, 5, 7, 10, 12])))
        early = pc.fill_null(pc.and_(early, "%z" not in form), False)  # strptime takes February 30 for March 2
        written, read = texts.filter(early), pc.strftime(times.filter(early), form)
        same = pc.equal(*(pc.replace_substring_regex(each, r"(^|\D+)0*", " ") for each in (written, read)))
        times = pc.replace_with_mask(times, early, pc.if_else(same, times.filter(early), None))
    return pc.multiply(times.cast(pa.int64()), 1_000_000)


def are_counts(column: Column, rules: ReadingRules) -> bool:
    """Whether a column of numbers, or of texts that are numbers, counts from 1970 on in one of the units."""
    values = replace(rules).texts(column.values) if is_text(column.values.type) else column.values
    if is_text(values.type):
        try:
            values = values.cast(pa.float64())
        except pa.ArrowInvalid:
            return False
    if not (pa.types.is_integer(values.type) or pa.types.is_float64(values.type)):
        return False
    bands = _band(np.array(pc.drop_null(values), np.float64))
    return bool(len(bands)) and bool((bands % 2 == 1).all())


def _of_texts(column: Column, texts: pa.Array, rules: ReadingRules) -> pa.Array:
    """The timestamps of texts, or their numbers. Raises DataError."""
    if (parsed := parse(texts, rules.time_format)) is not None:
        return parsed
    for kind in (pa.int64(), pa.float64()):
        try:
            return texts.cast(kind)
        except pa.ArrowInvalid:
            continue
    lengths, form = range(1, len(texts)), rules.time_format
    index = bisect.bisect_left(lengths, True, key=lambda n: parse(texts.slice(0, n), form) is None)
    if parse(texts.slice(index, 1), form) is None:
        raise column.error(index, f"{shown_text(texts.cast(pa.binary())[index].as_py())} is no time; read are: {READ}")
    raise column.error(index, f"times of two forms or zones, or dates and counts, are mixed; read are: {READ}")


def _of_numbers(column: Column, values: pa.Array) -> pa.Array:
    numbers_N = np.array(pc.fill_null(values, 0))
    if numbers_N.itemsize < 8:  # whose microseconds need 64 bits
        numbers_N = numbers_N.astype(np.int64)
    missing_N = np.array(values.is_null())
    band_N = _band(numbers_N.astype(np.float64))
    wrong_N = ~missing_N & (band_N % 2 == 0)
    column.check(wrong_N, lambda index: f"{numbers_N[index]} is no time; read are: {READ}")
    micros_N, unit_N = np.zeros(len(numbers_N), np.int64), band_N // 2
    for unit, per_micro in enumerate(_PER_MICRO):
        own_N = ~missing_N & (unit_N == unit)
        if not own_N.any():
            continue
        if per_micro > 1:
            micros_N[own_N] = numbers_N[own_N] // int(per_micro)
        else:
            micros_N[own_N] = np.round(numbers_N[own_N] * round(1 / per_micro))
    return pa.array(micros_N, mask=missing_N)


def _band(numbers_N: Float64s) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """Which of `_BANDS` each number has reached, from 0: an odd count is one of a unit."""
    with np.errstate(invalid="ignore"):
        return np.searchsorted(_BANDS, np.abs(numbers_N), side="right")
