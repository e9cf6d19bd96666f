"""Commands that run no job: config, estimate, bench, sweep, cache, certs, version."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from shardkeep import __version__
from shardkeep.cli.exits import run_command
from shardkeep.cli.options import Config, Debug, Set, complete_path, load, path


def certs(
    folder: Annotated[
        Path, typer.Argument(parser=path, metavar="DIR", help="Folder of the authority and of the hosts' folders.")
    ],
    host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[,NAME]...",
            help="All names of one host; the first names its folder; repeatable [default: localhost].",
        ),
    ] = None,
    days: Annotated[
        int, typer.Option(min=1, max=3650, metavar="N", help="Days for which the certificates are valid.")
    ] = 365,
    debug: Debug = False,
) -> None:
    """Make a certificate authority and a folder for --tls per host; run it again to add hosts."""

    def run() -> int:
        from shardkeep.trust.certificates import LOCAL, make_certs

        for made in make_certs(folder, host or [LOCAL], days=days):
            print(f"--tls {made}")
        return 0

    run_command(run, debug)


def config(config: Config, set_: Set = None, debug: Debug = False) -> None:
    """Check a job's config and print it with every default filled in."""

    def run() -> int:
        from shardkeep.roles.listeners import check_extras

        _, job = load(config, set_)
        check_extras(job)
        print(job.to_yaml(), end="")
        return 0

    run_command(run, debug)


def estimate(
    config: Config,
    set_: Set = None,
    gbit_per_s: Annotated[float, typer.Option(metavar="X", help="Bandwidth of each process's link, each way.")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Estimate a job's memory, traffic and shortest step without running it."""

    def run() -> int:
        from shardkeep.base.modules import search_last
        from shardkeep.estimate.view import show_estimate, waiting
        from shardkeep.roles.kernel_needs import compile_of_job
        from shardkeep.run.screen import console

        path, job = load(config, set_)
        if job.own_modules:
            search_last(path.resolve().parent)
        with waiting() as screen:
            compile_of_job(job, lambda text: screen.phase("kernels", text))
            from shardkeep.estimate.estimate import estimate as estimated  # after compiling: this import loads kernels

            found = estimated(job, gbit_per_s=gbit_per_s, progress=partial(screen.working, "data"))
        if as_json:
            print(json.dumps(found, indent=2))
        else:
            show_estimate(found, console())
        return 0

    run_command(run, debug)


def bench(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Names of benchmarks [default: all].")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List names and questions, and run nothing.")] = False,
    smoke: Annotated[bool, typer.Option("--smoke", help="Check that they run: one round of one second.")] = False,
    rounds: Annotated[int | None, typer.Option(min=1, metavar="N", help="Number of alternating rounds.")] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.1, metavar="X", help="Seconds per contestant and round.")
    ] = None,
    device: Annotated[str | None, typer.Option(metavar="cpu|cuda", help="Device of the dense models.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(parser=path, metavar="DIR", help="Folder of the JSON files [default: runs/bench-DATE]."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Run benchmarks."""

    def run() -> int:
        from shardkeep.cli.bench import bench_all, chosen

        benchmarks = chosen(names or ())
        if list_:
            width = max(len(benchmark.name) for benchmark in benchmarks)
            for benchmark in benchmarks:
                print(f"{benchmark.name:<{width}}  {benchmark.question}")
            return 0
        options = {"--rounds": rounds, "--seconds": seconds, "--device": device}
        given = {name: str(value) for name, value in options.items() if value is not None}
        return bench_all(benchmarks, options=given, smoke=smoke, out=out)

    run_command(run, debug)


def sweep(
    plan: Annotated[
        Path,
        typer.Argument(
            parser=path,
            metavar="SWEEP",
            autocompletion=complete_path,
            help="YAML file: base, grid or recipes, seeds.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            parser=path, metavar="DIR", help="Folder of runs and results; an interrupted sweep continues in it."
        ),
    ],
    debug: Debug = False,
) -> None:
    """Measure bytes against AUC: run a job with several recipes and seeds, and compare them."""

    def run() -> int:
        from shardkeep.run.screen import console
        from shardkeep.sweep.plan import load_sweep
        from shardkeep.sweep.sweep import sweep as sweep_all

        sweep_all(load_sweep(plan), out=out, console=console())
        return 0

    run_command(run, debug)


def cache(
    where: Annotated[
        Path | None,
        typer.Argument(
            parser=path,
            metavar="[FOLDER|CONFIG]",
            help="A cache, a folder of data or a config [default: here, and yours].",
        ),
    ] = None,
    clean: Annotated[bool, typer.Option("--clean", help="Delete entries that no job will read.")] = False,
    unused: Annotated[
        float | None,
        typer.Option(metavar="DAYS", min=0.0, help="With --clean: also delete entries that no job has read for DAYS."),
    ] = None,
    debug: Debug = False,
) -> None:
    """List converted data with place and size, or delete old entries."""

    def run() -> int:
        from shardkeep.cli.cache import cache_lines

        for line in cache_lines(where, clean=clean, unused_days=unused):
            print(line, flush=True)
        return 0

    run_command(run, debug)


def version() -> None:
    """Print the version."""
    typer.echo(__version__)
