"""What does it cost to outlive deaths, and how long does one hold training up (W1)?

The cost: samples/s of jobs that keep nothing, only the tower's last states, or the journal of pushes, too. The pause:
seconds from SIGKILL of one process to the end of the first step that comes after the last one before it. `--seconds` is
for the cost alone.
"""

from __future__ import annotations

import datetime
import json
import signal
import time
from typing import Any

import harness
import psutil
from w1_job import START_LIMIT_S, WARM_UP_S, Job, default_cores, job_config, running, shardkeep_job

NOTHING, STATES, OS, FSYNC = "keeps nothing", "the tower's states", "and a journal, os", "and a journal, fsync"
KEPT = {
    NOTHING: ("recovery.journal=off", "recovery.restarts=0"),
    STATES: ("recovery.journal=off",),
    OS: ("recovery.journal=os",),
    FSYNC: ("recovery.journal=fsync",),
}
COST_TARGET = 0.95
PAUSES_S = {"server 0": 6.0, "coordinator 0": 6.0, "worker 1": 6.0, "worker 1, compiled": 12.0}
SETTLED_S = 3.0
WORKERS, SERVERS = 2, 1


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--dims", type=int, nargs="+", default=[16])
    parser.add_argument("--only", choices=["cost", "pause"], help="one half of it")
    parser.add_argument("--start", choices=["auto", "spawn"], default="auto", help="launch.start of the pauses")
    options = harness.parse(parser)
    results: dict[str, Any] = {}
    for dim in options.dims:
        if options.only != "pause":
            results[f"cost, D={dim}"] = cost(dim, options)
        if options.only != "cost":
            results[f"pause, D={dim}, start: {options.start}"] = pause(dim, options)
    harness.write(options.json, "recovery", results)


def cost(dim: int, options: Any) -> dict[str, Any]:
    def job(overrides: tuple[str, ...], seconds: float) -> harness.Figures:
        return shardkeep_job(
            dim=dim, servers=SERVERS, workers=WORKERS, seconds=seconds, overrides=overrides, device=options.device,
            warm_up_s=1.0 if options.smoke else WARM_UP_S,
        )  # fmt: skip

    contestants = {name: lambda s, overrides=overrides: job(overrides, s) for name, overrides in KEPT.items()}
    found = harness.alternate(contestants, rounds=options.rounds, seconds=options.seconds)
    shown: dict[str, Any] = {"rounds": found}
    for name in (STATES, OS, FSYNC):
        ratio = shown[f"{name} / {NOTHING}"] = harness.ratios(found, name, NOTHING, "samples_per_s")
        harness.show_ratio(f"D={dim}: samples/s, {name} / {NOTHING}", ratio, COST_TARGET if name == OS else None)
    return shown


def pause(dim: int, options: Any) -> dict[str, Any]:
    contestants = {
        name: lambda _s, name=name: {"seconds": seconds_without_a_step(name, dim, options)}
        for name in PAUSES_S
        if not (options.smoke and "compiled" in name)
    }
    found = harness.alternate(contestants, rounds=options.rounds, seconds=options.seconds)
    shown: dict[str, Any] = {"rounds": found}
    for name, figures in found.items():
        spread = shown[name] = harness.spread([f["seconds"] for f in figures])
        harness.show_ratio(f"D={dim}: seconds from SIGKILL of {name} to the next step", spread, PAUSES_S[name])
    return shown


def seconds_without_a_step(victim: str, dim: int, options: Any) -> float:
    """Kills a process of a job that has trained for a while; until a step is done that was not done before."""
    config = job_config(
        dim=dim, servers=SERVERS, workers=WORKERS, consistency={"mode": "bounded", "staleness": 2}, batch=2048,
        device=options.device, cores=default_cores(SERVERS, WORKERS), report_every_s=0.001,
    )  # fmt: skip
    name, _, compiled = victim.partition(", ")
    overrides = (f"launch.start={options.start}", *(("tower.compile=on",) if compiled else ()))
    with running(config, overrides) as job:
        job.wait()
        time.sleep(SETTLED_S)
        job.processes[name].send_signal(signal.SIGKILL)
        killed = time.time()
        record = next_step(job, after=last_step(job))
        seconds = datetime.datetime.fromisoformat(record["time"]).timestamp() - killed
        members = json.loads((job.run / "members.json").read_text(encoding="utf-8"))["members"]
        job.processes |= {f"{m['role']} {m['index']}": psutil.Process(m["pid"]) for m in members}
        coordinator = json.loads((job.run / "coordinator.json").read_text(encoding="utf-8"))
        job.processes["coordinator 0"] = psutil.Process(coordinator["pid"])
        job.end()
    return seconds


def last_step(job: Job) -> int:
    time.sleep(0.3)  # a step that was under way ends, or does not; a coordinator's death does not stop training
    return max((int(record["step"]) for record in steps(job)), default=0)


def next_step(job: Job, *, after: int) -> dict[str, Any]:
    end = time.monotonic() + START_LIMIT_S
    while not (found := [record for record in steps(job) if int(record["step"]) > after]):
        if (job.run / "summary.json").exists():
            raise RuntimeError(f"the job ended: {(job.run / 'summary.json').read_text(encoding='utf-8')[:300]}")
        if time.monotonic() > end:
            raise RuntimeError(f"no step after {after} within {START_LIMIT_S:g} s")
        time.sleep(0.02)
    return found[0]


def steps(job: Job) -> list[dict[str, Any]]:
    lines = (job.run / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
    return [record for line in lines if (record := json.loads(line))["kind"] == "progress"]


if __name__ == "__main__":
    main()
