"""Hidden servers (W1): one server and one worker, a core each, against the same tower alone with ready-made inputs.

What is left of the tower's samples per second when rows come from a server and their gradients go back to it. The
tower runs as plain PyTorch, and as it does in shardkeep's workers: with malloc set so that large buffers cost no page
faults, and on some CPUs multiplied by oneDNN.
"""

from __future__ import annotations

from typing import Any

import harness
from tower_alone import tower_alone
from w1_job import WARM_UP_S, shardkeep_job

TARGETS = {16: 0.95, 64: 0.90}
OURS, TOWER, AS_IN_JOB = "shardkeep, 1 server + 1 worker", "the tower alone", "the tower alone, as in the job"


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

    def as_in_job(seconds: float) -> harness.Figures:
        return tower_alone(dim=dim, seconds=seconds, device=options.device, as_in_job=True)

    found = harness.alternate(
        {OURS: ours, TOWER: tower, AS_IN_JOB: as_in_job}, rounds=options.rounds, seconds=options.seconds
    )
    shown: dict[str, Any] = {"rounds": found}
    for other in (TOWER, AS_IN_JOB):
        ratio = shown[f"ratio, {other}"] = harness.ratios(found, OURS, other, "samples_per_s")
        above = shown[f"cpu_us_above, {other}"] = harness.differences(found, OURS, other, "cpu_us_per_sample")
        harness.show_ratio(f"D={dim} samples/s, shardkeep / {other}", ratio, TARGETS.get(dim))
        harness.show_ratio(f"D={dim} CPU us per sample, all processes, above {other}", above)
    return shown


if __name__ == "__main__":
    main()
