"""Commands that use a trained model: evaluate, predict, export."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from shardkeep.base.errors import JobError
from shardkeep.base.sizes import size_text
from shardkeep.cli.exits import run_command
from shardkeep.cli.options import Debug, complete_run, path, which_checkpoint
from shardkeep.run.unseen_lines import unseen_lines

if TYPE_CHECKING:
    from rich.table import Table

    from shardkeep.run.screen import Screen

TrainedRun = Annotated[
    Path, typer.Argument(parser=path, metavar="RUN", autocompletion=complete_run, help="Run folder.")
]
AnyModel = Annotated[
    Path, typer.Argument(parser=path, metavar="RUN", autocompletion=complete_run, help="Run folder, or an export.")
]
Model = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="last|best|STEP",
        help="Checkpoint: the newest one, the best by train.early_stopping, or of a step.",
    ),
]


MOST_GROUPS = 20
"""The most values of a column in a table on the screen."""


@contextmanager
def ready_to_score(run: Path) -> Iterator[Screen]:
    """Compiles what the run's kernels lack, and shows on stderr what takes long."""
    from shardkeep.estimate.view import waiting
    from shardkeep.inference.compiling import prepare

    with waiting() as screen:
        prepare(run, lambda text: screen.phase("kernels", text))
        yield screen


def evaluate(
    run: AnyModel,
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="File, folder or pattern with labelled rows; repeatable [default: --split]."),
    ] = None,
    model: Model = "last",
    split: Annotated[
        str, typer.Option(metavar="eval|train|test", help="The run's own data, where --data is not given.")
    ] = "eval",
    by: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="Also evaluate the rows of each value of this column of the files."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Evaluate the model of a run, without its processes."""
    which = which_checkpoint(model)
    if split not in ("eval", "train", "test"):
        raise typer.BadParameter(f"{split!r}; allowed: eval, train, test", param_hint="'--split'")

    def body() -> int:
        from shardkeep.run.screen import console, metric_name
        from shardkeep.run.text_tables import Trimmed, two_columns

        with ready_to_score(run) as screen:
            from shardkeep.inference.files import input_files
            from shardkeep.inference.scoring import evaluate_run

            def told(text: str, share: float) -> None:
                screen.working("evaluate", text, share)

            part = cast(Literal["eval", "train", "test"], split)
            found = evaluate_run(run, which=which, split=part, files=input_files(data or []), by=by, told=told)
        not_finite = found.get("not_finite", 0)
        if as_json:
            print(json.dumps(found, indent=2))
        else:
            groups = found.pop("by", None)
            buckets = found.pop("calibration_buckets", None)
            lines = [("", line) for line in unseen_lines(found.pop("unseen"))]
            rows = [(metric_name(name), _number(value)) for name, value in found.items() if value is not None]
            rows += [("bucket", "  ".join(f"{k} {_number(v)}" for k, v in bucket.items())) for bucket in buckets or ()]
            console().print(two_columns(rows + lines))
            if groups is not None:
                console().print(Trimmed(_table_of_groups(groups)))
        if not_finite:
            raise JobError(f"{not_finite:,} predictions are not finite (NaN or infinite)")
        return 0

    run_command(body, debug)


def predict(
    run: AnyModel,
    data: Annotated[
        list[str], typer.Option(metavar="FILE", help="File, folder or pattern with rows to score; repeatable.")
    ],
    out: Annotated[Path, typer.Option(parser=path, metavar="FILE", help="File to write: .parquet or .csv.")],
    model: Model = "last",
    keep: Annotated[str, typer.Option(metavar="A,B", help="Columns of the input to write beside `score`.")] = "",
    debug: Debug = False,
) -> None:
    """Score each row of files with the model of a run, in order."""
    which = which_checkpoint(model)

    def body() -> int:
        with ready_to_score(run) as screen:
            from shardkeep.inference.files import input_files
            from shardkeep.inference.scoring import predict_files

            def told(text: str, share: float) -> None:
                screen.working("predict", text, share)

            names = [name for name in keep.split(",") if name]
            done = predict_files(run, input_files(data), out, which=which, keep=names, told=told)
        place = os.fsencode(out).decode(errors="replace")
        print(
            f"{done.rows:,} rows scored by the model of step {done.step:,} in {done.seconds:.1f} s, written to {place}"
        )
        for line in unseen_lines(done.unseen):
            print(line)
        if done.not_finite:
            raise JobError(f"{done.not_finite:,} predictions in {out} are not finite (NaN or infinite)")
        return 0

    run_command(body, debug)


def export(
    run: TrainedRun,
    out: Annotated[Path, typer.Argument(parser=path, metavar="OUT", help="Folder: new, or an export to replace.")],
    model: Model = "last",
    rows: Annotated[str, typer.Option(metavar="fp32|fp16|int8", help="Number format of rows.")] = "fp32",
    tower: Annotated[
        str, typer.Option(metavar="fp32|int8", help="Number format of the dense model's matrices.")
    ] = "fp32",
    with_program: Annotated[
        bool, typer.Option("--with-program", help="Also store the dense model as a program of torch.export.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Write the model of a run to one folder, which needs neither servers nor the training data."""
    which = which_checkpoint(model)
    for option, value, allowed in (("rows", rows, ("fp32", "fp16", "int8")), ("tower", tower, ("fp32", "int8"))):
        if value not in allowed:
            raise typer.BadParameter(f"{value!r}; allowed: {', '.join(allowed)}", param_hint=f"'--{option}'")

    def body() -> int:
        with ready_to_score(run) as screen:
            from shardkeep.inference.export.writing import Formats, export_run

            def told(text: str, share: float) -> None:
                screen.working("export", text, share)

            formats = Formats(cast(Any, rows), cast(Any, tower))
            done = export_run(run, out, which=which, formats=formats, with_program=with_program, told=told)
        manifest = done.manifest
        count = sum(table.rows for table in manifest.tables)
        print(f"model of step {manifest.step:,} with {count:,} rows written to {out}: {size_text(done.size_bytes)}")
        if manifest.cost is None:
            print("what the number formats cost was not measured: the job's evaluation data are not there")
        from shardkeep.run.screen import metric_name

        if manifest.cost:
            print("change by the number formats, on the job's evaluation data:")
        for name, change in (manifest.cost or {}).items():
            print(f"  {metric_name(name):<20} {change:+.6f}")
        return 0

    run_command(body, debug)


def _table_of_groups(by: dict[str, Any]) -> Table:
    """The most frequent values of a column, with their metrics."""
    from rich.markup import escape
    from rich.table import Table

    from shardkeep.run.screen import metric_name

    groups, title = by["groups"], None
    if len(groups) > MOST_GROUPS:
        title = f"the {MOST_GROUPS} most frequent of {len(groups):,} values; --json has all"
    names = [name for name in groups[0] if name not in ("value", "note", "calibration_buckets")] if groups else []
    table = Table(escape(by["column"]), *map(metric_name, names), title=title, box=None)
    for group in groups[:MOST_GROUPS]:
        shown = ["-" if group.get(name) is None else _number(group[name]) for name in names]
        table.add_row("(missing)" if group["value"] is None else escape(group["value"]), *shown)
    return table


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.6f}" if isinstance(value, float) else str(value)
