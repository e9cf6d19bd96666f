"""How soon is an AUC reached over a slow link, with and without compression? Two network namespaces, `tc` between them.

A server and a worker on each side (the coordinator on the first), so that half of all rows and row gradients and all
dense gradients cross the link; `tc tbf` limits both directions, and a plain socket transfer is timed first. The link
has no delay of its own: this kernel has no netem. The data are synthetic with a planted teacher.

Time is that of training alone, from the first step: evaluations stop the clock (their pulls cross the link, too, and a
job that learns for real evaluates rarely). The AUC between two evaluations is taken to be a straight line. Unless --auc
names one, it is the best that every contestant reaches in every run, at every rate.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import harness
import two_hosts
import yaml

from shardkeep.compression.recipes import RECIPES

DEFAULT = ["fp32", "fp16", "safe", "balanced"]
TABLE_SIZES = [100_000] * 6 + [10_000] * 8 + [1000] * 6 + [100] * 6
Found = dict[str, Any]


def job_config(options: Any, settings: Mapping[str, Any], *, seed: int) -> dict[str, Any]:
    samples = options.steps * options.batch * 2
    config = {
        "name": "slow-link",
        "seed": seed,
        "threads": 1,
        "launch": {"affinity": "none"},
        "data": {
            "source": "synthetic",
            "synthetic": {
                "train_samples": samples,
                "eval_samples": options.eval_samples,
                "table_sizes": TABLE_SIZES,
            },
        },
        "model": {"name": "dlrm", "bottom": [256], "hidden": [256, 128]},
        "tables": {"default": {"dim": 16, "optimizer": {"name": "rowwise_adagrad", "lr": 0.05}}},
        "tower": {"optimizer": {"name": "adam", "lr": 0.001}, "compile": "off", "amp": "off"},
        "train": {"batch_size": options.batch, "report_every_s": 0.25},
        "eval": {"every_steps": options.every},
        "consistency": {"mode": options.mode},
        "checkpoint": {"every_steps": "off"},
        "transport": {"same_host": "sockets"},  # else rows are read out of the peer's memory, past the link
        "liveness": {"step_timeout_s": 120.0},
    }
    return harness.merged(config, settings)


def contestant(text: str) -> tuple[str, dict[str, Any]]:
    """`NAME:a.b=c,d.e=f` of --add, as nested settings."""
    name, _, settings = text.partition(":")
    found: dict[str, Any] = {}
    for part in filter(None, settings.split(",")):
        key, _, value = part.partition("=")
        nested = yaml.safe_load(value)
        for word in reversed(key.split(".")):
            nested = {word: nested}
        found = harness.merged(found, nested)
    return name, found


def run_once(options: Any, settings: Mapping[str, Any], mbit: float, *, seed: int) -> Found:
    """One job over a link of `mbit`; its AUC over training time, and what it moved."""
    with two_hosts.two_hosts(mbit=mbit) as (a, b):
        config = job_config(options, settings, seed=seed)
        before = a.sent(a.cable), b.sent(b.cable)
        job = two_hosts.run_job(config, coordinator=a, servers=[a, b], workers=[a, b])
        crossed = sum(
            (now - then).num_bytes for then, now in zip(before, (a.sent(a.cable), b.sent(b.cable)), strict=True)
        )
    summary = job.summary
    return {
        "curve": auc_over_time(job.records),
        "samples_per_s": summary["samples_per_s"],
        "bytes_per_sample": summary["bytes"]["per_sample"],
        "crossed_bytes_per_sample": crossed / summary["samples"],
        "step_ms": summary["step_ms"],
    }


def auc_over_time(records: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """(seconds of training, AUC) at each evaluation. Progress tells the mean milliseconds of the steps since the last
    one."""
    steps, seconds = [0.0], [0.0]
    for record in records:
        if record["kind"] == "progress":
            seconds.append(seconds[-1] + (record["step"] - steps[-1]) * record["step_ms"]["total"] / 1e3)
            steps.append(float(record["step"]))
    return [(at(float(r["step"]), steps, seconds), r["auc"]) for r in records if r["kind"] == "eval"]


def at(x: float, xs: list[float], ys: list[float]) -> float:
    """The straight line through points with rising x, at `x`; beyond the last it continues as it did."""
    for i in range(1, len(xs)):
        if x <= xs[i] or i == len(xs) - 1:
            return ys[i - 1] + (x - xs[i - 1]) * (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
    return ys[-1]


def seconds_to(auc: float, curve: list[tuple[float, float]]) -> float | None:
    """When the AUC is reached; None = never."""
    last_s, last_auc = 0.0, 0.5
    for now_s, now_auc in curve:
        if now_auc >= auc:
            return last_s + (now_s - last_s) * (auc - last_auc) / (now_auc - last_auc) if auc > last_auc else last_s
        last_s, last_auc = now_s, now_auc
    return None


def compare(options: Any, contestants: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    runs: dict[str, dict[str, list[Found]]] = {}
    plain: dict[str, float] = {}
    for mbit in options.mbit:
        with two_hosts.two_hosts(mbit=mbit) as (a, b):
            ways = [two_hosts.plain_transfer_mbit(*pair) for pair in ((a, b), (b, a))]
        plain[f"{mbit:g}"] = min(ways)
        print(f"link of {mbit:g} Mbit/s: a plain transfer has {ways[0]:.1f} and {ways[1]:.1f} Mbit/s", flush=True)
    for number in range(options.rounds):
        for mbit in options.mbit:
            for name, settings in contestants.items():
                found = run_once(options, settings, mbit, seed=1 + number)
                runs.setdefault(f"{mbit:g}", {}).setdefault(name, []).append(found)
                print(
                    f"round {number + 1}  {mbit:>6g} Mbit/s  {name:<30} {found['samples_per_s']:>9,.0f} samples/s"
                    f"  {found['bytes_per_sample']:>7,.0f} B a sample, {found['crossed_bytes_per_sample']:>7,.0f} over"
                    f" the link  AUC {found['curve'][-1][1]:.4f} after {found['curve'][-1][0]:.1f} s",
                    flush=True,
                )
    every = [found for by_name in runs.values() for rounds in by_name.values() for found in rounds]
    auc = options.auc if options.auc else min(max(auc for _, auc in found["curve"]) for found in every)
    table = {
        mbit: {name: [seconds_to(auc, found["curve"]) for found in rounds] for name, rounds in by_name.items()}
        for mbit, by_name in runs.items()
    }
    return {"plain_mbit": plain, "auc": auc, "seconds_to_auc": table, "runs": runs}


def show(results: dict[str, Any]) -> None:
    print(f"\nseconds of training to AUC {results['auc']:.4f}: median (min to max), and times as fast as the first")
    for mbit, by_name in results["seconds_to_auc"].items():
        base: list[float | None] = next(iter(by_name.values()))
        for name, seconds in by_name.items():
            reached = [s for s in seconds if s is not None]
            if len(reached) < len(seconds):
                print(f"  {mbit:>6} Mbit/s  {name:<30} not reached in {len(seconds) - len(reached)} of {len(seconds)}")
                continue
            told = f"{statistics.median(reached):8.1f} ({min(reached):.1f} to {max(reached):.1f})"
            faster = ""
            if all(base):
                faster = f"{statistics.median(b / s for b, s in zip(base, reached, strict=True) if b):6.2f} x"
            print(f"  {mbit:>6} Mbit/s  {name:<30} {told:<28}{faster}")


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--mbit", type=float, nargs="+", default=[100.0, 1000.0], help="rates of the link, each way")
    parser.add_argument("--recipes", nargs="+", default=DEFAULT, choices=list(RECIPES), help="in this order")
    parser.add_argument("--add", action="append", default=[], metavar="NAME:a.b=c,d.e=f",
                        help="a further contestant, by settings of the job")  # fmt: skip
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=1024, help="samples per worker and step")
    parser.add_argument("--every", type=int, default=30, help="steps between two evaluations")
    parser.add_argument("--eval-samples", type=int, default=20_000)
    parser.add_argument("--mode", default="bounded", choices=["sync", "bounded"])
    parser.add_argument("--auc", type=float, help="the AUC to reach; default: the best that all reach")
    options = harness.parse(parser)
    if options.smoke:
        options.steps, options.every, options.eval_samples = 40, 10, 5000
        options.mbit = options.mbit[:1]
    contestants: dict[str, Mapping[str, Any]] = {name: RECIPES[name].settings for name in options.recipes}
    contestants |= dict(contestant(text) for text in options.add)
    try:
        results = compare(options, contestants)
    except harness.CannotRun as reason:
        print(f"cannot run: {reason}")
        return
    show(results)
    arguments = {k: v for k, v in vars(options).items() if k != "json"}
    harness.write(options.json, "slow_link", {"arguments": arguments, "contestants": contestants, **results})


if __name__ == "__main__":
    main()
