"""A Slurm cluster on hosts: slurmctld on the first, slurmd on each of the others. It authenticates nobody."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.cluster import within
from tests.support.hosts import Host, hosts, started

PROGRAMS = ("slurmctld", "slurmd", "sbatch")
LIMIT_S = 90.0
CPUS = 8  # more than this machine has: several jobs' tasks share a core
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
SlurmdTimeout={patience_s}
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
NodeName={nodes} CPUs={cpus} RealMemory=8000 State=UNKNOWN
PartitionName=main Nodes={nodes} Default=YES MaxTime=INFINITE OverTimeLimit=0 State=UP
"""


def missing_program() -> str | None:
    """Why there can be no Slurm here, in one line; None if there can."""
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"needs {absent[0]} (scripts/install-all)" if absent else None


@dataclass(frozen=True)
class Job:
    """A job as `squeue` shows it, or as it ended.

    Attributes:
        state: In Slurm's words: PENDING, RUNNING, COMPLETED, TIMEOUT, ...
        hosts: Where it runs or ran, in the order of the nodes' numbers.
        restarts: How often Slurm started it again.
        minutes: Whole minutes since its last start.
    """

    state: str
    hosts: tuple[str, ...]
    restarts: int
    exit_code: int
    minutes: int


class Slurm:
    """The cluster: commands of a user at the first host.

    Args:
        env: Variables of the user, which jobs get as well.
    """

    def __init__(self, made: Sequence[Host], env: Mapping[str, str], *, patience_s: int) -> None:
        self.head, self.nodes = made[0], {host.name: host for host in made[1:]}
        folder = self.head.shared / "slurm"
        (folder / "state").mkdir(parents=True)
        names = ",".join(self.nodes)
        text = CONF.format(
            head=self.head.name, folder=folder, local=self.head.local, nodes=names, cpus=CPUS, patience_s=patience_s
        )
        (folder / "slurm.conf").write_text(text)
        self.work = self.head.shared / "work"
        self.work.mkdir()
        self._folder, self._env = folder, {**env, "SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        self.head.run("slurmctld", "-i", env=self._env)
        for host in self.nodes.values():
            self.start_node(host)
        within(LIMIT_S, lambda: self._idle() == set(self.nodes), f"{self._idle()} are idle", lambda: True)

    def start_node(self, host: Host) -> None:
        (host.disk / "spool").mkdir(exist_ok=True)
        host.run("slurmd", "-N", host.name, env=self._env)

    def run(self, *command: str) -> str:
        """A command at the first host, in the folder where jobs are submitted."""
        return self.head.run("bash", "-c", 'cd "$0" && exec "$@"', str(self.work), *command, env=self._env)

    def submit(self, script: Path, *options: str) -> str:
        """`sbatch`; the job's number. Options are stronger than those in the script."""
        return self.run("sbatch", "--parsable", *options, str(script)).strip().split(";")[0]

    def job(self, number: str) -> Job:
        fields = dict(
            part.split("=", 1) for part in self.run("scontrol", "-o", "show", "job", number).split() if "=" in part
        )
        names = (
            self.run("scontrol", "show", "hostnames", fields["NodeList"]).split()
            if "(" not in fields["NodeList"]
            else []
        )
        code, (hours, minutes) = int(fields["ExitCode"].split(":")[0]), fields["RunTime"].split(":")[:2]
        return Job(
            fields["JobState"], tuple(names), int(fields.get("Restarts", 0)), code, 60 * int(hours) + int(minutes)
        )

    def wait(self, number: str, *states: str, limit_s: float = LIMIT_S) -> Job:
        """Waits until a job is in one of the states."""
        within(
            limit_s,
            lambda: self.job(number).state in states,
            f"job {number} is not {' or '.join(states)}",
            lambda: True,
        )
        return self.job(number)

    def limit(self, number: str, minutes: int) -> None:
        """Sets a job's time limit."""
        self.run("scontrol", "update", f"JobId={number}", f"TimeLimit={minutes}")

    def printed(self) -> str:
        """What daemons and jobs printed, for a test that fails."""
        logs = [*self._folder.glob("*.log"), *self.work.rglob("*.out")]
        return "\n".join(f"---- {log.name}\n{log.read_text(errors='replace')[-4000:]}" for log in sorted(logs))

    def _idle(self) -> set[str]:
        lines = self.run("sinfo", "-h", "-N", "-o", "%N %T").splitlines()
        return {line.split()[0] for line in lines if line.split()[1] == "idle"}


@contextlib.contextmanager
def slurm(count: int, env: Mapping[str, str], *, patience_s: int = 10) -> Iterator[Slurm]:
    """A cluster of `count` nodes. `patience_s`: after this time without an answer, a node counts as lost."""
    with hosts(count + 1) as made, started(Slurm(made, env, patience_s=patience_s)) as cluster:
        yield cluster
