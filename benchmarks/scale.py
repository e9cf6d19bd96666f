"""Does the cost model of docs/scale.md predict the servers of jobs of 2 to 8 processes?

    python benchmarks/scale.py --ranks benchmarks/results/2026-11-29-many-ranks-servers.json --json FILE

It continues FILE. The constants of the model come from a result of many_ranks.py. The jobs are those of scaling.py:
`shardkeep train` with W1's ids and a tower that waits. The rows of a step are counted in the data before a job runs.
Then the job is measured: CPU milliseconds per step and server. The result has the constants, the jobs, and what the
model predicts for large jobs that nobody has run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import harness
import numpy as np
import scaling
import w1_data
import workload
from many_ranks import MANY_ROWS, MESHES, ROWS, TABLES

JOBS = ((1, 1), (1, 2), (2, 2), (2, 4), (4, 4))
"""Servers and workers."""
WAIT_MS, WARM_UP_S = 50.0, 6.0
RANKS = (50, 100, 200)
MANY_SERVERS, MANY_WORKERS = (25, 100), 400


def constants(spreads: Mapping[str, Any]) -> dict[str, float]:
    """CPU microseconds of a server, if nothing else is said."""

    def ms(job: str, key: str = "server ms") -> float:
        return float(spreads[job][key]["median"])

    small, rows, tables = (1e3 * ms(job) / 8 for job in ("bounded 8", f"rows {MANY_ROWS}", f"tables {TABLES}"))
    row = (rows - small) / (MANY_ROWS - ROWS)
    table = (tables - small) / (TABLES - 1)
    most = max(int(job.split()[1]) for job in spreads if job.startswith("bounded "))
    members = most + 2
    form = [ms(f"{mode} {most}", "form coordinator cpu s") for mode in ("sync", "bounded", "async")]
    beats = [ms(f"{mode} {most}", "coordinator share") for mode in ("sync", "bounded", "async")]
    return {
        "ranks": most,
        "call_us": 1e3 * ms(f"bounded {most}") / most - table - ROWS * row,
        "call_8_us": small - table - ROWS * row,
        "sync_us": 1e3 * ms(f"sync {most}") / most - table - ROWS * row,
        "table_us": table,
        "row_us": row,
        "gate_us": 1e3 * ms(f"gate bounded {most}", "ms") / most,
        "sum_us": 1e3 * ms(f"sum {most}", "ms") / most,
        "client_us": 1e3 * ms(f"bounded {most}", "clients ms") / most / 2,
        "rank_kb": 1e3 * (ms(f"bounded {most}", "server rss mb") - ms("bounded 8", "server rss mb")) / (most - 8),
        "member_form_ms": 1e3 * float(np.median(form)) / members,
        "beats_share": float(np.median(beats)),
        "mesh_us": ms(f"mesh {MESHES[-1]}", "ranks us"),
        "mesh_store_us": ms(f"mesh {MESHES[-1]}", "store us"),
    }


def server_ms(found: Mapping[str, float], *, servers: int, workers: int, rows: float, tables: int) -> float:
    """CPU milliseconds per step of a server in `bounded`: a call of each worker, with its share of the rows."""
    call = found["call_us" if workers > 8 else "call_8_us"]
    return workers * (call + tables * found["table_us"] + rows / servers * found["row_us"]) / 1e3


def rows_of_step(workers: int) -> float:
    """Distinct ids per worker and step of W1: what a pull requests."""
    ids_FS = np.load(w1_data.drawn(scaling.NUM_BATCHES * workers, seed=1) / "ids_FS.npy", mmap_mode="r")
    steps = range(0, 4 * workload.BATCH, workload.BATCH)
    return float(np.mean([sum(np.unique(ids_S[at : at + workload.BATCH]).size for ids_S in ids_FS) for at in steps]))


def job(found: Mapping[str, float], seconds: float, *, servers: int, workers: int) -> harness.Figures:
    rows, tables = rows_of_step(workers), len(workload.TABLE_SIZES)
    predicted = server_ms(found, servers=servers, workers=workers, rows=rows, tables=tables)
    run = scaling.measured(
        servers=servers, workers=workers, wait_ms=WAIT_MS, dim=16, warm_up_s=min(WARM_UP_S, seconds), seconds=seconds
    )
    measured = run["server_cpu_us"] * workload.BATCH * workers / servers / 1e3
    return {
        "steps per s": run["steps_per_s"],
        "rows": rows,
        "predicted ms": predicted,
        "measured ms": measured,
        "ratio": measured / predicted,
    }


def ranks(found: Mapping[str, float], spreads: Mapping[str, Any]) -> dict[str, harness.Figures]:
    """The jobs of many_ranks.py that the constants do not come from: predicted and measured as `job` does."""
    figures = {}
    for name in [f"bounded {ranks}" for ranks in RANKS if f"bounded {ranks}" in spreads]:
        count = int(name.split()[1])
        predicted = server_ms(found, servers=1, workers=count, rows=ROWS, tables=1)
        measured = float(spreads[name]["server ms"]["median"])
        figures[name] = {"predicted ms": predicted, "measured ms": measured, "ratio": measured / predicted}
    return figures


def predictions(found: Mapping[str, float], *, servers: int) -> harness.Figures:
    """What nobody has measured: a job of many servers and 400 workers, each with W1's batch."""
    rows, tables = rows_of_step(1), len(workload.TABLE_SIZES)
    server = server_ms(found, servers=servers, workers=MANY_WORKERS, rows=rows, tables=tables)
    return {
        "rows": rows,
        "calls per step": servers * MANY_WORKERS,
        "server ms per step": server,
        "steps per s of one core": 1e3 / server,
        "worker ms per step": servers * found["client_us"] / 1e3,
        "form coordinator s": (servers + MANY_WORKERS) * found["member_form_ms"] / 1e3,
        "mesh s of one rank": MANY_WORKERS * found["mesh_us"] / 1e6,
        "mesh store s": MANY_WORKERS**2 * found["mesh_store_us"] / 1e6,
    }


def main() -> None:
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--ranks", type=Path, required=True, help="a result of many_ranks.py")
    options = harness.parse(parser)
    known = json.loads(options.ranks.read_text())["results"]["spreads"]
    found = constants(known)
    file = json.loads(options.json.read_text())["results"] if options.json and options.json.exists() else {}
    jobs: dict[str, list[harness.Figures]] = file.get("jobs", {})
    contestants: dict[str, harness.Contestant] = {
        f"servers {servers} workers {workers}": partial(job, found, servers=servers, workers=workers)
        for servers, workers in (JOBS[:1] if options.smoke else JOBS)
    }
    for name in [
        *(name for name in contestants if name not in jobs),
        None,
    ]:  # writes the file after each, and at the end
        if name is not None:
            jobs |= harness.alternate({name: contestants[name]}, rounds=options.rounds, seconds=options.seconds)
        large = {f"{servers} servers": predictions(found, servers=servers) for servers in MANY_SERVERS}
        results = {"constants": found, "ranks": ranks(found, known), "jobs": jobs, "predictions": large}
        harness.write(options.json, "scale", results)
    for name, rounds in jobs.items():
        harness.show_ratio(f"{name}, measured / predicted", harness.spread([each["ratio"] for each in rounds]))


if __name__ == "__main__":
    main()
