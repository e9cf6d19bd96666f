"""The commands of `shardkeep tables`, which look at the rows of a run: show, export."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardkeep.cli.model_commands import ready_to_score
from shardkeep.cli.options import Json, Model, TrainedRun, path_option

if TYPE_CHECKING:
    from rich.table import Table

    from shardkeep.tables.counters import Bin
    from shardkeep.tables.figures import TableFigures


def show(
    run: TrainedRun,
    model: Model = "last",
    table: Annotated[str | None, typer.Option(metavar="NAME", help="Show this table alone, with its top rows.")] = None,
    top: Annotated[int, typer.Option(min=1, max=100_000, metavar="N", help="Number of top rows with --table.")] = 20,
    as_json: Json = False,
) -> int:
    """Show rows, bytes, norms and what policies did of a run's tables, from a checkpoint. The job may still run."""
    from shardkeep.view.screen import console
    from shardkeep.view.text_tables import Trimmed, two_columns

    with ready_to_score(run) as screen:
        from shardkeep.run.trained import with_checkpoint
        from shardkeep.tables.figures import figures_of

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
        return 0
    shown_on = console()
    at = "" if step is None or step <= checkpoint.step else f" was at step {step:,} and"
    runs = "" if summary else f", of a job that{at} has not ended"
    shown_on.print(f"step {checkpoint.step:,}{runs}", markup=False, soft_wrap=True)
    if table is None:
        shown_on.print(Trimmed(_table_of(found, loads)))
        if any(one.policy_counts for one in found):
            shown_on.print()
            shown_on.print(Trimmed(_table_of_policies(found)))
        return 0
    shown_on.print(two_columns(_rows_of(found[0], loads)))
    for histogram in _histograms_of(found[0]):
        shown_on.print(Trimmed(histogram))
        shown_on.print()
    shown_on.print(Trimmed(_table_of_top(found[0])))
    return 0


def export(
    run: TrainedRun,
    table: Annotated[str, typer.Option(metavar="NAME", help="Table to write.")],
    form: Annotated[
        str | None,
        typer.Option("--format", metavar="parquet|npy|safetensors", help="Left out = that of --out, else parquet."),
    ] = None,
    out: Annotated[Path | None, path_option("File to write [default: the table's name in the current folder].")] = None,
    model: Model = "last",
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


_POLICY_COUNTS = {
    "admitted_rows": "admitted ids",
    "refused_rows": "refused rows",
    "candidates": "ids without a row",
    "evicted_rows": "evicted rows",
}
_BAR = 40
"""Characters of the longest bar."""


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
        rows = [{"id": r.id, "norm": r.norm, "squared_gradients": r.squared_gradients} for r in figures.top]
        found["top"] = {"by": figures.top_by, "rows": rows}
    return found


def _table_of(found: list[TableFigures], loads: Mapping[str, float]) -> Table:
    from shardkeep.base.sizes import size_text
    from shardkeep.estimate.view import table_of

    norms_of = ("mean norm", "1 %", "50 %", "99 %", "max")
    view = table_of("table", "rows", "dim", "bytes", "optimizer state", "load", *norms_of)
    for one in found:
        norms = ["-"] * 5 if one.norms is None else [f"{value:#.4g}" for value in one.norms.values()]
        counts = (f"{one.rows:,}", str(one.spec.dim), size_text(one.row_bytes), size_text(one.optimizer_bytes))
        load = f"{loads[one.spec.name]:.2f}" if one.spec.name in loads else "-"
        view.add_row(one.spec.name, *counts, load, *norms)
    total = sum(one.row_bytes for one in found), sum(one.optimizer_bytes for one in found)
    view.add_row("all", f"{sum(one.rows for one in found):,}", "", *map(size_text, total), style="bold")
    return view


def _table_of_policies(found: list[TableFigures]) -> Table:
    from shardkeep.estimate.view import table_of

    view = table_of("policies of table", "precision", *_POLICY_COUNTS.values())
    for one in found:
        if one.policy_counts:
            counts = (f"{one.policy_counts[key]:,}" if key in one.policy_counts else "-" for key in _POLICY_COUNTS)
            view.add_row(one.spec.name, one.spec.dtype, *counts)
    return view


def _histograms_of(one: TableFigures) -> Iterator[Table]:
    """Of ages and scores, a line for each bin."""
    from shardkeep.estimate.view import table_of

    clock = "steps" if one.spec.evict is None or one.spec.evict.ttl_s is None else "seconds"
    for title, bins in ((f"{clock} since the last push", one.ages), ("score", one.scores)):
        if bins:
            view, most = table_of(title, "rows"), max(bin.rows for bin in bins)
            view.add_column("")
            for bin in bins:
                view.add_row(_range(bin, whole=bins is one.ages), f"{bin.rows:,}", "#" * (_BAR * bin.rows // most))
            yield view


def _range(bin: Bin, *, whole: bool) -> str:
    """What is in a bin; `whole`: whole numbers."""
    if not whole:
        return f"{bin.first:,g} to {bin.end:,g}"
    first, last = int(bin.first), int(bin.end) - 1
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def _rows_of(one: TableFigures, loads: Mapping[str, float]) -> list[tuple[str, str]]:
    from shardkeep.base.sizes import size_text

    rows = [
        ("table", f"{one.spec.name}: dim {one.spec.dim}, {one.spec.optimizer.name}"),
        ("precision", f"rows {one.spec.dtype}, optimizer state {one.spec.state_dtype}"),
        ("rows", f"{one.rows:,}"),
        (
            "bytes",
            f"{size_text(one.row_bytes)} of ids and weights, {size_text(one.optimizer_bytes)} of optimizer state",
        ),
    ]
    if one.spec.name in loads:
        rows.append(("load", f"{loads[one.spec.name]:.2f} of the entries of the servers' indexes"))
    if one.norms is not None:
        rows.append(("norms", "  ".join(f"{_norm_name(name)} {value:#.4g}" for name, value in one.norms.items())))
    if one.not_finite:
        rows.append(("not finite", f"{one.not_finite:,} rows"))
    rows += [(text, f"{one.policy_counts[key]:,}") for key, text in _POLICY_COUNTS.items() if key in one.policy_counts]
    return rows


def _norm_name(key: str) -> str:
    """`50 %` for `p50`, as the overview has it."""
    return f"{key[1:]} %" if key[1:].isdigit() else key


def _table_of_top(one: TableFigures) -> Table:
    from shardkeep.estimate.view import table_of

    view = table_of("top by squared gradients" if one.top_by == "squared_gradients" else "top by norm", "norm")
    if one.top_by == "squared_gradients":
        view.add_column("squared gradients", justify="right")
    for row in one.top:
        squares = [] if row.squared_gradients is None else [f"{row.squared_gradients:#.4g}"]
        view.add_row(str(row.id), f"{row.norm:#.4g}", *squares)
    return view
