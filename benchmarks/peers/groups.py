"""Process groups of the opponents that are made of torch.distributed: formed over files, on loopback, left in order."""

from __future__ import annotations

import datetime
import os
import warnings

import torch.distributed as dist
from processes import Link
from torch.distributed import rpc

LIMIT_S = 60.0
"""On forming a group, and on any one call."""


def form_workers(link: Link, rank: int, num_workers: int, *, backend: str = "gloo", even_alone: bool = False) -> None:
    """The default group, if there is more than one worker."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if num_workers > 1 or even_alone:
        limit = datetime.timedelta(seconds=LIMIT_S)
        place = f"file://{link.folder}/workers"
        dist.init_process_group(backend, init_method=place, rank=rank, world_size=num_workers, timeout=limit)


def form_rpc(link: Link, name: str, num_workers: int, *, rank: int = 0) -> None:
    """The RPC group of a server, rank 0, and the workers."""
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    # TensorPipe's first choice, shared memory, busy-polls. With a core for each of two processes that is faster (W2,
    # D=16: 9 against 8 M ids/s); with three on two cores it cost 7-10 us of CPU a sample, so there sockets are better.
    sockets = {"_transports": ["uv"], "_channels": ["cma", "basic"]} if num_workers > 1 else {}
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{link.folder}/rpc", rpc_timeout=LIMIT_S, **sockets)
    with warnings.catch_warnings():  # torch's own use of a deprecated type
        warnings.filterwarnings("ignore", message="You are using a Backend", category=UserWarning)
        rpc.init_rpc(name, rank=rank, world_size=1 + num_workers, rpc_backend_options=options)


def leave() -> None:
    """Waits for all members of the RPC group, then leaves; a server waits here while it serves."""
    if rpc._is_current_rpc_agent_set():
        rpc.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()
