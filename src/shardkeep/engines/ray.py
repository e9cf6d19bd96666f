"""Ray: jobs and servers on the machines of a Ray cluster, as actors that run `shardkeep node`. Needs ray when called.

Ray starts a lost actor again on another machine, and `shardkeep node` continues the job there.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shardkeep.base.errors import JobError, JobStopped, MissingPackage, UserError
from shardkeep.base.files import atomic_write, local, make_folder
from shardkeep.base.plugging.packages import missing
from shardkeep.config import JobConfig, load_config
from shardkeep.config.paths import anchored
from shardkeep.ps.config import TableSpec
from shardkeep.run.reader import RunReader
from shardkeep.run.summary import Summary
from shardkeep.trust.tokens import keep_token

if TYPE_CHECKING:
    from shardkeep.loop.client import EmbeddingClient
LAST_S, POLL_S, PATIENCE_S = 30.0, 0.2, 10.0
"""Seconds that machines get to end after one has failed, and servers after their trainers have left; the last one: that
machines get to come before a line names what is missing."""
Place = str | Path
Resources = Mapping[str, float]
ONE: Resources = {"CPU": 1}


def train(
    config: JobConfig | Place,
    *,
    run_dir: Place,
    nodes: int,
    resources: Resources = ONE,
    only: Literal["servers", "workers"] | None = None,
    keep: Place | None = None,
) -> Summary:
    """Runs a job on machines of a Ray cluster, or continues the one in `run_dir`. Blocks until the job is over.

    Args:
        config: The job, or its YAML file. Data and own modules are at the same path on all machines.
        run_dir: The run folder, which this process and all machines see.
        resources: Of one machine, such as {"CPU": 8}.
        only: Another call in the same folder runs the other role, on machines of its own.
        keep: Folder for journals on a disk of each machine; None = the run folder.

    Returns and raises as `shardkeep.train`; MissingPackage without ray.
    """
    words = [*(("--only", only) if only else ()), *(("--keep", str(keep)) if keep else ())]
    with _machines(_job(config), Path(local(run_dir)).absolute(), nodes, resources, words) as (_, ends):
        summary = _wait(ends) or {}
    if summary.get("status") == "stopped":
        raise JobStopped(summary["message"])
    return Summary.model_validate(summary)


@contextlib.contextmanager
def servers(
    config: JobConfig | Place | Sequence[TableSpec],
    *,
    num: int,
    trainers: int,
    run_dir: Place,
    resources: Resources = ONE,
) -> Iterator[Servers]:
    """Runs servers on a Ray cluster, around `TorchTrainer` or other trainers of your own.

        with shardkeep.ray.servers(tables, num=4, trainers=8, run_dir="/shared/runs/one") as run:
            TorchTrainer(loop, train_loop_config={"run": run}, ...).fit()  # the loop calls config["run"].connect()

    They end after all trainers have closed their clients, or when the block raises. `config` may be the tables;
    `resources` are those of each server. Otherwise as `train`.
    """
    from shardkeep.loop.joining import checked_tables, config_around  # here: actors need no torch

    if isinstance(config, Sequence) and not isinstance(config, str):
        tables = {table.name: table.model_dump(exclude={"name"}) for table in checked_tables(config)}
        config = JobConfig.model_validate({"name": "custom-loop", "tables": tables})
    job = config_around(_job(config), servers=num, trainers=trainers)
    run = RunReader(run_dir)
    number = run.number()
    with _machines(job, run.path, num, resources, ["--only", "servers"]) as (token, ends):
        while run.number() == number or run.address() is None:
            if _wait(ends, POLL_S) is not None:
                raise UserError(f"{run.path}: holds a job that is completed; choose another folder")
        yield Servers(run.path, token)
        _wait(ends, LAST_S)


@dataclass(frozen=True)
class Servers:
    """Servers that run. It can be pickled, and holds the job's token."""

    run_dir: Path
    token: str = field(repr=False)

    def connect(self, *, index: int | None = None, timeout_s: float = 120.0, **options: Any) -> EmbeddingClient:
        """Joins as trainer `index`; None = its world rank in Ray Train. Otherwise as `shardkeep.connect`.

        An error of this trainer does not end the job, as Ray Train starts all trainers again; they resume from the
        loop's newest checkpoint. `timeout_s`: Ray needs 75 s to notice that the coordinator's machine is lost."""
        from ray.train import get_context
        from ray.util import get_node_ip_address

        from shardkeep.loop.connecting import connect

        options |= {"advertise": get_node_ip_address(), "insecure_data_plane": True, "restarted": True}
        rank = get_context().get_world_rank() if index is None else index
        with tempfile.TemporaryDirectory() as folder:
            secret = Path(folder, "token")
            atomic_write(secret, self.token, private=True)
            return connect(self.run_dir, index=rank, token_file=secret, timeout_s=timeout_s, **options)


class Machine:
    """An actor: one machine of a job."""

    def run(self, config: str, token: str, run: str, words: Sequence[str]) -> tuple[int, str, dict[str, Any] | None]:
        """Runs `shardkeep node` until the job is over: its exit code, its errors, the job's summary."""
        from ray.util import get_node_ip_address

        with tempfile.TemporaryDirectory() as folder:
            job, secret = Path(folder, "job.yaml"), Path(folder, "token")
            job.write_text(config, encoding="utf-8")
            atomic_write(secret, token, private=True)
            place = ("--run-dir", run, "--advertise", get_node_ip_address())
            trust = ("--token-file", str(secret), "--insecure-data-plane", "--parent-pipe")
            code, errors = -1, ""
            while code not in (0, JobError.exit_code, UserError.exit_code):  # after 143 and signals: again
                code, errors = _run((sys.executable, "-m", "shardkeep", "node", str(job), *place, *trust, *words))
        return code, errors, RunReader(Path(run)).summary()


def _run(command: Sequence[str]) -> tuple[int, str]:
    """Runs a command in a session of its own: its exit code and its errors. Ray logs what it prints."""
    pipe = subprocess.PIPE  # that to stdin closes when Ray ends this process, which need not end its children
    with subprocess.Popen(command, stdin=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        errors = []
        for line in process.stderr or ():
            print(line, end="", file=sys.stderr, flush=True)
            errors += [line.removeprefix("error: ").rstrip()] if line.startswith("error: ") else []
    return process.returncode, "\n".join(errors) or "interrupted"


@contextlib.contextmanager
def _machines(
    job: JobConfig, run: Path, nodes: int, resources: Resources, words: Sequence[str]
) -> Iterator[tuple[str, list[Any]]]:
    """Machines that run a job until the block ends: the job's token, and references to what `Machine.run` returns."""
    if (need := missing("ray")) is not None:
        raise MissingPackage(f"shardkeep.ray {need}")
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    make_folder(run)
    token = keep_token(run)
    group = placement_group([dict(resources)] * nodes, strategy="SPREAD")
    try:
        ready = group.ready()
        if not ray.wait([ready], timeout=PATIENCE_S)[0]:
            known = {key: n for key, n in ray.available_resources().items() if key in resources}
            wanted = f"{nodes} machines with {dict(resources)} each"
            print(f"shardkeep.ray: waiting for {wanted}; free in the cluster: {known}", file=sys.stderr, flush=True)
        ray.get(ready)
        claim = {"num_cpus": resources.get("CPU", 0), "num_gpus": resources.get("GPU", 0)}
        actor = ray.remote(max_restarts=-1, max_task_retries=-1, **claim)(Machine)
        places = [PlacementGroupSchedulingStrategy(group, rank) for rank in range(nodes)]
        machines = [actor.options(scheduling_strategy=place).remote() for place in places]
        text, of_all = job.with_effect().to_yaml(), ("--nodes", str(nodes), *words)
        yield (
            token,
            [
                each.run.remote(text, token, str(run), ("--rank", str(rank), *of_all))
                for rank, each in enumerate(machines)
            ],
        )
    finally:
        remove_placement_group(group)


def _wait(ends: Sequence[Any], limit_s: float | None = None) -> dict[str, Any] | None:
    """Waits for the end of all machines: the first one's summary. Raises UserError and JobError if one has failed."""
    import ray

    left, failed = list(ends), ""
    while left:
        done, left = ray.wait(left, timeout=LAST_S if failed else limit_s)
        if not done:
            break
        code, errors, _ = ray.get(done[0])
        if code == UserError.exit_code:
            raise UserError(errors)
        failed = failed or (errors if code else "")
    if failed:
        raise JobError(failed)
    return None if left else ray.get(ends[0])[2]


def _job(config: JobConfig | Place) -> JobConfig:
    return anchored(config, Path.cwd(), JobConfig) if isinstance(config, JobConfig) else load_config(config)
