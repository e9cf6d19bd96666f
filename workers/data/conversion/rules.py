"""Rules: what is the same for all columns of a job when raw values are read. A model keeps those it was trained by.

N = values
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

FORM = 2
"""The number of these rules in stored inputs."""
COMMA_NUMBER = re.compile(rb"[+-]?([0-9]+|[0-9]{1,3}(\.[0-9]{3})+),[0-9]+")


@dataclass(frozen=True)
class ReadingRules:
    """`missing`: values that mean a missing one. `time_format`: forms of times that are texts.

    Numbers are compared by value, the category `1322.0` is `1322`, and times are read in seconds, or in microseconds
    where they are categories.
    """

    missing: tuple[str, ...] = ()
    time_format: tuple[str, ...] = ()

    @property
    def marks(self) -> list[float]:
        """The numbers among the missing values."""
        return numbers_of(self.missing)

    def texts(self, values: pa.Array) -> pa.Array:
        """Texts without the spaces around them; missing ones are null."""
        values = clean_texts(values)
        if self.missing:
            marked = pc.is_in(values, value_set=pa.array(self.missing, values.type))
            if self.marks:
                marked = pc.or_(marked, equal_to(values, self.marks))
            values = pc.if_else(marked, None, values)
        return values


def clean_texts(values: pa.Array) -> pa.Array:
    """Texts without the spaces around them. Bytes need not be UTF-8."""
    options = pc.CastOptions(target_type=pa.large_string(), allow_invalid_utf8=True)
    return pc.ascii_trim_whitespace(pc.cast(values, options=options))


def equal_to(texts: pa.Array, numbers: Sequence[float], point: str = ".") -> pa.Array:
    """Which texts are one of the numbers, however it is written with this decimal point; null is none."""
    coded = texts.dictionary_encode()
    equal = [number_of(text, point) in numbers for text in coded.dictionary.cast(pa.binary()).to_pylist()]
    return pc.fill_null(pa.array([*equal, False]).take(pc.fill_null(coded.indices, len(equal))), False)


def numbers_of(texts: Sequence[str], point: str = ".") -> list[float]:
    """The finite numbers among `texts`."""
    return [number for text in texts if (number := number_of(text.encode(), point)) is not None]


def number_of(text: bytes, point: str = ".") -> float | None:
    """The finite number that a text is with this decimal point; None = it is none."""
    if point == ",":
        text = (text.replace(b".", b"") if COMMA_NUMBER.fullmatch(text) else text).replace(b",", b".")
    try:
        number = float(text)
    except ValueError:
        return None
    return number if np.isfinite(number) and b"_" not in text else None


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


def is_empty(values: pa.Array) -> bool:
    """Whether all values are null or NaN: such a column often has a numeric type without meaning it."""
    if values.null_count == len(values):
        return True
    return pa.types.is_floating(values.type) and bool(np.isnan(values.to_numpy(zero_copy_only=False)).all())
