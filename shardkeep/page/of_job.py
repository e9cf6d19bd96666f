"""The page of a running job, served by the process that leads it."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardkeep.base.errors import ConfigError, UserError
from shardkeep.page.server import (
    LOOPBACK,
    MISSING,
    PageServer,
    forget_address,
    installed,
    keep_address,
    kept_address,
    page_url,
)
from shardkeep.page_config import PageConfig
from shardkeep.ps.control.grpc.addresses import is_loopback, split_address
from shardkeep.trust.tokens import token_of
from shardkeep.trust.view import view_token

if TYPE_CHECKING:
    from shardkeep.page.state import RunState


@contextlib.contextmanager
def serving_page(page: PageConfig, run: Path, token: str, *, tls: Path | None = None) -> Iterator[str | None]:
    """Serves the page of a run until the block ends; yields its address with the token, None = there is no page.

    Args:
        page: Where it listens. It takes the place of an earlier process of the job, if that is free.
        run: The run folder.
        token: The job's token; the page wants the view token that follows from it.
        tls: Folder of certificates; an address that other machines reach is HTTPS then.

    Raises:
        ConfigError: It cannot listen on the address that the config names.
        UserError: The config names an address, and starlette is not installed.
    """
    try:
        server = _server(page, run, token, tls) if page.on else None
    except (ConfigError, UserError) as error:
        if page.required:
            raise type(error)(f"page.listen: {error}") from error
        server = None
    if server is None:
        forget_address(run)
        yield None
        return
    keep_address(run, server.address, secure=server.url.startswith("https"))
    try:
        yield server.url
    finally:
        server.close()


def check_installed(page: PageConfig) -> None:
    """Raises UserError if the config names an address, and starlette or uvicorn is not installed. Imports neither."""
    if page.required and not installed():
        raise UserError(f"page.listen: the page {MISSING}; or auto")


def page_line(run: Path, token: str | None = None) -> str | None:
    """The address of the page of the job in this run folder, with its token; None = it has none.

    `token`: the job's; None = this user's own for the folder."""
    with contextlib.suppress(ConfigError, UserError):
        if (kept := kept_address(run)) is not None:
            return page_url(kept[0], view_token(token_of(run) if token is None else token), secure=kept[1])
    return None


def _server(page: PageConfig, run: Path, token: str, tls: Path | None) -> PageServer:
    listen = page.listen if page.required else LOOPBACK
    kept = kept_address(run)
    wide = not is_loopback(split_address(listen, lowest_port=0)[0])
    context = None
    if tls is not None and wide:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls / "cert.pem", tls / "key.pem")
    before = None if kept is None else kept[0]
    return PageServer(listen, view_token(token), lambda: _runs(run), before=before, tls=context)


def _runs(run: Path) -> Sequence[RunState]:
    from shardkeep.page.state import RunState

    return [RunState(run, serving=True)]
