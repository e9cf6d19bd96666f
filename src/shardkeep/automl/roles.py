"""Roles: what each column of a file is for, and why. The rules of a role are one table; names.yaml has the words.

N = rows, V = distinct values
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from shlex import quote
from typing import Any, Literal

import numpy as np
import pyarrow.compute as pc  # type: ignore[import-untyped]

from shardkeep.automl import names
from shardkeep.automl.columns import Facts, are_dates, auc_alone, purity
from shardkeep.automl.job_file import flow
from shardkeep.base.arrays import Bools, Float64s
from shardkeep.base.errors import DataError
from shardkeep.workers.data.conversion import times
from shardkeep.workers.data.conversion.chunk import Chunk, Column, missing_column
from shardkeep.workers.data.conversion.labels import decode_labels
from shardkeep.workers.data.conversion.rules import ReadingRules
from shardkeep.workers.data.conversion.teaching import filled_end
from shardkeep.workers.label_config import LabelColumn

Use = Literal["label", "weight", "time", "dense", "sparse", "sequence", "left out"]
FEWEST_TIMES = 20
"""Distinct times from which the newest tenth of the rows can be cut off."""
KNOWS, TELLS, DOUBTED = 0.999, 0.9, 0.55
"""AUC from which a column alone knows the answer, and from which it may have come after it; and that of a column with a
name of outcomes, if it is beyond chance."""
ALIKE = 0.3
"""Values that a history and a feature share, of those of either, from which they are of one kind."""
FEW, FEW_TEXTS = 200, 20
"""Distinct whole numbers up to which each is looked up, too (examples/adult.yaml does so), and texts of a label."""
_TRUE = ("true", "True", "TRUE", "t", "yes", "Yes", "YES", "y", "Y", "ja", "Ja", "JA", "click")


@dataclass(frozen=True)
class Role:
    """What a column is used for, and why. `settings`: what its entry in the config needs beside its name. `question`:
    what only the user knows. `doubt`: why it may come after the label, and the end of that sentence."""

    facts: Facts
    use: Use
    why: str
    settings: Mapping[str, Any] | None = None
    question: str = ""
    doubt: tuple[str, str] = ("", "")

    @property
    def name(self) -> str:
        """That of the column."""
        return self.facts.name

    @property
    def both(self) -> bool:
        """Whether the numbers of a dense column are looked up, too."""
        return self.use == "dense" and self.facts.kind == "whole" and self.facts.distinct <= FEW

    @property
    def user(self) -> int | None:
        """0 for what is surely a user; None = it is none."""
        return names.rank_of_user(self.name) if self.use == "sparse" and self.facts.kind != "list" else None


def roles_of(columns: Sequence[Facts], rows: Chunk, rules: ReadingRules, label: LabelColumn | None) -> list[Role]:
    """The role of each column, in their order. `rows`: those that the columns were read from; `label`: the one that the
    user names. Raises DataError where no column can be the label, and where nothing is left to learn from."""
    named = {} if label is None else label.model_dump(exclude_none=True)
    target, origin = _label(columns, named.get("column"), named.get("positive"), rows.path), rows.path
    label = LabelColumn.model_validate({"column": target.name, **(target.settings or {})})
    rules = replace(rules, missing=(*rules.missing, *target.facts.marks))
    positive_N, known_N = decode_labels(rows, [label], lambda _: rules).value_N == 1, target.facts.code_N >= 0
    roles = [target if facts is target.facts else _role(facts) for facts in columns]
    roles = _grouped([_doubted(role, positive_N, known_N) for role in _one_of_each(roles)])
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
    more = [] if best else [facts for facts in columns if _could_be_cut(facts)]
    rated = sorted(pairs + more, key=lambda facts: (not _is_outcome(facts.name), facts.distinct > 2))[:12]
    if not rated:
        raise DataError(f"{origin}: has no column that could be a label: none has two values, or a few")
    why = f"{len(best)} columns could be the label" if best else "no column has two values and a name of labels"
    shown = ", ".join(f"{facts.name} ({_values(facts)})" for facts in rated)
    raise DataError(f"{origin}: {why}; candidates: {shown}; name one: --label {quote(rated[0].name)}")


def _is_outcome(name: str) -> bool:
    return names.rank_of_label(name) is not None or names.fits(name, "ratings") or names.fits(name, "afterwards")


def _could_be_cut(facts: Facts) -> bool:
    """Whether a column of more than two values could be cut in two classes."""
    few = facts.distinct <= (FEW_TEXTS if facts.kind == "text" else FEW)
    known = "id" in names.words_of(facts.name) or names.rank_of_user(facts.name) is not None or is_time(facts)
    cut = facts.kind in ("text", "whole", "number") and facts.distinct > 2
    return cut and not known and (few or (_is_outcome(facts.name) and facts.kind != "text"))


def _values(facts: Facts) -> str:
    if facts.distinct > 2 and facts.number_V is not None:
        return f"{facts.distinct} values, {np.nanmin(facts.number_V):g} to {np.nanmax(facts.number_V):g}"
    shown = [" ".join(example.split())[:20] for example in facts.examples()]
    return ", ".join(sorted(shown) + ["..."] * (facts.distinct > 3))


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
            f"--set {quote(f'data.label.positive={flow([facts.examples()[0]])}')}"
        )
    number_N = _numbers(facts)
    edges_V = np.unique(number_N)[:-1]
    above = float(edges_V[int(np.argmin([abs((number_N > edge).mean() - 0.5) for edge in edges_V[:1000]]))])
    why = f"{why}; above {above:g} means 1; or the number: train.loss: mse"
    return Role(facts, "label", why, settings={"positive": {"above": above}, **missing})


def _role(facts: Facts) -> Role:
    """The role of a column that is not the label: the first of `ROLES` that fits."""
    use, why = next((use, why) for fits, use, why in ROLES if fits(facts))
    if why == UNREAD:
        ways = " or ".join(f"--set 'data.time_format=\"{each}\"'" for each in facts.formats) or "set data.time_format"
        shown = ", ".join(example[:30] for example in facts.examples())
        question = f"{facts.name}: are {shown} dates? Write all as 2024-05-01 13:45, or {ways}; others: data.missing"
        return Role(facts, use, why, question=question)
    if use == "time" and is_doubted(facts):
        use, why = "dense", "times that change with the outcome, by their name: no split"
    settings = None
    if facts.entries is not None and facts.length_N is not None and use != "left out":
        cut = {} if facts.separator is None else {"separator": facts.separator.lstrip("[")}
        settings = {"width": int(facts.length_N.max())} if use == "dense" else {**cut, "pooling": "mean"}
        found = filled_end(facts.entries.code_N, facts.length_N) if use == "sparse" else None
        code = -1 if found is None else int(facts.entries.code_N[found[1]])
        if found is not None and code >= 0 and type(pad := facts.entries.values[code].as_py()) in (int, float, str):
            settings, why = settings | {"pad": pad}, f"{why}; {pad} fills the {found[0]} of {found[2]:.0%} of them"
    return Role(facts, use, why, settings)


def _doubted(role: Role, positive_N: Bools, known_N: Bools) -> Role:
    """An input with its doubt, or left out where it alone has the answer."""
    facts, use = role.facts, role.use
    if use not in ("dense", "sparse"):
        return role
    few = facts.distinct <= (FEW if names.rank_of_user(facts.name) is None else FEW_TEXTS)  # ids tell by popularity
    doubt = purity(facts, positive_N, known_N, each=few and role.settings is None and use == "sparse")
    if role.settings is None and (auc := auc_alone(facts, positive_N)) > DOUBTED:
        if auc > KNOWS:
            return Role(facts, "left out", f"alone it has an AUC of {auc:.4f}: it knows the answer")
        ones = int(positive_N.sum())
        sure = auc - 0.5 > 5 * np.sqrt((len(positive_N) + 1) / (12 * ones * (len(positive_N) - ones)))
        if (auc > TELLS and (few or use == "dense")) or (sure and is_doubted(facts)):
            doubt = doubt if doubt[0] else (f"alone it has an AUC of {auc:.2f}", "")
    return replace(role, doubt=doubt)


def doubts(roles: Sequence[Role]) -> list[str]:
    """The question for each kind of doubt: one line for all of its columns."""
    found: dict[str, list[str]] = {}
    for role in roles:
        if role.doubt[0]:
            found.setdefault(role.doubt[1], []).append(f"{role.name}: {role.doubt[0]}")
    ends = {True: "is it known before the label? If not, leave it out",
            False: "are they known before the label? Leave out those that are not"}  # fmt: skip
    return [f"{', '.join(each)}{end}; {ends[len(each) == 1]}" for end, each in found.items()]


def is_doubted(facts: Facts) -> bool:
    """Whether a column changes with the outcome, by its name: no time for a split."""
    return names.fits(facts.name, "outcomes") or (
        names.fits(facts.name, "ends") and (facts.kind == "time" or is_time(facts))
    )


def is_time(facts: Facts) -> bool:
    """Whether a column has times for `data.time`: by its kind, or numbers with a name of times that count from 1970 on,
    only grow, are written as 20240501, or are called timestamp."""
    if facts.number_V is None or facts.kind == "truth" or facts.missing or facts.distinct < FEWEST_TIMES:
        return False
    if facts.kind == "time" or not names.means_time(facts.name):
        return facts.kind == "time"
    grows, stamped = bool((np.diff(_numbers(facts)) >= 0).all()), "timestamp" in names.words_of(facts.name)
    column, V = Column("", np.arange(len(facts.values)), "", facts.values), facts.number_V
    dated = ((abs(V - 2e7) < 1e6) & (abs(V // 100 % 100 - 6.5) < 6) & (abs(V % 100 - 16) < 16)).all()  # 20240501
    return bool(times.are_counts(column, ReadingRules()) or grows or (stamped and facts.distinct > 5 * FEW) or dated)


def _numbers(facts: Facts) -> Float64s:
    """Of the rows that have one."""
    assert facts.number_V is not None
    return facts.number_V[facts.code_N[facts.code_N >= 0]]


def _is_vector(facts: Facts) -> bool:
    lists = facts.entries is not None and facts.entries.kind == "number" and facts.length_N is not None
    return lists and len(set(facts.length_N[facts.code_N >= 0])) == 1  # type: ignore[index]


def _is_free(facts: Facts) -> bool:
    """Whether texts are sentences: of three words that seldom recur, or of eight."""
    words = 1 + pc.mean(pc.count_substring(facts.values, " ")).as_py()
    return bool(
        (words >= 3 and facts.distinct > 0.3 * (facts.code_N >= 0).sum()) or (words >= 8 and facts.distinct > 100)
    )


def _are_counts(facts: Facts) -> bool:
    """Whether whole numbers are counts: by their name, or many small ones without gaps and a few far above."""
    if (told := names.means_number(facts.name)) is not None or facts.distinct < 3:
        return bool(told) and facts.distinct > 2
    number_N = _numbers(facts)
    low, middle, top = np.quantile(number_N, [0.02, 0.5, 1.0])
    small = len(np.unique(number_N[(number_N >= low) & (number_N <= middle)]))
    skewed = top - low > 5 * (middle - low + 1) and small > 0.5 * (middle - low)
    return bool(low >= -10 and middle < 10_000 and skewed and facts.distinct < 0.5 * (top - low))


UNREAD = "dates in a form that is not read"
# Adult, dnn, official test, two seeds: fnlwgt (21,648 values in 32,561 rows) dense .9302, left out .9296, sparse .9273.
ROLES: tuple[tuple[Callable[[Facts], Any], Use, str], ...] = (
    (lambda f: f.kind == "empty", "left out", "empty"),
    (lambda f: f.kind == "other", "left out", "a struct, JSON, infinite numbers or another type that is not read"),
    (lambda f: names.NAMELESS.fullmatch(f.name), "left out", "an index without a name"),
    (_is_vector, "dense", "a vector of one width"),
    (lambda f: f.entries and f.entries.kind == "number", "left out", "fractions in lists of several lengths"),
    (lambda f: f.entries and f.entries.kind in ("list", "other"), "left out", "lists of lists, or of a type not read"),
    (lambda f: f.kind == "list", "sparse", "several values a row"),
    (lambda f: f.distinct == 1 and not f.missing, "left out", "constant"),
    (lambda f: names.rank_of_label(f.name) is not None and f.distinct <= 2, "left out",
     "called like a label; known only after it"),
    (lambda f: f.kind == "text" and (f.formats or (f.distinct >= FEWEST_TIMES and are_dates(f.values)) or
                                     (f.distinct > FEW and names.means_time(f.name))), "left out", UNREAD),
    (lambda f: names.fits(f.name, "ratings") or (names.fits(f.name, "afterwards") and not is_time(f)), "left out",
     "by its name known only after the label"),
    (lambda f: names.fits(f.name, "weights") and f.number_V is not None and np.nanmin(f.number_V) >= 0, "weight",
     "numbers from 0 on and a name of weights"),
    (is_time, "time", "times and a name of times"),
    (lambda f: f.kind == "time" and f.missing, "dense", "times, some of them missing: no split by them"),
    (lambda f: f.kind == "time", "dense", "times"),
    (lambda f: f.kind == "number", "dense", "numbers with fractions, or durations"),
    (lambda f: f.kind == "whole" and names.means_number(f.name) and f.distinct > 2, "dense", "a name of numbers"),
    (lambda f: f.distinct == (f.code_N >= 0).sum() > 2, "left out", "one value a row"),
    (lambda f: names.rank_of_user(f.name) is not None and f.distinct > 2, "sparse", "called like users"),
    (lambda f: f.kind == "text" and _is_free(f), "left out", "free text"),
    (lambda f: f.kind == "text", "sparse", "texts that recur"),
    (lambda f: f.kind == "whole" and _are_counts(f), "dense", "whole numbers, most of them small"),
    (lambda f: f.kind == "whole" and 2 * f.distinct > (f.code_N >= 0).sum() and "id" not in names.words_of(f.name),
     "dense", "whole numbers that seldom recur"),
    (lambda f: True, "sparse", "two values, or whole numbers that are codes"),
)  # fmt: skip
"""In this order: whether it fits, the role, and why."""


def _one_of_each(roles: Sequence[Role]) -> list[Role]:
    """With one column of times, the one with the most values, and one of weights; another one is a number."""
    stamps = [role for role in roles if role.use == "time"]
    time = max(stamps, key=lambda role: (names.means_time(role.name), role.facts.distinct), default=None)
    weight = next((role for role in roles if role.use == "weight"), None)
    more = [role.name for role in roles if role.use in ("time", "weight") and role is not time and role is not weight]
    return [Role(role.facts, "dense", f"another {role.use}") if role.name in more else role for role in roles]


def _grouped(roles: Sequence[Role]) -> list[Role]:
    """With list columns that have one length in each row, and one with the values of a feature, as sequences."""
    groups: dict[tuple[Any, ...], list[Role]] = {}
    for role in roles:
        if role.facts.length_N is not None and role.use != "dense" and role.facts.length_N.max() > 1:
            groups.setdefault((role.facts.separator, role.facts.length_N.tobytes()), []).append(role)
    found = dict[str, Role]()
    for members in groups.values():
        if any(role.use == "sparse" and (len(members) > 1 or table_of(role, roles) != role.name) for role in members):
            why = f"a history: {', '.join(role.name for role in members)} have one length in each row"
            found |= {role.name: replace(role, use="sequence", why=why) for role in members}
    return [found.get(role.name, role) for role in roles]


def table_of(history: Role, roles: Sequence[Role]) -> str:
    """The feature whose values a list column has: by its name, `item_id` for `hist_item_ids`; by its values, if it is
    called a history or has texts with digits; or its own table."""
    stem, entries = names.stem_of(history.name), history.facts.entries
    features = [role for role in roles if role.use == "sparse" and role.facts.kind != "list"]
    if named := next((each.name for each in features if stem and names.stem_of(each.name) == stem), None):
        return named
    codes = entries is not None and entries.kind == "text" and bool(re.search(r"\d", "".join(entries.examples())))
    if entries is not None and entries.kind == "whole" and entries.number_V is not None:
        codes = bool(np.nanmax(entries.number_V) > 10 * entries.distinct)  # with gaps: not alike by chance
    if not (codes or names.fits(history.name, "pasts")):
        return history.name
    known, least = {*map(str, history.facts.values.to_pylist())}, (ALIKE, history.name)
    items = [role for role in features if role.user is None and role.facts.distinct > FEWEST_TIMES]
    values = {role.name: {*map(str, role.facts.values.to_pylist())} for role in items}
    return max([least, *((len(own & known) / len(own | known), name) for name, own in values.items())])[1]
