"""Commands that judge what runs have learned: compare, report."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from shardkeep.base.errors import ShardkeepError, UserError
from shardkeep.cli.model_commands import ready_to_score
from shardkeep.cli.options import Model, Runs, newest_run, path_argument, path_option, word_option

if TYPE_CHECKING:
    from shardkeep.inference.scoring import EvaluationScores
    from shardkeep.page.records import Json
    from shardkeep.page.state import RunState


def compare(
    runs: Annotated[list[Path], path_argument("Run folders; all others are compared with the first.")],
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="File, folder or pattern with labelled rows; repeatable [default: --split]."),
    ] = None,
    split: Annotated[
        str, word_option("The runs' own data, where --data is not given.", "eval", "train", "test")
    ] = "eval",
    model: Model = "last",
) -> None:
    """Compare runs: results, settings that differ, and what metrics differ by on the same rows, with intervals."""
    from shardkeep.page.comparison import compared
    from shardkeep.page.state import RunState
    from shardkeep.view.screen import console
    from shardkeep.view.text_tables import columns

    if len(runs) < 2:
        raise UserError("shardkeep compare requires two runs or more")
    states = [RunState(run) for run in runs]
    names, sections = [state.name for state in states], [state.sections() for state in states]
    scores = [_scores_of(run, data or [], split, model) for run in runs]
    from shardkeep.analysis.differences import COLUMNS, differences_of_runs  # after compiling: this loads kernels

    rows, found, shown = differences_of_runs(names, scores), compared(states, sections), console()
    shown.print(columns(["", *names], found["results"]))
    if found["settings"]:
        shown.print()
        shown.print(columns(["setting", *names], found["settings"]))
    shown.print()
    shown.print(columns(COLUMNS, rows))


def report(
    html: Annotated[Path, path_option("File to write.", "--html")],
    runs: Runs = None,
    scores: Annotated[
        bool, typer.Option(help="Score the evaluation rows of jobs that have ended: calibration and differences.")
    ] = True,
) -> None:
    """Write the page of runs as one HTML file, which needs no network and can be sent."""
    from shardkeep.base.files import atomic_write
    from shardkeep.page.files import whole_page
    from shardkeep.page.state import RunState

    if html.is_dir():
        raise UserError(f"--html {html}: is a folder; name a file")
    states = [RunState(run) for run in runs or [newest_run(None)]]
    text = whole_page(states, *(_judged(states) if scores else ()))
    with contextlib.suppress(OSError):
        html.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(html, text)
    print(f"report  {html}", flush=True)


def _scores_of(run: Path, data: Sequence[str] = (), split: str = "eval", model: Any = "last") -> EvaluationScores:
    with ready_to_score(run) as screen:
        from shardkeep.inference.files import input_files
        from shardkeep.inference.scoring import evaluation_rows

        told, part = partial(screen.working, "evaluate"), cast(Literal["eval", "train", "test"], split)
        return evaluation_rows(run, which=model, split=part, files=input_files(data), told=told).scores()


def _judged(states: Sequence[RunState]) -> tuple[list[Json], Json]:
    """What scores of the evaluation rows say of each run, and of the runs together; or a note why that is not known."""
    scored: list[Json] = []
    known: list[EvaluationScores] = []
    for state in states:
        path = state.records.reader.path
        try:
            if state.records.reader.summary() is None:
                raise UserError(f"{path}: the job has not ended, so its evaluation rows are not scored")
            known.append(_scores_of(path))
            from shardkeep.analysis.calibration import quality_of

            scored.append({"quality": quality_of(known[-1])})
        except ShardkeepError as error:
            scored.append({"note": str(error)})
    if len(states) < 2:
        return scored, {}
    if len(known) < len(states):
        return scored, {"note": next(one["note"] for one in scored if "note" in one)}
    from shardkeep.analysis.differences import differences_of_runs

    try:
        return scored, {"differences": differences_of_runs([state.name for state in states], known)}
    except ShardkeepError as error:
        return scored, {"note": str(error)}
