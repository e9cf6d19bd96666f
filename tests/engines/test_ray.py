"""Programs on a Ray cluster of three hosts."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardkeep.base.yaml_text import write_yaml
from shardkeep.run.reader import RunReader
from tests.support.chaos import JOB
from tests.support.cluster import records, stalled, within
from tests.support.golden import Golden
from tests.support.hosts import Host, missing, worker_on
from tests.support.ray_cluster import ROOT, RayCluster, missing_ray, ray_cluster
from tests.support.ray_programs import JOB as JOB_PROGRAM, TRAINERS

REASON = missing() or missing_ray()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.waits_for_processes,
    pytest.mark.timeout(400),
    pytest.mark.group("ray"),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(3) as cluster:
        yield cluster


def said(program: subprocess.Popen[str], word: str) -> list[str]:
    """The other words of the next line that begins with `word`. Ray prints lines of its own."""
    assert program.stdout is not None
    return next(line for line in program.stdout if line.startswith(word)).split()[1:]


LIMIT_S = 240.0
LIVENESS = {"lease_s": 30.0, "step_timeout_s": 30.0}  # a machine that is off answers nothing


class Training:
    """A job on two nodes, in a folder of its own."""

    def __init__(self, cluster: RayCluster, name: str, *, keep: str = "", **config: Any) -> None:
        self._cluster = cluster
        folder = Path(tempfile.mkdtemp(prefix=name, dir=cluster.head.shared))  # a test may run once more
        (folder / "job.yaml").write_text(write_yaml({**JOB, "liveness": LIVENESS, **config}))
        self.run = RunReader(folder / "run")
        self._start = lambda: cluster.program(JOB_PROGRAM, str(folder / "job.yaml"), str(self.run.path), keep)
        self._program = self._start()

    def records(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in records(self.run) if record["kind"] == kind]

    def step(self) -> int:
        return max((record["step"] for record in self.records("progress")), default=0)

    def train(self, steps: int) -> None:
        """Waits for more steps."""
        last = self.step() + steps
        within(LIMIT_S, lambda: self.step() >= last, f"no step {last}", lambda: self._program.poll() is None)

    def host_of(self, rank: int) -> Host:
        """The host where server `rank` runs."""
        members = self.run.member_list()
        pid = next(each["pid"] for each in members if (each["role"], each["index"]) == ("server", rank))
        return next(host for host in self._cluster.nodes.values() if pid in host.pids)

    def off(self, rank: int) -> Host:
        """Switches a machine off, and waits until the job has left it."""
        lost, other, address = self.host_of(rank), self.host_of(1 - rank), self.run.address()
        known = len(self.recoveries())
        with stalled(worker_on(other, self.run)) if lost != other else contextlib.nullcontext():
            lost.off()  # the job might end first
        within(LIMIT_S, lambda: len(self.recoveries()) > known, "no recovery", lambda: self._program.poll() is None)
        assert rank or self.run.address() != address
        return lost

    def start_again(self) -> None:
        """Kills the program, waits until Ray has ended all that it started, and starts it again."""
        with self._program:
            self._program.kill()
        within(LIMIT_S, lambda: not self.processes(), f"{self.processes()} are left", lambda: True)
        self._program = self._start()

    def processes(self) -> list[psutil.Process]:
        return [each for each in psutil.process_iter() if str(self.run.path) in cmdline(each)]

    def recoveries(self) -> list[dict[str, Any]]:
        return [record for record in self.records("phase") if record["phase"] == "recovery"]

    def end(self) -> list[str]:
        """Waits for its end: status and digest, or the class and the text of its error."""
        with self._program:
            return list(json.loads(" ".join(said(self._program, "ended"))))


def cmdline(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []


def test_a_job_outlives_the_machine_of_its_coordinator(cluster: RayCluster, golden: Golden) -> None:
    job = Training(cluster, "off")
    job.train(1)
    cluster.start_again([job.off(0)])
    assert job.end() == ["completed", golden.summary["state_digest"]]
    assert {recovery["lost_steps"] for recovery in job.recoveries()} == {0}


@pytest.mark.chaos
@pytest.mark.timeout(900)  # four starts of a job
def test_a_job_outlives_its_killed_program_and_machines_that_are_switched_off(
    cluster: RayCluster, golden: Golden
) -> None:
    job = Training(cluster, "program")
    job.train(20)
    job.start_again()
    job.train(20)
    lost = [job.off(1)]
    job.train(20)
    lost += [job.off(0)]  # both shares are on one machine now
    cluster.start_again(lost)
    assert job.end() == ["completed", golden.summary["state_digest"]]
    assert {recovery["lost_steps"] for recovery in job.recoveries()} == {0}


FAULTS = {"trainer": (50,), "server, trainer and error": (20, 50, 80)}


@pytest.mark.parametrize("faults", ["trainer", pytest.param("server, trainer and error", marks=pytest.mark.chaos)])
def test_trainers_of_ray_train_outlive_what_dies(cluster: RayCluster, faults: str) -> None:
    name = f"faults-{len(FAULTS[faults])}"
    with cluster.program(TRAINERS, name, *map(str, FAULTS[faults])) as program:
        assert said(program, "undisturbed") == said(program, name)
    run = RunReader(cluster.head.shared / name)
    assert (run.summary() or {})["status"] == "completed"
    assert len(list(run.path.glob("fault-*"))) == len(FAULTS[faults])


@pytest.mark.chaos
def test_the_programs_of_the_guide_run_as_they_stand(cluster: RayCluster) -> None:
    page = (ROOT / "docs" / "guide" / "ray.md").read_text(encoding="utf-8")
    files = dict(re.findall(r"^```\w+ (\S+)\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    for name, text in files.items():
        Path(cluster.head.shared, name).write_text(text, encoding="utf-8")
    with cluster.program(files["ray_job.py"]) as program:
        assert float(said(program, "AUC")[0]) > 0.9
    with cluster.program(files["ray_loop.py"]) as program:
        program.communicate(timeout=LIMIT_S)
    summary = RunReader(cluster.head.shared / "runs" / "ray-loop").summary() or {}
    assert (summary["status"], summary["steps"]) == ("completed", 60)
    shutil.rmtree(cluster.head.shared / "tuned", ignore_errors=True)  # of an earlier try
    with cluster.program(files["ray_tune.py"]) as program:
        trial, auc, *_ = said(program, "best")
    assert 0.5 < float(auc) <= 1.0
    runs = list(Path(cluster.head.shared, "tuned").iterdir())
    assert len(runs) == 4 and any(trial in run.name for run in runs)
