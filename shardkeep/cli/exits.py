"""Exit codes and error lines of commands.

0 = done, 1 = the job failed or was stopped, 2 = the user's input is wrong, 128 + N = a server or worker left on
signal N.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

import typer

from shardkeep.base.errors import JobError, JobStopped, ShardkeepError
from shardkeep.roles.departure import Leaving


def run_command(run: Callable[[], int], debug: bool) -> NoReturn:
    """Runs the body of a command and exits with its code. An error of shardkeep is one line on stderr."""
    try:
        code = run()
    except ShardkeepError as error:
        if debug:
            traceback.print_exc()
        code = report(error)
    except OSError as error:  # a file or folder is missing, full or not permitted
        if debug:
            traceback.print_exc()
        what = f"{error.filename}: " if error.filename is not None else ""
        code = report(JobError(f"{what}{error.strerror or error}"))
    except Leaving as leaving:
        say(str(leaving))
        code = leaving.code
    except KeyboardInterrupt:
        say("interrupted")
        code = 1
    raise typer.Exit(code)


def report(error: ShardkeepError) -> int:
    """Prints an error to stderr and returns its exit code."""
    head = "" if isinstance(error, JobStopped) else "error: "
    for line in str(error).splitlines():  # a config may have several problems
        say(f"{head}{line}")
    return error.exit_code


def say(text: str) -> None:
    """Prints a line to stderr."""
    with contextlib.suppress(OSError):  # the device is full: the exit code still reports the error
        print(text, file=sys.stderr, flush=True)
