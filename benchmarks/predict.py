"""How fast does `shardkeep predict` score a file, beside pandas and nn.EmbeddingBag with the same dense model?

    python benchmarks/predict.py                 # 1 M and 10 M rows; needs pandas
    python benchmarks/predict.py --rows 200000 --rounds 1

Both sides read the same parquet file and write a parquet file of scores, with one thread, in processes of their own.
Figures: rows/s; seconds without those inside the dense model; the largest anonymous memory (RssAnon).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import harness
import numpy as np

SPARSE, DENSE, IDS, DIM = 10, 4, 100_000, 16
HIDDEN = [512, 256]
BATCH = 2048
TEXTS = [f"{i * 2_654_435_761 % 2**32:08x}" for i in range(IDS)]


def write_rows(path: Path, rows: int, seed: int, *, texts: bool) -> None:
    """Rows of numbers, ids by Zipf's law, and labels that follow some of them. `texts`: ids are hexadecimal texts."""
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    random = np.random.default_rng(seed)
    names = [*(f"d{i}" for i in range(DENSE)), *(f"s{i}" for i in range(SPARSE))]
    kinds = [pa.float32()] * DENSE + [pa.string() if texts else pa.int64()] * SPARSE
    schema = pa.schema([*zip(names, kinds, strict=True), ("label", pa.int8())])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, rows, 1_000_000):
            n = min(1_000_000, rows - start)
            dense = [random.normal(size=n).astype(np.float32) for _ in range(DENSE)]
            sparse = [(random.zipf(1.2, n) * 2_654_435_761 + i) % IDS for i in range(SPARSE)]
            chance = 1 / (1 + np.exp(-(dense[0] + (sparse[0] % 5 - 2))))
            ids = [pa.array(TEXTS).take(pa.array(column)) if texts else column for column in sparse]
            columns = [*dense, *ids, (random.random(n) < chance).astype(np.int8)]
            writer.write_table(pa.table(columns, schema=schema))


def train(folder: Path, *, texts: bool) -> Path:
    """A run with rows for most ids. Returns its folder."""
    import shardkeep

    write_rows(folder / "train.parquet", 300_000, seed=1, texts=texts)
    config: dict[str, Any] = {
        "servers": 0,
        "workers": 1,
        "data": {
            "train": str(folder / "train.parquet"),
            "label": "label",
            "dense": [f"d{i}" for i in range(DENSE)],
            "sparse": [f"s{i}" for i in range(SPARSE)],
        },
        "model": {"name": "dlrm", "bottom": HIDDEN, "hidden": HIDDEN},
        "tables": {"default": {"dim": DIM}},
        "tower": {"amp": "off"},
        "train": {"batch_size": BATCH // 4},
    }
    shardkeep.train(shardkeep.JobConfig.model_validate(config), run_dir=folder / "run", quiet=True)
    return folder / "run"


class Timed:
    """Seconds inside a module's forward, and the largest RssAnon of this process, MB."""

    def __init__(self, module: Any) -> None:
        self.seconds, self.most_mb, self._over = 0.0, 0.0, threading.Event()
        forward = module.forward

        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = forward(*arguments)
            self.seconds += time.perf_counter() - began
            return result

        module.forward = timed
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            text = Path("/proc/self/status").read_text()
            self.most_mb = max(self.most_mb, int(text.split("RssAnon:")[1].split()[0]) / 1024)

    def figures(self, rows: int, seconds: float) -> dict[str, float]:
        self._over.set()
        return {
            "rows_per_s": rows / seconds,
            "dense_model_s": self.seconds,
            "rest_s": seconds - self.seconds,
            "rss_anon_mb": self.most_mb,
        }


def ours(run: Path, data: Path, out: Path, rows: int) -> dict[str, float]:
    import torch

    from shardkeep.inference import scoring
    from shardkeep.inference.loading import load_trained

    torch.set_num_threads(1)
    trained = load_trained(run)
    timed = Timed(trained.dense.model)
    scoring.load_trained = lambda *_: trained  # type: ignore[assignment]
    began = time.perf_counter()
    scoring.predict_files(run, [data], out)
    return timed.figures(rows, time.perf_counter() - began)


def plain(run: Path, data: Path, out: Path, rows: int) -> dict[str, float]:
    """The same weights in nn.EmbeddingBag, behind a vocabulary of each column."""
    import pandas as pd  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import torch

    from shardkeep.inference.loading import load_trained
    from shardkeep.inference.predictor import Predictor

    torch.set_num_threads(1)
    trained = load_trained(run)
    rows_of_run = Predictor(trained)
    model, transform = trained.dense.model.eval(), trained.inputs.fitted.transform  # type: ignore[union-attr]
    origins = trained.inputs.fitted.origins  # type: ignore[union-attr]
    import pyarrow.parquet as pq

    texts = str(pq.read_schema(data).field("s0").type) != "int64"
    known = np.array(TEXTS, object) if texts else np.arange(IDS)
    bags = {
        name: torch.nn.EmbeddingBag.from_pretrained(torch.from_numpy(rows_of_run.rows(name, known)), mode="sum")
        for name in (f"s{i}" for i in range(SPARSE))
    }
    vocabulary = {name: pd.Index(known) for name in bags}
    timed, scores = Timed(model), []
    began = time.perf_counter()
    frame = pd.read_parquet(data)
    stored = frame[[f"d{i}" for i in range(DENSE)]].to_numpy(np.float32) - np.asarray(origins, np.float32)
    dense = torch.from_numpy((stored - transform.shift_I) * transform.factor_I)
    ids = {name: torch.from_numpy(vocabulary[name].get_indexer(frame[name])) for name in bags}
    with torch.no_grad():
        for start in range(0, len(frame), BATCH):
            part = slice(start, start + BATCH)
            rows_of = {name: bag(ids[name][part][:, None]) for name, bag in bags.items()}
            scores.append(torch.sigmoid(model(dense[part], rows_of)))
    pd.DataFrame({"score": torch.cat(scores).numpy().reshape(-1)}).to_parquet(out)
    return timed.figures(rows, time.perf_counter() - began)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", nargs="+", type=int, default=[1_000_000, 10_000_000])
    parser.add_argument("--ids", nargs="+", choices=["texts", "numbers"], default=["texts", "numbers"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--smoke", action="store_true", help="one round of few rows: does it run at all")
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        side, run, data, out, rows = options.one
        print(json.dumps((ours if side == "ours" else plain)(Path(run), Path(data), Path(out), int(rows))))
        return 0
    if importlib.util.find_spec("pandas") is None:
        print("predict.py: pandas is needed, in the same environment")
        return 2
    if options.smoke:
        options.rows, options.rounds, options.ids = [20_000], 1, ["numbers"]
    results: dict[str, Any] = {}
    for ids in options.ids:
        with tempfile.TemporaryDirectory() as name:
            folder, texts = Path(name), ids == "texts"
            run = train(folder, texts=texts)
            for rows in options.rows:
                data = folder / f"{rows}.parquet"
                write_rows(data, rows, seed=2, texts=texts)
                results[f"{rows} {ids}"] = _rounds(run, data, folder, rows, options.rounds)
                data.unlink()
    harness.write(options.json, "predict", results)
    return 0


def _rounds(run: Path, data: Path, folder: Path, rows: int, rounds: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {"ours": [], "plain": []}
    for _ in range(rounds):
        for side in found:
            out = folder / f"{side}.parquet"
            command = [sys.executable, __file__, "--one", side, str(run), str(data), str(out), str(rows)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{side}: {done.stderr.strip().splitlines()[-1]}")
            found[side].append(json.loads(done.stdout.splitlines()[-1]))
    _check_equal(folder)
    rest = harness.ratios(found, "plain", "ours", "rest_s")
    whole = harness.spread([f["dense_model_s"] / (f["dense_model_s"] + f["rest_s"]) for f in found["ours"]])
    print(f"{rows:,} rows")
    for side, figures in found.items():
        spread = {key: harness.spread([each[key] for each in figures]) for key in figures[0]}
        print(f"  {side:<6}" + "  ".join(f"{key} {value['median']:,.1f}" for key, value in spread.items()), flush=True)
    harness.show_ratio("  all but the dense model, plain / ours", rest, 3.0)
    harness.show_ratio("  rows/s, ours / the bare dense model", whole, 0.9)
    return {"found": found, "rest_ratio": rest, "share_of_bare_model": whole}


def _check_equal(folder: Path) -> None:
    import pyarrow.parquet as pq

    scores = [pq.read_table(folder / f"{side}.parquet")["score"].to_numpy() for side in ("ours", "plain")]
    if not np.allclose(*scores, atol=1e-4):
        raise SystemExit(f"the scores differ by up to {np.abs(scores[0] - scores[1]).max()}")


if __name__ == "__main__":
    sys.exit(main())
