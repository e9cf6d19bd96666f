"""The command line: one command per role and per question. Commands read arguments and print errors, nothing else.

Imports that take time stand inside the commands, so that `--help` is instant.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn

import typer

from shardkeep.cli.exits import report
from shardkeep.cli.job_commands import scale, status, train
from shardkeep.cli.output import OutputError, drop_output, guard_output
from shardkeep.cli.role_commands import coordinator, fork_server, server, worker
from shardkeep.cli.tool_commands import bench, cache, certs, estimate, sweep, version

app = typer.Typer(
    help="Trains recommendation models whose embedding tables live in parameter servers.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
for command in (train, coordinator, server, worker, status, certs, scale, estimate, bench, sweep, cache, version):
    app.command()(command)
app.command("fork-server", hidden=True)(fork_server)


def main() -> NoReturn:
    """The `shardkeep` command."""
    guard_output()
    try:
        app(prog_name="shardkeep")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except OutputError as error:  # of the help
        code = report(error)
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OutputError as error:
        drop_output()
        code = code or report(error)
    if "torch" in sys.modules:  # its teardown takes a second of CPU, and all that matters is closed by now
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
