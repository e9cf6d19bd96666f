"""Trainers of a script, forked from one process that has its imports, with torchrun's variables. torchrun would import
torch once more for itself, and once for each trainer: 10 CPU s. None is started again.

python -m tests.support.forked_trainers --nproc-per-node COUNT MODULE SCRIPT
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from typing import NoReturn

import torch.distributed as dist

FORKED = ("tests.support.forked_trainers", "--nproc-per-node", "2")


def main(_option: str, count: str, module: str, script: str) -> int:
    """The exit code of the first trainer that failed, or 0. `module`: what the script imports, beside shardkeep."""
    for name in ("torch._dynamo", "torch.nn.parallel", "shardkeep.nn", module):  # Adam imports the first
        importlib.import_module(name)
    reads, writes = os.pipe()
    pids = []
    for rank in range(int(count)):
        if not (pid := os.fork()):
            os.close(writes)
            _train(script, rank, int(count), reads)
        pids.append(pid)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # after the forks: it has a thread
    os.write(writes, f"{store.port:5}".encode() * len(pids))
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return next((code for code in codes if code), 0)


def _train(script: str, rank: int, count: int, reads: int) -> NoReturn:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    numbers |= {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "TORCHELASTIC_RESTART_COUNT": 0}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.read(reads, 5).decode().strip()}
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "forked"}
    os.environ |= {name: str(number) for name, number in numbers.items()} | place | agent
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
