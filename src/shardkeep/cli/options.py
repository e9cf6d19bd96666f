"""Arguments and options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardkeep.base.errors import ConfigError, UserError
from shardkeep.base.files import local
from shardkeep.base.logs.log import LogFormat
from shardkeep.cli.exits import report
from shardkeep.launch.machine import PROCESSES_TEXT, index_of

if TYPE_CHECKING:
    from shardkeep.config import JobConfig


def path(text: str | Path) -> Path:
    """Returns a path with `~` expanded: shells do not expand it in `--option=~/folder`. Exits for an address."""
    try:
        return Path(local(text)).expanduser()
    except ConfigError as error:
        raise typer.Exit(report(error)) from error
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
    expanded = str(path(text))
    return expanded if text.startswith("~") else text


def launched_index() -> int:
    """Returns the index that a launcher set for this process. Raises BadParameter."""
    try:
        return index_of(None)
    except UserError as error:
        raise typer.BadParameter(str(error), param_hint="'--index'") from error


def which_checkpoint(text: str | int) -> Any:
    """The checkpoint that `--model` names: auto, last, best, or a step."""
    if text in ("auto", "last", "best") or str(text).isdecimal():
        return int(text) if str(text).isdecimal() else text
    raise typer.BadParameter(f"{text!r}; allowed: auto, last, best, or the step of a checkpoint")


def path_argument(help: str, metavar: str = "RUN") -> Any:
    """An argument that names a file or folder; with `metavar` RUN or MODEL, the folder of a run."""
    return typer.Argument(parser=path, metavar=metavar, autocompletion=_completion(metavar), help=help)


def path_option(help: str, *names: str, metavar: str = "FILE") -> Any:
    """The same for an option."""
    return typer.Option(*names, parser=path, metavar=metavar, autocompletion=_completion(metavar), help=help)


def _completion(metavar: str) -> Callable[[str], list[str]]:
    return complete_run if metavar in ("RUN", "MODEL") else complete_path


def word_option(help: str, *allowed: str) -> Any:
    """An option that is one of these words."""

    def read(text: str) -> str:
        if text in allowed:
            return text
        raise typer.BadParameter(f"{text!r}; allowed: {', '.join(allowed)}")

    return typer.Option(parser=read, metavar="|".join(allowed), help=help)


def count_option(help: str) -> Any:
    return typer.Option(min=1, metavar="N", help=help)


CONFIG_HELP = "YAML file of the job; `demo` is the built-in one."
Config = Annotated[Path, path_argument(CONFIG_HELP, "CONFIG")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=VALUE", help="Override a setting of the config; repeatable.")
]
Dialect = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=VALUE", help="How the CSV files of --data are written; repeatable."),
]
Label = Annotated[
    str | None,
    typer.Option("--label", metavar="COLUMN", help="The column to predict [default: by its name and two values]."),
]
Run = Annotated[Path | None, path_argument("Run folder [default: the newest in runs/].")]
Runs = Annotated[
    list[Path] | None,
    path_argument("Run folders, running or finished; several are compared [default: the newest in runs/]."),
]
TrainedRun = Annotated[Path, path_argument("Run folder.")]
AnyModel = Annotated[Path, path_argument("Run folder, or an export.")]
Data = Annotated[
    list[str] | None,
    typer.Option(metavar="FILE", help="File, folder or pattern with labelled rows; repeatable [default: --split]."),
]
Split = Annotated[Any, word_option("The run's own data, where --data is not given.", "eval", "train", "test")]
Arithmetic = Annotated[
    Any, word_option("Arithmetic of the dense model [default: the job's tower.amp].", "auto", "off", "bf16", "fp16")
]
MODEL = "auto|last|best|STEP"
Model = Annotated[
    Any,
    typer.Option(
        "--model",
        parser=which_checkpoint,
        metavar=MODEL,
        help="Checkpoint: the newest one, the best by train.early_stopping, or of a step; auto = the best, if any.",
    ),
]
RunDir = Annotated[Path | None, path_option("New folder of the run [default: runs/NAME-DATE].", metavar="DIR")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
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
        show_default=f"the first of {PROCESSES_TEXT} that is set",
        help="Number of this process in its role, from 0. Launch servers and workers separately.",
    ),
]
Advertise = Annotated[str, typer.Option(metavar="HOST", help="This machine's address or name as members reach it.")]
Keeps = Annotated[
    Path,
    path_option(
        "Folder for recovery/ (a server's journal, a worker's dense states) and profile/. A replacement reads "
        "recovery/; without it a server resumes from the last checkpoint.",
        "--run-dir",
        metavar="DIR",
    ),
]
TokenFile = Annotated[
    Path | None,
    path_option(
        "File with the job's token, readable by you alone [default: the one that the coordinator made for you]."
    ),
]
TlsFolder = Annotated[
    Path | None,
    path_option(
        "Folder with ca.pem, cert.pem, key.pem for mutual TLS; `shardkeep certs` makes one.", "--tls", metavar="DIR"
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
    typer.Option(metavar="text|json", help="Form of the log; json = one object a line, see docs/reference/log.md."),
]
ParentPipe = Annotated[bool, typer.Option("--parent-pipe", hidden=True)]  # ends the process when stdin closes
Sheltered = Annotated[bool, typer.Option("--sheltered", hidden=True)]  # heeds no signal of others: `shardkeep node`
Code = Annotated[Path | None, typer.Option("--code", parser=path, hidden=True)]  # folder of the user's own modules


def load(path: Path, overrides: list[str] | None) -> tuple[Path, JobConfig]:
    """Returns the path of the config file, and the config with the overrides."""
    from shardkeep.config import load_config

    built_in = Path(__file__).parents[1] / "examples" / "demo.yaml"
    found = built_in if str(path) == "demo" and not path.exists() else path
    return found, load_config(found, overrides or [])


def code_folder(config: Path, path: Path) -> Path:
    """The folder that is searched for the user's own modules: that of the config file, or the current one for `demo`.

    Args:
        config: As on the command line.
        path: What `load` returned for it."""
    return path.resolve().parent if path == config else Path.cwd()


def newest_run(run: Path | None, otherwise: str = "") -> Path:
    """The run folder, or the newest one in runs/. Raises UserError."""
    from shardkeep.run.reader import latest_run

    if found := run or latest_run():
        return found
    raise UserError(f"no run folder in runs/; name one{otherwise}")
