"""Two hosts within one: network namespaces with a cable between them, and a job whose roles are spread over both.

Needs root, Linux and iproute2. Touches no interface but its own. The cable is a veth pair; `tc tbf` at both of its ends
limits each direction. With `plain_packets` no interface takes more than one segment at once (gso_max_segs 1), so that
its counters are those of real packets; else the kernel hands over up to 64 KB with one header.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness

from shardkeep.base.yaml_text import write_yaml

HERE = Path(__file__).resolve().parent
LIMIT_S = 1800.0
START_LIMIT_S = 400.0
POLL_S = 0.1
MTU = 1500
RECEIVE = """
import socket, sys, time
listening = socket.create_server((sys.argv[1], 0))
print(listening.getsockname()[1], flush=True)
one, _ = listening.accept()
first, total = None, 0
while chunk := one.recv(1 << 20):
    first = first or time.monotonic()
    total += len(chunk)
print(total * 8 / (time.monotonic() - first) / 1e6)
"""
SEND = """
import socket, sys, time
one = socket.create_connection((sys.argv[1], int(sys.argv[2])))
end = time.monotonic() + float(sys.argv[3])
while time.monotonic() < end:
    one.sendall(bytes(1 << 16))
"""


@dataclass(frozen=True)
class Traffic:
    """What an interface has sent since it exists."""

    num_bytes: int
    packets: int

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(self.num_bytes - earlier.num_bytes, self.packets - earlier.packets)


class Host:
    """One of the two: a namespace, its address and its end of the cable."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address, self.cable = name, address, f"{name}v"
        self.prefix = ("ip", "netns", "exec", name)

    def sent(self, interface: str) -> Traffic:
        """What `cable`, or `lo`, has sent."""
        for line in self._read("/proc/net/dev").splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == interface:
                columns = numbers.split()
                return Traffic(int(columns[8]), int(columns[9]))
        raise RuntimeError(f"{self.name} has no interface {interface}")

    def resent_segments(self) -> int:
        """TCP segments that were sent once more, of all connections."""
        names, values = (line.split() for line in self._read("/proc/net/snmp").splitlines() if line.startswith("Tcp:"))
        return int(values[names.index("RetransSegs")])

    def _read(self, path: str) -> str:
        return subprocess.run([*self.prefix, "cat", path], check=True, capture_output=True, text=True).stdout


@contextlib.contextmanager
def two_hosts(*, mbit: float | None = None, plain_packets: bool = False) -> Iterator[tuple[Host, Host]]:
    """The hosts, with `mbit` million bits a second each way between them; None = as fast as the machine.

    Raises CannotRun."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        raise harness.CannotRun("needs root, and ip and tc of iproute2")
    hosts = tuple(Host(f"sk{os.getpid()}{end}", f"10.79.0.{i + 1}") for i, end in enumerate("ab"))
    near, far = hosts
    try:
        for host in hosts:
            run("ip", "netns", "add", host.name)
        run("ip", "link", "add", near.cable, "netns", near.name, "type", "veth", "peer", "name", far.cable,
            "netns", far.name)  # fmt: skip
        for host in hosts:
            for interface in ("lo", host.cable):
                if plain_packets:
                    run("ip", "-n", host.name, "link", "set", interface, "mtu", str(MTU), "gso_max_segs", "1")
                run("ip", "-n", host.name, "link", "set", interface, "up")
            run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.cable)
            if mbit is not None:
                burst = max(65_536, int(mbit * 1e6 / 8 * 0.004))  # what passes between two ticks of the kernel
                run("tc", "-n", host.name, "qdisc", "add", "dev", host.cable, "root", "tbf",
                    "rate", f"{mbit:g}mbit", "burst", str(burst), "latency", "50ms")  # fmt: skip
        yield near, far
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.name], check=False, capture_output=True)


def plain_transfer_mbit(near: Host, far: Host, *, seconds: float = 2.0) -> float:
    """What one plain TCP connection carries from `near` to `far`, in million bits of payload a second."""
    receiver = subprocess.Popen(
        [*far.prefix, sys.executable, "-c", RECEIVE, far.address], stdout=subprocess.PIPE, text=True
    )
    assert receiver.stdout is not None
    try:
        port = receiver.stdout.readline().strip()
        run(*near.prefix, sys.executable, "-c", SEND, far.address, port, str(seconds))
        return float(receiver.stdout.readline())
    finally:
        receiver.kill()
        receiver.wait()
        receiver.stdout.close()


@dataclass(frozen=True)
class Job:
    """A job that has ended: its summary.json and the lines of its metrics.jsonl."""

    summary: dict[str, Any]
    records: list[dict[str, Any]]


def run_job(config: dict[str, Any], *, coordinator: Host, servers: Sequence[Host], workers: Sequence[Host]) -> Job:
    """Runs a job with a role of each kind on each host that is named, to its end; leaves no process.

    Raises RuntimeError with the roles' last words when it fails."""
    from shardkeep.base.compiling.kernels import compile_kernels, kernel_modules

    compile_kernels(kernel_modules())  # else every role waits for the first one that does
    more = {"servers": len(servers), "workers": len(workers), "liveness": {"form_timeout_s": START_LIMIT_S}}
    config = harness.merged(config, more)
    with tempfile.TemporaryDirectory(prefix="two-hosts-") as name, contextlib.ExitStack() as ending:
        folder, run_dir = Path(name), Path(name) / "run"
        (folder / "job.yaml").write_text(write_yaml(config), encoding="utf-8")
        roles: list[tuple[subprocess.Popen[bytes], Path]] = []

        def start(host: Host, title: str, *arguments: str) -> Path:
            output = folder / f"{title}.txt"
            with output.open("wb") as file:
                process = subprocess.Popen(
                    [*host.prefix, sys.executable, "-m", "shardkeep", *arguments],
                    stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment(),
                )  # fmt: skip
            ending.callback(_end, process)
            roles.append((process, output))
            return output

        listen = ("--listen", f"{coordinator.address}:0", "--insecure-data-plane")
        said = start(coordinator, "coordinator", "coordinator", str(folder / "job.yaml"), "--run-dir", str(run_dir),
                     *listen)  # fmt: skip
        told = _told(said, roles)
        for role, hosts in (("server", servers), ("worker", workers)):
            for index, host in enumerate(hosts):
                start(
                    host, f"{role}-{index}", role, "--coordinator", told["coordinator"], "--index", str(index),
                    "--advertise", host.address, "--insecure-data-plane",
                    "--token-file", told["token_file"], "--run-dir", str(folder),
                )  # fmt: skip
        _wait(roles)
        lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return Job(json.loads((run_dir / "summary.json").read_text("utf-8")), [json.loads(line) for line in lines])


def environment() -> dict[str, str]:
    """That of a process of a job: it finds the package and the benchmarks' modules, and has one thread."""
    path = os.pathsep.join(filter(None, [str(HERE.parent / "src"), str(HERE), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def run(*command: str) -> None:
    """Runs a command; its errors are ours."""
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:6])}: {done.stderr.strip()}")


def _told(said: Path, roles: Sequence[tuple[subprocess.Popen[bytes], Path]]) -> dict[str, str]:
    """What the coordinator says once it listens."""
    end = time.monotonic() + START_LIMIT_S
    while time.monotonic() < end:
        for line in said.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.startswith("{") and line.endswith("\n"):
                return dict(json.loads(line))
        if roles[0][0].poll() is not None:
            break
        time.sleep(POLL_S)
    raise _failed("its coordinator does not listen", roles)


def _wait(roles: Sequence[tuple[subprocess.Popen[bytes], Path]]) -> None:
    end = time.monotonic() + LIMIT_S
    while any(process.poll() is None for process, _ in roles):
        if any(process.poll() for process, _ in roles):
            raise _failed("failed", roles)
        if time.monotonic() > end:
            raise _failed(f"still runs after {LIMIT_S:g} s", roles)
        time.sleep(POLL_S)
    if any(process.returncode for process, _ in roles):
        raise _failed("failed", roles)


def _failed(text: str, roles: Sequence[tuple[subprocess.Popen[bytes], Path]]) -> RuntimeError:
    time.sleep(1.0)  # the others' last words
    tails = "\n".join(f"---- {out.name}\n{out.read_text(errors='replace')[-1500:]}" for _, out in roles)
    return RuntimeError(f"the job {text}\n{tails}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
