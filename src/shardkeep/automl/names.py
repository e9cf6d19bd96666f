"""What the names of columns mean in the field, by the words of names.yaml."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

from shardkeep.base.yaml_text import read_text, read_yaml

NAMELESS = re.compile(r"(unnamed:? ?\d+|index|level_\d+|__index_level_\d+__|row_?(num|number|id|index)|x\.\d)?", re.I)
"""What pandas and R call a column that had no name."""


@functools.cache
def _known() -> dict[str, Any]:
    return dict(read_yaml(read_text(Path(__file__).with_name("names.yaml"))))


def words_of(name: str) -> list[str]:
    """The words of a name in lower case: `userID`, `user_id` and `userid` are user and id."""
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]
    known = {*_known()["users"], *_known()["codes"]}
    return [
        part for word in words for part in ((word[:-2], "id") if word[:-2] in known and word[-2:] == "id" else (word,))
    ]


def fits(name: str, key: str) -> bool:
    """Whether a name is, with underscores between its words, one of the words or the pattern at a key of names.yaml."""
    known, joined = _known()[key], "_".join(words_of(name))
    return re.fullmatch(known.replace(" ", ""), joined) is not None if isinstance(known, str) else joined in known


def rank_of_label(name: str) -> int | None:
    """0 for what is a label before all others; None = it is not called like one."""
    joined = "".join(word for word in words_of(name) if word not in _known()["fillers"])
    return next((rank for rank, words in enumerate(_known()["labels"]) if joined in words), None)


def rank_of_user(name: str) -> int | None:
    """0 for what is a user before all others; None = it is not called like one."""
    first, *rest = words_of(name) or [""]
    users = _known()["users"]
    return users.index(first) if first in users and set(rest) <= set(_known()["keys"]) else None


def means_time(name: str) -> bool:
    """Whether a name is one of times, such as `event_time` or `unixReviewTime`."""
    words, known = words_of(name) or [""], _known()
    first_or_last = words[-1] in known["times"] or words[0] in ("time", "date") or "timestamp" in words
    return first_or_last and not set(words) & set(known["counted"])


def formats() -> list[str]:
    """Patterns of strptime by which people write times."""
    return [date + clock for date in _known()["dates"] for clock in _known()["clocks"]] + list(_known()["stamps"])


def means_number(name: str) -> bool | None:
    """Whether whole numbers of this name are counted or measured, not codes; None = it does not tell."""
    words, known = words_of(name), _known()
    if words and (words[0] in known["counted"] or {"per", "since"} & set(words)):
        return True
    telling = [word for word in reversed(words) if word in known["numbers"] or word in known["codes"]]
    return telling[0] in known["numbers"] if telling else None


def stem_of(name: str) -> frozenset[str]:
    """What tells ids of one kind from those of another: that of `hist_item_ids` is that of `item_id`."""
    return frozenset(word.rstrip("s") for word in words_of(name)) - {*_known()["histories"], *_known()["keys"]}
