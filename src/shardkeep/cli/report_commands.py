"""Commands that judge what runs have learned: compare, report."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardkeep.base.errors import ShardkeepError, UserError
from shardkeep.cli.model_commands import ready_to_score
from shardkeep.cli.options import Data, Model, Runs, Split, newest_run, path_argument, path_option

if TYPE_CHECKING:
    from shardkeep.inference.scoring import EvaluationScores
    from shardkeep.page.records import Json
    from shardkeep.page.state import RunState


def compare(
    runs: Annotated[list[Path], path_argument("Run folders; all others are compared with the first.")],
    data: Data = None,
    split: Split = "eval",
    model: Model = "auto",
) -> None:
    """Compare runs: results, settings that differ, and what metrics differ by on the same rows, with intervals."""
    from shardkeep.page.comparison import compared
    from shardkeep.page.state import RunState
    from shardkeep.view.screen import console
    from shardkeep.view.text_tables import table_of

    if len(runs) < 2:
        raise UserError("shardkeep compare requires two runs or more")
    states = [RunState(run) for run in runs]
    found, names = compared(states, [state.sections() for state in states]), [state.name for state in states]
    rows = _differences(states, [_scores_of(run, data or [], split, model) for run in runs])
    heads = ["result", *names], ["setting", *names], rows.pop(0)
    for head, lines in zip(heads, (found["results"], found["settings"], rows), strict=True):
        console().print(table_of(head, lines) if lines else f"no {head[0]} differs")
        console().print()


def report(
    html: Annotated[Path, path_option("File to write.", "--html")],
    runs: Runs = None,
    no_scores: Annotated[
        bool, typer.Option("--no-scores", help="Score no evaluation rows: neither calibration nor differences.")
    ] = False,
) -> None:
    """Write the page of runs as one HTML file, which needs no network and can be sent."""
    from shardkeep.base.files import atomic_write
    from shardkeep.page.files import whole_page
    from shardkeep.page.state import RunState

    if html.is_dir():
        raise UserError(f"--html {html}: is a folder; name a file")
    states = [RunState(run) for run in runs or [newest_run(None)]]
    text = whole_page(states, *(() if no_scores else _judged(states)))
    with contextlib.suppress(OSError):
        html.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(html, text)
    print(f"report  {html}", flush=True)


def _scores_of(run: Path, data: Sequence[str] = (), split: Any = "eval", model: Any = "auto") -> EvaluationScores:
    with ready_to_score(run) as screen:
        from shardkeep.inference.files import input_files
        from shardkeep.inference.scoring import evaluation_rows

        told = partial(screen.working, "evaluate")
        rows = evaluation_rows(run, which=model, split=split, files=input_files(data), told=told)
        scores = rows.scores()
    if rows.seen:
        print(f"note: {run.name} was trained on {rows.seen}: its metrics on new ones are lower")
    return scores


def _differences(states: Sequence[RunState], scores: Sequence[EvaluationScores]) -> list[list[str]]:
    """The names of columns, and a row for each difference."""
    from shardkeep.analysis.differences import COLUMNS, differences  # once kernels are compiled

    found = differences(scores, [state.name for state in states])
    return [list(COLUMNS), *(each.texts(pair) for pair, each in found)]


def _judged(states: Sequence[RunState]) -> tuple[list[Json], Json]:
    """What scores of the evaluation rows say of each run, and of the runs together; or a note why that is not known."""
    scored: list[Json] = []
    known: list[EvaluationScores] = []
    try:
        for state in states:
            known.append(_scores_of(state.records.reader.path))
            from shardkeep.analysis.calibration import quality_of

            scored.append({"quality": quality_of(known[-1])})
        return scored, {"differences": _differences(states, known)} if len(known) > 1 else {}
    except ShardkeepError as error:
        return [*scored, *[{}] * (len(states) - len(scored))], {"note": f"Not scored: {error}."}
