"""Hidden servers (W1): one server and one worker, a core each, against the same tower alone with ready-made inputs.

What is left of the tower's samples per second when rows come from a server and their gradients go back to it.
"""

from __future__ import annotations

from typing import Any

import harness
from tower_alone import tower_alone
from w1_job import WARM_UP_S, shardkeep_job

TARGETS = {16: 0.95, 64: 0.90}
OURS, TOWER = "shardkeep, 1 server + 1 worker", "the tower alone"


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64])
    options = harness.parse(parser)
    results: dict[str, Any] = {}
    for dim in options.dims:
        print(f"D = {dim}")
        results[f"D={dim}"] = compare(dim, options)
    harness.write(options.json, "hidden_servers", results)


def compare(dim: int, options: Any) -> dict[str, Any]:
    def ours(seconds: float) -> harness.Figures:
        warm_up_s = 1.0 if options.smoke else WARM_UP_S
        return shardkeep_job(dim=dim, servers=1, workers=1, seconds=seconds, warm_up_s=warm_up_s, device=options.device)

    def tower(seconds: float) -> harness.Figures:
        return tower_alone(dim=dim, seconds=seconds, device=options.device)

    found = harness.alternate({OURS: ours, TOWER: tower}, rounds=options.rounds, seconds=options.seconds)
    ratio = harness.ratios(found, OURS, TOWER, "samples_per_s")
    above = harness.differences(found, OURS, TOWER, "cpu_us_per_sample")
    harness.show_ratio(f"D={dim} samples/s, shardkeep / tower alone", ratio, TARGETS.get(dim))
    harness.show_ratio(f"D={dim} CPU us per sample above the tower, all processes", above)
    return {"rounds": found, "ratio": ratio, "cpu_us_above_tower": above}


if __name__ == "__main__":
    main()
