"""Beside the peers (W1): two workers and their servers on two cores, against what else trains such a model on them.

An opponent that is not installed is left out of the best; those with servers have one. Towers that run at once on
both cores share a cache and a memory bus, and each sample then takes longer: so both a tower alone and two are shown.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import harness
from opponents import contestant
from tower_alone import tower_alone
from w1_job import WARM_UP_S, shardkeep_job

OURS, TOWER, TUTORIAL = "shardkeep", "the tower alone, 1 core", "official tutorial, 1 + 2"
TWO_TOWERS = "two towers alone, a core each"
BEST_OF = ("TorchRec, 2 ranks", "OpenEmbedding + DDP, 1 + 2", "RPC by hand + DDP, 1 + 2")
SCRIPTS = dict(zip((*BEST_OF, TUTORIAL), ("torchrec_dmp", "openembedding", "rpc_by_hand", "rpc_tutorial"), strict=True))
TARGETS = {16: {"best": 1.10, "tutorial": 1.35, "cpu_us": 3.5}, 64: {"best": 1.30, "tutorial": 1.80, "cpu_us": 8.0}}


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--servers", type=int, default=1, help="servers of shardkeep")
    options = harness.parse(parser)
    results = {f"D={dim}": compare(dim, options) for dim in options.dims}
    harness.write(options.json, "beside_peers", results)


def compare(dim: int, options: argparse.Namespace) -> dict[str, Any]:
    print(f"D = {dim}")

    def ours(seconds: float) -> harness.Figures:
        warm_up_s = 1.0 if options.smoke else WARM_UP_S
        return shardkeep_job(
            dim=dim, servers=options.servers, workers=2, seconds=seconds, warm_up_s=warm_up_s, device=options.device
        )

    def tower(seconds: float) -> harness.Figures:
        return tower_alone(dim=dim, seconds=seconds, device=options.device)

    def two_towers(seconds: float) -> harness.Figures:
        with ThreadPoolExecutor(2) as pool:
            pair = pool.map(
                lambda core: tower_alone(dim=dim, seconds=seconds, core=core, device=options.device), (0, 1)
            )
            one, other = pair
        mean_us = (one["cpu_us_per_sample"] + other["cpu_us_per_sample"]) / 2
        return {"samples_per_s": one["samples_per_s"] + other["samples_per_s"], "cpu_us_per_sample": mean_us}

    peers = {
        name: contestant(script, workload="w1", dim=dim, workers=2, device=options.device)
        for name, script in SCRIPTS.items()
    }
    found = harness.alternate(
        {OURS: ours, **peers, TOWER: tower, TWO_TOWERS: two_towers}, rounds=options.rounds, seconds=options.seconds
    )
    return {"rounds": found, **shown(dim, found)}


def shown(dim: int, found: Mapping[str, list[harness.Figures]]) -> dict[str, Any]:
    """Prints the ratios beside their targets."""
    targets = TARGETS.get(dim, {})
    each = {name: harness.ratios(found, OURS, name, "samples_per_s") for name in BEST_OF}
    for name, ratio in each.items():
        harness.show_ratio(f"D={dim} samples/s, shardkeep / {name}", ratio)
    best = over_best(found, BEST_OF)
    harness.show_ratio(f"D={dim} samples/s, shardkeep / the best of these in each round", best, targets.get("best"))
    tutorial = harness.ratios(found, OURS, TUTORIAL, "samples_per_s")
    harness.show_ratio(f"D={dim} samples/s, shardkeep / {TUTORIAL}", tutorial, targets.get("tutorial"))
    above = harness.differences(found, OURS, TOWER, "cpu_us_per_sample")
    harness.show_ratio(f"D={dim} CPU us per sample above the tower's (at most)", above, targets.get("cpu_us"))
    above_two = harness.differences(found, OURS, TWO_TOWERS, "cpu_us_per_sample")
    harness.show_ratio(f"D={dim} CPU us per sample above that of two towers at once", above_two)
    share = harness.ratios(found, OURS, TWO_TOWERS, "samples_per_s")
    harness.show_ratio(f"D={dim} samples/s, shardkeep / two towers at once, without rows and dense sum", share)
    return {
        "ratios": each,
        "ratio_best": best,
        "ratio_tutorial": tutorial,
        "ratio_two_towers": share,
        "cpu_us_above_tower": above,
        "cpu_us_above_two_towers": above_two,
    }


def over_best(found: Mapping[str, list[harness.Figures]], names: Sequence[str]) -> dict[str, float]:
    """shardkeep / the fastest of `names`, round by round; nothing when none could run."""
    rivals = [found[name] for name in names if name in found]
    if not rivals or OURS not in found:
        return {}
    best = [max(figures["samples_per_s"] for figures in one) for one in zip(*rivals, strict=True)]
    return harness.spread([ours["samples_per_s"] / other for ours, other in zip(found[OURS], best, strict=True)])


if __name__ == "__main__":
    main()
