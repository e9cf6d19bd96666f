"""Commands that show runs in a browser: view, report."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from shardkeep.base.errors import UserError
from shardkeep.cli.exits import run_command
from shardkeep.cli.options import Debug, complete_run, path

Runs = Annotated[
    list[Path] | None,
    typer.Argument(
        parser=path,
        metavar="[RUN]...",
        autocompletion=complete_run,
        help="Run folders, running or finished; several are compared [default: the newest in runs/].",
    ),
]


def view(
    runs: Runs = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address of the page; port 0 = any free one.")
    ] = "127.0.0.1:0",
    token_file: Annotated[
        Path | None,
        typer.Option(
            parser=path,
            metavar="FILE",
            help="File with a token that the page wants, readable by you alone [default: a new one, printed].",
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Show runs in a browser: prints the address of a page and serves it until Ctrl-C."""

    def body() -> int:
        import secrets

        from shardkeep.page.server import PageServer
        from shardkeep.page.state import RunState
        from shardkeep.ps.control.grpc.addresses import is_loopback, split_address
        from shardkeep.ps.control.grpc.endpoint import read_token

        if token_file is None and not is_loopback(host := split_address(listen, lowest_port=0)[0]):
            raise UserError(
                f"--listen {host}: other machines may reach it; allowed: 127.0.0.1, or any address with "
                "--token-file FILE (docs/guide/security.md)"
            )
        token = secrets.token_hex(32) if token_file is None else read_token(token_file)
        states = [RunState(run) for run in _chosen(runs)]
        server = PageServer(listen, token, lambda: states)
        try:
            print(f"page  {server.url}", flush=True)
            server.wait()
        except KeyboardInterrupt:
            pass
        finally:
            server.close()
        return 0

    run_command(body, debug)


def report(
    html: Annotated[Path, typer.Option("--html", parser=path, metavar="FILE", help="File to write.")],
    runs: Runs = None,
    debug: Debug = False,
) -> None:
    """Write the page of runs as one HTML file, which needs no network and can be sent."""

    def body() -> int:
        from shardkeep.base.files import atomic_write
        from shardkeep.page.files import whole_page
        from shardkeep.page.state import RunState

        if html.is_dir():
            raise UserError(f"--html {html}: is a folder; name a file")
        text = whole_page([RunState(run) for run in _chosen(runs)])
        with contextlib.suppress(OSError):
            html.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(html, text)
        print(f"report  {html}", flush=True)
        return 0

    run_command(body, debug)


def _chosen(runs: list[Path] | None) -> list[Path]:
    from shardkeep.run.reader import latest_run

    if runs:
        return runs
    if (newest := latest_run()) is None:
        raise UserError("no run folder in runs/; name one")
    return [newest]
