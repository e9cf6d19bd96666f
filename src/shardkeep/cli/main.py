"""The command line: one command per role and per question. Commands only read arguments and print errors.

Slow imports are inside the commands, so that `--help` is instant.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from shardkeep import __version__
from shardkeep.cli.exits import Debug, OutputError, as_command, drop_output, guard_output, open_streams, report
from shardkeep.cli.job_commands import scale, status, stop, train, view, with_
from shardkeep.cli.model_commands import evaluate, export, predict, serve
from shardkeep.cli.report_commands import compare, report as report_page
from shardkeep.cli.role_commands import coordinator, fork_server, node, server, worker
from shardkeep.cli.table_commands import export as export_table, show
from shardkeep.cli.tool_commands import cache, certs, config, estimate, init, kernels, sweep, tune

Body = Callable[..., int | None]
GROUPS: dict[str, tuple[Body, ...]] = {
    "Jobs on this machine": (train, status, view, stop, scale, with_),
    "A trained model": (evaluate, compare, predict, export, serve),
    "Before and beside a job": (init, config, estimate, report_page, sweep, tune, cache, kernels),
    "Several machines": (node, coordinator, server, worker, certs),
}


class Grouped(TyperGroup):
    """Lists its commands by group, a group of commands last."""

    def list_commands(self, ctx: Any) -> list[str]:
        groups, shown = list(GROUPS), [name for name, each in self.commands.items() if not each.hidden]

        def place(name: str) -> tuple[int, bool]:
            each: Any = self.commands[name]
            return groups.index(each.rich_help_panel), hasattr(each, "commands")

        return sorted(shown, key=place)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        names = self.list_commands(ctx)
        limit = formatter.width - 6 - max(map(len, names))
        for group in GROUPS:
            found: list[Any] = [self.commands[name] for name in names]
            rows = [(c.name, c.get_short_help_str(limit)) for c in found if c.rich_help_panel == group]
            with formatter.section(group):
                formatter.write_dl(rows)


class WithDefault(TyperGroup):
    """A group whose command `show` needs no name. Write `./export` for a run folder with the name of a command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ctx.help_option_names):
            args = ["show", *args]
        return super().parse_args(ctx, args)


form: dict[str, Any] = {
    "rich_markup_mode": None,
    "context_settings": {"help_option_names": ["-h", "--help"], "max_content_width": 110},
}
app = typer.Typer(
    cls=Grouped,
    help="Trains recommendation models whose embedding tables live in parameter servers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    **form,
)
tables = typer.Typer(cls=WithDefault, help="Show the rows of a run's tables, or write them to a file.", **form)
for group, commands in GROUPS.items():
    for command in commands:
        app.command(command.__name__.rstrip("_"), rich_help_panel=group)(as_command(command))
tables.command("show")(as_command(show))
tables.command("export")(as_command(export_table))
app.add_typer(tables, name="tables", rich_help_panel="A trained model")
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
    if debug:
        context.default_map = _with_debug(context.command)


def _with_debug(group: Any) -> dict[str, Any]:
    """Defaults of all commands, which have --debug."""
    return {
        name: _with_debug(each) if hasattr(each, "commands") else {"debug": True}
        for name, each in group.commands.items()
    }


def main() -> NoReturn:
    """The `shardkeep` command."""
    open_streams()
    guard_output()
    try:
        app(prog_name="shardkeep")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except OutputError as error:  # while printing the help
        code = report(error)
    try:
        sys.stdout.flush()
    except OutputError as error:
        drop_output()
        code = code or report(error)
    if "torch" in sys.modules:  # its teardown takes a second of CPU, and everything is closed already
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
