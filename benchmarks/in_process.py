"""One process, one core (W1): shardkeep with `servers: 0` against plain PyTorch with merged tables and FBGEMM."""

from __future__ import annotations

import argparse
from typing import Any

import harness
from opponents import contestant
from w1_job import WARM_UP_S, shardkeep_job

OURS = "shardkeep, servers: 0"
SCRIPTS = {"PyTorch, merged tables": "pytorch_merged", "FBGEMM TBE": "fbgemm_tbe"}
TARGETS = {16: 1.0, 64: 1.2}


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64])
    options = harness.parse(parser)
    results = {f"D={dim}": compare(dim, options) for dim in options.dims}
    harness.write(options.json, "in_process", results)


def compare(dim: int, options: argparse.Namespace) -> dict[str, Any]:
    print(f"D = {dim}")

    def ours(seconds: float) -> harness.Figures:
        warm_up_s = 1.0 if options.smoke else WARM_UP_S
        return shardkeep_job(
            dim=dim, servers=0, workers=1, cores=([[0]], []), seconds=seconds, warm_up_s=warm_up_s,
            device=options.device,
        )  # fmt: skip

    peers = {
        name: contestant(script, workload="w1", dim=dim, cores=[0], device=options.device)
        for name, script in SCRIPTS.items()
    }
    found = harness.alternate({OURS: ours, **peers}, rounds=options.rounds, seconds=options.seconds)
    result: dict[str, Any] = {"rounds": found}
    for name in SCRIPTS:
        ratio = harness.ratios(found, OURS, name, "samples_per_s")
        harness.show_ratio(f"D={dim} samples/s, shardkeep / {name}", ratio, TARGETS.get(dim))
        result[f"ratio to {name}"] = ratio
    return result


if __name__ == "__main__":
    main()
