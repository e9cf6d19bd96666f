"""A Ray cluster on hosts: the head on the first, which runs no task, and a node on each of the others.

Ray has an environment of its own (scripts/install-all). This process does not import it: its programs run on the
first host.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.support.hosts import Host, hosts, started

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".venv-engines" / "bin"
PYTHON = ENVIRONMENT / "python"
PORT = 6379
CPUS = 3
STORE_BYTES = 80_000_000


def missing_ray() -> str | None:
    """Why there can be no Ray here, in one line; None if there can."""
    return None if (ENVIRONMENT / "ray").exists() else "needs .venv-engines (scripts/install-all)"


class RayCluster:
    """The cluster. Programs on the first host join it by `ray.init(address="auto")`.

    Args:
        env: Variables of nodes and programs.
        patience_s: After about this time without an answer, a node counts as lost. Ray's own value is 75 s.
    """

    def __init__(self, made: Sequence[Host], env: Mapping[str, str], *, patience_s: int) -> None:
        self.head, self.nodes = made[0], {host.name: host for host in made[1:]}
        home = self.head.shared / "home"  # a program may leave a token here
        home.mkdir()
        self.env = {
            "HOME": str(home),
            "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"),  # has compiled kernels
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
            "OMP_NUM_THREADS": "1",
            "RAY_AUTH_MODE": "disabled",
            "RAY_ADDRESS": f"{self.head.address}:{PORT}",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_prestart_worker_first_driver": "0",  # an idle worker a CPU costs 2 CPU s
            "RAY_worker_niceness": "0",  # of 15
            "RAY_health_check_initial_delay_ms": "1000",
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_timeout_ms": "2000",
            "RAY_health_check_failure_threshold": str(patience_s),
            **env,
        }

    def start(self) -> None:
        self._ray(self.head, "--head", "--port", str(PORT), "--num-cpus", "0", "--include-dashboard", "false")
        for host in self.nodes.values():  # in turn: a node must start within 30 s
            self.start_node(host)

    def start_node(self, host: Host) -> None:
        self._ray(
            host, "--address", self.env["RAY_ADDRESS"], "--num-cpus", str(CPUS), "--resources", f'{{"{host.name}": 1}}'
        )

    def start_again(self, lost: Sequence[Host]) -> None:
        """Switches nodes on."""
        for host in lost:
            host.on()
            self.start_node(host)

    def program(self, text: str, *arguments: str) -> subprocess.Popen[str]:
        """Starts a Python program on the first host. What it prints is in `stdout`."""
        return subprocess.Popen(
            [*self.head.prefix, str(PYTHON), "-c", text, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            env=self.env,
            cwd=self.head.shared,
        )

    def printed(self) -> str:
        """What Ray's processes wrote about failures, for a test that fails."""
        logs = [
            log for host in (self.head, *self.nodes.values()) for log in host.disk.glob("ray/session_2*/logs/*.err")
        ]
        return "\n".join(
            f"---- {log}\n{log.read_text(errors='replace')[-3000:]}" for log in sorted(logs) if log.stat().st_size
        )

    def _ray(self, host: Host, *options: str) -> None:
        """Starts Ray on a host, a second time if need be: Ray gives its processes 30 s, short on a busy machine."""
        place = ("--node-ip-address", host.address, "--object-store-memory", str(STORE_BYTES))
        where = ("--temp-dir", str(host.local / "ray"))
        command = (str(ENVIRONMENT / "ray"), "start", *options, *place, *where)
        try:
            host.run(*command, env=self.env)
        except AssertionError:
            host.off()
            host.on()
            host.run(*command, env=self.env)


@contextlib.contextmanager
def ray_cluster(count: int, env: Mapping[str, str] | None = None, *, patience_s: int = 5) -> Iterator[RayCluster]:
    """A cluster of `count` nodes."""
    with contextlib.ExitStack() as stack:
        temporary = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))  # short: for sockets
        made = stack.enter_context(hosts(count + 1))
        own = {"TMPDIR": temporary, **(env or {})}
        yield stack.enter_context(started(RayCluster(made, own, patience_s=patience_s)))
