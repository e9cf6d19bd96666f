"""Rules: how values of each type are read, and the one text of a value. A model keeps those it was trained by.

The canonical text of a value stands for it in ids, marks of missing values, `label.positive`, `split.by`, pads and
names of items. A column of ids is of one kind for all files of a job, which typing.py finds:

| Arrow type | as texts: id = XXH3 of | as numbers: id = | as times: id = microseconds since 1970 |
|---|---|---|---|
| string, binary, large ones, views, dictionaries | the canonical text | its whole number, else refused | \
its time, else refused |
| bool | `1`, `0` | 1, 0 | refused |
| int8 to int64, uint8 to uint64 | the digits | the number; uint64 as its 64 bits | of a count since 1970 |
| float16 to float64, decimal | the digits of a whole number, else refused | the whole number, else refused | \
of a float64 that counts since 1970 |
| arrow.uuid, fixed_size_binary[16] | lower case with hyphens | refused | refused |
| date32, date64 | `2024-05-01` | refused | of the day's start, UTC |
| timestamp | refused: a time has many texts | refused | the time; no zone = UTC |
| duration, time32, time64 | refused | microseconds | refused |
| null, and NaN of a float | missing | missing | missing |
| lists of these | each entry | each entry | each entry |

| text | canonical |
|---|---|
| ` a ` (space, tab, line end) | `a` |
| `1322.0`, `-7.00`, `-0.0` (a whole float, as pandas writes it) | `1322`, `-7`, `0` |
| `true`, `True`, `FALSE` (any case) | `1`, `0` |
| `6BA7B810-9DAD-11D1-80B4-00C04FD430C8` | lower case |

N = values
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

FORM = 4
"""The number of these rules and of the form of stored inputs."""
COMMA_NUMBER = re.compile(rb"[+-]?([0-9]+|[0-9]{1,3}(\.[0-9]{3})+),[0-9]+")
_TRUTHS = {b"true": b"1", b"false": b"0"}
_WHOLE_FLOAT = re.compile(rb"-?(0)\.0+|(-?[1-9][0-9]*)\.0+")
_UUID = re.compile(rb"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")
_OTHER_FORM = rf"^(?:(?i:true|false)|{_WHOLE_FLOAT.pattern.decode()}|{_UUID.pattern.decode()})$"


def canonical(text: bytes) -> bytes:
    """The one form of a text, as the table above has it."""
    text = text.strip(b" \t\n\v\f\r")
    if text[-1:] == b"0" and (whole := _WHOLE_FLOAT.fullmatch(text)):
        return whole[1] or whole[2]
    if len(text) in (4, 5):
        return _TRUTHS.get(text.lower(), text)
    return text.lower() if len(text) == 36 and _UUID.fullmatch(text) else text


def canonical_texts(texts: pa.Array) -> pa.Array:
    """The canonical form of texts without spaces around them; null stays null."""
    other = pc.fill_null(pc.match_substring_regex(texts, _OTHER_FORM), False)
    forms = list(map(canonical, texts.filter(other).cast(pa.binary()).to_pylist()))
    return pc.replace_with_mask(texts, other, pa.array(forms, pa.binary()).cast(texts.type)) if forms else texts


@dataclass
class ReadingRules:
    """How one column is read.

    Attributes:
        missing: Values that mean a missing one: texts in canonical form, and numbers by value.
        time_format: Forms of times that are texts.
        zone: Whether its times have a zone; None = no time is known.
        removed: How many values the marks have removed so far, without empty texts.
    """

    missing: tuple[str, ...] = ()
    time_format: tuple[str, ...] = ()
    zone: bool | None = None
    removed: int = 0

    @property
    def marks(self) -> list[float]:
        """The numbers among the missing values."""
        return numbers_of(self.missing)

    def texts(self, values: pa.Array) -> pa.Array:
        """Values as texts without the spaces around them; missing ones are null."""
        texts = clean_texts(values)
        if not self.missing:
            return texts
        marked = pc.is_in(texts, value_set=pa.array(self.missing, texts.type))
        if any(number_of(form) is not None or b"-" in form for form in map(canonical, map(str.encode, self.missing))):
            marked = pc.or_(marked, are_listed(texts, self.missing))
        present = pc.if_else(marked, None, texts)
        empty = pc.sum(pc.equal(pc.binary_length(texts), 0)).as_py() or 0
        self.removed += present.null_count - texts.null_count - (empty if "" in self.missing else 0)
        return present

    def numbers(self, values: pa.Array) -> pa.Array:
        """Numbers and truth values in their own type; NaN and missing ones are null. Durations are as they are."""
        if not is_number(values.type):
            return values
        marks = self.marks
        if values.type == pa.float32():  # 0.1 is the nearest float32 there
            marks += [float(np.float32(mark)) for mark in marks if mark % 1]
        numbers_N = np.array(pc.fill_null(values.cast(pa.float64(), safe=False), math.nan))
        marked_N = np.isin(numbers_N, marks)
        self.removed += int(marked_N.sum())
        missing_N = marked_N | np.isnan(numbers_N)
        return pc.if_else(pa.array(missing_N), None, values) if missing_N.any() else values


Rules = Callable[[str], ReadingRules]
"""The rules of the column of a name."""


def clean_texts(values: pa.Array) -> pa.Array:
    """Texts, bytes that need not be UTF-8, or what Arrow writes of other values, without the spaces around them."""
    options = pc.CastOptions(target_type=pa.large_string(), allow_invalid_utf8=True)
    return pc.ascii_trim_whitespace(pc.cast(values, options=options))


def listing(listed: Sequence[str], point: str = ".") -> Callable[[bytes], bool]:
    """Whether a canonical text is one of those listed, or is equal to one as a number with this decimal point.

    A number that float64 does not hold exactly is compared as a text."""
    forms = frozenset(canonical(text.encode()) for text in listed)
    numbers = [number for number in numbers_of(listed, point) if abs(number) < 1 << 53 or math.isinf(number)]
    return lambda form: form in forms or (bool(numbers) and number_of(form, point) in numbers)


def are_listed(texts: pa.Array, listed: Sequence[str], point: str = ".") -> pa.Array:
    """Which texts without spaces around them are listed, as of `listing`; null is not."""
    coded, is_listed = texts.dictionary_encode(), listing(listed, point)
    found = [is_listed(canonical(text)) for text in coded.dictionary.cast(pa.binary()).to_pylist()]
    return pc.fill_null(pa.array([*found, False]).take(pc.fill_null(coded.indices, len(found))), False)


def numbers_of(texts: Sequence[str], point: str = ".") -> list[float]:
    """The numbers among `texts`."""
    return [number for text in texts if (number := number_of(canonical(text.encode()), point)) is not None]


def number_of(text: bytes, point: str = ".") -> float | None:
    """The number, finite or infinite, that a text is with this decimal point; None = it is none."""
    if point == ",":
        text = (text.replace(b".", b"") if COMMA_NUMBER.fullmatch(text) else text).replace(b",", b".")
    try:
        number = float(text)
    except ValueError:
        return None
    return None if math.isnan(number) or b"_" in text else number


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this type holds texts or bytes."""
    return kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


def is_number(kind: pa.DataType) -> bool:
    """Whether a column of this type holds numbers or truth values."""
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_decimal(kind)
    )


def is_time(kind: pa.DataType) -> bool:
    """Whether a column of this type holds dates or times of a calendar."""
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date(kind))


def is_list(kind: pa.DataType) -> bool:
    """Whether a column of this type has several values a row."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
