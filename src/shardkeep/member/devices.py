"""The device of a worker, and the backend that it could use for dense gradients."""

from __future__ import annotations

import torch

from shardkeep.base.errors import ConfigError
from shardkeep.config import JobConfig
from shardkeep.ps.control.records import Formation


def worker_device(config: JobConfig, formation: Formation | None, index: int) -> tuple[torch.device, str]:
    """Returns the device, and "nccl" if no other worker uses it, else "gloo". Raises ConfigError.

    Workers with one host (`--advertise`) take its GPUs in the order of their indices. So no launcher names a local
    rank. `workers/collectives/process_group.py` makes all workers agree on one backend.

    Args:
        config: Of the job.
        formation: Of this generation; None = a job in one process.
        index: Of this worker.
    """
    hosts = [m.host for m in formation.of_role("worker")] if formation is not None else [""] * (index + 1)
    local, here = hosts[:index].count(hosts[index]), hosts.count(hosts[index])
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.tower.device == "cuda" and not available:
        raise ConfigError("tower.device: cuda, but this machine has no CUDA device; allowed: auto or cpu")
    if not available or config.tower.device == "cpu" or (config.tower.device == "auto" and available < here):
        return torch.device("cpu"), "gloo"
    # NCCL refuses two ranks on one GPU.
    return torch.device("cuda", local % available), "nccl" if available >= here else "gloo"


def peak_device_bytes(device: torch.device) -> dict[str, int]:
    """Returns the summary's entry about a GPU's memory; {} on a CPU."""
    return {"peak_cuda_bytes": torch.cuda.max_memory_allocated(device)} if device.type == "cuda" else {}
