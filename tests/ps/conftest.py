"""What tests of the transport share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardkeep.ps.control.grpc.server import StoreHost


@pytest.fixture(scope="module")
def store_host() -> Iterator[StoreHost]:
    """A store that is open, for the whole module."""
    host = StoreHost()
    host.open(0)
    yield host
    host.close()
