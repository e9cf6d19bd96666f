"""Hosts as network namespaces, on which the engines run."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.cluster import gone, within
from tests.support.hosts import Host, hosts, missing

pytestmark = [pytest.mark.chaos, pytest.mark.skipif(missing() is not None, reason=str(missing()))]
ROOT = Path(__file__).resolve().parents[2]
REACH = "import socket, sys; socket.create_connection((sys.argv[1], 7000), timeout=2).close()"
LISTEN = (
    "import socket, time; s = socket.create_server(('0.0.0.0', 7000)); print('listening', flush=True); time.sleep(600)"
)


@pytest.fixture
def pair() -> Iterator[tuple[Host, ...]]:
    with hosts(2) as pair:
        yield pair


@contextlib.contextmanager
def listener(host: Host) -> Iterator[subprocess.Popen[str]]:
    """A process on it that listens at port 7000."""
    command = [*host.prefix, sys.executable, "-c", LISTEN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "listening\n"
            yield process
        finally:
            process.kill()


def reaches(host: Host, other: str) -> bool:
    return subprocess.run([*host.prefix, sys.executable, "-c", REACH, other], capture_output=True).returncode == 0


def test_a_host_has_a_name_an_address_and_a_disk_of_its_own(pair: tuple[Host, ...]) -> None:
    for host in pair:
        host.run("bash", "-c", f"hostname > {host.local}/name; hostname > {host.shared}/{host.name}")
        assert host.address in host.run("ip", "addr")
        assert Path("/proc/self/cgroup").read_text().count("\n") == host.run("cat", "/proc/self/cgroup").count("\n")
    assert [(host.disk / "name").read_text() for host in pair] == ["x0\n", "x1\n"]
    assert sorted(path.name for path in pair[0].shared.iterdir()) == ["x0", "x1"]


def test_a_host_that_is_off_is_out_of_reach_and_has_no_process(pair: tuple[Host, ...]) -> None:
    near, far = pair
    with listener(far) as process:
        assert reaches(near, far.name) and reaches(near, far.address)
        far.off()
        assert process.wait(10) == -signal.SIGKILL and not far.pids and not reaches(near, far.name)
    far.on()
    with listener(far):
        assert reaches(near, far.name)
        far.cut()
        assert far.pids and not reaches(near, far.name)
        far.join()
        assert reaches(near, far.name)


def test_hosts_of_a_killed_test_run_are_taken_away() -> None:
    script = (
        "import subprocess, time\nfrom tests.support.hosts import hosts\n"
        "with hosts(1) as (host,):\n"
        "    process = subprocess.Popen([*host.prefix, 'sleep', '600'], start_new_session=True)\n"
        "    while process.pid not in host.pids or not host.shared.is_dir(): pass\n"
        "    print(process.pid, host.space, host.shared.parent, flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT) as run:
        assert run.stdout is not None
        pid, space, folder = run.stdout.readline().split()
        assert Path("/var/run/netns", space).exists() and Path(folder).is_dir()
        process = psutil.Process(int(pid))
        run.kill()
    within(60, lambda: not Path(folder).exists(), "the folder is still there", lambda: True)
    assert not Path("/var/run/netns", space).exists() and not gone([process], limit_s=10)
