"""Facts: what the rows of an excerpt say about a column. Decides nothing.

N = rows, V = distinct values, B = bins
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from shardkeep.automl import names
from shardkeep.base.arrays import Bools, Float64s, Ints
from shardkeep.base.errors import DataError
from shardkeep.workers.data.conversion import times
from shardkeep.workers.data.conversion.chunk import Column
from shardkeep.workers.data.conversion.decoding import as_lists, decode_numbers, list_lengths
from shardkeep.workers.data.conversion.rules import ReadingRules, is_list, is_number, is_text, is_time
from shardkeep.workers.metrics.quality import auc

Kind = Literal["empty", "whole", "number", "truth", "time", "text", "list", "other"]
SURE = ("\\N", "NULL", "<NA>", "#N/A", "NaT")
MARKS = (*SURE, "None", "none", "N/A", "n/a", "-")
"""What some programs write for a missing value of any kind, and of a number, beside the default of `data.missing`."""
LIST_ROWS = 8192
"""Of which the lists in a column of texts are cut: brackets take 30 us a row."""
SEPARATORS = ("|", ";", "^", "\x01", "\x02", "#", ",", " ")
BINS = 256
FEWEST_PURE, ODDS = 50, 1e-6
"""Rows of one class that are asked about, and the odds of that by chance from which they are."""
_DATE = (
    r"^(\pL{2,9}\.?,? )?(\d{4}[-/.]\d\d?[-/.]\d\d?|\d\d?[-/]\d\d?[-/]\d\d(\d\d)?|\d\d?\.\d\d?\.\d{4}"
    r"|(19|20)\d\d[- ]?(W\d\d|Q[1-4])|\d\d?\.?[ -]\pL{3,9}\.?[ -]\d{4}|\pL{3,9}\.? \d\d?,? \d{4})([ T,:].*)?$"
)
_ID = r"^[\w.:-]*\d[\w.:-]*$"


@dataclass(frozen=True)
class Facts:
    """One column. `code_N`: which of `values` a row has, -1 = none. `number_V`: the values of numbers and times, in
    seconds. `marks`: texts among numbers that mean a missing one. Of lists: `length_N`, `entries`, and how texts are
    cut. `utf8`: whether all texts are. `formats`: patterns for `data.time_format` that read texts, which stay
    texts where there are several."""

    name: str
    kind: Kind
    code_N: Ints
    values: pa.Array
    number_V: Float64s | None = None
    marks: tuple[str, ...] = ()
    length_N: Ints | None = None
    entries: Facts | None = None
    separator: str | None = None
    utf8: bool = True
    formats: tuple[str, ...] = ()

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
        return round(self.distinct + once * (math.sqrt(max(1.0, num_rows / len(self.code_N))) - 1))

    def examples(self) -> list[str]:
        """The most frequent values."""
        count_V = np.bincount(self.code_N[self.code_N >= 0], minlength=len(self.values))
        return [str(self.values[int(at)]) for at in np.argsort(-count_V, kind="stable")[:3] if len(self.values)]


def sure_marks(columns: Iterable[pa.Array]) -> set[str]:
    """Those of `SURE` that stand in a column of texts."""
    texts = (values for values in columns if is_text(values.type))
    return {mark for values in texts for mark in SURE if pc.index(values, pa.scalar(mark, values.type)).as_py() >= 0}


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
        return Facts(name, "other", np.zeros(len(values), np.int64), pa.array([str(values.type)]))
    encoded = values.dictionary_encode()
    code_N, known = np.array(pc.fill_null(encoded.indices, -1), np.int64), _readable(encoded.dictionary)
    column = Column(name, np.arange(len(known)), name, known, decimal)
    kind, number_V = _read(column, rules)
    formats = _formats_of(known) if kind == "text" and not inside else ()
    if len(formats) == 1:
        kind, number_V = _read(column, replace(rules, time_format=formats))
    if kind == "text" and not (inside or formats or are_dates(known)) and (separator := _separator_of(name, known)):
        some = values.take(pa.array(np.arange(0, len(values), -(-len(values) // LIST_ROWS))))
        return _of_lists(name, some, rules, separator)
    if number_V is not None and is_text(known.type) and (marks := tuple({*MARKS}.intersection(known.to_pylist()))):
        values = pc.if_else(pc.is_in(values, value_set=pa.array(marks, values.type)), None, values)
        return replace(look_at(name, values, rules, decimal=decimal, inside=inside), marks=marks)
    return Facts(name, kind, code_N, known, number_V, utf8=known is encoded.dictionary, formats=formats)


def _readable(texts: pa.Array) -> pa.Array:
    """Values as they are, or those of texts that are no UTF-8 by Windows-1252, which has Latin-1 in it."""
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        return pa.array([None if text is None else _shown(text) for text in texts.cast("binary").to_pylist()])
    return texts


def _shown(text: bytes) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError:
        return text.decode("cp1252", "replace")


def are_dates(texts: pa.Array) -> bool:
    """Whether most texts are dates, in a form that is read or not."""
    return bool(pc.mean(pc.cast(pc.match_substring_regex(texts, _DATE), "float64")).as_py() > 0.5)


def _formats_of(known: pa.Array) -> tuple[str, ...]:
    """The patterns that read all texts, one for each reading."""
    known = pc.if_else(pc.is_in(known, value_set=pa.array(MARKS, known.type)), None, known).drop_null()
    fitting = [each for each in names.formats() if len(known) and not times.read_as(known.slice(0, 8), each).null_count]
    read = {each: moments for each in fitting if not (moments := times.read_as(known, each)).null_count}
    return tuple(each for each in read if next(other for other in read if read[other] == read[each]) == each)


def _read(column: Column, rules: ReadingRules) -> tuple[Kind, Float64s | None]:
    """The kind of distinct values, and their numbers."""
    known, texts = column.values, is_text(column.values.type)
    if texts:
        marked = pc.is_in(known, value_set=pa.array(MARKS, known.type))
        column = replace(column, values=pc.if_else(marked, None, known))
        codes = pc.any(pc.match_substring_regex(column.values, r"^0\d+$")).as_py()  # with zeros in front
        if codes or column.values.null_count == len(known):
            return "text", None
    try:
        number_V = decode_numbers(column, rules if texts else ReadingRules())
    except DataError:
        if is_time(known.type) or (texts and times.parse(column.values, rules.time_format) is not None):
            return "time", times.seconds(column, rules)
        return "text" if texts else "other", None  # infinite numbers
    truth = texts and pc.any(pc.match_substring_regex(known, "(?i)^(true|false)$")).as_py()
    present_V = number_V[~np.isnan(number_V)]
    exact = (abs(present_V) < 2**53).all() if pa.types.is_floating(known.type) else not pa.types.is_temporal(known.type)
    whole = exact and (present_V == np.floor(present_V)).all()
    return "truth" if truth or pa.types.is_boolean(known.type) else "whole" if whole else "number", number_V


def _of_lists(name: str, values: pa.Array, rules: ReadingRules, separator: str | None = None) -> Facts:
    column, mark = Column(name, np.arange(len(values)), name, values), separator and separator.lstrip("[")
    try:
        lists = as_lists(column, rules, mark, brackets=mark != separator)
        length_N = list_lengths(lists)
        entries = look_at(name, column.entries(lists, length_N).values, rules, inside=True)
    except DataError:  # structs, JSON
        return Facts(name, "other", np.zeros(len(values), np.int64), pa.array([str(values.type)]))
    kind: Kind = "list" if len(entries.values) else "empty"
    return Facts(name, kind, np.where(length_N > 0, 0, -1), entries.values, None, (), length_N, entries, separator)


def _separator_of(name: str, known: pa.Array) -> str:
    """What separates the entries of texts that are lists, with [ before it where they stand in brackets; "" = they are
    none. Raises DataError where some are in brackets and some are not."""
    share = pc.mean(pc.cast(pc.match_substring_regex(known, r"^(\[.*\]|\{[^:]*\})$"), pa.float64())).as_py()
    if 0.1 < share < 0.98:
        raise DataError(
            f"column {name}: {share:.0%} of its texts are lists in brackets, the others are not; write all in one way"
        )
    some = known.slice(0, LIST_ROWS)
    if share >= 0.98:
        spaces, commas = (pc.any(pc.match_substring(some, mark)).as_py() for mark in " ,")
        return "[ " if spaces and not commas else "[,"
    for mark in SEPARATORS:
        lists = pc.split_pattern(some, mark)
        length_V = np.array(pc.list_value_length(lists))
        if (length_V > 1).mean() < 0.1 or ((length_V == length_V[0]).all() and length_V[0] < 3):
            continue
        entries = pc.ascii_trim_whitespace(lists.flatten())
        ids = mark != "," and np.array(pc.match_substring_regex(entries, _ID)).mean() > 0.9
        if ids or (mark != " " and len(entries) >= 3 * pc.count_distinct(entries).as_py()):
            return mark
    return ""


def purity(facts: Facts, positive_N: Bools, known_N: Bools, *, each: bool) -> tuple[str, str]:
    """Which rows have one class beyond chance, as `578 of 578 rows that are not 0` and `have the label 1`; "" = none.
    The most such rows, of those that are missing, 0 or the most frequent value, the others, and with `each` those of
    each value. `known_N`: has a label.

    Chance is the share of the class; of a value that at the purest mixed one, if that is more: where few of 18 years
    earn much, none of 17 years is no leak."""
    step = -(-len(positive_N) // len(facts.code_N))  # lists in texts are read in a part of the rows
    own_N = known_N[::step]
    code_N, one_N, V = facts.code_N[own_N] + 1, positive_N[::step][own_N], len(facts.values) + 1
    count_V, is_V = np.bincount(code_N, minlength=V), np.arange(V)
    shown = ["missing", *(str(value)[:40] for value in facts.values.to_pylist())]
    usual = {0, *(1 + np.flatnonzero(facts.number_V == 0) if facts.number_V is not None else ())}
    usual |= {1 + int(count_V[1:].argmax())} if V > 1 and facts.length_N is None else set()
    groups = {shown[at]: is_V == at for at in (range(V) if each else sorted(usual))}
    groups |= {f"not {shown[at]}": (is_V > 0) & (is_V != at) for at in sorted(usual)}
    found = [(0, "", "")]
    for label, is_N in ((1, one_N), (0, ~one_N)):
        same_V, share = np.bincount(code_N, is_N, minlength=V), is_N.mean()
        mixed_V = (count_V >= FEWEST_PURE) & (same_V < count_V)
        near = max([share, *(same_V[mixed_V] / count_V[mixed_V])])
        for name, of_V in groups.items():
            count, chance = int(count_V[of_V].sum()), share if name.startswith("not ") else near
            if FEWEST_PURE <= count == same_V[of_V].sum() < len(code_N) and count * np.log(chance) < np.log(ODDS):
                found.append((count, f"{count:,} of {count:,} rows that are {name}", f" have the label {label}"))
    return max(found)[1:]


def auc_alone(facts: Facts, positive_N: Bools) -> float:
    """The AUC of a column without the others: of its numbers as they are, or of the mean label that the other half of
    the rows has at the same value or in the same bin of numbers."""
    if positive_N.all() or not positive_N.any():
        return 0.5
    code_N, score_N, alone = facts.code_N + 1, np.empty(len(facts.code_N)), 0.5
    label_N = positive_N.astype(np.float64)
    if facts.number_V is not None:
        by_number = auc(np.append(facts.number_V, -np.inf)[facts.code_N], label_N)
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
    return max(alone, auc(score_N, label_N))
