#!/usr/bin/env python3
"""How fast are samples read and trained on where memory holds a quarter of them, beside the same samples in memory?

A control group with a memory limit holds the process, and the page cache counts. The process is fresh, and no page of
the data is cached as it starts. Needs root, or control groups that this user may make. `--folder` keeps the data.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import shardkeep
from shardkeep.base.machine.control_groups import groups_of
from shardkeep.config import JobConfig
from shardkeep.workers.data.samples import Data, ReadsAhead
from shardkeep.workers.data.sampling import Blocks, StepSlices
from shardkeep.workers.data.sources.registry import open_data

ROWS, PART = 18_000_000, 1_000_000
NUM_DENSE, NUM_IDS = 13, 26
BATCH = 1_024
SHARE = 4
"""The data have so many times the memory limit."""
TARGET = 0.7
FORMS = {"in memory": "rows", "rows": "rows", "blocks": "blocks"}
"""The shuffle of each contestant. The first one has no limit."""


class Enough(Exception):
    """A job has run for long enough."""


def job_of(folder: Path, shuffle: str) -> JobConfig:
    """Small layers and rows, so that a step waits for its samples as soon as it can."""
    return JobConfig.model_validate(
        {
            **harness.ONE_PROCESS,
            "data": {
                "root": str(folder),
                "train": ["*.parquet"],
                "cache": str(folder / "cache"),
                "label": "label",
                "dense": [f"I{i + 1}" for i in range(NUM_DENSE)],
                "sparse": [f"C{f + 1}" for f in range(NUM_IDS)],
                "shuffle": shuffle,
            },
            "model": {"name": "dlrm", "bottom": [16], "hidden": [16]},
            "tables": {"default": {"dim": 4}},
            "tower": {"compile": "off", "amp": "off"},
            "train": {"batch_size": BATCH, "epochs": 1_000},
            "checkpoint": {"every_steps": "off"},
        }
    )


def make(folder: Path, rows: int) -> None:
    """Writes the synthetic clicks as Parquet files, where they are not there yet."""
    synthetic = {"train_samples": rows, "eval_samples": 2, "num_dense": NUM_DENSE}
    job = JobConfig.model_validate({"data": {"source": "synthetic", "synthetic": synthetic}})
    train = open_data(job.data, seed=1).train
    for start in range(0, rows, PART):
        path = folder / f"part-{start:012}.parquet"
        if not path.exists():
            batch = train.gather(np.arange(start, min(start + PART, rows)))
            columns: dict[str, Any] = {"label": batch.label_BT[:, 0].astype(np.uint8)}
            columns |= {f"I{i + 1}": np.ascontiguousarray(batch.dense_BI[:, i]) for i in range(NUM_DENSE)}
            columns |= {name: ragged.values_N for name, ragged in batch.ids.items()}
            pq.write_table(pa.table(columns), path, compression="none", use_dictionary=False)


@contextlib.contextmanager
def memory_limit(size: int) -> Iterator[Path]:
    """A control group inside our own one that may use `size` bytes. Raises CannotRun where there is none to be had."""
    folders, version = groups_of("memory")
    if not folders:
        raise harness.CannotRun("no control group of memory is mounted")
    group = folders[0] / f"out-of-memory-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        raise harness.CannotRun(f"{group}: {error.strerror}") from error
    try:
        (group / ("memory.limit_in_bytes" if version == 1 else "memory.max")).write_text(str(size))
        yield group
    except OSError as error:
        raise harness.CannotRun(f"{error.filename}: {error.strerror}") from error
    finally:
        deadline = time.monotonic() + 60
        while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:  # processes that end
            time.sleep(0.1)
        group.rmdir()


def read(data: Data, shuffle: str, seconds: float) -> harness.Figures:
    """Samples per second of a loop that gathers, with what is read ahead."""
    blocks = Blocks() if shuffle == "blocks" else None
    slices = StepSlices(len(data.train), batch_size=BATCH, epochs=1_000, shuffle=blocks or True)
    step, began = 0, time.monotonic()
    while time.monotonic() - began < seconds:
        if isinstance(data.train, ReadsAhead):
            for start, stop in slices.ahead(step, begins=step == 0):
                data.train.prefetch(start, stop)
        data.train.gather(slices.rows(step, 0))
        step += 1
    return {"samples_per_s": step * BATCH / (time.monotonic() - began)}


def train(job: JobConfig, seconds: float) -> harness.Figures:
    """Samples per second of a job in one process that a callback ends, from its first report on, and the share of
    its time in which steps wait for samples."""
    reports, waits = list[tuple[float, int]](), list[float]()

    class Ends(shardkeep.Callback):
        def on_progress(self, event: Any) -> None:
            reports.append((time.monotonic(), event.samples))
            waits.append(event.step_ms["data"] / event.step_ms["total"])
            if reports[-1][0] - reports[0][0] > seconds:
                raise Enough

    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(Enough):
        shardkeep.train(job, run_dir=Path(folder) / "run", quiet=True, callbacks=[Ends()])
    (began, first), (end, last) = reports[0], reports[-1]
    return {"samples_per_s": (last - first) / (end - began), "waits": sum(waits[1:]) / len(waits[1:])}


def child(queue: Any, what: str, folder: Path, form: str, group: Path | None, seconds: float) -> None:
    if group is not None:
        (group / "cgroup.procs").write_text(str(os.getpid()))
    job = job_of(folder, FORMS[form])
    for path in (folder / "cache").rglob("*"):
        if path.is_file() and group is None:
            with path.open("rb") as file:
                while file.read(1 << 24):
                    pass
    queue.put(
        read(open_data(job.data, seed=job.seed), job.data.shuffle, seconds) if what == "read" else train(job, seconds)
    )


def run(what: str, folder: Path, form: str, limit: int, seconds: float) -> harness.Figures:
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.Queue()
    with contextlib.nullcontext() if form == "in memory" else memory_limit(limit) as group:
        process = spawn.Process(target=child, args=(queue, what, folder, form, group, seconds))
        return harness.result_of([process], queue, limit_s=10 * seconds + 300)


def main() -> None:
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--folder", type=Path, help="where the data lie, and stay")
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--only", nargs="+", default=["read", "train"], choices=["read", "train"])
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=list(FORMS))
    options = harness.parse(parser)
    with tempfile.TemporaryDirectory() as own:
        folder, rows = options.folder or Path(own), PART if options.smoke else options.rows
        folder.mkdir(exist_ok=True, parents=True)
        make(folder, rows)
        job = job_of(folder, "rows")
        size = open_data(job.data, seed=job.seed).stored_bytes
        os.sync()
        limit = max(size // SHARE, 1 << 30 if options.smoke else 0)
        print(f"{size:,} bytes of samples, a limit of {limit:,}")
        results: dict[str, Any] = {}
        for what in options.only:
            forms = {form: partial(run, what, folder, form, limit) for form in options.forms}
            results[what] = harness.alternate(forms, rounds=options.rounds, seconds=options.seconds)
            for form in ("rows", "blocks"):
                ratio = harness.ratios(results[what], form, "in memory", "samples_per_s")
                harness.show_ratio(f"{what}: {form} beside in memory", ratio, TARGET)
        harness.write(options.json, "out_of_memory", {"rows": rows, "bytes": size, "limit": limit, "rounds": results})


if __name__ == "__main__":
    main()
