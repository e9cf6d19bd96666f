"""A role's main for tests of starts: shows what a process gets from its start, then does what its environment says."""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """`sys.argv`: main file, role, what to do [argument], --parent-pipe."""
    act = sys.argv[2]
    if act == "launch":
        launch(Path(sys.argv[3]), sys.argv[1:2] + sys.argv[4:])
        return
    print(json.dumps(facts()), flush=True)
    if act == "wait":
        sys.stdin.buffer.read()
    elif act == "fail":
        raise RuntimeError("the probe fails")
    elif act == "signal":
        if int(sys.argv[3]) == signal.SIGINT:  # ignored where pytest runs in the background
            signal.signal(signal.SIGINT, signal.default_int_handler)
        os.kill(os.getpid(), int(sys.argv[3]))
    elif act == "grandchild":
        subprocess.Popen(["sleep", "600"])
        sys.stdin.buffer.read()
    elif act == "exit":
        sys.exit(int(sys.argv[3]))


def launch(log: Path, arguments: list[str]) -> None:
    """Forks a role from a server of its own; prints whether that is a fork of this process, and the role's parent."""
    from shardkeep.launch.processes.fork_server import ForkServer

    commands = Path("/proc/self/cmdline"), "/proc/{}/cmdline"
    server = ForkServer(dict(os.environ), main=f"{__name__}:main")
    with log.open("ab") as output:
        process = server.fork(arguments, log=output.fileno(), env=dict(os.environ))
    is_fork = commands[0].read_bytes() == Path(commands[1].format(server.pid)).read_bytes()
    print(json.dumps({"is a fork": is_fork, "own": {"pid": os.getpid()}}), flush=True)
    sys.stdin.buffer.read()
    process.kill()
    server.close()


def facts() -> dict[str, Any]:
    """What is equal in all processes that were started in the same way, and what must not be, under `own`."""
    import numpy as np

    pid = os.getpid()
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    masks = {line.split(":")[0]: line.split()[1] for line in status if line.startswith("Sig")}
    del masks["SigQ"]  # pending signals of the whole user
    return {
        "argv": sys.argv,
        "environment": dict(os.environ),
        "leads its session": os.getsid(0) == os.getpgrp() == pid,
        "child of the launcher": os.getppid() == int(os.environ["LAUNCHER"]),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "descriptors": {p.name: of for p in sorted(Path("/proc/self/fd").iterdir()) if (of := kind(p))},
        "cores": sorted(os.sched_getaffinity(0)),
        "masks": masks,
        "handlers": {
            n: str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGHUP)
        },
        "limits": [
            resource.getrlimit(n) for n in (resource.RLIMIT_NOFILE, resource.RLIMIT_STACK, resource.RLIMIT_CORE)
        ],
        "folder": str(Path.cwd()),
        "path": sys.path,
        "nice": os.nice(0),
        "stdout": [sys.stdout.encoding, sys.stdout.line_buffering, sys.stdout.write_through],
        "collects garbage": gc.isenabled(),
        "own": {"pid": pid, "random": random.random(), "numpy": float(np.random.random())},
    }


def kind(descriptor: Path) -> str:
    """What a descriptor is, "" where it was that of the listing. The logs are two."""
    try:
        return str(descriptor.readlink()).split(":")[0].replace("spawned", "forked")
    except OSError:
        return ""


if __name__ == "__main__":
    main()
