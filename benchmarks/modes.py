"""What the promises of `sync` cost (W1): sync, bounded and async, two workers with one and with two servers.

No opponent has modes; the tower alone on one core is shown for scale.
"""

from __future__ import annotations

import functools
from typing import Any

import harness
from tower_alone import tower_alone
from w1_job import WARM_UP_S, shardkeep_job

MODES = ("sync", "bounded", "async")
TARGETS = {"sync": 0.75}
WORKERS = 2
TOWER = "the tower alone, 1 core"


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--dims", type=int, nargs="+", default=[16])
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2])
    options = harness.parse(parser)
    results: dict[str, Any] = {}
    for dim in options.dims:
        for servers in options.servers:
            print(f"D = {dim}, {servers} + {WORKERS}")
            results[f"D={dim}, {servers} + {WORKERS}"] = compare(dim, servers, options)
    harness.write(options.json, "modes", results)


def compare(dim: int, servers: int, options: Any) -> dict[str, Any]:
    warm_up_s = 1.0 if options.smoke else WARM_UP_S

    def job(mode: str, seconds: float) -> harness.Figures:
        return shardkeep_job(
            dim=dim, servers=servers, workers=WORKERS, mode=mode, seconds=seconds, warm_up_s=warm_up_s,
            device=options.device,
        )  # fmt: skip

    def tower(seconds: float) -> harness.Figures:
        return tower_alone(dim=dim, seconds=seconds, device=options.device)

    contestants = {mode: functools.partial(job, mode) for mode in MODES}
    found = harness.alternate({**contestants, TOWER: tower}, rounds=options.rounds, seconds=options.seconds)
    shown: dict[str, Any] = {"rounds": found}
    for mode in ("sync", "async"):
        ratio = shown[f"{mode} / bounded"] = harness.ratios(found, mode, "bounded", "samples_per_s")
        label = f"D={dim}, {servers} + {WORKERS}: samples/s, {mode} / bounded"
        harness.show_ratio(label, ratio, TARGETS.get(mode))
    return shown


if __name__ == "__main__":
    main()
