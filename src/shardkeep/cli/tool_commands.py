"""Commands beside jobs: init, config, estimate, sweep, tune, cache, kernels, certs."""

from __future__ import annotations

import json
import shlex
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from shardkeep.base.errors import MissingPackage, UserError
from shardkeep.base.plugging.packages import missing
from shardkeep.cli.options import Config, Json, Label, Set, code_folder, count_option, load, path_argument, path_option

Jobs = Annotated[
    int | None, count_option("Trials at once; left out = as cores and memory allow. One alone for figures of speed.")
]


def certs(
    folder: Annotated[Path, path_argument("Folder of the authority and of the hosts' folders.", "DIR")],
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
) -> None:
    """Make a certificate authority and a folder for --tls per host; run it again to add hosts."""
    from shardkeep.trust.certificates import LOCAL, make_certs

    for made in make_certs(folder, host or [LOCAL], days=days):
        print(f"--tls {made}")


def init(
    files: Annotated[list[Path], path_argument("Files of data, folders or patterns.", "FILE")],
    label: Label = None,
    out: Annotated[Path, path_option("File to write.", metavar="FILE")] = Path("job.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    set_: Set = None,
) -> None:
    """Write a job's config for files of yours, and show what was seen and chosen."""
    from shardkeep.automl.init import plan_of
    from shardkeep.automl.view import show
    from shardkeep.workers.file_kinds import data_suffix

    if out.is_dir() or out in files or data_suffix(out.name):
        raise UserError(f"--out {out}: is {'a folder' if out.is_dir() else 'called like data'}; name a file of YAML")
    if out.exists() and not force:
        raise UserError(f"{out}: exists; --force replaces it, --out FILE names another")
    plan = plan_of([str(file) for file in files], label=label, overrides=set_ or [])
    show(plan)
    plan.write(out)
    print(f"job       {out}; next: shardkeep train {shlex.quote(str(out))}")


def config(config: Config, set_: Set = None) -> None:
    """Check a job's config and print it with every default filled in."""
    from shardkeep.member.listeners import check_extras

    _, job = load(config, set_)
    check_extras(job)
    print(job.with_effect().to_yaml(), end="")


def estimate(
    config: Config,
    set_: Set = None,
    gbit_per_s: Annotated[float, typer.Option(metavar="X", help="Bandwidth of each process's link, each way.")] = 10.0,
    as_json: Json = False,
) -> None:
    """Estimate a job's memory, traffic and shortest step without running it."""
    from shardkeep.assembly.kernel_needs import compile_of_job
    from shardkeep.base.plugging.modules import search_last
    from shardkeep.estimate.view import show_estimate, waiting
    from shardkeep.view.screen import console

    path, job = load(config, set_)
    if job.own_modules:
        search_last(code_folder(config, path))
    with waiting() as screen:
        compile_of_job(job, lambda text: screen.phase("kernels", text))
        from shardkeep.estimate.estimate import estimate as estimated  # after compiling: this import loads kernels

        found = estimated(job, gbit_per_s=gbit_per_s, progress=partial(screen.working, "data"))
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        show_estimate(found, console())


def sweep(
    plan: Annotated[Path, path_argument("YAML file: base, recipes, seeds; or a job's.", "SWEEP")],
    out: Annotated[
        Path, path_option("Folder of runs and results; an interrupted sweep continues in it.", metavar="DIR")
    ],
    recipes: Annotated[
        str | None, typer.Option(metavar="A,B", help="Compressions by name, in place of SWEEP's.")
    ] = None,
    over: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=A,B,C", help="Run every recipe, or else the job, with each value; repeatable."),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="N,N", help="Run every variant with each, in place of SWEEP's.")
    ] = None,
    set_: Set = None,
    metric: Annotated[
        str | None, typer.Option(metavar="auc/LABEL", help="The label whose AUC counts, of a job with several labels.")
    ] = None,
    jobs: Jobs = None,
) -> None:
    """Measure bytes against AUC: run a job with several recipes or settings, and compare them with fp32."""
    from shardkeep.experiments.plan import load_sweep
    from shardkeep.experiments.runner import run
    from shardkeep.experiments.sweep import Sweep
    from shardkeep.view.screen import console

    planned = load_sweep(plan, set_ or [], over=over, metric=metric, recipes=recipes, seeds=seeds)
    run(Sweep(planned, out), console=console(), jobs=jobs)


def tune(
    config: Config,
    trials: Annotated[int, count_option("Trials in all, without --grid.")] = 30,
    minutes: Annotated[float | None, typer.Option(min=0.0, metavar="M", help="End after so many minutes.")] = None,
    over: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUES", help="Search this key: A,B,C, LOW..HIGH or log:LOW..HIGH; repeatable."),
    ] = None,
    grid: Annotated[bool, typer.Option("--grid", help="Try every combination of --over, and nothing else.")] = False,
    set_: Set = None,
    out: Annotated[
        Path | None, path_option("Folder; a search continues in it [default: runs/NAME-tune].", metavar="DIR")
    ] = None,
    jobs: Jobs = None,
) -> None:
    """Search a job's settings by trials that stop early: writes the best config, its test metrics and a report."""
    if words := missing("optuna"):
        raise MissingPackage(f"shardkeep tune {words}")
    from shardkeep.experiments.runner import run
    from shardkeep.experiments.tune import Search, SearchedJob
    from shardkeep.view.screen import console

    path, job = load(config, set_)
    folder = out or Path("runs") / f"{job.name}-tune"
    search = Search(SearchedJob(path, set_ or [], over or [], grid=grid), folder, trials)
    run(search, console=console(), jobs=jobs, minutes=minutes)


def cache(
    where: Annotated[
        Path | None,
        path_argument("A cache, a folder of data or a config [default: here, and yours].", "FOLDER|CONFIG"),
    ] = None,
    clean: Annotated[
        bool, typer.Option("--clean", help="Delete columns of files that have changed or are gone.")
    ] = False,
    unused: Annotated[
        float | None,
        typer.Option(metavar="DAYS", min=0.0, help="With --clean: also delete columns that no job has read for DAYS."),
    ] = None,
) -> None:
    """List stored columns of data with place and size, or delete useless ones."""
    from shardkeep.cli.cache import cache_lines

    for line in cache_lines(where, clean=clean, unused_days=unused):
        print(line, flush=True)


def kernels(
    to: Annotated[Path, path_option("Cache folder, for XDG_CACHE_HOME of the image.", "--to", metavar="DIR")],
) -> None:
    """Compile all kernels into a folder, such as one of a container image."""
    from shardkeep.base.compiling.kernels import compile_for_image, kernel_modules

    print(f"kernels   compiled in {compile_for_image(to, kernel_modules())}")
    print(f"          XDG_CACHE_HOME={to.absolute()} uses them, on this type of CPU")
