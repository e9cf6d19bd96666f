"""Hosts as network namespaces: each has an address, a name and a disk of its own, and can be switched off and on.

They share this machine's kernel, files and numbers of processes. A process of its own takes them away, even after a
killed test run.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from tests.support import disks
from tests.support.import_path import IMPORT_PATH

if TYPE_CHECKING:
    from shardkeep.run.reader import RunReader

LIMIT_S = 120.0
PORT = "eth0"
SWITCH = "switch"
NETWORK = "10.77.0"
FIRST_GROUP = 7700
ON_HOST = 'hostname "$0"; mount --bind "$1" /etc/hosts; mount --bind "$2" "$3"; shift 3; exec "$@"'
"""What bash runs in new namespaces: its arguments are name, file of all names, disk, its place, and the command."""


@dataclass(frozen=True)
class Host:
    """A host that is on.

    Attributes:
        name: As `hostname` and other hosts know it.
        local: The folder where its processes see its disk. Each host has another disk there.
        shared: A folder that all hosts see.
    """

    name: str
    address: str
    shared: Path
    local: Path
    space: str
    group: int
    """Of the files that its processes write; see `recorded`."""

    @property
    def disk(self) -> Path:
        """The folder where this test sees its disk."""
        return self.shared.parent / "disks" / self.name

    @property
    def prefix(self) -> tuple[str, ...]:
        """Comes before a command that runs on it. Control groups stay visible, unlike in `ip netns exec`."""
        inside = ("nsenter", f"--net=/var/run/netns/{self.space}", "unshare", "--uts", "--mount", "bash", "-c", ON_HOST)
        return (*inside, self.name, str(self.shared.parent / "names"), str(self.disk), str(self.local))

    def run(self, *command: str, env: Mapping[str, str] | None = None, limit_s: float = LIMIT_S) -> str:
        """What a command on it prints; fails unless it ends with 0. `env`: in addition to this process's."""
        with tempfile.TemporaryFile("w+") as printed:  # no pipe: a daemon that it leaves would keep that open
            done = subprocess.run(
                [*self.prefix, *command],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                timeout=limit_s,
            )
            printed.seek(0)
            text = printed.read()
        assert done.returncode == 0, f"{self.name}: {' '.join(command)} ended with {done.returncode}\n{text[-3000:]}"
        return text

    @property
    def pids(self) -> list[int]:
        return pids(self.space)

    @property
    def kept(self) -> Path:
        """What is recorded of the shared folder, for all hosts."""
        return self.shared.with_name("kept")

    @property
    def recorded(self) -> dict[str, str]:
        """The environment of its processes that lets `lose` take away what they have not synced. Homes are shared."""
        recorded = json.dumps({"top": str(self.shared), "kept": str(self.kept), "group": self.group})
        return {disks.VARIABLE: recorded, "XDG_STATE_HOME": str(self.shared / "state")}

    def cut(self) -> None:
        """Takes its cable out. Its processes live on."""
        ip("-n", self.space, "link", "set", PORT, "down")

    def join(self) -> None:
        """Puts its cable in."""
        ip("-n", self.space, "link", "set", PORT, "up")

    def off(self) -> None:
        """Switches it off: nobody hears a word of its processes' ends. Its disk stays."""
        self.cut()
        kill(self.space)

    def lose(self, seed: int | None = None) -> list[str]:
        """Switches it off, and takes away what it has not synced to the shared folder (tests/support/disks.py)."""
        self.off()
        return disks.lose(self.shared, self.kept, self.group, seed)

    on = join
    """Switches it on; nothing runs on it."""


@contextlib.contextmanager
def hosts(count: int) -> Iterator[tuple[Host, ...]]:
    """Hosts x0, x1, ... on one switch, until the `with` ends. See `missing` first."""
    top = Path(tempfile.mkdtemp(prefix="hosts-", dir="/tmp"))  # short: paths of sockets have 107 bytes
    made = [
        Host(f"x{i}", f"{NETWORK}.{i + 1}", top / "shared", top / "local", f"{top.name}-x{i}", FIRST_GROUP + i)
        for i in range(count)
    ]
    with _keeper(top):
        _make(top, made)
        yield tuple(made)


@functools.cache
def missing() -> str | None:
    """Why this machine can have no hosts, in one line; None if it can."""
    if os.geteuid() != 0:
        return "hosts need root"
    if absent := [program for program in ("ip", "nsenter", "unshare") if shutil.which(program) is None]:
        return f"hosts need {absent[0]}"
    trial = ["unshare", "--net", "--uts", "--mount", "ip", "link", "add", "name", SWITCH, "type", "bridge"]
    tried = subprocess.run(trial, capture_output=True, text=True)
    return f"hosts need namespaces ({tried.stderr.strip().splitlines()[-1]})" if tried.returncode else None


def ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
    return done.stdout


def pids(space: str) -> list[int]:
    return [int(line) for line in ip("netns", "pids", space).split()]


def kill(space: str) -> None:
    """Kills all processes of a namespace, and those that they started meanwhile."""
    while found := pids(space):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _make(top: Path, made: Sequence[Host]) -> None:
    for folder in (top / "shared", top / "kept", top / "local", *(host.disk for host in made)):
        folder.mkdir(parents=True)
    lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in made)]
    (top / "names").write_text("".join(f"{line}\n" for line in lines))
    switch = f"{top.name}-{SWITCH}"
    ip("netns", "add", switch)
    ip("-n", switch, "link", "add", SWITCH, "type", "bridge")
    ip("-n", switch, "link", "set", SWITCH, "up")
    for host in made:
        ip("netns", "add", host.space)
        ip("link", "add", PORT, "netns", host.space, "type", "veth", "peer", "name", host.name, "netns", switch)
        ip("-n", switch, "link", "set", host.name, "master", SWITCH, "up")
        ip("-n", host.space, "addr", "add", f"{host.address}/24", "dev", PORT)
        ip("-n", host.space, "link", "set", "lo", "up")
        host.join()


@contextlib.contextmanager
def _keeper(top: Path) -> Iterator[None]:
    """A process in a session of its own, which takes the hosts away once this one leaves the `with` or is gone."""
    command, env = (sys.executable, "-m", "tests.support.hosts", str(top)), {**os.environ, "PYTHONPATH": IMPORT_PATH}
    keeper = subprocess.Popen(command, stdin=subprocess.PIPE, env=env, start_new_session=True)
    try:
        yield
    finally:
        keeper.communicate(b"end\n", timeout=LIMIT_S)


def _take_away(top: Path) -> None:
    for space in Path("/var/run/netns").glob(f"{top.name}-*"):
        kill(space.name)
        ip("netns", "del", space.name)
    shutil.rmtree(top)


def worker_on(host: Host, run: RunReader) -> psutil.Process:
    """The process of a job's worker on a host."""
    pids = host.pids
    workers = (member for member in run.member_list() if member["role"] == "worker")
    return psutil.Process(next(member["pid"] for member in workers if member["pid"] in pids))


if __name__ == "__main__":
    sys.stdin.readline()
    _take_away(Path(sys.argv[1]))
