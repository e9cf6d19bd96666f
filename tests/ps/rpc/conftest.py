"""A server in a process of its own, for each test: what one test leaves there, no other meets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.rpc_groups import Group, Pair, service_settings


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair(service_settings("sync"))
    yield pair
    pair.close()


@pytest.fixture
def group(pair: Pair) -> Group:
    return pair.form()
