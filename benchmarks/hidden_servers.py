"""Hidden servers (W1): one server and one worker, a core each, against the same tower alone with ready-made inputs.

What is left of the tower's samples per second when rows come from a server and their gradients go back to it. The
tower alone runs as plain PyTorch, and as it does in shardkeep's workers: with malloc set so that large buffers cost no
page faults, and on some CPUs multiplied by oneDNN. There shardkeep runs with torch's products, too: it is against the
same products that a ratio says what rows cost.
"""

from __future__ import annotations

from typing import Any

import harness
from tower_alone import tower_alone
from w1_job import WARM_UP_S, shardkeep_job

TARGETS = {16: 0.95, 64: 0.90}
OURS, TORCHS = "shardkeep, 1 server + 1 worker", "shardkeep, torch's products"
TOWER, AS_IN_JOB = "the tower alone", "the tower alone, as in the job"


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
    def job(seconds: float, *overrides: str) -> harness.Figures:
        warm_up_s = 1.0 if options.smoke else WARM_UP_S
        return shardkeep_job(
            dim=dim, servers=1, workers=1, seconds=seconds, warm_up_s=warm_up_s, device=options.device,
            overrides=overrides,
        )  # fmt: skip

    def with_torchs(seconds: float) -> harness.Figures:
        return job(seconds, "tower.linear=torch")

    def tower(seconds: float) -> harness.Figures:
        return tower_alone(dim=dim, seconds=seconds, device=options.device)

    def as_in_job(seconds: float) -> harness.Figures:
        return tower_alone(dim=dim, seconds=seconds, device=options.device, as_in_job=True)

    from shardkeep.workers.dense import onednn

    contestants = {OURS: job, TOWER: tower, AS_IN_JOB: as_in_job}
    pairs = [(OURS, AS_IN_JOB), (OURS, TOWER)]
    if onednn.helps() and options.device == "cpu":
        contestants[TORCHS] = with_torchs
        pairs.insert(1, (TORCHS, TOWER))
    found = harness.alternate(contestants, rounds=options.rounds, seconds=options.seconds)
    shown: dict[str, Any] = {"rounds": found}
    for mine, other in pairs:
        ratio = shown[f"ratio, {mine} / {other}"] = harness.ratios(found, mine, other, "samples_per_s")
        above = shown[f"cpu_us_above, {mine} / {other}"] = harness.differences(found, mine, other, "cpu_us_per_sample")
        harness.show_ratio(f"D={dim} samples/s, {mine} / {other}", ratio, TARGETS.get(dim))
        harness.show_ratio(f"D={dim} CPU us per sample, all processes, above that tower's", above)
    return shown


if __name__ == "__main__":
    main()
