"""What shardkeep's dependencies bring into this environment, and what is here beside them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from importlib import metadata

from packaging.requirements import Requirement


def name_of(distribution: str) -> str:
    """A distribution's name as the index spells it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def closure(requirements: Iterable[str]) -> set[str]:
    """The names of the distributions that these requirements bring here, those included."""
    found: set[tuple[str, frozenset[str]]] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        wanted = waiting.pop()
        one = (name_of(wanted.name), frozenset(wanted.extras))
        with contextlib.suppress(metadata.PackageNotFoundError):  # of another platform
            below = [] if one in found else [Requirement(text) for text in metadata.requires(wanted.name) or []]
            found.add(one)
            waiting += [each for each in below if _holds(each, wanted.extras)]
    return {name for name, _ in found}


def _holds(wanted: Requirement, extras: Iterable[str]) -> bool:
    return wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in ("", *extras))


def modules_beside(distributions: Iterable[str]) -> list[str]:
    """The top-level modules of this environment that none of these distributions brings."""
    kept = set(distributions)
    by_module = metadata.packages_distributions()
    return sorted(module for module, owners in by_module.items() if not kept & {name_of(owner) for owner in owners})
