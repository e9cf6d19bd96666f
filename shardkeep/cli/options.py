"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from shardkeep.config import JobConfig


def path(text: str | Path) -> Path:
    """Returns a path with `~` expanded: shells do not expand it in `--option=~/folder`."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise typer.BadParameter(f"{text}: {error}") from error


def address_or_path(text: str) -> str:
    """Returns an address as it is, and a path with `~` expanded."""
    return str(path(text)) if text.startswith("~") else text


Config = Annotated[
    Path, typer.Argument(parser=path, metavar="CONFIG", help="YAML file of the job; `demo` is the built-in one.")
]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="A.B=VALUE", help="Override a setting; repeatable.")]
Run = Annotated[Path | None, typer.Argument(parser=path, help="Run folder [default: the newest in runs/].")]
RunDir = Annotated[Path | None, typer.Option(parser=path, help="New folder of the run [default: runs/NAME-DATE].")]
Coordinator = Annotated[
    str,
    typer.Option(
        parser=address_or_path,
        metavar="HOST:PORT",
        help="Where the coordinator listens, or its run folder; waits 120 s for it.",
    ),
]
Index = Annotated[int, typer.Option(min=0, help="Number of this process among its role, from 0.")]
Advertise = Annotated[str, typer.Option(metavar="HOST", help="This machine's address, as the others reach it.")]
Keeps = Annotated[
    Path,
    typer.Option(
        "--run-dir",
        parser=path,
        help="Folder of what this process keeps: recovery/ (a server's journal or a worker's tower states, for its "
        "replacement, which looks there first) and profile/.",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        parser=path,
        metavar="FILE",
        help="The job's token, for your eyes only [default: yours for the run folder, made by its coordinator].",
    ),
]
TlsFolder = Annotated[
    Path | None,
    typer.Option(
        "--tls", parser=path, metavar="DIR", help="Mutual TLS: ca.pem, cert.pem, key.pem, as of `shardkeep certs`."
    ),
]
Insecure = Annotated[
    bool, typer.Option("--insecure-data-plane", help="Accept an address that other machines reach: docs/security.md.")
]
ParentPipe = Annotated[bool, typer.Option("--parent-pipe", hidden=True)]  # end when stdin ends
Code = Annotated[Path | None, typer.Option("--code", parser=path, hidden=True)]  # where the user's own modules are
Debug = Annotated[bool, typer.Option("--debug", help="Show a traceback with an error.")]


def load(path: Path, overrides: list[str] | None) -> tuple[Path, JobConfig]:
    """Returns the path of the config's file and the config with the overrides."""
    from shardkeep.config import load_config

    built_in = Path(__file__).parents[1] / "examples" / "demo.yaml"
    found = built_in if str(path) == "demo" and not path.exists() else path
    return found, load_config(found, overrides or [])
