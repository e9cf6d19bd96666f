"""How a launcher starts the processes of its roles: the setting, and the choice."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from shardkeep.base.errors import ConfigError
from shardkeep.base.settings import Settings
from shardkeep.config.affinity import AffinityConfig

GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""The devices of CUDA, ROCm, and CUDA under WSL."""


class LaunchConfig(Settings):
    """The processes that `train`, `node`, `with` and `EmbeddingClient.serve` start on a machine."""

    affinity: AffinityConfig = AffinityConfig()
    """Cores for the processes: `none`, `auto`, or lists by role. `train` alone pins processes."""

    start: Literal["auto", "spawn", "fork_server"] = "auto"
    """fork_server = each role is forked from one process that has done the imports; seconds faster, needs Linux and
    training on CPUs. spawn = each role is a new Python process. auto = fork_server where possible."""


def forks(launch: LaunchConfig, *, servers: int, device: str) -> bool:
    """Whether roles are forked. `device`: `tower.device`. Raises ConfigError where they cannot be and must."""
    if launch.start == "spawn":
        return False
    why = _why_not(servers, device)
    if why and launch.start == "fork_server":
        raise ConfigError(f"launch.start: fork_server, but {why}; allowed: auto or spawn")
    return not why


def _why_not(servers: int, device: str) -> str:
    if not servers:
        return "with servers: 0 there is one process"
    if sys.platform != "linux":
        return f"it needs Linux, and this is {sys.platform}"
    if device == "cuda":
        return "tower.device is cuda, which needs spawn"
    if device == "auto" and any(Path(gpu).exists() for gpu in GPUS):
        return "this machine has a GPU that towers may use (tower.device: auto)"
    return ""
