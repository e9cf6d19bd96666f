"""Short steps: TorchRec's golden example over our servers beside TorchRec's own sharding, CPU ms a step of all
processes.

Two trainers on two cores, random ids, `shard` and `shardkeep with --servers 1`. The CPU is the slope between two step
counts of one run, so that no start counts. `--before` is another checkout of this project, to compare with. Needs
torchrec in this environment (CONTRIBUTING.md says how).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness

LOOP = Path(__file__).resolve().parent / "peers" / "golden_loop.py"
SMALL: dict[str, Any] = {"hidden": [64], "ids": 1, "zipf": False}
SHAPES: dict[str, dict[str, Any]] = {
    "D=128, batch 32": {**SMALL, "dim": 128, "batch": 32},
    "D=32, batch 512": {**SMALL, "dim": 32, "batch": 512},
    "D=32, batch 2048": {**SMALL, "dim": 32, "batch": 2048},
    "D=128, batch 512": {**SMALL, "dim": 128, "batch": 512},
    "20 ids a feature": {"hidden": [1024, 1024, 512, 256], "ids": 20, "zipf": True, "dim": 64, "batch": 2048},
}
"""Widths of the top layers before the logit; ids of each feature and sample (pooled), by Zipf's law or all alike; width
of rows; samples of a trainer. The last one is no short step: it is what people train."""
OURS, BEFORE, THEIRS = "shard()", "shard(), before", "TorchRec's sharding"
TARGET_MS = 18.0
"""Of the shortest steps."""
LIMIT_S = 500.0


def trained(side: str, shape: str, steps: tuple[int, int], checkout: Path | None) -> harness.Figures:
    """Runs peers/golden_loop.py on two cores. `checkout`: whose library; None = this one."""
    if importlib.util.find_spec("torchrec") is None:
        raise harness.CannotRun("torchrec is not installed")
    given = {**SHAPES[shape], "first": steps[0], "last": steps[1], "cores": [0, 1], "root": os.getpid()}
    with tempfile.TemporaryDirectory(prefix="small-steps-") as folder:
        output = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(LOOP)]
        command += ["torchrec" if side == THEIRS else "shardkeep", str(output), json.dumps(given)]
        if side != THEIRS:
            around = [sys.executable, "-m", "shardkeep", "with", "--servers", "1", "--run-dir", f"{folder}/run"]
            command = [*around, "--", *command]
        path = {} if checkout is None else {"PYTHONPATH": f"{checkout / 'src'}:{checkout}"}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env={**os.environ, **path}
        )
        if done.returncode:
            raise RuntimeError(f"{side}, {shape}: exit code {done.returncode}\n{done.stderr[-30_000:]}")
        figures: harness.Figures = json.loads(output.read_text())
    return figures


def compare(shape: str, options: Any) -> dict[str, Any]:
    steps = (20, 60) if options.smoke else (options.first, options.last)
    contestants: dict[str, harness.Contestant] = {
        OURS: lambda _: trained(OURS, shape, steps, None),
        THEIRS: lambda _: trained(THEIRS, shape, steps, None),
    }
    if options.before is not None:
        contestants[BEFORE] = lambda _: trained(BEFORE, shape, steps, options.before.resolve())
    found = harness.alternate(contestants, rounds=options.rounds, seconds=options.seconds)
    results: dict[str, Any] = {"steps": steps, "rounds": found}
    for other in (THEIRS, BEFORE):
        for key, better in (("cpu_ms", "less"), ("steps_per_s", "more")):
            results[f"{key}, {OURS} / {other}"] = ratio = harness.ratios(found, OURS, other, key)
            harness.show_ratio(f"{shape}: {key} ({better} is better), {OURS} / {other}", ratio)
    if own := [figures["cpu_ms"] for figures in found.get(OURS, [])]:
        results["cpu_ms"] = spread = harness.spread(own)
        target = f"   target {TARGET_MS:.0f}" if shape == next(iter(SHAPES)) else ""
        print(f"{shape}: CPU ms a step {spread['min']:.1f} / {spread['median']:.1f} / {spread['max']:.1f}{target}")
    return results


def main() -> None:
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--only", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--before", type=Path, help="another checkout, whose library is compared with this one")
    parser.add_argument("--first", type=int, default=1000, help="the step at which counting begins")
    parser.add_argument("--last", type=int, default=3000, help="the step at which it ends")
    options = harness.parse(parser)
    harness.write(options.json, "small_steps", {shape: compare(shape, options) for shape in options.only})


if __name__ == "__main__":
    main()
