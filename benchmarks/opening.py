"""How soon does an export with large tables answer, and which memory does it take?

    python benchmarks/opening.py                # one table of 10 GB, D = 64
    python benchmarks/opening.py --gigabytes 1

Each round opens the export in new processes: once after its files have left the page cache, and in two processes at
once that have read the same rows. Figures: seconds of imports, and to open; milliseconds of the first answer (one row
of the table, then 1,000 rows) and of later ones; anonymous memory (RssAnon) and shared memory of files (RssFile).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import numpy as np

DIM = 64
TARGETS = {"open_s": 1.0, "anonymous_mb": 400.0}


def small_export(folder: Path) -> Path:
    """A trained model with one feature, and its export."""
    import shardkeep
    from shardkeep.inference.export.writing import export_run

    random = np.random.default_rng(1)
    users = random.integers(0, 100, 2000)
    lines = [
        "clicked,user,price",
        *(f"{u % 3 % 2},{u},{p:.2f}" for u, p in zip(users, random.random(2000), strict=True)),
    ]
    (folder / "train.csv").write_text("\n".join(lines) + "\n")
    config: dict[str, Any] = {
        "servers": 0,
        "workers": 1,
        "data": {"train": str(folder / "train.csv"), "label": "clicked", "dense": ["price"], "sparse": ["user"]},
        "model": {"bottom": [256], "hidden": [512, 256]},
        "tables": {"default": {"dim": DIM}},
        "tower": {"amp": "off"},
        "train": {"batch_size": 128},
    }
    shardkeep.train(shardkeep.JobConfig.model_validate(config), run_dir=folder / "run", quiet=True)
    export_run(folder / "run", folder / "model")
    return folder / "model"


def enlarge(out: Path, rows: int) -> None:
    """Gives the export's table as many rows, with random ids, in place of the trained ones."""
    from shardkeep.inference.export.manifest import commit, new_files, read_manifest, records_of
    from shardkeep.inference.export.rows import write_rows
    from shardkeep.inference.export.tower import TOWER
    from shardkeep.ps.placement import keys_of

    random = np.random.default_rng(2)
    ids_N = np.unique(random.integers(-(2**63), 2**63 - 1, rows))
    ids_N = ids_N[np.argsort(keys_of(ids_N))]
    block = (random.normal(size=(1 << 16, DIM)) * 0.1).astype(np.float32)
    manifest = read_manifest(out)
    parts = ((ids_N[i : i + (1 << 16)], block[: min(1 << 16, ids_N.size - i)]) for i in range(0, ids_N.size, 1 << 16))
    with new_files(out) as folder:
        table = write_rows(folder, 0, manifest.tables[0].spec, parts, "fp32")
        (folder / TOWER).write_bytes((out / manifest.folder / TOWER).read_bytes())
        files = records_of(out, list(folder.iterdir()))
        commit(out, replace(manifest, folder=folder.name, tables=(table,), files=files))
    np.save(out.parent / "ids.npy", random.choice(ids_N, min(200_000, ids_N.size), replace=False))


def asked(out: Path, hold: bool) -> None:
    """One process: opens, answers, prints its figures; waits for stdin's end if `hold`."""
    import psutil

    started = time.perf_counter()
    import shardkeep
    import shardkeep.inference.export.opening
    import shardkeep.inference.predictor

    ids_N = np.load(out.parent / "ids.npy")
    rows = {"user": ids_N[:1], "price": np.zeros(1)}
    began = time.perf_counter()
    predictor = shardkeep.load(out)
    opened = time.perf_counter()
    predictor.predict(rows)
    first = time.perf_counter()
    many = {"user": ids_N[:1000], "price": np.zeros(1000)}
    predictor.predict(many)
    thousand = time.perf_counter()
    predictor.predict(many)
    again = time.perf_counter()
    predictor.rows("user", ids_N)
    read = time.perf_counter()
    status = dict(
        line.split(":", 1)
        for line in Path(f"/proc/{psutil.Process().pid}/status").read_text().splitlines()
        if ":" in line
    )
    figures = {
        "imports_s": began - started,
        "open_s": opened - began,
        "first_ms": (first - opened) * 1e3,
        "thousand_cold_ms": (thousand - first) * 1e3,
        "thousand_warm_ms": (again - thousand) * 1e3,
        "rows_200k_s": read - again,
        "anonymous_mb": int(status["RssAnon"].split()[0]) / 1e3,
        "file_mb": int(status["RssFile"].split()[0]) / 1e3,
    }
    print(json.dumps(figures), flush=True)
    if hold:
        sys.stdin.read()


def started(out: Path, *, hold: bool = False) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--asked", str(out), *(["--hold"] if hold else [])]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def figures_of(process: subprocess.Popen[str]) -> harness.Figures:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"the process that opens the export ended with {process.wait()}")
    found: harness.Figures = json.loads(line)
    return found


def cold(out: Path) -> harness.Figures:
    from shardkeep.base.files import let_go

    for path in out.rglob("*.safetensors"):
        let_go(path)
    process = started(out)
    found = figures_of(process)
    process.communicate(timeout=60)
    return found


def two_at_once(out: Path) -> harness.Figures:
    """The memory of two processes that hold the same rows: their proportional sets (Pss) count shared pages once."""
    both = [started(out, hold=True) for _ in range(2)]
    try:
        found = figures_of(both[0])
        figures_of(both[1])
        text = Path(f"/proc/{both[0].pid}/smaps_rollup").read_text()
        return found | {
            "proportional_mb": next(int(line.split()[1]) / 1e3 for line in text.splitlines() if line.startswith("Pss:"))
        }
    finally:
        for process in both:
            process.communicate(timeout=60)


def main() -> None:
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--gigabytes", type=float, default=10.0, help="size of the table's rows")
    parser.add_argument("--asked", type=Path, help="used by this script alone")
    parser.add_argument("--hold", action="store_true", help="used by this script alone")
    options = harness.parse(parser)
    if options.asked is not None:
        asked(options.asked, options.hold)
        return
    rows = int((0.05 if options.smoke else options.gigabytes) * 1e9 / (DIM * 4))
    with tempfile.TemporaryDirectory(prefix="opening-") as name:
        out = small_export(Path(name))
        enlarge(out, rows)
        found = harness.alternate(
            {"cold": lambda _: cold(out), "two at once": lambda _: two_at_once(out)}, rounds=options.rounds, seconds=0
        )
    results: dict[str, Any] = {"rows": rows, "dim": DIM, "rounds": found}
    for key, target in TARGETS.items():
        spread = harness.spread([figures[key] for figures in found["cold"]])
        print(f"{key:<14} {spread['min']:.3g} / {spread['median']:.3g} / {spread['max']:.3g}   target {target:g}")
        results[key] = spread
    harness.write(options.json, "opening", results)


if __name__ == "__main__":
    main()
