"""How a command ends: exit codes, error lines, and standard output that cannot be written.

0 = done, 1 = the job failed or was stopped, 2 = the user's input is wrong, 128 + N = a server or worker left on
signal N.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import io
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from shardkeep.base.errors import DataError, JobError, JobStopped, ShardkeepError, Superseded
from shardkeep.base.printable import printable
from shardkeep.base.system_errors import in_words
from shardkeep.member.departure import Leaving

Debug = Annotated[bool, typer.Option("--debug", help="Show a traceback with an error.")]


def as_command(body: Callable[..., int | None]) -> Callable[..., NoReturn]:
    """The command of a function, with --debug added to its options; see `run_command`."""

    @functools.wraps(body)
    def command(*, debug: bool, **given: Any) -> NoReturn:
        run_command(lambda: body(**given), debug)

    known = inspect.signature(body, eval_str=True)
    option = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug)
    command.__signature__ = known.replace(parameters=[*known.parameters.values(), option])  # type: ignore[attr-defined]
    command.__annotations__ = {**body.__annotations__, "debug": Debug}
    return command


def run_command(run: Callable[[], int | None], debug: bool) -> NoReturn:
    """Runs the body of a command and exits with its code; None = 0. An error, also of the system, is one line."""
    try:
        code = run() or 0
    except (ShardkeepError, OSError, UnicodeError) as error:
        if debug:
            traceback.print_exc()
        code = report(error)
    except Leaving as leaving:
        say(str(leaving))
        code = leaving.code
    except KeyboardInterrupt:
        say("interrupted")
        code = 1
    raise typer.Exit(code)


def report(error: ShardkeepError | OSError | UnicodeError) -> int:
    """Prints an error to stderr and returns its exit code."""
    head = "" if isinstance(error, JobStopped | Superseded) else "error: "
    text = in_words(error)
    for line in [text] if isinstance(error, DataError) else text.splitlines():  # a config may have several problems
        say(f"{head}{line}")
    return error.exit_code if isinstance(error, ShardkeepError) else JobError.exit_code


def say(text: str) -> None:
    """Prints a line to stderr."""
    with contextlib.suppress(OSError):  # the device is full: the exit code still reports the error
        print(printable(text), file=sys.stderr, flush=True)


class OutputError(ShardkeepError):
    """Standard output cannot be written."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(f"standard output cannot be written ({cause.strerror or cause})")


class Output(io.TextIOWrapper):
    """Writes text to a file descriptor. Raises OutputError, except for EPIPE: the reader of a pipe may leave."""

    lossy = False
    """Whether text that cannot be written is lost instead: the output of a job only informs."""

    def write(self, text: str, /) -> int:
        with self._mapped():
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with self._mapped():
            super().flush()

    @contextlib.contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise
            if not self.lossy:
                raise OutputError(error) from error


def open_streams() -> None:
    """Gives the standard streams that a parent has closed to the null device. Sockets would take their numbers, and
    what asks a stream whether it is a terminal would fail."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115


def guard_output() -> None:
    """Makes sys.stdout an Output."""
    if isinstance(old := sys.stdout, io.TextIOWrapper):
        form = {name: getattr(old, name) for name in ("encoding", "errors", "line_buffering", "write_through")}
        form |= {"errors": "backslashreplace"} if old.errors == "strict" else {}  # names of files may be no text
        sys.stdout = Output(old.detach(), **form)


def lose_output() -> None:
    """From here on, output that cannot be written ends nothing."""
    if isinstance(sys.stdout, Output):
        sys.stdout.lossy = True


def drop_output() -> None:
    """Discards buffered and later output."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
