"""The drop-in: a TorchRec script over our servers beside the same script under TorchRec's own sharding, and W1 in
that script, and in a plain loop, beside W1 as a job. Two trainers on two cores, `bounded`; all use torch's own matrix
products.

Needs torchrec in this environment (CONTRIBUTING.md says how).
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness
from beside_peers import KEEP_NOTHING
from w1_job import WARM_UP_S, shardkeep_job

PEERS = Path(__file__).resolve().parent / "peers"
WORKLOADS = {"w1, D=16": ("w1", 16, 2048), "w1, D=64": ("w1", 64, 2048), "sequences, D=64": ("sequences", 64, 64)}
TARGETS = {"w1, D=16": 0.95, "w1, D=64": 1.1, "sequences, D=64": 1.0}
OURS, KEEPING_NOTHING, THEIRS, JOB = "shard()", "shard(), keeping nothing", "TorchRec's sharding", "the job"
LOOP = "a plain loop with ahead"
SCRIPTS = {THEIRS: ("sharded_loop.py", "torchrec"), LOOP: ("plain_loop.py",)}
LIMIT_S = 300.0


def script(side: str, workload: str, dim: int, batch: int, seconds: float, warm_up_s: float) -> harness.Figures:
    """Runs peers/sharded_loop.py or plain_loop.py on two cores. Raises CannotRun without torchrec, if it needs that."""
    if side != LOOP and importlib.util.find_spec("torchrec") is None:
        raise harness.CannotRun("torchrec is not installed")
    given = {"workload": workload, "dim": dim, "workers": 2, "batch": batch, "seconds": seconds}
    given |= {"warm_up": warm_up_s, "cores": [0, 1], "device": "cpu", "seed": 1}
    with tempfile.TemporaryDirectory(prefix="drop-in-") as folder:
        output = Path(folder) / "figures.json"
        first, *others = SCRIPTS.get(side, ("sharded_loop.py", "shardkeep"))
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
        ]
        command += [str(PEERS / first), *others, str(output), json.dumps(given)]
        if side != THEIRS:
            around = [sys.executable, "-m", "shardkeep", "with", "--servers", "1", "--run-dir", f"{folder}/run"]
            settings = KEEP_NOTHING if side == KEEPING_NOTHING else ()
            command = [*around, *(part for each in settings for part in ("--set", each)), "--", *command]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if done.returncode:
            raise RuntimeError(f"{side}, {workload}: exit code {done.returncode}\n{done.stderr[-3000:]}")
        figures = json.loads(output.read_text())
    if not figures["loss_last"] < figures["loss_first"]:
        raise RuntimeError(f"{side}, {workload}: the loss did not fall: {figures}")
    return {"samples_per_s": figures["steps"] * batch * 2 / figures["elapsed_s"], "loss_last": figures["loss_last"]}


def compare(name: str, options: Any) -> dict[str, Any]:
    workload, dim, batch = WORKLOADS[name]
    warm_up_s = 1.0 if options.smoke else WARM_UP_S

    def of(side: str) -> harness.Contestant:
        return lambda seconds: script(side, workload, dim, batch, seconds, warm_up_s)

    contestants = {side: of(side) for side in (OURS, KEEPING_NOTHING, THEIRS)}
    if workload == "w1":
        contestants[LOOP] = of(LOOP)
        contestants[JOB] = lambda seconds: shardkeep_job(
            dim=dim, servers=1, workers=2, seconds=seconds, warm_up_s=warm_up_s, overrides=("tower.linear=torch",)
        )
    contestants = {side: each for side, each in contestants.items() if side in (options.sides or contestants)}
    found = harness.alternate(contestants, rounds=options.rounds, seconds=options.seconds)
    pairs = {
        "beside_torchrec": (OURS, THEIRS, TARGETS[name]),
        "keeping_nothing_beside_torchrec": (KEEPING_NOTHING, THEIRS, TARGETS[name]),
        "beside_the_job": (OURS, JOB, 0.92),
        "loop_beside_the_job": (LOOP, JOB, 0.95),
    }
    results: dict[str, Any] = {"rounds": found}
    for key, (ours, other, target) in pairs.items():
        results[key] = harness.ratios(found, ours, other, "samples_per_s")
        if ours in contestants and other in contestants:
            harness.show_ratio(f"{name} samples/s, {ours} / {other}", results[key], target)
    return results


def main() -> None:
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--only", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--sides", nargs="+", choices=[OURS, KEEPING_NOTHING, THEIRS, LOOP, JOB], help="default: all")
    options = harness.parse(parser)
    harness.write(options.json, "drop_in", {name: compare(name, options) for name in options.only})


if __name__ == "__main__":
    main()
