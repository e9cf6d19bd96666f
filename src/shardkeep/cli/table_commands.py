"""The commands of `shardkeep tables`, which look at the rows of a run: show, export."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardkeep.cli.model_commands import ready_to_score
from shardkeep.cli.options import Json, Model, TrainedRun, path_option

if TYPE_CHECKING:
    from shardkeep.tables.figures import TableFigures


def show(
    run: TrainedRun,
    model: Model = "auto",
    table: Annotated[str | None, typer.Option(metavar="NAME", help="Show this table alone, with its top rows.")] = None,
    top: Annotated[int, typer.Option(min=1, max=100_000, metavar="N", help="Number of top rows with --table.")] = 20,
    as_json: Json = False,
) -> None:
    """Show rows, bytes, norms and what policies did of a run's tables, from a checkpoint. The job may still run."""
    from shardkeep.view.screen import console

    with ready_to_score(run) as screen:
        from shardkeep.run.trained import with_checkpoint
        from shardkeep.tables.figures import figures_of
        from shardkeep.tables.view import show_table, show_tables

        told = partial(screen.working, "tables")
        checkpoint, found = with_checkpoint(
            run, model, lambda one: figures_of(one, told, table=table, top=top if table is not None else 0)
        )
        summary, step = _how_far(run)
        known = (summary or {}).get("tables") or () if checkpoint.step == step else ()
        loads = {str(one["name"]): float(one["load_factor"]) for one in known if "load_factor" in one}
    if as_json:
        head = {"step": checkpoint.step, "ended": summary is not None, "job_step": step}
        entries = [_json_of(figures, loads.get(figures.spec.name), table) for figures in found]
        print(json.dumps(head | {"tables": entries}, indent=2))
        return
    at = "" if step is None or step <= checkpoint.step else f" was at step {step:,} and"
    runs = "" if summary else f", of a job that{at} has not ended"
    console().print(f"step {checkpoint.step:,}{runs}", markup=False, soft_wrap=True)
    if table is None:
        show_tables(found, loads, console())
    else:
        show_table(found[0], loads, console())


def export(
    run: TrainedRun,
    table: Annotated[str, typer.Option(metavar="NAME", help="Table to write.")],
    form: Annotated[
        str | None,
        typer.Option("--format", metavar="parquet|npy", help="Left out = that of --out, else parquet."),
    ] = None,
    out: Annotated[Path | None, path_option("File to write [default: the table's name in the current folder].")] = None,
    model: Model = "auto",
) -> None:
    """Write the ids and rows of one table to a file. The job may still run."""
    with ready_to_score(run) as screen:
        from shardkeep.run.trained import with_checkpoint
        from shardkeep.tables.export import export_table, target_of

        target, chosen = target_of(table, form, out)

        told = partial(screen.working, "export", str(target))
        checkpoint, (rows, files) = with_checkpoint(
            run, model, lambda one: export_table(one, table, target, chosen, told)
        )
    names = " and ".join(map(str, files))
    print(f"{rows:,} rows of table {table} at step {checkpoint.step:,}, written to {names}")


def _how_far(run: Path) -> tuple[Mapping[str, Any] | None, int | None]:
    """The summary of a job that has ended, and its last step; None = not known. Raises UserError for damaged files."""
    from shardkeep.records.lines import newest
    from shardkeep.records.training import Progress
    from shardkeep.run.reader import RunReader

    if (summary := RunReader(run).summary()) is not None:
        return summary, int(summary.get("steps") or 0)
    last = newest(run / "metrics.jsonl", Progress)
    return None, None if last is None else last.step


def _json_of(figures: TableFigures, load_factor: float | None, table: str | None) -> dict[str, Any]:
    found = figures.to_json() | {"load_factor": load_factor}
    if table is not None:
        found["top"] = {"by": figures.top_by, "rows": list(map(asdict, figures.top))}
    return found
