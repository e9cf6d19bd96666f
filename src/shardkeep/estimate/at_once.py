"""How many jobs of one kind run on this machine at once, and how each runs then."""

from __future__ import annotations

from shardkeep.base.machine.limits import limit_bytes
from shardkeep.base.machine.topology import read_topology
from shardkeep.config import JobConfig
from shardkeep.core_plan import worker_threads

TABLES_SHARE = 0.25
"""Of the machine's memory for the tables of all jobs: some have wider rows than others."""


def at_once(job: JobConfig) -> int:
    """As many as the machine has cores for their workers, as servers work while workers wait, and memory for their
    tables. May take seconds; the job's kernels are compiled."""
    topology = read_topology()
    cores = topology.quota_cores or len(topology.cores)
    most = min(cores // (max(1, job.workers) * worker_threads(job)), len(topology.gpu_nodes) or cores)
    if most < 2:
        return 1
    from shardkeep.estimate.estimate import estimate  # this import loads kernels

    tables_bytes = sum(table["bytes"] for table in estimate(job, gbit_per_s=1.0)["tables"])
    return max(1, min(most, int(TABLES_SHARE * limit_bytes() / max(1, tables_bytes))))


def beside_others(job: JobConfig) -> JobConfig:
    """A job as it runs beside others: with one thread per worker if the job takes all cores, and no page."""
    launch = job.launch.model_copy(update={"affinity": type(job.launch.affinity)()})
    web = job.web.model_copy(update={"page": "off", "metrics": "off"})
    threads = 1 if job.threads == "auto" else job.threads
    return job.model_copy(update={"launch": launch, "web": web, "threads": threads}).with_effect()
