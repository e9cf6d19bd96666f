"""`shardkeep stop`: reads the arguments, prints how the job ended."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardkeep.base.errors import UserError
from shardkeep.cli.exits import run_command
from shardkeep.cli.options import Ask, Debug, Run, TlsFolder, TokenFile

TIMEOUT_S = 600.0


def stop(
    run: Run = None,
    timeout: Annotated[
        float, typer.Option(min=0.0, metavar="S", help="Seconds to wait for the end of the job.")
    ] = TIMEOUT_S,
    coordinator: Ask = None,
    token_file: TokenFile = None,
    tls: TlsFolder = None,
    debug: Debug = False,
) -> None:
    """Stop a running job with a checkpoint, and wait until it has ended."""

    def ask() -> int:
        from shardkeep.launch.stop import stop_at, stop_run
        from shardkeep.ps.control.grpc.addresses import is_address
        from shardkeep.ps.control.grpc.tls import read_tls
        from shardkeep.roles.access import endpoint_of
        from shardkeep.run.reader import latest_run

        if coordinator is not None and is_address(coordinator):
            lines = stop_at(endpoint_of(coordinator, token_file=token_file, tls=tls), timeout_s=timeout)
        else:
            path = run or (latest_run() if coordinator is None else Path(coordinator))
            if path is None:
                raise UserError("no run folder in runs/; name one, or use --coordinator HOST:PORT")
            known = None if tls is None else read_tls(tls)
            lines = stop_run(path, timeout_s=timeout, token_file=token_file, tls=known)
        print("\n".join(lines), flush=True)
        return 0

    run_command(ask, debug)
