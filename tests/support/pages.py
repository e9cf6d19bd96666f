"""Pages of run folders for tests, served in the test's own process, and what a reader finds on the page."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from urllib.parse import urlsplit

from shardkeep.config.web import WebConfig
from shardkeep.page.of_job import LIMITS, page_url, serve_page
from shardkeep.page.state import RunState
from shardkeep.web.access import Access
from shardkeep.web.server import WebServer
from shardkeep.web.site import Site
from tests.support.browser import Visit

LIVE = "document.querySelector('#connection').className === 'live'"
DRAWN = "!document.body.classList.contains('waiting')"


@dataclass(frozen=True)
class PageAddress:
    """Where a page is. `url` has the token."""

    url: str

    @property
    def place(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        assert parts.hostname is not None and parts.port is not None
        return parts.hostname, parts.port

    @property
    def netloc(self) -> str:
        return urlsplit(self.url).netloc

    @property
    def token(self) -> str:
        return urlsplit(self.url).query.removeprefix("token=")

    @property
    def bearer(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}


@contextlib.contextmanager
def viewed(*runs: Path, now: datetime | None = None) -> Iterator[PageAddress]:
    """Serves the page of run folders until the end of the `with`. It accepts any number of connections per second.

    `now`: The time at which the page sees the folders; None = the time of this machine."""
    from shardkeep.page.app import page_app  # here: it loads starlette

    clock = time.time if now is None else now.timestamp
    states, access = [RunState(run, clock=clock) for run in runs], Access("0123456789abcdef" * 4)
    site = Site(lambda: page_app(states, access), access, replace(LIMITS, per_s=1e6, burst=1000))
    with contextlib.closing(WebServer()) as web:
        yield PageAddress(page_url(web.open("127.0.0.1:0", site), access.token or ""))


@contextlib.contextmanager
def served_page(page: WebConfig, run: Path, token: str, *, tls: Path | None = None) -> Iterator[str | None]:
    """Serves the page of a run as its job does, until the end of the `with`."""
    with contextlib.closing(WebServer()) as web:
        yield serve_page(web, page, run, token, tls=tls)


def tile(visit: Visit, name: str) -> str:
    """The figure of the overview below a heading, without its unit."""
    found = visit.page.locator(f"#overview .tile:has(dt:text-is('{name}')) .value")
    return found.inner_text().strip()


def number(text: str) -> float:
    """The number that a figure shows: 1,200 and 14.8 GB, with their unit."""
    match = re.fullmatch(r"([\d,.]+)\s*(B|kB|MB|GB|TB|k|M|G|%)?", text)
    assert match is not None, f"{text!r} is no number"
    factor = {None: 1, "B": 1, "k": 1e3, "kB": 1e3, "M": 1e6, "MB": 1e6, "G": 1e9, "GB": 1e9, "TB": 1e12}
    return float(match[1].replace(",", "")) * factor.get(match[2], 1)


def rows_of(visit: Visit, section: str) -> list[list[str]]:
    script = (
        "s => [...document.querySelector(s + ' table').tBodies[0].rows].map(r => [...r.cells].map(c => c.innerText))"
    )
    found: list[list[str]] = visit.page.evaluate(script, f"#{section}")
    return found
