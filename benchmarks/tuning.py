"""How long do trials take by `shardkeep tune`, beside a loop over `shardkeep train` in a shell?

The same trials to their end, without pruning: every combination of widths and learning rates of a small job over a CSV,
in one process each. `tune` runs as many at once as there are cores, converts the file once and imports once; the loop
runs one after the other and finds the file converted from its second job on. Seconds and CPU seconds of both from an
empty cache; the seconds from `tune`'s first trial to the first step of the second one. `--seconds` has no effect.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import harness
import numpy as np

TUNE, LOOP = "shardkeep tune", "a loop over shardkeep train"
TARGET, START_S = 0.8, 2.0
SHARDKEEP = (sys.executable, "-m", "shardkeep")
OVER = {"model.hidden": ["[64, 32]", "[128, 64]", "[256, 128]"], "tower.optimizer.lr": ["0.001", "0.003"]}
JOB = """
name: clicks
servers: 0
data:
  {train: [clicks.csv], split: {by: random, eval: 0.1, test: 0}, label: click, dense: [price],
   sparse: [user, item, hour]}
model: {name: dnn}
train: {batch_size: 512, epochs: 2, report_every_s: 0.1}
"""


def write_files(folder: Path, rows: int) -> None:
    """job.yaml and clicks.csv, whose label follows the user and the item."""
    random = np.random.default_rng(7)
    users, items = random.normal(size=5_000), random.normal(size=2_000)
    user_B, item_B = random.integers(0, len(users), rows), random.integers(0, len(items), rows)
    chance_B = 1.0 / (1.0 + np.exp(1.0 - users[user_B] - items[item_B]))
    click_B, price_B, hour_B = random.random(rows) < chance_B, random.random(rows), random.integers(0, 24, rows)
    with (folder / "clicks.csv").open("w", encoding="utf-8") as file:
        file.write("click,user,item,hour,price\n")
        file.writelines(
            f"{int(click)},u{user},i{item},{hour},{price:.4f}\n"
            for click, user, item, hour, price in zip(click_B, user_B, item_B, hour_B, price_B, strict=True)
        )
    (folder / "job.yaml").write_text(JOB, encoding="utf-8")


def by_tune(rows: int) -> harness.Figures:
    over = [part for key, values in OVER.items() for part in ("--over", f"{key}={','.join(values)}")]
    with tempfile.TemporaryDirectory(prefix="tuning-") as folder:
        figures = timed(Path(folder), rows, [["tune", "job.yaml", "--grid", "--out", "out", *over]])
        return figures | {"start_s": start_of_second(Path(folder) / "out")}


def by_loop(rows: int) -> harness.Figures:
    points = [dict(zip(OVER, values, strict=True)) for values in itertools.product(*OVER.values())]
    sets = [[part for key, value in point.items() for part in ("--set", f"{key}={value}")] for point in points]
    commands = [["train", "job.yaml", "--run-dir", f"runs/{number}", *each] for number, each in enumerate(sets)]
    with tempfile.TemporaryDirectory(prefix="tuning-") as folder:
        return timed(Path(folder), rows, commands)


def timed(folder: Path, rows: int, commands: list[list[str]]) -> harness.Figures:
    """Runs the commands one after the other on fresh files."""
    write_files(folder, rows)
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    for command in commands:
        subprocess.run([*SHARDKEEP, *command], cwd=folder, stdout=subprocess.DEVNULL, check=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": time.perf_counter() - began, "cpu_s": cpu_s, "load": os.getloadavg()[0]}


def start_of_second(out: Path) -> float:
    """Seconds from the start of the second trial, when its job is written, to its first record of a trained step."""
    for line in (out / "runs" / "1" / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record.get("step"):
            first = datetime.datetime.fromisoformat(record["time"]).timestamp()
            return first - (out / "jobs" / "1.yaml").stat().st_mtime
    raise harness.CannotRun("the second trial has trained no step")


def main() -> None:
    options = harness.parse(harness.arguments(__doc__))
    rows = 5_000 if options.smoke else 200_000
    contestants: dict[str, harness.Contestant] = {TUNE: lambda _: by_tune(rows), LOOP: lambda _: by_loop(rows)}
    if not options.smoke:
        by_loop(1_000)  # so that the kernels are there
    found = harness.alternate(contestants, rounds=options.rounds, seconds=options.seconds)
    for name, rounds in found.items():
        print(name, *(f"{key} {harness.spread([each[key] for each in rounds])}" for key in rounds[0]))
    harness.show_ratio(f"seconds, {TUNE} / {LOOP}", harness.ratios(found, TUNE, LOOP, "seconds"), TARGET)
    harness.write(options.json, "tuning", {"rounds": found, "target": TARGET, "start_target_s": START_S})


if __name__ == "__main__":
    main()
