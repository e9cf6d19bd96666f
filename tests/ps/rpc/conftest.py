"""A server in a process of its own. Each group of it has a service of its own: what one test leaves there, no other
meets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.support.rpc_groups import Group, Pair


@pytest.fixture
def pair() -> Iterator[Pair]:
    """For tests that kill the server or count what the two processes hold."""
    with contextlib.closing(Pair()) as pair:
        yield pair


@pytest.fixture(scope="module")
def lasting_pair() -> Iterator[Pair]:
    with contextlib.closing(Pair()) as pair:
        yield pair


@pytest.fixture
def group(lasting_pair: Pair) -> Iterator[Group]:
    group = lasting_pair.form()
    yield group
    group.leave()
