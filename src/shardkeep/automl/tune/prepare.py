"""What all trials share, made before the first one: kernels, converted data, processes of a trial, trials at once."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
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
"""A trial has so many where the job has fewer, so that it can stop early."""
TABLES_SHARE = 0.25
"""Of the machine's memory for the tables of all trials at once: some have wider rows than the job."""


def opened(plan: Plan, starter: Starter, screen: Screen) -> Plan:
    """The plan with its data's fingerprint: compiles and converts what all trials share. Raises UserError."""
    job = plan.job
    if job.own_modules:
        search_last(plan.code_folder)
    starter.load(compile_of_job(job, partial(screen.phase, "kernels")))
    data = open_data(job.data, seed=job.seed, progress=partial(screen.working, "data"), items=job.items)
    screen.end_bar()
    if data.eval is None:
        raise ConfigError("the job has no evaluation data, by which trials are compared; allowed: data.split, or eval")
    screen.phase("data", data.describe())
    return replace(plan, data=data.fingerprint)


def for_this_machine(plan: Plan) -> tuple[Plan, int, int]:
    """The plan with what follows from its steps and the machine, the number of trials at once, and the evaluations
    after which a trial may stop early. Takes seconds."""
    from shardkeep.estimate.estimate import estimate  # after compiling: this import loads kernels

    job = plan.job
    needs = estimate(job, gbit_per_s=1.0)
    steps, tables_bytes = needs["job"]["steps"], sum(table["bytes"] for table in needs["tables"])
    most = int(TABLES_SHARE * limit_bytes() / max(1, tables_bytes))
    every = job.eval.every_steps
    if (job.train.epochs if every == "epoch" else steps // every) < EVALUATIONS:
        plan = plan.over(f"eval.every_steps={math.ceil(steps / EVALUATIONS)}")
    if job.servers and most:
        with contextlib.suppress(ConfigError):  # a setting that needs servers
            plan = plan.over("servers=0", "workers=1", f"train.batch_size={job.train.batch_size * job.workers}")
    topology, job = read_topology(), plan.job
    cores = topology.quota_cores or len(topology.cores)
    threads = job.workers * (1 if job.threads == "auto" else worker_threads(job)) + job.servers
    at_once = max(1, min(cores // threads, most, len(topology.gpu_nodes) or cores))
    return plan, at_once, plan.first_look(steps)
