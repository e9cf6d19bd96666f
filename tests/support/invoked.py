"""A command of `shardkeep` in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from shardkeep.cli.main import app


def invoke(*arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command that has ended without a traceback."""
    done = CliRunner().invoke(app, [str(each) for each in arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
    return done.exit_code, done.stdout, done.stderr
