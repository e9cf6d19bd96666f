"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardkeep.base.log import LogFormat

if TYPE_CHECKING:
    from shardkeep.config import JobConfig


def path(text: str | Path) -> Path:
    """Returns a path with `~` expanded: shells do not expand it in `--option=~/folder`."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise typer.BadParameter(f"{text}: {error}") from error


def complete_path(incomplete: str) -> list[str]:
    """Files and folders that start with `incomplete`, for the shell's completion."""
    head = incomplete[: incomplete.rfind("/") + 1]
    begin = incomplete[len(head) :]
    found = (each for each in path(head or ".").iterdir() if each.name.startswith(begin))
    return sorted(f"{head}{each.name}{'/' if each.is_dir() else ''}" for each in found)


def complete_run(incomplete: str) -> list[str]:
    """Run folders in runs/ that start with `incomplete`, newest first; if there are none, files and folders."""
    runs = [str(found.parent) for found in sorted(Path("runs").glob("*/config.yaml"), key=_changed, reverse=True)]
    return [run for run in runs if run.startswith(incomplete)] or complete_path(incomplete)


def _changed(file: Path) -> float:
    return file.stat().st_mtime


def address_or_path(text: str) -> str:
    """Returns an address as it is, and a path with `~` expanded."""
    return str(path(text)) if text.startswith("~") else text


def launched_index() -> int:
    """Returns the index that a launcher set for this process. Raises BadParameter."""
    from shardkeep.base.errors import UserError
    from shardkeep.roles.place import index_of

    try:
        return index_of(None)
    except UserError as error:
        raise typer.BadParameter(str(error), param_hint="'--index'") from error


Config = Annotated[
    Path,
    typer.Argument(
        parser=path,
        metavar="CONFIG",
        autocompletion=complete_path,
        help="YAML file of the job; `demo` is the built-in one.",
    ),
]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=VALUE", help="Override a setting of the config; repeatable.")
]
Run = Annotated[
    Path | None,
    typer.Argument(
        parser=path, metavar="[RUN]", autocompletion=complete_run, help="Run folder [default: the newest in runs/]."
    ),
]
RunDir = Annotated[
    Path | None, typer.Option(parser=path, metavar="DIR", help="New folder of the run [default: runs/NAME-DATE].")
]
Coordinator = Annotated[
    str,
    typer.Option(
        parser=address_or_path,
        metavar="HOST:PORT",
        help="Address or run folder of the coordinator; the member waits 120 s for it.",
    ),
]
Ask = Annotated[
    str | None,
    typer.Option(
        "--coordinator", parser=address_or_path, metavar="HOST:PORT", help="Ask the coordinator at this address."
    ),
]
Index = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="N",
        default_factory=launched_index,
        show_default="the first of RANK, SLURM_PROCID and JOB_COMPLETION_INDEX that is set",
        help="Number of this process in its role, from 0. Launch servers and workers separately.",
    ),
]
Advertise = Annotated[str, typer.Option(metavar="HOST", help="This machine's address as other members reach it.")]
Keeps = Annotated[
    Path,
    typer.Option(
        "--run-dir",
        parser=path,
        metavar="DIR",
        help="Folder for recovery/ (a server's journal, a worker's dense states) and profile/. A replacement reads "
        "recovery/; without it a server resumes from the last checkpoint.",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        parser=path,
        metavar="FILE",
        help="File with the job's token, readable by you alone [default: the one that the coordinator made for you].",
    ),
]
TlsFolder = Annotated[
    Path | None,
    typer.Option(
        "--tls",
        parser=path,
        metavar="DIR",
        help="Folder with ca.pem, cert.pem, key.pem for mutual TLS; `shardkeep certs` makes one.",
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure-data-plane", help="Accept an address that other machines can reach: see docs/guide/security.md."
    ),
]
Log = Annotated[
    LogFormat,
    typer.Option(
        "--log-format",
        metavar="text|json",
        help="Form of the log; json = one object a line, see docs/reference/log.md.",
    ),
]
ParentPipe = Annotated[bool, typer.Option("--parent-pipe", hidden=True)]  # ends the process when stdin closes
Code = Annotated[Path | None, typer.Option("--code", parser=path, hidden=True)]  # folder of the user's own modules
Debug = Annotated[bool, typer.Option("--debug", help="Show a traceback with an error.")]


def load(path: Path, overrides: list[str] | None) -> tuple[Path, JobConfig]:
    """Returns the path of the config file, and the config with the overrides."""
    from shardkeep.config import load_config

    built_in = Path(__file__).parents[1] / "examples" / "demo.yaml"
    found = built_in if str(path) == "demo" and not path.exists() else path
    return found, load_config(found, overrides or [])


def which_checkpoint(text: str) -> Any:
    """The checkpoint that `--model` names: last, best, or a step."""
    if text in ("last", "best") or text.isdecimal():
        return int(text) if text.isdecimal() else text
    raise typer.BadParameter(f"{text!r}; allowed: last, best, or the step of a checkpoint", param_hint="'--model'")
