"""What a launcher says of a process and of its machine: the one table of environment variables, which names launchers.

A variable that is set and empty counts as unset.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardkeep.base.errors import UserError
from shardkeep.base.net.addresses import is_loopback, resolve

Environment = Mapping[str, str]
MACHINES = (
    ("PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR"),
    ("GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR"),
    ("SLURM_NODEID", "SLURM_NNODES", "SLURM_LAUNCH_NODE_IPADDR"),
    ("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS"),
    ("DSTACK_NODE_RANK", "DSTACK_NODES_NUM", "DSTACK_MASTER_NODE_IP"),
    ("JOB_COMPLETION_INDEX", "", ""),
)
"""Each launcher's rank of this machine, number of machines, and addresses, the first of them that of machine 0 or near
it. The first launcher whose rank is set counts: of two, the inner one."""
PROCESSES = ("RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX")
"""The number of a process among all of one launch; the first that is set counts."""
PROCESSES_TEXT = f"{', '.join(PROCESSES[:-1])} and {PROCESSES[-1]}"
WORLD, RESTARTS, MOST_RESTARTS = "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True)
class Machine:
    """One machine of a job. `head`: an address or name of machine 0, or of one near it; "" = not known."""

    rank: int
    nodes: int
    head: str = ""

    def own_address(self, *, alone: bool = True) -> tuple[str, str]:
        """This machine's address for the others, and where it comes from. Looks names up; sends nothing.

        `alone`: no other command runs machines of the job."""
        from shardkeep.base.net.interfaces import named_host, route_to  # psutil takes 0.1 s, and --help needs none

        if self.nodes == 1 and alone:
            return "127.0.0.1", "the only machine"
        found = route_to(self.head) if self.head else None
        if found is not None and not is_loopback(found):
            return found, f"the route to {self.head}"
        name = named_host("0.0.0.0")
        with contextlib.suppress(OSError):
            name = resolve(name)[0]
        return name, "the name of this machine"


def machine_of(rank: int | None, nodes: int | None, environment: Environment = os.environ) -> Machine:
    """This machine: what is given, else what its launcher says. Raises UserError."""
    names = next((names for names in MACHINES if _text(names[0], environment)), ("", "", ""))
    rank = _number(names[0], environment) if rank is None else rank
    if rank is None:
        ranks = ", ".join(each[0] for each in MACHINES)
        raise UserError(f"no rank of this machine: give --rank N, or use a launcher that sets one of {ranks}")
    nodes = _number(names[1], environment) if nodes is None else nodes
    if nodes is None:
        raise UserError("no number of machines: give --nodes N; no variable of a launcher says it")
    if rank >= nodes:
        raise UserError(f"machine {rank} of {nodes} machines; allowed: ranks 0 to {nodes - 1} (--rank, --nodes)")
    return Machine(rank, nodes, next(iter(_text(names[2], environment).split()), ""))


def index_of(index: int | None, environment: Environment = os.environ) -> int:
    """Returns `index`, or the number in the first of `PROCESSES` that is set. Raises UserError.

    The number counts all processes of one launch. So start servers by one launch and workers by another.
    """
    found = (number for name in PROCESSES if (number := _number(name, environment)) is not None)
    if index is None and (index := next(found, None)) is None:
        raise UserError(f"no index: give it, or use a launcher that sets {PROCESSES_TEXT.replace(' and ', ' or ')}")
    return index


def is_numbered(environment: Environment = os.environ) -> bool:
    """Whether a launcher numbers this process."""
    return any(_text(name, environment) for name in PROCESSES)


def world_size(environment: Environment = os.environ) -> int | None:
    """The number of processes of the launch; None = the launcher does not say."""
    text = _text(WORLD, environment)
    return int(text) if text.isdecimal() else None


def restarts_left(environment: Environment = os.environ) -> bool:
    """Whether the launcher starts all processes again after an error of this one."""
    count, most = _text(RESTARTS, environment), _text(MOST_RESTARTS, environment)
    return count.isdecimal() and most.isdecimal() and int(count) < int(most)


def port_range() -> str:
    """`32768-60999`: the ports from which the system chooses those of torch."""
    with contextlib.suppress(OSError):
        return "-".join(PORT_RANGE.read_text(encoding="ascii").split())
    return "any free ones"


def _text(name: str, environment: Environment) -> str:
    return environment.get(name, "").strip()


def _number(name: str, environment: Environment) -> int | None:
    """The number in a variable; None = it is not set. Raises UserError."""
    text = _text(name, environment)
    if text and not (text.isascii() and text.isdigit()):
        raise UserError(f"{name}={text} is not a whole number from 0; set it to one, or give the number")
    return int(text) if text else None
