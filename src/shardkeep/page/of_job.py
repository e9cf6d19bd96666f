"""The page of runs: the site that a web server serves, its address for a browser, and the file that keeps it.

The process that leads a job serves the page of the job."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from shardkeep.base.errors import ConfigError, MissingPackage, UserError
from shardkeep.base.files import atomic_write
from shardkeep.base.net.addresses import is_loopback, split_address
from shardkeep.base.plugging.packages import PAGE, missing
from shardkeep.config.web import WebConfig
from shardkeep.records.json_text import to_json
from shardkeep.run.json_files import read_json
from shardkeep.trust.tls import read_tls
from shardkeep.trust.tokens import token_of
from shardkeep.trust.view import view_token
from shardkeep.web.access import Access
from shardkeep.web.server import WebServer
from shardkeep.web.site import Limits, Site, shown_url

if TYPE_CHECKING:
    from shardkeep.page.state import RunState
    from shardkeep.web.routes import Routes

LOOPBACK = "127.0.0.1:0"
LIMITS = Limits(connections=128, per_s=8, burst=32, backlog=64, head_bytes=16 << 10, wait_s=10.0)
"""A browser opens at most six connections."""
NICE = 10
"""Of the thread that serves a page."""


def serve_page(web: WebServer, config: WebConfig, run: Path, token: str, *, tls: Path | None = None) -> str | None:
    """Serves the page of a run until the server ends; returns its address with the token, None = there is no page.

    Args:
        config: Where it listens. It takes the place of an earlier process of the job, if that is free.
        run: The run folder.
        token: The job's token; the page wants the view token that follows from it.
        tls: Folder of certificates; an address that other machines reach is HTTPS then.

    Raises:
        ConfigError: It cannot listen on the address that the config names.
        MissingPackage: The config names an address, and starlette is not installed.
    """
    if not config.has_page:
        forget_address(run)
        return None
    listen, kept = config.page if config.needs_page else LOOPBACK, kept_address(run)
    secure = tls is not None and not is_loopback(split_address(listen, lowest_port=0)[0])
    access = Access(view_token(token), read_tls(tls) if tls is not None and secure else None, of_peers=False)

    def runs() -> Sequence[RunState]:
        from shardkeep.page.state import RunState

        return [RunState(run, serving=True)]

    try:
        address = open_page(web, listen, access, runs, before=None if kept is None else kept[0])
    except (UserError, MissingPackage) as error:
        if config.needs_page:
            raise type(error)(f"web.page: {error}") from error
        forget_address(run)
        return None
    keep_address(run, address, secure=secure)
    return page_url(address, view_token(token), secure=secure)


def open_page(
    web: WebServer,
    listen: str,
    access: Access,
    runs: Callable[[], Sequence[RunState]],
    *,
    before: str | None = None,
) -> str:
    """Serves the page of some runs at an address, and returns the address.

    Args:
        access: With the view token, and TLS for HTTPS.
        runs: Opens the run folders; called in the server's thread by the first connection.
        before: Address to take again if it is free.

    Raises ConfigError where it cannot listen, MissingPackage without starlette or uvicorn."""
    if (need := missing(*PAGE)) is not None:
        raise MissingPackage(f"the page {need}")

    def routes() -> Routes:
        from shardkeep.page.app import page_app

        return page_app(runs(), access)

    return web.open(listen, Site(routes, access, LIMITS), before=before)


def page_url(address: str, token: str, *, secure: bool = False) -> str:
    """The address for a browser, with the token."""
    return f"{shown_url(address, secure=secure)}/?token={token}"


def keep_address(run: Path, address: str, *, secure: bool = False) -> None:
    """Writes where the page of a run is; a coordinator that is restarted takes the same place."""
    atomic_write(run / "page.json", to_json({"address": address, "secure": secure}) + "\n")


def forget_address(run: Path) -> None:
    """Deletes the address of an earlier process of the job."""
    with contextlib.suppress(OSError):
        (run / "page.json").unlink(missing_ok=True)


def kept_address(run: Path) -> tuple[str, bool] | None:
    """Where the page of a run is, or was, and whether it is HTTPS."""
    with contextlib.suppress(OSError, UserError):
        if (found := read_json(run / "page.json")) is not None and isinstance(found.get("address"), str):
            return found["address"], bool(found.get("secure"))
    return None


def page_line(run: Path, token: str | None = None) -> str | None:
    """The address of the page of the job in this run folder, with its token; None = it has none.

    `token`: the job's; None = this user's own for the folder."""
    with contextlib.suppress(ConfigError, UserError):
        if (kept := kept_address(run)) is not None:
            return page_url(kept[0], view_token(token_of(run) if token is None else token), secure=kept[1])
    return None


def page_text(run: Path, address: str, *streams: TextIO | None) -> str:
    """What to print of a run's page: its address, which has the token, on terminals alone; else what shows the run."""
    terminals = all(stream is not None and stream.isatty() for stream in streams)
    return address if terminals else f"shardkeep view {shlex.quote(str(run))}"
