"""How far do workers scale? The tower is replaced by a timed wait, as a GPU would leave the CPU idle; W1's ids.

Real jobs of `shardkeep train` with 1, 2, 4, 8 workers and 1, 2, 4 servers. Efficiency is the rate per worker over that
of one worker with as many servers in the same round; it is held against its target where all processes together use
less than 0.9 of the cores. The last lines have no wait: what the full cores reach.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import harness
import w1_data
import w1_job
import workload

from shardkeep.base.machine.topology import usable_cores

TARGETS = {2: 0.95, 4: 0.92, 8: 0.90}
FULL = 0.9
NUM_BATCHES = 16  # for each worker: eight workers hold copies of all of them
FULL_WORKERS = 2
"""Workers of the job without a wait: one for each core of the two that the targets are stated for."""


def measured(
    *, servers: int, workers: int, wait_ms: float, dim: int, warm_up_s: float, seconds: float
) -> harness.Figures:
    """One job: samples/s, CPU microseconds a sample of each role, and how many cores each role keeps busy."""
    config = w1_job.job_config(
        dim=dim, servers=servers, workers=workers, consistency={"mode": "bounded", "staleness": 2},
        batch=workload.BATCH, device="cpu", cores=None, report_every_s=min(1.0, seconds / 8),
    )  # fmt: skip
    config["data"]["options"]["num_batches"] = NUM_BATCHES * workers
    w1_data.drawn(NUM_BATCHES * workers, seed=1)
    config["model"] = {"name": "waiting_model:Waiting", "options": {"wait_ms": wait_ms}}
    with w1_job.running(config) as job:
        job.wait()
        before, after = job.window(warm_up_s, seconds)
        job.end()
    return with_cores(w1_job.figures(before, after, workload.BATCH * workers))


def with_cores(figures: harness.Figures) -> harness.Figures:
    """The figures, and the cores kept busy: all, by workers, by servers; samples/s for each core that servers use."""
    rate = figures["samples_per_s"] / 1e6
    return figures | {
        "cores": figures["cpu_us_per_sample"] * rate,
        "worker_cores": figures["worker_cpu_us"] * rate,
        "server_cores": figures["server_cpu_us"] * rate,
        "samples_per_s_per_server_core": 1e6 / figures["server_cpu_us"],
    }


def efficiency(found: Mapping[str, list[harness.Figures]], *, servers: int, workers: int) -> dict[str, float]:
    """Rate per worker over that of one worker, round by round: min, median, max."""
    many, one = found[key(servers, workers)], found[key(servers, 1)]
    return harness.spread([m["samples_per_s"] / workers / o["samples_per_s"] for m, o in zip(many, one, strict=True)])


def key(servers: int, workers: int, wait: bool = True) -> str:
    return f"servers {servers} workers {workers}" + ("" if wait else " no wait")


def points(found: Mapping[str, list[harness.Figures]], servers: Sequence[int], workers: Sequence[int]) -> list[Any]:
    """A record for each job with a wait: medians over the rounds, efficiency, whether the cores were full."""
    records = []
    for s in servers:
        for w in workers:
            rounds = found[key(s, w)]
            record = {"servers": s, "workers": w} | {k: harness.spread([r[k] for r in rounds]) for k in rounds[0]}
            full = record["cores"]["median"] >= FULL * usable()
            records.append(record | {"efficiency": efficiency(found, servers=s, workers=w), "cores_full": full})
    return records


def usable() -> int:
    return len(usable_cores())


def show(records: Sequence[Mapping[str, Any]], limits: Mapping[int, Mapping[str, Any]], wait_ms: float) -> None:
    print(f"\nA wait of {wait_ms:g} ms a step for the tower; {usable()} cores. Medians; efficiency min / median / max.")
    print("servers workers  samples/s        efficiency        target   cores busy: all, workers, servers")
    for r in records:
        rate, busy = r["samples_per_s"]["median"], [r[k]["median"] for k in ("cores", "worker_cores", "server_cores")]
        shown = " / ".join(f"{r['efficiency'][k]:.3f}" for k in ("min", "median", "max"))
        parts = "   ".join(f"{cores:.2f}" for cores in busy)
        print(f"{r['servers']:>7} {r['workers']:>7} {rate:>10,.0f}   {shown}   {judged(r):<6}   {parts}")
    for servers, r in limits.items():
        rate, busy, each = (r[k]["median"] for k in ("samples_per_s", "cores", "samples_per_s_per_server_core"))
        print(
            f"no wait, {servers} server{'s' if servers > 1 else ''}, {FULL_WORKERS} workers: {rate:,.0f} samples/s, "
            f"{busy:.2f} cores busy, {each:,.0f} samples/s for each core that servers use"
        )


def judged(record: Mapping[str, Any]) -> str:
    """The target, marked where it was missed; `full` where the cores were, which ends the promise."""
    target = TARGETS.get(record["workers"])
    if target is None:
        return ""
    if record["cores_full"]:
        return "full"
    return f"{target:.2f}" + ("" if record["efficiency"]["median"] >= target else " missed")


def plot(records: Sequence[Mapping[str, Any]], path: Path, wait_ms: float) -> None:
    """Efficiency and busy cores over workers, a line for each number of servers."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed (pip install 'shardkeep[report]')")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for servers in sorted({r["servers"] for r in records}):
        own = [r for r in records if r["servers"] == servers]
        workers = [r["workers"] for r in own]
        median = [r["efficiency"]["median"] for r in own]
        error = [[abs(r["efficiency"][k] - r["efficiency"]["median"]) for r in own] for k in ("min", "max")]
        label = f"{servers} server{'s' if servers > 1 else ''}"
        left.errorbar(workers, median, yerr=error, marker="o", capsize=3, label=label)
        right.plot(workers, [r["cores"]["median"] for r in own], marker="o", label=label)
    left.plot(list(TARGETS), list(TARGETS.values()), "k_", markersize=14, label="target")
    left.set(xlabel="workers", ylabel="samples/s per worker, of one worker's", ylim=(0, 1.1))
    right.axhline(usable(), color="k", linewidth=0.8, linestyle=":", label="all cores")
    right.set(xlabel="workers", ylabel="cores busy", ylim=(0, None))
    for axes in (left, right):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.suptitle(f"W1 ids, a wait of {wait_ms:g} ms for the tower")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    print(f"plotted to {path}")


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2, 4], help="numbers of servers")
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of workers; 1 must be there"
    )
    parser.add_argument("--wait-ms", type=float, default=200.0, help="wait of each step")
    parser.add_argument("--dim", type=int, default=16, help="embedding dim")
    parser.add_argument("--plot", type=Path, help="PNG file; left out = beside the JSON file")
    options = harness.parse(parser)
    if 1 not in options.workers:
        parser.error("--workers: 1 must be among them, the efficiency is held against it")
    if options.smoke:
        options.servers, options.workers, options.wait_ms = [1], [1, 2], 50.0

    def job(servers: int, workers: int, wait_ms: float) -> harness.Contestant:
        warm_up_s = 1.0 if options.smoke else 6.0
        return lambda seconds: measured(
            servers=servers, workers=workers, wait_ms=wait_ms, dim=options.dim, warm_up_s=warm_up_s, seconds=seconds
        )

    jobs = {key(s, w): job(s, w, options.wait_ms) for s in options.servers for w in options.workers}
    jobs |= {key(s, FULL_WORKERS, wait=False): job(s, FULL_WORKERS, 0.0) for s in options.servers}
    found = harness.alternate(jobs, rounds=options.rounds, seconds=options.seconds)
    records = points(found, options.servers, options.workers)
    limits = {}
    for s in options.servers:
        rounds = found[key(s, FULL_WORKERS, wait=False)]
        limits[s] = {k: harness.spread([r[k] for r in rounds]) for k in rounds[0]}
    show(records, limits, options.wait_ms)
    harness.write(
        options.json, "scaling",
        {"wait_ms": options.wait_ms, "dim": options.dim, "points": records, "no_wait": limits, "rounds": found},
    )  # fmt: skip
    target = options.plot or (options.json.with_suffix(".png") if options.json else None)
    if target is not None:
        plot(records, target, options.wait_ms)


if __name__ == "__main__":
    main()
