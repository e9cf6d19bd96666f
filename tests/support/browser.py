"""Headless Chromium for tests of pages: what a page requests, what it logs, what axe-core finds, where the focus goes.

scripts/install-all installs what it needs. Without it, tests are skipped.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page, ViewportSize

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
AXE = Path(sys.prefix) / "share" / "axe-core" / "axe.min.js"
LIMIT_S, POLL_MS = 30.0, 50
WIDE, NARROW = (1440, 900), (390, 844)
Look = Literal["light", "dark"]

FOCUSED = """() => {
  const e = document.activeElement;
  if (!e || e === document.body) return null;
  const style = getComputedStyle(e), box = e.getBoundingClientRect();
  const name = e.getAttribute('aria-label') || e.innerText || e.getAttribute('name') || e.id || '';
  return {
    tag: e.tagName.toLowerCase(), id: e.id, name: name.trim().slice(0, 60),
    ring: (style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) > 0) || style.boxShadow !== 'none',
    shown: box.width > 0 && box.height > 0, top: box.top + scrollY, left: box.left + scrollX,
  };
}"""
"""What has the focus: null = nothing."""


class Visit:
    """One page in a window of its own, and all that it requested and logged. The methods have a limit."""

    def __init__(self, context: BrowserContext) -> None:
        self.requests: list[str] = []
        self.problems: list[str] = []
        """Errors and warnings of the console, exceptions, and requests that failed."""
        self.page: Page = context.new_page()
        self.page.set_default_timeout(LIMIT_S * 1000)
        context.on("request", lambda request: self.requests.append(request.url))
        self.page.on("websocket", lambda socket: self.requests.append(socket.url))
        self.page.on("console", lambda message: self._logged(message.type, message.text))
        self.page.on("pageerror", lambda error: self.problems.append(f"exception: {error}"))

    def open(self, address: str) -> None:
        """Opens an address. Does not wait for streams to end."""
        self.page.goto(address, wait_until="load")

    def wait(self, expression: str, *, limit_s: float = LIMIT_S) -> None:
        """Waits until a JavaScript expression is true. Not by a script of the page, whose policy allows no eval."""
        end = time.monotonic() + limit_s
        while not self.page.evaluate(expression):
            assert time.monotonic() < end, f"not true within {limit_s:g} s: {expression}\n{self.text()[:4000]}"
            self.page.wait_for_timeout(POLL_MS)

    def text(self, selector: str = "body") -> str:
        return self.page.inner_text(selector)

    def hosts(self) -> set[str]:
        """Where requests went; those within the page (data, blob) go nowhere."""
        return {urlsplit(url).netloc for url in self.requests} - {""}

    def too_wide(self) -> int:
        """Pixels by which the page is wider than the window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))

    def axe(self) -> list[str]:
        """The serious and critical findings of axe-core, each with the first elements."""
        if not AXE.exists():
            pytest.skip("no axe-core: run make test LONG=1")
        self.page.evaluate(AXE.read_text(encoding="utf-8"))
        found = self.page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
        grave = [finding for finding in found if finding["impact"] in ("serious", "critical")]
        return [_shown(finding) for finding in grave]

    def tab_stops(self, most: int = 400) -> list[dict[str, Any]]:
        """What has the focus after each Tab, from the page's top until the focus leaves the page or comes round."""
        self.page.evaluate("document.activeElement && document.activeElement.blur()")
        stops: list[dict[str, Any]] = []
        for _ in range(most):
            self.page.keyboard.press("Tab")
            stop = self.page.evaluate(FOCUSED)
            if stop is None or stop in stops:
                break
            stops.append(stop)
        return stops

    def _logged(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.problems.append(f"{kind}: {text}")


class Chromium:
    """One process of Chromium; each visit has its own window and cookies."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser

    @contextlib.contextmanager
    def visit(self, *, size: tuple[int, int] = WIDE, look: Look = "light", **options: Any) -> Iterator[Visit]:
        viewport: ViewportSize = {"width": size[0], "height": size[1]}
        context = self._browser.new_context(viewport=viewport, color_scheme=look, reduced_motion="reduce", **options)
        try:
            yield Visit(context)
        finally:
            context.close()


@contextlib.contextmanager
def chromium() -> Iterator[Chromium]:
    """Starts Chromium. Skips the test where it or playwright is missing."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip(f"none of {', '.join(PROGRAMS)} is installed: run make test LONG=1")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.skip("no playwright: run make test LONG=1")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield Chromium(browser)
        finally:
            browser.close()


def _shown(finding: dict[str, Any]) -> str:
    nodes = [f"{node['html'][:120]}  ({_reason(node)})" for node in finding["nodes"][:5]]
    return "\n  ".join([f"{finding['impact']} {finding['id']}: {finding['help']} ({len(finding['nodes'])})", *nodes])


def _reason(node: dict[str, Any]) -> str:
    checks = [*node["any"], *node["all"], *node["none"]]
    return str(checks[0]["message"]) if checks else ""
