"""The command line: one command per role and per question. Commands only read arguments and print errors.

Slow imports are inside the commands, so that `--help` is instant.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from shardkeep import __version__
from shardkeep.cli.exits import report
from shardkeep.cli.job_commands import scale, status, train, with_
from shardkeep.cli.model_commands import evaluate, export, predict
from shardkeep.cli.options import Debug
from shardkeep.cli.output import OutputError, drop_output, guard_output
from shardkeep.cli.page_commands import report as report_page
from shardkeep.cli.page_commands import view
from shardkeep.cli.role_commands import coordinator, fork_server, server, worker
from shardkeep.cli.serve_command import serve
from shardkeep.cli.stop_command import stop
from shardkeep.cli.table_commands import tables, tables_export
from shardkeep.cli.tool_commands import bench, cache, certs, config, estimate, sweep, version


class _TwoWords(TyperGroup):
    """Commands whose name may have two words. A run folder with the name of the second word is written `./export`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        both = " ".join(args[:2])
        if len(args) > 1 and both in self.commands:
            return both, self.commands[both], args[2:]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_TwoWords,
    help="Trains recommendation models whose embedding tables live in parameter servers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
for command in (
    train,
    status,
    view,
    stop,
    scale,
    evaluate,
    predict,
    export,
    serve,
    tables,
    config,
    estimate,
    sweep,
    bench,
    cache,
    coordinator,
    server,
    worker,
    certs,
    version,
):
    app.command()(command)
app.command("tables export")(tables_export)
app.command("report")(report_page)
app.command("with")(with_)
app.command("fork-server", hidden=True)(fork_server)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _general(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
    debug: Debug = False,
) -> None:
    if debug:  # the default of every command's own --debug
        context.default_map = {name: {"debug": True} for name in context.command.commands}  # type: ignore[attr-defined]


def main() -> NoReturn:
    """The `shardkeep` command."""
    guard_output()
    try:
        app(prog_name="shardkeep")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except OutputError as error:  # while printing the help
        code = report(error)
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OutputError as error:
        drop_output()
        code = code or report(error)
    if "torch" in sys.modules:  # its teardown takes a second of CPU, and everything is closed already
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
