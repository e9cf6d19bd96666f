"""Jobs on a Slurm cluster of hosts, by deploy/slurm.sbatch as it is: slurmctld on the first, slurmd on the others. It
authenticates nobody."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import psutil
import pytest

from shardkeep.base.yaml_text import write_yaml
from shardkeep.run.reader import RunReader
from tests.support.chaos import EDITED, JOB
from tests.support.cluster import patient, records, stalled, within
from tests.support.golden import Golden
from tests.support.hosts import Host, hosts, missing, worker_on
from tests.support.import_path import ROOT

ABSENT = [program for program in ("slurmctld", "slurmd", "sbatch") if shutil.which(program) is None]
REASON = missing() or (f"needs {ABSENT[0]} (scripts/install-all)" if ABSENT else None)
pytestmark = [
    pytest.mark.waits_for_processes,
    pytest.mark.timeout(600),
    pytest.mark.group("slurm"),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]
LIMIT_S = 240.0
CONF = """\
ClusterName=here
SlurmctldHost={head}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={local}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={local}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmctldTimeout=30
SlurmdTimeout=10
BatchStartTimeout=20
MessageTimeout=5
TCPTimeout=2
KillWait=10
InactiveLimit=0
ReturnToService=2
SchedulerParameters=bf_interval=3,sched_interval=3
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
NodeName={nodes} CPUs=8 RealMemory=8000 State=UNKNOWN
PartitionName=main Nodes={nodes} Default=YES MaxTime=INFINITE OverTimeLimit=0 State=UP
"""
"""With more CPUs than this machine has: several jobs' tasks share a core."""


@dataclass(frozen=True)
class Job:
    """A job as Slurm shows it: its state in Slurm's words, where it runs or ran in the order of the nodes' numbers, how
    often it was started again, and whole minutes since its last start."""

    state: str
    hosts: tuple[str, ...]
    restarts: int
    exit_code: int
    minutes: int


class Slurm:
    """The cluster: commands of a user at the first host. `env`: variables of the user, which jobs get as well."""

    def __init__(self, made: Sequence[Host], env: Mapping[str, str]) -> None:
        self.head, self.nodes = made[0], {host.name: host for host in made[1:]}
        self._folder, self.work = self.head.shared / "slurm", self.head.shared / "work"
        (self._folder / "state").mkdir(parents=True)
        self.work.mkdir()
        place = {"folder": self._folder, "local": self.head.local}
        text = CONF.format(head=self.head.name, nodes=",".join(self.nodes), **place)
        (self._folder / "slurm.conf").write_text(text)
        self._env = {**env, "SLURM_CONF": str(self._folder / "slurm.conf")}
        self.head.run("slurmctld", "-i", env=self._env)
        for host in self.nodes.values():
            self.start_node(host)
        states = lambda: self.run("sinfo", "-h", "-N", "-o", "%T").split()  # noqa: E731
        within(90, lambda: states() == ["idle"] * len(self.nodes), f"{states()}", lambda: True)

    def start_node(self, host: Host) -> None:
        (host.disk / "spool").mkdir(exist_ok=True)
        host.run("slurmd", "-N", host.name, env=self._env)

    def run(self, *command: str) -> str:
        """A command at the first host, in the folder where jobs are submitted."""
        return self.head.run("bash", "-c", 'cd "$0" && exec "$@"', str(self.work), *command, env=self._env)

    def job(self, number: str) -> Job:
        shown = self.run("scontrol", "-o", "show", "job", number).split()
        fields = dict(part.split("=", 1) for part in shown if "=" in part)
        placed = "(" not in fields["NodeList"]
        names = self.run("scontrol", "show", "hostnames", fields["NodeList"]).split() if placed else []
        code, (hours, minutes) = int(fields["ExitCode"].split(":")[0]), fields["RunTime"].split(":")[:2]
        restarts = int(fields.get("Restarts", 0))
        return Job(fields["JobState"], tuple(names), restarts, code, 60 * int(hours) + int(minutes))

    def wait(self, number: str, *states: str) -> Job:
        within(LIMIT_S, lambda: self.job(number).state in states, f"job {number}: not {states}", lambda: True)
        return self.job(number)

    def limit(self, number: str, minutes: int) -> None:
        self.run("scontrol", "update", f"JobId={number}", f"TimeLimit={minutes}")

    def print_logs(self) -> None:
        for log in sorted([*self._folder.glob("*.log"), *self.work.rglob("*.out")]):
            print(f"---- {log.name}\n{log.read_text(errors='replace')[-4000:]}")


@pytest.fixture(scope="module")
def whole_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Of a user with a command `shardkeep`."""
    command = tmp_path_factory.mktemp("bin") / "shardkeep"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m shardkeep "$@"\n')
    command.chmod(0o755)
    path = f"{command.parent}{os.pathsep}{os.environ['PATH']}"
    with hosts(4) as made:
        yield Slurm(made, {"PATH": path, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"})


@pytest.fixture
def cluster(whole_cluster: Slurm) -> Iterator[Slurm]:
    """The cluster; a test that fails shows what it printed."""
    yield whole_cluster
    whole_cluster.print_logs()


class Training:
    """The job of deploy/slurm.sbatch in a folder of its own."""

    def __init__(self, cluster: Slurm, name: str, *, lease_s: float) -> None:
        self._cluster = cluster
        self._folder = cluster.work / name
        self._folder.mkdir()
        self.config = self._folder / "clicks.yaml"
        self.config.write_text(write_yaml(patient({**JOB, "liveness": {"lease_s": lease_s}})))
        self.run = RunReader(self._folder / "runs" / "clicks")
        self.number = ""

    def submit(self, *options: str) -> None:
        """Options are stronger than those in the script."""
        two = ("--nodes=2", "--cpus-per-task=1", f"--chdir={self._folder}")
        submitted = self._cluster.run("sbatch", "--parsable", *two, *options, str(ROOT / "deploy" / "slurm.sbatch"))
        self.number = submitted.strip().split(";")[0]

    def steps(self) -> list[int]:
        return [record["step"] for record in records(self.run) if record["kind"] == "progress"]

    def train(self, step: int) -> None:
        going = lambda: self.summary.get("status") in (None, "stopped")  # noqa: E731
        within(LIMIT_S, lambda: max(self.steps(), default=0) >= step, f"no step {step}", going)

    @contextlib.contextmanager
    def held(self, step: int) -> Iterator[None]:
        """Waits for a step, and keeps the job from its next ones: a worker is stopped."""
        self.train(step)
        worker = next(m["pid"] for m in self.run.member_list() if m["role"] == "worker")
        with stalled(psutil.Process(worker)):
            yield

    def end(self, golden: Golden) -> Job:
        """Waits for its end, with the model of an undisturbed `shardkeep train`."""
        job = self._cluster.wait(self.number, "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED")
        assert (job.state, job.exit_code) == ("COMPLETED", 0)
        assert self.summary["state_digest"] == golden.summary["state_digest"]
        return job

    def give(self, task: int, rank: int, *words: str) -> None:
        """Gives other arguments to the command `shardkeep` of one machine of a task of an array."""
        command = self._folder / "shardkeep"
        changed = f'[ "$SLURM_ARRAY_TASK_ID.$SLURM_PROCID" != {task}.{rank} ] || set -- {shlex.join(words)}'
        command.write_text(f'#!/bin/sh\n{changed}\nexec {sys.executable} -m shardkeep "$@"\n')
        command.chmod(0o755)

    @property
    def summary(self) -> dict[str, Any]:
        return self.run.summary() or {}

    def leaves(self, times: int) -> None:
        """Waits until machine 0 was to leave so often."""
        printed = self._folder / f"slurm-{self.number}.out"
        within(LIMIT_S, lambda: printed.read_text().count("node/0 - leaving") >= times, "no SIGTERM", lambda: True)


@pytest.mark.slow
def test_a_job_outlives_the_machine_of_its_coordinator(cluster: Slurm, golden: Golden) -> None:
    assert sorted(cluster.run("srun", "--nodes=3", "hostname").split()) == ["x1", "x2", "x3"]
    job = Training(cluster, "off", lease_s=30.0)
    job.submit()
    job.train(1)
    lost, other = (cluster.nodes[host] for host in cluster.job(job.number).hosts)
    address = job.run.address()
    with stalled(worker_on(other, job.run)):  # or the job might end first
        lost.off()
    job.config.write_text(write_yaml(EDITED))
    done = job.end(golden)
    assert done.restarts >= 1 and lost.name not in done.hosts and job.run.address() != address
    lost.on()
    cluster.start_node(lost)
    assert len(job.summary["starts"]) == 1, "not taken over"
    job.submit()
    refused = cluster.wait(job.number, "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED")
    assert (refused.state, refused.exit_code, refused.restarts) == ("FAILED", 2, 0)
    assert [recovery["lost_steps"] for recovery in job.summary["recoveries"]] == [0] * len(job.summary["recoveries"])


@pytest.mark.slow
def test_wrong_input_of_one_machine_ends_the_task_of_an_array_with_2_and_its_neighbour_goes_on(
    cluster: Slurm,
) -> None:
    job = Training(cluster, "wrong", lease_s=30.0)
    job.give(1, 1, "node", "nothing.yaml", "--run-dir", "runs/clicks-1", "--insecure-data-plane")
    job.submit("--array=1,2", "--export=ALL,PATH=.:" + os.environ["PATH"])
    states = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED")
    ends = [cluster.wait(f"{job.number}_{task}", *states) for task in (1, 2)]
    assert [(end.state, end.exit_code, end.restarts) for end in ends] == [("FAILED", 2, 0), ("COMPLETED", 0, 0)]


@pytest.mark.chaos
def test_a_job_continues_after_a_requeue_after_its_time_limit_and_after_it_is_cancelled(
    cluster: Slurm, golden: Golden
) -> None:
    job = Training(cluster, "continued", lease_s=60.0)
    job.submit("--signal=TERM@120")
    with job.held(30):
        cluster.run("scontrol", "requeue", job.number)
        job.leaves(1)
    with job.held(80):
        cluster.limit(job.number, cluster.job(job.number).minutes + 2)  # Slurm looks at time limits every 30 s
        job.leaves(2)
    within(LIMIT_S, lambda: cluster.job(job.number).restarts == 2, "not in the queue again", lambda: True)
    cluster.limit(job.number, 60)
    with job.held(140):
        cluster.run("scancel", job.number)
        job.leaves(3)
    assert cluster.wait(job.number, "CANCELLED").restarts == 2
    job.submit()
    assert job.end(golden).restarts == 0
    assert not sum(max(last - step + 1, 0) for last, step in pairwise(job.steps())), "steps were trained again"
    assert sum(start["status"] == "stopped" for start in job.summary["starts"]) == 3
