"""Few cases in which any two values of any two factors meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product

Case = dict[str, str]
Pair = frozenset[tuple[str, str]]


def pairs_of(case: Case) -> set[Pair]:
    return {frozenset(each) for each in combinations(case.items(), 2)}


def cases_of(factors: Mapping[str, Sequence[str]]) -> list[Case]:
    """Of all cases the one with the most new pairs, the first of several, until there is no new pair."""
    every = [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]
    left, found = set[Pair]().union(*map(pairs_of, every)), []
    while left:
        found.append(max(every, key=lambda case: len(left & pairs_of(case))))
        left -= pairs_of(found[-1])
    return found
