"""Programs on a Ray cluster of hosts: the head on the first, which runs no task, and a node on each of the others.

Ray has an environment of its own (scripts/install-all). This process does not import it: its programs run on the
first host, as texts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardkeep.base.yaml_text import write_yaml
from shardkeep.run.reader import RunReader
from tests.support.chaos import EDITED, JOB
from tests.support.cluster import records, stalled, within
from tests.support.golden import Golden
from tests.support.hosts import Host, hosts, missing, worker_on

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".venv-engines" / "bin"
REASON = missing() or (None if (ENVIRONMENT / "ray").exists() else "needs .venv-engines (scripts/install-all)")
pytestmark = [
    pytest.mark.waits_for_processes,
    pytest.mark.timeout(900),
    pytest.mark.group("ray"),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]
LIMIT_S = 240.0


class RayCluster:
    """The cluster. Programs on the first host join it by `ray.init(address="auto")`."""

    def __init__(self, made: Sequence[Host], temporary: str) -> None:
        self.head, *self.nodes = made
        home = self.head.shared / "home"  # a program may leave a token here
        home.mkdir()
        self.address = f"{self.head.address}:6379"
        self.env = {
            "HOME": str(home),
            "TMPDIR": temporary,  # short: for sockets
            "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"),  # has compiled kernels
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
            "OMP_NUM_THREADS": "1",
            "RAY_AUTH_MODE": "disabled",
            "RAY_ADDRESS": self.address,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_prestart_worker_first_driver": "0",  # an idle worker a CPU costs 2 CPU s
            "RAY_worker_niceness": "0",  # of 15
            "RAY_health_check_initial_delay_ms": "1000",
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_timeout_ms": "2000",
            "RAY_health_check_failure_threshold": "5",  # a node counts as lost after as many seconds, not after 75
        }
        self._start(self.head, "--head", "--port", "6379", "--num-cpus", "0", "--include-dashboard", "false")
        for host in self.nodes:  # in turn: a node must start within 30 s
            self.start_node(host)

    def start_node(self, host: Host) -> None:
        self._start(host, "--address", self.address, "--num-cpus", "3", "--resources", f'{{"{host.name}": 1}}')

    def _start(self, host: Host, *options: str) -> None:
        """Starts Ray on a host, a second time if need be: Ray gives its processes 30 s, short on a busy machine."""
        place = ("--node-ip-address", host.address, "--object-store-memory", "80000000")
        command = (str(ENVIRONMENT / "ray"), "start", *options, *place, "--temp-dir", str(host.local / "ray"))
        try:
            host.run(*command, env=self.env)
        except AssertionError:
            host.off()
            host.on()
            host.run(*command, env=self.env)

    def program(self, text: str, *arguments: str) -> subprocess.Popen[str]:
        """Starts a Python program on the first host. What it prints is in `stdout`."""
        return subprocess.Popen(
            [*self.head.prefix, str(ENVIRONMENT / "python"), "-c", text, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            env=self.env,
            cwd=self.head.shared,
        )

    def print_failures(self) -> None:
        """What Ray's processes wrote about failures, for a test that fails."""
        for host in (self.head, *self.nodes):
            for log in sorted(host.disk.glob("ray/session_2*/logs/*.err")):
                print(f"---- {log}\n{log.read_text(errors='replace')[-3000:]}" if log.stat().st_size else "")


@pytest.fixture(scope="module")
def whole_cluster() -> Iterator[RayCluster]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary, hosts(4) as made:
        yield RayCluster(made, temporary)


@pytest.fixture
def cluster(whole_cluster: RayCluster) -> Iterator[RayCluster]:
    yield whole_cluster
    whole_cluster.print_failures()


def said(program: subprocess.Popen[str], word: str) -> list[str]:
    """The other words of the next line that begins with `word`. Ray prints lines of its own."""
    assert program.stdout is not None
    return next(line for line in program.stdout if line.startswith(word)).split()[1:]


TRAIN = """
import json, sys, ray, shardkeep
ray.init(address="auto")
try:
    summary = shardkeep.ray.train(sys.argv[1], run_dir=sys.argv[2], nodes=2)
    print("ended", json.dumps([summary.status, summary.state_digest]))
except shardkeep.ShardkeepError as error:
    print("ended", json.dumps([type(error).__name__, str(error)]))
"""
"""A job on two nodes. Prints its status and digest, or its error."""


class Training:
    """A job on two nodes, in a folder of its own."""

    def __init__(self, cluster: RayCluster, name: str) -> None:
        self._cluster = cluster
        folder = cluster.head.shared / name
        folder.mkdir()
        liveness = {"lease_s": 30.0, "step_timeout_s": 30.0}  # a machine that is off answers nothing
        self._config = folder / "job.yaml"
        self._config.write_text(write_yaml({**JOB, "liveness": liveness}))
        self.run = RunReader(folder / "run")
        self._start = lambda: cluster.program(TRAIN, str(self._config), str(self.run.path))
        self._program = self._start()

    def train(self, steps: int) -> None:
        step = lambda: max((r["step"] for r in records(self.run) if r["kind"] == "progress"), default=0)  # noqa: E731
        last = step() + steps
        within(LIMIT_S, lambda: step() >= last, f"no step {last}", lambda: self._program.poll() is None)

    def host_of(self, rank: int) -> Host:
        members = self.run.member_list()
        pid = next(each["pid"] for each in members if (each["role"], each["index"]) == ("server", rank))
        return next(host for host in self._cluster.nodes if pid in host.pids)

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
        """Kills the program, waits until Ray has ended all that it started, and starts it again with an edited file."""
        self._config.write_text(write_yaml(EDITED))
        with self._program:
            self._program.kill()
        here, roles = str(self.run.path), {member["pid"] for member in self.run.member_list()}

        def left() -> list[psutil.Process]:
            found = psutil.process_iter(["cmdline"])
            return [each for each in found if each.pid in roles or here in (each.info["cmdline"] or ())]

        within(LIMIT_S, lambda: not left(), f"{left()} are left", lambda: True)
        self._program = self._start()

    def recoveries(self) -> list[dict[str, Any]]:
        return [record for record in records(self.run) if record.get("phase") == "recovery"]

    def end(self, golden: Golden, lost: Sequence[Host]) -> None:
        """Switches the lost machines on, and waits for the end: the model of `shardkeep train`."""
        for host in lost:
            host.on()
            self._cluster.start_node(host)
        with self._program:
            ended = json.loads(" ".join(said(self._program, "ended")))
        assert ended == ["completed", golden.summary["state_digest"]]
        assert {recovery["lost_steps"] for recovery in self.recoveries()} == {0}
        self._config.write_text(write_yaml(EDITED))
        with self._start() as program:
            kind, text = json.loads(" ".join(said(program, "ended")))
        assert kind == "UserError" and "holds a run with another config already (given: name=" in text


@pytest.mark.slow
def test_a_job_outlives_the_machine_of_its_coordinator(cluster: RayCluster, golden: Golden) -> None:
    job = Training(cluster, "off")
    job.train(1)
    job.end(golden, [job.off(0)])


@pytest.mark.chaos
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
    job.end(golden, lost)


TRAINERS = """
import json, os, signal
from pathlib import Path
import ray, ray.train.torch, torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.nn import functional as F
import shardkeep

def loop(config):
    run_dir = config["run"].run_dir
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with config["run"].connect() as client:
        if client.dense_state is not None:
            model.load_state_dict(client.dense_state["model"])
            optimizer.load_state_dict(client.dense_state["optimizer"])
        while client.step < 100:
            fault = run_dir / "fault"
            if client.rank == 1 and client.step == 50 and run_dir.name == "hurt" and not fault.exists():
                fault.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            ids = torch.randint(300, (64,), generator=torch.Generator().manual_seed(2 * client.step + client.rank))
            rows = client.lookup({"item": ids})
            loss = F.binary_cross_entropy_with_logits(model(rows["item"])[:, 0], (ids % 2).float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            client.apply(rows, scale=0.5)
            if client.step % 30 == 0:
                client.checkpoint({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        digest = client.summary(digest=True)["state_digest"]
    if client.rank == 0:
        (run_dir / "result").write_text(json.dumps([digest, loss.item()]))

ray.init(address="auto")
liveness = {"form_timeout_s": 600}  # a busy machine starts trainers late
config = shardkeep.JobConfig(consistency="sync", tables={"item": {"dim": 8}}, liveness=liveness)
for name in ("whole", "hurt"):
    with shardkeep.ray.servers(config, num=2, trainers=2, run_dir=name) as run:
        TorchTrainer(
            loop,
            train_loop_config={"run": run},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=f"{Path.cwd()}/results", name=name,
                                 failure_config=FailureConfig(max_failures=3)),
        ).fit()
    print(name, Path(name, "result").read_text(), flush=True)
"""
"""Two trainers, undisturbed, and again where one of them dies. Prints digest and loss of each."""


@pytest.mark.slow
def test_trainers_of_ray_train_outlive_the_death_of_one(cluster: RayCluster) -> None:
    with cluster.program(TRAINERS) as program:
        assert said(program, "whole") == said(program, "hurt")
    run = RunReader(cluster.head.shared / "hurt")
    assert (run.summary() or {})["status"] == "completed" and (run.path / "fault").exists()


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
    with cluster.program(files["ray_tune.py"]) as program:
        trial, auc, *_ = said(program, "best")
    assert 0.5 < float(auc) <= 1.0
    runs = list(Path(cluster.head.shared, "tuned").iterdir())
    assert len(runs) == 4 and any(trial in run.name for run in runs)
