"""Commands that use a trained model: evaluate, predict, export, serve."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from shardkeep.base.errors import JobError
from shardkeep.base.logs.log import configure
from shardkeep.base.printable import printable
from shardkeep.base.sizes import size_text
from shardkeep.cli.options import (
    AnyModel,
    Arithmetic,
    Data,
    Dialect,
    Json,
    Model,
    Split,
    TlsFolder,
    TrainedRun,
    count_option,
    path_argument,
    path_option,
    word_option,
)
from shardkeep.view.unseen_lines import unseen_lines, unseen_shares

if TYPE_CHECKING:
    from rich.table import Table

    from shardkeep.inference.files import Told
    from shardkeep.inference.scoring import EvaluationRows
    from shardkeep.view.screen import Screen

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
    data: Data = None,
    model: Model = "auto",
    split: Split = "eval",
    by: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="Also evaluate the rows of each value of this column of the files."),
    ] = None,
    importance: Annotated[
        bool, typer.Option("--importance", help="Also tell what each column is worth, by permuting it several times.")
    ] = False,
    amp: Arithmetic = None,
    dialect: Dialect = None,
    as_json: Json = False,
) -> None:
    """Evaluate the model of a run, without its processes."""
    with ready_to_score(run) as screen:
        from shardkeep.inference.files import input_files
        from shardkeep.inference.scoring import evaluation_rows

        told, files = partial(screen.working, "evaluate"), input_files(data or [])
        rows = evaluation_rows(
            run, which=model, split=split, files=files, by=by, amp=amp, told=told, settings=dialect or ()
        )
        found, picture = _with_importance(rows, told, run) if importance else (rows.evaluate(), None)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        _show_evaluation(found, picture)
    if not_finite := found.get("not_finite", 0):
        raise JobError(f"{not_finite:,} predictions are not finite (NaN or infinite)")


def _with_importance(rows: EvaluationRows, told: Told, run: Path) -> tuple[dict[str, Any], Path | None]:
    """The metrics with what each column is worth, and its picture."""
    import torch

    from shardkeep.analysis.importance import importance_of, write_picture
    from shardkeep.core_plan import worker_threads

    torch.set_num_threads(worker_threads(rows.trained.config))  # as in training: more wait for each other
    rows = replace(rows, datasets=list(rows.datasets))  # read once, scored many times
    found = rows.evaluate() | {"importance": importance_of(rows, told)}
    return found, write_picture(found["importance"], run)


def _show_evaluation(found: dict[str, Any], picture: Path | None) -> None:
    from shardkeep.view.screen import console, metric_name
    from shardkeep.view.text_tables import Trimmed, table_of, two_columns

    groups, worth = found.pop("by", None), found.pop("importance", None)
    buckets = found.pop("calibration_buckets", None)
    lines = [("", line) for line in unseen_lines(found.pop("unseen"))]
    rows = [(metric_name(name), _number(value)) for name, value in found.items() if value is not None]
    rows += [("bucket", "  ".join(f"{k} {_number(v)}" for k, v in bucket.items())) for bucket in buckets or ()]
    console().print(two_columns(rows + lines))
    if groups is not None:
        console().print(Trimmed(_table_of_groups(groups)))
    if worth is not None:
        heads = ("column", f"{metric_name(worth['metric'])} it is worth", "spread")
        of_columns = [
            (one["column"], f"{one['mean']:+.5f}", f"{one['spread']:.5f}")
            if one["mean"] is not None
            else (one["column"], "undefined", "")
            for one in worth["columns"]
        ]
        console().print(table_of(heads, of_columns))
    if picture is not None:
        print(f"picture  {picture}")


def predict(
    run: AnyModel,
    out: Annotated[Path, path_option("File to write: .parquet or .csv.")],
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="File, folder or pattern with rows to score; repeatable [or --split]."),
    ] = None,
    split: Annotated[Any, word_option("The run's own rows, in place of --data.", "eval", "train", "test")] = None,
    model: Model = "auto",
    keep: Annotated[str, typer.Option(metavar="A,B", help="Columns of the input to write beside `score`.")] = "",
    top: Annotated[
        int | None,
        typer.Option(min=1, metavar="K", help="Of a retrieval model: write the K best items of each row."),
    ] = None,
    amp: Arithmetic = None,
    dialect: Dialect = None,
) -> None:
    """Score each row of files with the model of a run, in order."""
    if (data is None) == (split is None):
        raise typer.BadParameter("needs --data FILE or --split, one of them", param_hint="'--data'")
    with ready_to_score(run) as screen:
        from shardkeep.inference.files import input_files
        from shardkeep.inference.loading import load_trained
        from shardkeep.inference.scoring import predict_files

        told = partial(screen.working, "predict")
        names = [name for name in keep.split(",") if name]
        rows = split or input_files(data or [])
        trained = load_trained(run, model, amp=amp)
        done = predict_files(trained, rows, out, keep=names, top=top, told=told, settings=dialect or ())
    place = os.fsencode(out).decode(errors="replace")
    print(f"{done.rows:,} rows scored by the model of step {done.step:,} in {done.seconds:.1f} s, written to {place}")
    if shares := unseen_shares(done.unseen):  # has no summary: names all
        print(printable(f"values without a row: {', '.join(shares)}"))
    if done.not_finite:
        raise JobError(f"{done.not_finite:,} predictions in {out} are not finite (NaN or infinite)")


def export(
    run: TrainedRun,
    out: Annotated[Path, path_argument("Folder: new, or an export to replace.", "OUT")],
    model: Model = "auto",
    rows: Annotated[str, word_option("Number format of rows.", "fp32", "fp16", "int8")] = "fp32",
    tower: Annotated[str, word_option("Number format of the dense model's matrices.", "fp32", "int8")] = "fp32",
    with_program: Annotated[
        bool, typer.Option("--with-program", help="Also store the dense model as a program of torch.export.")
    ] = False,
) -> None:
    """Write the model of a run to one folder, which needs neither servers nor the training data."""
    with ready_to_score(run) as screen:
        from shardkeep.inference.export.writing import Formats, export_run

        told = partial(screen.working, "export")
        formats = Formats(cast(Any, rows), cast(Any, tower))
        manifest = export_run(run, out, which=model, formats=formats, with_program=with_program, told=told)
    count = sum(table.rows for table in manifest.tables)
    print(f"model of step {manifest.step:,} with {count:,} rows written to {out}: {size_text(manifest.size_bytes)}")
    if manifest.cost is None:
        print("what the number formats cost was not measured: the job's evaluation data are not there")
    from shardkeep.view.screen import metric_name

    if manifest.cost:
        print("change by the number formats, on the job's evaluation data:")
    for name, change in (manifest.cost or {}).items():
        print(f"  {metric_name(name):<20} {change:+.6f}")


def serve(
    model: Annotated[Path, path_argument("Run folder or export.", "MODEL")],
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address for gRPC; port 0 = any free one.")
    ] = "127.0.0.1:8001",
    http: Annotated[
        str, typer.Option(metavar="HOST:PORT|off", help="Address for HTTP and /metrics; needs shardkeep[web].")
    ] = "127.0.0.1:8000",
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the model for clients [default: the job's, or the folder's]."),
    ] = None,
    which: Model = "auto",
    follow: Annotated[
        Path | None,
        path_option("Serve the newest checkpoint of this run, which may be training, or start later.", metavar="RUN"),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read all files of an export and compare their checksums first.")
    ] = False,
    max_delay_ms: Annotated[
        float,
        typer.Option(min=0, max=10_000, metavar="MS", help="How long a request may wait for others to join its batch."),
    ] = 2.0,
    max_batch: Annotated[
        int, typer.Option(min=1, max=65_536, metavar="ROWS", help="Rows of a batch; a larger request is one batch.")
    ] = 1024,
    max_queue: Annotated[int, count_option("Requests that may wait; more are refused.")] = 1024,
    max_message_mb: Annotated[
        int, typer.Option(min=1, max=1024, metavar="MB", help="Largest request or reply, in MiB.")
    ] = 16,
    threads: Annotated[int, count_option("Threads of a batch's matrix products.")] = 1,
    amp: Arithmetic = None,
    most_top: Annotated[int, count_option("Items of a row that a request may ask for, of a retrieval model.")] = 100,
    token_file: Annotated[
        Path | None, path_option("File with a token that every call must show; readable by you alone.")
    ] = None,
    tls: TlsFolder = None,
) -> int:
    """Serve a model by the Open Inference Protocol v2, over gRPC and HTTP."""
    if follow is not None and which not in ("auto", "last"):
        raise typer.BadParameter(
            f"{str(which)!r} with --follow, which serves the newest; allowed: last", param_hint="'--model'"
        )
    configure("serve", 0, level=logging.WARNING)
    from shardkeep.inference.server.settings import Limits, ServerSettings
    from shardkeep.web.access import Access

    most_bytes, address = max_message_mb << 20, None if http == "off" else http
    limits = Limits(delay_s=max_delay_ms / 1000, rows=max_batch, requests=max_queue, size=16 * most_bytes)
    settings = ServerSettings(listen, address, Access.read(token_file, tls), limits, most_bytes)
    settings.check()  # before the model is loaded
    with ready_to_score(model):
        import torch

        from shardkeep.inference.following import Follower
        from shardkeep.inference.loading import made_at
        from shardkeep.inference.predictor import load
        from shardkeep.inference.server.follow import following
        from shardkeep.inference.server.serve import Addresses, model_name, serve_until_signal
        from shardkeep.inference.server.served_model import ServedModel

        torch.set_num_threads(threads)
        follower = None if follow is None else Follower(follow, amp=amp)
        awaited = None if follower is None else follower.awaited()
        predictor = load(model, which, verify=verify, amp=amp)
        served = ServedModel(predictor, made_at(model), most_top=most_top)
    shown = name or model_name(predictor, model)

    def say(line: str) -> None:
        print(line, flush=True)

    def ready(addresses: Addresses) -> None:
        text = f"serving {shown}, step {predictor.step:,}: gRPC {addresses.grpc}"
        say(text + (f", HTTP {addresses.http}" if addresses.http else ""))
        if awaited is not None:
            say(f"waiting: {awaited}; its first checkpoint replaces this model")

    with contextlib.nullcontext() if follower is None else following(served, follower, told=say):
        serve_until_signal(shown, served, settings, ready=ready)
    return 0


def _table_of_groups(by: dict[str, Any]) -> Table:
    """The most frequent values of a column, with their metrics."""
    from rich.table import Table

    from shardkeep.view.screen import metric_name

    groups, title = by["groups"], None
    if len(groups) > MOST_GROUPS:
        title = f"the {MOST_GROUPS} most frequent of {len(groups):,} values; --json has all"
    keys = dict.fromkeys(name for group in groups for name in group)
    names = [name for name in keys if name not in ("value", "note", "calibration_buckets")]
    table = Table(printable(by["column"]), *map(metric_name, names), title=title, box=None)
    for group in groups[:MOST_GROUPS]:
        shown = ["-" if group.get(name) is None else _number(group[name]) for name in names]
        table.add_row("(missing)" if group["value"] is None else printable(group["value"]), *shown)
    return table


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.6f}" if isinstance(value, float) else str(value)
