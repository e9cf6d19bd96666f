"""`shardkeep status`: the state of a job, from its coordinator while it runs, from its run folder afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from shardkeep.base.errors import TransportError, UserError
from shardkeep.cli.status_facts import of_ended, of_lost, of_one_process, of_running
from shardkeep.cli.vacancies import NONE_LEFT, awaited, killed_lines, unled_lines
from shardkeep.config import stored_config
from shardkeep.ps.control.grpc.client import fetch_status
from shardkeep.records.record import Json
from shardkeep.run.next_steps import resume_line
from shardkeep.run.processes import launcher_there, living
from shardkeep.run.reader import RunReader, latest_run
from shardkeep.trust.endpoint import Endpoint
from shardkeep.trust.tls import Tls
from shardkeep.view.run_view import ended_text

StatusView = Callable[[Json, Sequence[str]], object]
"""Shows a job, once: what is known of it, and the lines that a person reads before the figures."""


def show_run(run: Path | None, view: StatusView, *, token_file: Path | None = None, tls: Tls | None = None) -> int:
    """Shows the run in folder `run`; None = the newest in runs/. Returns 1 if the job failed or was killed, else 0."""
    path = run or latest_run()
    if path is None:
        raise UserError("no run folder in runs/; name one, or use --coordinator HOST:PORT")
    try:
        if not (path / "config.yaml").exists():
            missing = "is not a run folder (it has no config.yaml)" if path.is_dir() else "there is no such folder"
            raise UserError(f"{path}: {missing}")
        return _show_folder(RunReader(path), view, token_file=token_file, tls=tls)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise UserError(f"{path}: a file of this run is damaged ({error})") from error


def _show_folder(folder: RunReader, view: StatusView, *, token_file: Path | None, tls: Tls | None) -> int:
    path, summary = folder.path, folder.summary()
    if summary is None:
        launcher = launcher_there(path)
        if launcher is False and not living(folder):
            view(of_lost(folder, "killed", NONE_LEFT, resume=resume_line(path)), list(killed_lines(folder)))
            return 1
        coordinator = folder.endpoint(token_file)
        if coordinator is None and folder.summary() is not None:  # the job has just ended
            return _show_folder(folder, view, token_file=token_file, tls=tls)
        if coordinator is None:
            return _show_unled(folder, view, launched=bool(launcher))
        launched = bool(launcher) or (launcher is None and not folder.by_hand)
        try:
            return show_job(replace(coordinator, tls=tls), view, run=path, launched=launched)
        except TransportError:
            if tls is None and (needed := folder.tls_option()) is not None:
                raise UserError(f"the coordinator at {coordinator.address} uses TLS: add --tls {needed}") from None
            return _show_unled(folder, view, launched=launcher is not None)
    view(of_ended(folder, summary), [ended_text(summary)])
    return 0 if summary["status"] == "completed" else 1


def _show_unled(folder: RunReader, view: StatusView, *, launched: bool) -> int:
    """Shows a job without a coordinator that answers. Returns 0 for a job in one process, else 1."""
    if launched and folder.address() is None and not stored_config(folder.path).servers:
        view(of_one_process(folder), ["running in one process"])
        return 0
    lines = list(unled_lines(folder, launched=launched))
    view(of_lost(folder, "unreachable", "; ".join(lines)), lines)
    return 1


def show_job(coordinator: Endpoint, view: StatusView, *, run: Path | None = None, launched: bool | None = None) -> int:
    """Shows the state that the coordinator reports. Returns 1 for a failed or incomplete job, else 0.

    Args:
        coordinator: The job's coordinator.
        view: Shows it.
        run: The run folder, if known.
        launched: Whether `shardkeep train` started the job; None = unknown.

    Raises:
        TransportError: The coordinator does not answer.
        UserError: The coordinator refuses the request.
    """
    status = fetch_status(coordinator)
    facts = of_running(status, run)
    said = f"{status.state}{': ' + status.message if status.message else ''}"
    vacant = awaited(status, where=coordinator.address if run is None else str(run), launched=launched)
    view(facts, [said, *vacant, *facts["warnings"]])
    return 1 if status.state in ("failed", "incomplete") else 0
