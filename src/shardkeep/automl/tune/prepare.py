"""What all trials share, made before the first one: kernels, converted data, processes of a trial, trials at once."""

from __future__ import annotations

import math
from functools import partial

from shardkeep.assembly.kernel_needs import compile_of_job
from shardkeep.automl.tune.plan import Plan
from shardkeep.base.errors import ConfigError
from shardkeep.base.machine.limits import limit_bytes
from shardkeep.base.machine.topology import read_topology
from shardkeep.base.plugging.modules import search_last
from shardkeep.core_plan import worker_threads
from shardkeep.launch.processes.starter import Starter
from shardkeep.view.screen import Screen
from shardkeep.workers.data.sources.registry import open_data

EVALUATIONS = 4
"""A trial has so many where the job has fewer, so that it can be stopped early."""
TABLES_SHARE = 0.25
"""Of the machine's memory for the tables of all trials at once: rows of the search may be wider than the job's."""


def prepare(plan: Plan, starter: Starter, screen: Screen) -> tuple[Plan, int]:
    """Returns the plan with what follows from data and machine, and the number of trials at once. Raises UserError."""
    job = plan.job
    if job.checkpoint.dir is not None:
        raise ConfigError("checkpoint.dir: all trials would share it; leave it out, each trial has a folder of its own")
    if job.own_modules:
        search_last(plan.code_folder)
    starter.load(compile_of_job(job, lambda text: screen.phase("kernels", text)))
    data = open_data(job.data, seed=job.seed, progress=partial(screen.working, "data"), items=job.items)
    screen.end_bar()
    if data.eval is None:
        raise ConfigError("the job has no evaluation data, by which trials are compared; allowed: data.split, or eval")
    screen.phase("data", data.describe())
    from shardkeep.estimate.estimate import estimate  # after compiling: this import loads kernels

    needs = estimate(job, gbit_per_s=10.0)
    tables_bytes = sum(table["bytes"] for table in needs["tables"])
    most = max(1, int(TABLES_SHARE * limit_bytes() / max(1, tables_bytes)))
    overrides = (
        []
        if needs["job"]["steps"] > 0 and _evaluations(plan, needs["job"]["steps"]) >= EVALUATIONS
        else [f"eval.every_steps={math.ceil(needs['job']['steps'] / EVALUATIONS)}"]
    )
    if job.servers and TABLES_SHARE * limit_bytes() >= tables_bytes:
        overrides += _one_process(plan)
    plan = plan.over(*overrides)
    topology = read_topology()
    cores, job = topology.quota_cores or len(topology.cores), plan.job
    each = job.workers * (1 if job.threads == "auto" else worker_threads(job)) + job.servers
    return plan, min(max(1, cores // each), most, len(topology.gpu_nodes) or cores)


def _evaluations(plan: Plan, steps: int) -> int:
    every = plan.job.eval.every_steps
    return plan.job.train.epochs if every == "epoch" else steps // every


def _one_process(plan: Plan) -> list[str]:
    """What runs the job in one process with the same samples a step; nothing where a setting needs servers."""
    batch = plan.job.train.batch_size * plan.job.workers
    wanted = ["servers=0", "workers=1", f"train.batch_size={batch}"]
    try:
        plan.load(*wanted)
    except ConfigError:
        return []
    return wanted
