"""The command that serves a trained model."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardkeep.base.log import configure
from shardkeep.cli.exits import run_command
from shardkeep.cli.model_commands import Model, ready_to_score
from shardkeep.cli.options import Debug, TlsFolder, complete_run, path, which_checkpoint

if TYPE_CHECKING:
    from shardkeep.inference.server.serve import ServerSettings


def serve(
    model: Annotated[
        Path, typer.Argument(parser=path, metavar="MODEL", autocompletion=complete_run, help="Run folder or export.")
    ],
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
    which: Model = "last",
    follow: Annotated[
        Path | None,
        typer.Option(
            parser=path,
            metavar="RUN",
            autocompletion=complete_run,
            help="Serve the newest checkpoint of this run, which may be training, or start later.",
        ),
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
    max_queue: Annotated[
        int, typer.Option(min=1, metavar="N", help="Requests that may wait; more are refused.")
    ] = 1024,
    max_message_mb: Annotated[
        int, typer.Option(min=1, max=1024, metavar="MB", help="Largest request or reply, in MiB.")
    ] = 16,
    threads: Annotated[int, typer.Option(min=1, metavar="N", help="Threads of a batch's matrix products.")] = 1,
    token_file: Annotated[
        Path | None,
        typer.Option(
            parser=path, metavar="FILE", help="File with a token that every call must show; readable by you alone."
        ),
    ] = None,
    tls: TlsFolder = None,
    debug: Debug = False,
) -> None:
    """Serve a model by the Open Inference Protocol v2, over gRPC and HTTP."""
    chosen = which_checkpoint(which)
    if follow is not None and chosen != "last":
        raise typer.BadParameter(
            f"{which!r} with --follow, which serves the newest; allowed: last", param_hint="'--model'"
        )

    def body() -> int:
        configure("serve", 0, level=logging.WARNING)
        settings = _settings(listen, http, max_delay_ms, max_batch, max_queue, max_message_mb, token_file, tls)
        with ready_to_score(model):
            import torch

            from shardkeep.inference.following import Follower
            from shardkeep.inference.loading import made_at
            from shardkeep.inference.predictor import load
            from shardkeep.inference.server.follow import following
            from shardkeep.inference.server.serve import Addresses, model_name, serve_until_signal
            from shardkeep.inference.server.served_model import ServedModel

            torch.set_num_threads(threads)
            follower = None if follow is None else Follower(follow)
            awaited = None if follower is None else follower.awaited()
            predictor = load(model, chosen, verify=verify)
            served = ServedModel(predictor, made_at(model))
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

    run_command(body, debug)


def _settings(
    listen: str,
    http: str,
    max_delay_ms: float,
    max_batch: int,
    max_queue: int,
    max_message_mb: int,
    token_file: Path | None,
    tls: Path | None,
) -> ServerSettings:
    """Raises ConfigError, before the model is loaded."""
    from shardkeep.inference.server.access import Access
    from shardkeep.inference.server.batcher import Limits
    from shardkeep.inference.server.serve import ServerSettings

    most_bytes = max_message_mb << 20
    limits = Limits(delay_s=max_delay_ms / 1000, rows=max_batch, requests=max_queue, size=16 * most_bytes)
    address = None if http == "off" else http
    settings = ServerSettings(listen, address, Access.read(token_file, tls), limits, most_bytes)
    settings.check()
    return settings
