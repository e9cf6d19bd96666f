"""Beside the peers (W1): two workers and their servers on two cores, against what else trains such a model on them.

An opponent that is not installed is left out of the best; those with servers have one. Towers that run at once on
both cores share a cache and a memory bus, and each sample then takes longer: so both a tower alone and two are shown.
None of the opponents outlives a death, so shardkeep runs as it comes, with a journal and the tower's last states, and
with neither, as they do; and so once more with torch's own matrix products, which all of them use, where it would take
oneDNN's (`tower.linear`).
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
BARE = "shardkeep, keeping nothing"
SAME_PRODUCTS = "shardkeep, keeping nothing, torch's products"
KEEP_NOTHING = ("recovery.journal=off", "recovery.restarts=0")
OURS_BY_WAY = {OURS: (), BARE: KEEP_NOTHING, SAME_PRODUCTS: (*KEEP_NOTHING, "tower.linear=torch")}
TWO_TOWERS = "two towers alone, a core each"
BEST_OF = ("TorchRec, 2 ranks", "OpenEmbedding + DDP, 1 + 2", "RPC by hand + DDP, 1 + 2")
SCRIPTS = dict(zip((*BEST_OF, TUTORIAL), ("torchrec_dmp", "openembedding", "rpc_by_hand", "rpc_tutorial"), strict=True))
TARGETS = {16: {"best": 1.10, "tutorial": 1.35, "cpu_us": 3.5}, 64: {"best": 1.30, "tutorial": 1.80, "cpu_us": 8.0}}
KEYS = {
    "shardkeep": OURS, "keeping_nothing": BARE, "same_products": SAME_PRODUCTS, "torchrec": BEST_OF[0],
    "openembedding": BEST_OF[1], "rpc_by_hand": BEST_OF[2], "tutorial": TUTORIAL, "tower": TOWER,
    "two_towers": TWO_TOWERS,
}  # fmt: skip


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--only", nargs="+", choices=list(KEYS), default=list(KEYS), help="contestants; all by default")
    parser.add_argument("--servers", type=int, default=1, help="servers of shardkeep")
    parser.add_argument("--workers", type=int, default=2, help="of each; TorchRec needs a GPU for each")
    options = harness.parse(parser)
    results = {f"D={dim}": compare(dim, options) for dim in options.dims}
    harness.write(options.json, "beside_peers", results)


def compare(dim: int, options: argparse.Namespace) -> dict[str, Any]:
    print(f"D = {dim}")

    def ours(overrides: Sequence[str]) -> harness.Contestant:
        warm_up_s = 1.0 if options.smoke else WARM_UP_S
        return lambda seconds: shardkeep_job(
            dim=dim, servers=options.servers, workers=options.workers, seconds=seconds, warm_up_s=warm_up_s,
            device=options.device, overrides=overrides,
        )  # fmt: skip

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
        name: contestant(script, workload="w1", dim=dim, workers=options.workers, device=options.device)
        for name, script in SCRIPTS.items()
    }
    every = {name: ours(overrides) for name, overrides in OURS_BY_WAY.items()}
    every |= {**peers, TOWER: tower, TWO_TOWERS: two_towers}
    chosen = {KEYS[key]: every[KEYS[key]] for key in options.only}
    found = harness.alternate(chosen, rounds=options.rounds, seconds=options.seconds)
    return {"rounds": found} | {name: shown(dim, name, found) for name in OURS_BY_WAY if name in found}


def shown(dim: int, name: str, found: Mapping[str, list[harness.Figures]]) -> dict[str, Any]:
    """Prints the ratios of shardkeep, in one of its ways, beside their targets."""
    targets = TARGETS.get(dim, {})
    each = {other: harness.ratios(found, name, other, "samples_per_s") for other in BEST_OF}
    for other, ratio in each.items():
        harness.show_ratio(f"D={dim} samples/s, {name} / {other}", ratio)
    best = over_best(found, name, BEST_OF)
    harness.show_ratio(f"D={dim} samples/s, {name} / the best of these in each round", best, targets.get("best"))
    tutorial = harness.ratios(found, name, TUTORIAL, "samples_per_s")
    harness.show_ratio(f"D={dim} samples/s, {name} / {TUTORIAL}", tutorial, targets.get("tutorial"))
    above = harness.differences(found, name, TOWER, "cpu_us_per_sample")
    harness.show_ratio(f"D={dim} CPU us per sample of {name} above the tower's (at most)", above, targets.get("cpu_us"))
    above_two = harness.differences(found, name, TWO_TOWERS, "cpu_us_per_sample")
    harness.show_ratio(f"D={dim} CPU us per sample of {name} above that of two towers at once", above_two)
    share = harness.ratios(found, name, TWO_TOWERS, "samples_per_s")
    harness.show_ratio(f"D={dim} samples/s, {name} / two towers at once, without rows and dense sum", share)
    return {
        "ratios": each,
        "ratio_best": best,
        "ratio_tutorial": tutorial,
        "ratio_two_towers": share,
        "cpu_us_above_tower": above,
        "cpu_us_above_two_towers": above_two,
    }


def over_best(found: Mapping[str, list[harness.Figures]], name: str, rival_names: Sequence[str]) -> dict[str, float]:
    """`name` / the fastest of the rivals, round by round; nothing when none could run."""
    rivals = [found[rival] for rival in rival_names if rival in found]
    if not rivals or name not in found:
        return {}
    best = [max(figures["samples_per_s"] for figures in one) for one in zip(*rivals, strict=True)]
    return harness.spread([ours["samples_per_s"] / other for ours, other in zip(found[name], best, strict=True)])


if __name__ == "__main__":
    main()
