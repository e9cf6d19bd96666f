"""Facts: what the rows of an excerpt say about a column. Decides nothing.

N = rows, V = distinct values, B = bins
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from numpy.typing import NDArray

from shardkeep.base.arrays import Float64s, Ints
from shardkeep.base.errors import DataError
from shardkeep.workers.data.conversion import times
from shardkeep.workers.data.conversion.chunk import Column
from shardkeep.workers.data.conversion.decoding import as_lists, decode_numbers, list_lengths
from shardkeep.workers.data.conversion.rules import ReadingRules, is_list, is_number, is_text, is_time

Kind = Literal["empty", "whole", "number", "truth", "time", "text", "list", "other"]
MARKS = ("\\N", "None", "none", "N/A", "n/a", "#N/A", "<NA>", "NaT", "NULL", "-")
"""What some programs write for a missing number, beside the default of `data.missing`."""
LIST_ROWS = 8192
"""Of which the lists in a column of texts are cut: brackets take 30 us a row."""
SEPARATORS = ("|", ";", "^", "\x01", "\x02", "#", ",", " ")
BINS = 256
_ID = r"^[\w.:-]*\d[\w.:-]*$"


@dataclass(frozen=True)
class Facts:
    """One column. `code_N`: which of `values` a row has, -1 = none. `number_V`: the values of numbers and times, in
    seconds. `marks`: texts among numbers that mean a missing one. Of lists: `length_N`, `entries`, and how texts are
    cut."""

    name: str
    kind: Kind
    code_N: Ints
    values: pa.Array
    number_V: Float64s | None = None
    marks: tuple[str, ...] = ()
    length_N: Ints | None = None
    entries: Facts | None = None
    separator: str | None = None

    @property
    def distinct(self) -> int:
        """Distinct values, of lists those of their entries."""
        return len(self.values) if self.entries is None else self.entries.distinct

    @property
    def missing(self) -> float:
        """The share of rows without a value."""
        return float((self.code_N < 0).mean())

    def distinct_of_all(self, num_rows: int) -> int:
        """About how many distinct values so many rows have (GEE, Charikar et al. 2000)."""
        if self.entries is not None:
            return self.entries.distinct_of_all(round(num_rows * len(self.entries.code_N) / len(self.code_N)))
        count_V = np.bincount(self.code_N[self.code_N >= 0], minlength=1)
        once = int((count_V == 1).sum())
        return round(self.distinct - once + once * max(1.0, num_rows / len(self.code_N)) ** 0.5)

    def examples(self) -> list[str]:
        """The most frequent values."""
        count_V = np.bincount(self.code_N[self.code_N >= 0], minlength=len(self.values))
        return [str(self.values[int(at)]) for at in np.argsort(-count_V, kind="stable")[:3] if len(self.values)]


def look_at(name: str, values: pa.Array, rules: ReadingRules, *, decimal: str = ".", inside: bool = False) -> Facts:
    """The facts of a column. `inside`: it has the entries of lists. Raises DataError for lists of two kinds."""
    if is_list(values.type):
        return _of_lists(name, values, rules)
    if is_text(values.type):
        values = rules.texts(values)
    elif pa.types.is_floating(values.type):
        values = pa.array(values.to_numpy(zero_copy_only=False), from_pandas=True)  # NaN is missing
    if values.null_count == len(values):
        return Facts(name, "empty", np.full(len(values), -1), values.slice(0, 0))
    if not (is_text(values.type) or is_number(values.type) or pa.types.is_temporal(values.type)):
        return Facts(name, "other", np.zeros(len(values), np.int64), pa.array([str(values[0])]))
    encoded = values.dictionary_encode()
    code_N, known = np.array(pc.fill_null(encoded.indices, -1), np.int64), encoded.dictionary
    kind, number_V, marks = _read(known, rules, decimal)
    if kind == "text" and not inside and (separator := _separator_of(name, known)):
        step = -(-len(values) // LIST_ROWS)
        some = values.take(list(range(0, len(values), step)))
        column = Column(name, np.arange(len(some)), name, some)
        bracketed = separator[:1] == "["
        lists = as_lists(column, rules, separator.removeprefix("["), brackets=bracketed)
        return _of_lists(name, lists, rules, separator)
    if marks:
        missing_V = np.isin(np.array(known.to_pylist(), object), marks)
        code_N = np.where((code_N >= 0) & missing_V[code_N], -1, code_N)
    return Facts(name, kind, code_N, known, number_V, marks)


def _read(known: pa.Array, rules: ReadingRules, decimal: str) -> tuple[Kind, Float64s | None, tuple[str, ...]]:
    """The kind of distinct values, their numbers, and the marks among them."""
    if is_time(known.type):
        return "time", times.seconds(Column("", np.arange(len(known)), "", known), rules), ()
    if not is_text(known.type):
        number_V = decode_numbers(Column("", np.arange(len(known)), "", known), ReadingRules())
        return ("truth" if pa.types.is_boolean(known.type) else _kind_of(number_V)), number_V, ()
    marked = pc.is_in(known, value_set=pa.array(MARKS, known.type))
    column = Column("", np.arange(len(known)), "", pc.if_else(marked, None, known), decimal)
    marks = tuple(str(mark) for mark in known.filter(marked))
    if len(marks) == len(known):
        return "text", None, ()
    if (micros := times.parse(column.values)) is not None and not _all(known, r"^\d{1,6}$|^\d{9,}$"):
        if not _all(known, r"^\d+$"):
            return "time", np.array(pc.fill_null(micros, 0), np.float64) / 1e6, marks
    if _all(known, r"^0\d+$", some=True):  # codes with zeros in front
        return "text", None, ()
    try:
        number_V = decode_numbers(column, rules)
    except DataError:
        return "text", None, ()
    truth = set(pc.ascii_lower(known).to_pylist()) <= {"true", "false"}
    return ("truth" if truth else _kind_of(number_V)), number_V, marks


def _kind_of(number_V: Float64s) -> Kind:
    present_V = number_V[~np.isnan(number_V)]
    return "whole" if (present_V == np.floor(present_V)).all() and (abs(present_V) < 2**53).all() else "number"


def _all(texts: pa.Array, pattern: str, *, some: bool = False) -> bool:
    match = pc.match_substring_regex(texts, pattern)
    return bool((pc.any if some else pc.all)(match).as_py())


def _of_lists(name: str, lists: pa.Array, rules: ReadingRules, separator: str | None = None) -> Facts:
    length_N = list_lengths(lists)
    column = Column(name, np.arange(len(lists)), name, lists)
    entries = look_at(name, column.entries(lists, length_N).values, rules, inside=True)
    kind: Kind = "list" if len(entries.values) else "empty"
    return Facts(name, kind, np.where(length_N > 0, 0, -1), entries.values, None, (), length_N, entries, separator)


def _separator_of(name: str, known: pa.Array) -> str:
    """What separates the entries of texts that are lists, with [ before it where they stand in brackets; "" = they are
    none. Raises DataError where some are in brackets and some are not."""
    share = pc.mean(pc.cast(pc.match_substring_regex(known, r"^\[.*\]$"), pa.float64())).as_py()
    if 0.1 < share < 0.98:
        raise DataError(
            f"column {name}: {share:.0%} of its texts are lists in brackets, the others are not; write all in one way"
        )
    if share >= 0.98:
        return "[," if _all(known, ",", some=True) or not _all(known, " ", some=True) else "[ "
    some = known.slice(0, LIST_ROWS)
    for mark in SEPARATORS:
        lists = pc.split_pattern(some, mark)
        length_V = np.array(pc.list_value_length(lists))
        if (length_V > 1).mean() < 0.1 or ((length_V == length_V[0]).all() and length_V[0] < 3):
            continue
        entries = pc.ascii_trim_whitespace(lists.flatten())
        ids = mark != "," and (np.array(pc.match_substring_regex(entries, _ID)).mean() > 0.9)
        recurring = len(entries) >= 3 * pc.count_distinct(entries).as_py()
        if ids or (recurring and mark != " "):
            return mark
    return ""


def auc_alone(facts: Facts, positive_N: NDArray[np.bool_]) -> float:
    """The AUC of a column without the others: of its numbers as they are, or of the mean label that the other half of
    the rows has at the same value or in the same bin of numbers."""
    code_N, score_N, alone = facts.code_N + 1, np.empty(len(facts.code_N)), 0.5
    if facts.number_V is not None:
        by_number = _auc(np.append(facts.number_V, -np.inf)[facts.code_N], positive_N)
        alone = max(by_number, 1 - by_number)
        bins = min(BINS, len(code_N) // 20)
        if facts.distinct > bins:
            edges_B = np.nanquantile(facts.number_V, np.linspace(0, 1, bins))
            code_N = np.where(code_N > 0, 1 + np.searchsorted(edges_B, facts.number_V[facts.code_N]), 0)
    odd_N, size = np.arange(len(code_N)) % 2 == 1, int(code_N.max()) + 1
    for half_N in (odd_N, ~odd_N):
        count_B = np.bincount(code_N[half_N], minlength=size)
        sum_B = np.bincount(code_N[half_N], positive_N[half_N], minlength=size)
        score_N[~half_N] = ((sum_B + positive_N.mean()) / (count_B + 1.0))[code_N[~half_N]]
    return max(alone, _auc(score_N, positive_N))


def _auc(score_N: Float64s, positive_N: NDArray[np.bool_]) -> float:
    _, rank_N, count_R = np.unique(score_N, return_inverse=True, return_counts=True)
    positive_R = np.bincount(rank_N, positive_N, minlength=len(count_R))
    negative_R = count_R - positive_R
    below_R = np.cumsum(negative_R) - negative_R
    pairs = max(1.0, float(positive_R.sum() * negative_R.sum()))
    return float((positive_R * (below_R + negative_R / 2)).sum()) / pairs
