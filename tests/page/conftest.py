"""What tests of the page share: one Chromium for each module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.browser import Chromium, chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with chromium() as browser:
        yield browser
