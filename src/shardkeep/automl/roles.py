"""Roles: what each column of a file is for, and why. Knows the words of the field (names.py), no data set.

N = rows, V = distinct values
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pyarrow.compute as pc  # type: ignore[import-untyped]

from shardkeep.automl import names
from shardkeep.automl.columns import Facts, auc_alone
from shardkeep.base.errors import DataError
from shardkeep.workers.data.conversion import times
from shardkeep.workers.data.conversion.chunk import Column, missing_column
from shardkeep.workers.data.conversion.rules import ReadingRules

Use = Literal["label", "weight", "time", "dense", "sparse", "sequence", "left out"]
FEWEST_TIMES = 20
"""Distinct times from which the newest tenth of the rows can be cut off."""
KNOWS = 0.999
"""AUC from which a column alone knows the answer."""
FEW, FEW_TEXTS = 200, 20
"""Distinct whole numbers up to which each is looked up, too: examples/adult.yaml does so."""
_TRUE = ("true", "True", "TRUE", "t", "yes", "Yes", "YES", "y", "Y", "click")


@dataclass(frozen=True)
class Role:
    """What a column is used for, and why. `both`: its numbers are looked up, too. `user`: its values look like users,
    the surest with 0. `settings`: what its entry in the config needs beside its name."""

    facts: Facts
    use: Use
    why: str = ""
    both: bool = False
    user: int | None = None
    settings: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        """That of the column."""
        return self.facts.name


def roles_of(columns: Sequence[Facts], *, label: str | None, positive: Any, origin: str) -> list[Role]:
    """The role of each column, in their order. `label`: the one that the user names; `positive`: the values that mean
    1, if they are known. Raises DataError where no column can be the label, and where nothing is left to learn from."""
    target = _label(columns, label, positive, origin)
    codes_N = target.facts.code_N
    settings: Any = target.settings or {}
    positive_N = np.isin(codes_N, _positive_codes(target.facts, settings.get("positive")))
    roles = [target if facts is target.facts else _role(facts, positive_N) for facts in columns]
    roles = _one_of_each(_grouped(roles))
    if not any(role.use in ("dense", "sparse", "sequence") for role in roles):
        shown = "; ".join(f"{role.name}: {role.why}" for role in roles if role is not target)
        raise DataError(f"{origin}: all columns beside the label {target.name} are left out ({shown[:300] or 'none'})")
    return roles


def _label(columns: Sequence[Facts], wanted: str | None, positive: Any, origin: str) -> Role:
    by_name = {facts.name: facts for facts in columns}
    if wanted is not None:
        if wanted not in by_name:
            raise missing_column(origin, wanted, list(by_name))
        return _as_label(by_name[wanted], positive, origin, "named by --label")
    ranks = {facts.name: rank for facts in columns if (rank := names.rank_of_label(facts.name)) is not None}
    fitting = [name for name in ranks if by_name[name].distinct == 2 and by_name[name].kind != "list"]
    best = [name for name in fitting if ranks[name] == min(ranks[each] for each in fitting)]
    if len(best) == 1:
        return _as_label(by_name[best[0]], positive, origin, "two values and a name of labels")
    pairs = [facts for facts in columns if facts.name in best or (not best and facts.distinct == 2)]
    if not pairs and (one := next((name for name in ranks if by_name[name].distinct == 1), None)):
        return _as_label(by_name[one], positive, origin, "")  # raises
    rated = sorted(pairs or filter(_could_be_cut, columns), key=lambda facts: not _is_outcome(facts.name))[:12]
    if not rated:
        raise DataError(f"{origin}: has no column that could be a label: none has two values, or a few")
    why = f"{len(best)} columns could be the label" if best else "no column has two values and a name of labels"
    shown = ", ".join(f"{facts.name} ({_values(facts)})" for facts in rated)
    raise DataError(f"{origin}: {why}; candidates: {shown}; name one: --label {rated[0].name}")


def _is_outcome(name: str) -> bool:
    return names.rank_of_label(name) is not None or names.fits(name, "ratings") or names.fits(name, "afterwards")


def _could_be_cut(facts: Facts) -> bool:
    """Whether more than two values could be cut in two classes."""
    few = facts.distinct <= (FEW_TEXTS if facts.kind == "text" else FEW)
    known = "id" in names.words_of(facts.name) or names.rank_of_user(facts.name) is not None or is_time(facts)
    kinds = ("text", "whole", "number")
    return facts.kind in kinds and not known and (few or (_is_outcome(facts.name) and facts.kind != "text"))


def _values(facts: Facts) -> str:
    if facts.distinct > 2 and facts.number_V is not None:
        return f"{facts.distinct} values, {np.nanmin(facts.number_V):g} to {np.nanmax(facts.number_V):g}"
    return ", ".join(sorted(facts.examples()))


def _as_label(facts: Facts, positive: Any, origin: str, why: str) -> Role:
    """A column as the label: two values, or numbers cut in two. Raises DataError."""
    missing = {"missing": "skip"} if facts.missing else {}
    if positive is not None:
        return Role(facts, "label", why, settings={"positive": positive, **missing})
    texts = list(map(str, facts.values.to_pylist()))
    if facts.distinct < 2 or facts.kind == "list":
        held = "lists" if facts.kind == "list" else f"one value in the rows read ({', '.join(texts) or 'none'})"
        raise DataError(f"{origin}: the label {facts.name} has {held}; both classes are needed")
    if facts.distinct == 2:
        if facts.number_V is not None and set(facts.number_V) == {0.0, 1.0}:
            return Role(facts, "label", why, settings=missing)
        rare = texts[int(np.bincount(facts.code_N[facts.code_N >= 0]).argmin())]
        one = next((text for text in texts if text in _TRUE), rare)
        one = one if facts.number_V is None else texts[int(facts.number_V.argmax())]
        return Role(facts, "label", f"{why}; {one} means 1", settings={"positive": [one], **missing})
    if facts.number_V is None:
        shown = ", ".join(facts.examples())
        raise DataError(
            f"{origin}: the label {facts.name} has {facts.distinct} texts ({shown}, ...); say which mean 1: "
            f"--set 'data.label.positive=[{facts.examples()[0]}]'"
        )
    number_N = facts.number_V[facts.code_N[facts.code_N >= 0]]
    edges_V = np.unique(number_N)[:-1]
    above = float(edges_V[int(np.argmin([abs((number_N > edge).mean() - 0.5) for edge in edges_V[:1000]]))])
    why = f"{why}; above {above:g} means 1"
    return Role(facts, "label", why, settings={"positive": {"above": above}, **missing})


def _positive_codes(facts: Facts, positive: Any) -> list[int]:
    if isinstance(positive, Mapping) and facts.number_V is not None:
        low, high = positive.get("above", -np.inf), positive.get("below", np.inf)
        return [int(code) for code in np.flatnonzero((facts.number_V > low) & (facts.number_V < high))]
    ones = [str(each) for each in positive] if isinstance(positive, list) else ["1", "1.0", "true", "True"]
    return [code for code, value in enumerate(facts.values.to_pylist()) if str(value) in ones]


def _role(facts: Facts, positive_N: np.ndarray[Any, np.dtype[np.bool_]]) -> Role:
    """The role of a column that is not the label."""
    if facts.kind == "empty":
        return Role(facts, "left out", "empty")
    if facts.kind == "other":
        return Role(facts, "left out", "a struct or another type that is not read; flatten it")
    if names.NAMELESS.fullmatch(facts.name):
        return Role(facts, "left out", "an index without a name")
    if facts.kind == "list":
        return _role_of_list(facts)
    if facts.distinct == 1 and not facts.missing:
        return Role(facts, "left out", "constant")
    if names.rank_of_label(facts.name) is not None and (facts.distinct <= 2 or facts.missing > 0):
        return Role(facts, "left out", "called like a label; known only after it")
    if names.fits(facts.name, "ratings") or (names.fits(facts.name, "afterwards") and not is_time(facts)):
        return Role(facts, "left out", "by its name known only after the label")
    if names.fits(facts.name, "weights") and facts.number_V is not None and np.nanmin(facts.number_V) >= 0:
        return Role(facts, "weight", "numbers from 0 on and a name of weights")
    if is_time(facts):
        return Role(facts, "time", "times and a name of times")
    if (auc := auc_alone(facts, positive_N)) > KNOWS:
        return Role(facts, "left out", f"alone it has an AUC of {auc:.4f}: it knows the answer")
    return _feature(facts)


def is_time(facts: Facts) -> bool:
    """Whether a column has times for `data.time`: by its kind, or numbers with a name of times that count from 1970 on,
    only grow, or are called timestamp."""
    if facts.number_V is None or facts.kind == "truth" or facts.missing or facts.distinct < FEWEST_TIMES:
        return False
    if facts.kind == "time" or not names.means_time(facts.name):
        return facts.kind == "time"
    column = Column("", np.arange(len(facts.values)), "", facts.values)
    number_N = facts.number_V[facts.code_N]
    grows, stamped = bool((np.diff(number_N) >= 0).all()), "timestamp" in names.words_of(facts.name)
    return times.are_counts(column, ReadingRules()) or grows or (stamped and facts.distinct > 5 * FEW)


def _role_of_list(facts: Facts) -> Role:
    entries, cut = facts.entries, {} if facts.separator is None else {"separator": facts.separator.lstrip("[")}
    assert entries is not None and facts.length_N is not None
    widths = set(facts.length_N[facts.length_N > 0])
    if entries.kind == "number":
        if len(widths) != 1:
            return Role(facts, "left out", "fractions in lists of several lengths", settings=cut)
        return Role(facts, "dense", "a vector of one width", settings={"width": int(widths.pop())})
    if entries.kind not in ("whole", "text", "truth", "time"):
        return Role(facts, "left out", f"lists of {entries.kind}")
    return Role(facts, "sparse", "several values a row", settings={**cut, "pooling": "mean"})


def _feature(facts: Facts) -> Role:
    """A column of one value a row: numbers, categories or neither."""
    user, rows = names.rank_of_user(facts.name), int((facts.code_N >= 0).sum())
    counts = names.means_number(facts.name)
    if facts.kind in ("number", "time"):
        return Role(facts, "dense", "numbers with fractions" if facts.kind == "number" else "times")
    if facts.distinct == rows > 2 and not (counts and facts.kind == "whole"):
        return Role(facts, "left out", "one value a row")
    if facts.kind == "text" and facts.distinct > 5 * FEW and names.means_time(facts.name):
        return Role(facts, "left out", "called a time and not read as one; write it as 2024-05-01 13:45")
    if user is not None and facts.distinct > 2:
        return Role(facts, "sparse", "called like users", user=user)
    if facts.kind == "text":
        return _role_of_text(facts, rows)
    if facts.kind == "truth" or facts.distinct <= 2:
        return Role(facts, "sparse", "two values")
    if counts is None and (counts := _are_counts(facts)):
        return Role(facts, "dense", "whole numbers, most of them small", both=facts.distinct <= FEW)
    if counts:
        return Role(facts, "dense", "whole numbers and a name of numbers", both=facts.distinct <= FEW)
    return Role(facts, "sparse", "whole numbers that are codes")


def _role_of_text(facts: Facts, rows: int) -> Role:
    words_V = np.array(pc.count_substring(facts.values, " ")) + 1
    if (words_V.mean() >= 3 and facts.distinct > 0.3 * rows) or (words_V.mean() >= 8 and facts.distinct > 100):
        return Role(facts, "left out", "free text")
    return Role(facts, "sparse", "texts that recur")


def _are_counts(facts: Facts) -> bool:
    """Whether whole numbers without a telling name are counts: many small ones without gaps, a few far above."""
    assert facts.number_V is not None
    number_N = facts.number_V[facts.code_N[facts.code_N >= 0]]
    low, middle, top = np.quantile(number_N, [0.02, 0.5, 1.0])
    small = len(np.unique(number_N[(number_N >= low) & (number_N <= middle)]))
    skewed = top - low > 5 * (middle - low + 1) and small > 0.5 * (middle - low)
    return bool(low >= -10 and middle < 10_000 and skewed and facts.distinct < 0.5 * (top - low))


def _grouped(roles: Sequence[Role]) -> list[Role]:
    """With list columns that have one length in each row as parts of one sequence."""
    lists = [role for role in roles if role.facts.kind == "list" and role.use in ("sparse", "left out")]
    groups: dict[tuple[Any, ...], list[Role]] = {}
    for role in lists:
        length_N = role.facts.length_N
        assert length_N is not None
        if length_N.max() > 1:
            groups.setdefault((role.facts.separator, length_N.tobytes()), []).append(role)
    found = {}
    for members in groups.values():
        if len(members) > 1 and any(role.use == "sparse" for role in members):
            why = f"a history: {', '.join(role.name for role in members)} have one length in each row"
            found |= {role.name: replace(role, use="sequence", why=why) for role in members}
    return [found.get(role.name, role) for role in roles]


def _one_of_each(roles: Sequence[Role]) -> list[Role]:
    """With one column of times, the one with the most values, and one of weights; another time is a number."""
    stamps = [role for role in roles if role.use == "time"]
    named = [role for role in stamps if names.means_time(role.name)] or stamps
    time = max(named, key=lambda role: role.facts.distinct, default=None)
    weight = next((role for role in roles if role.use == "weight"), None)
    found = []
    for role in roles:
        if role.use == "time" and role is not time:
            role = Role(role.facts, "dense", f"another time beside {time.name if time else ''}")
        if role.use == "weight" and role is not weight:
            role = Role(role.facts, "dense", "another weight")
        found.append(role)
    return found
