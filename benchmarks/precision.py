"""What do rows of fp16, bf16 and int8 cost? Bytes and ns of a row beside fp32, and AUC over seeds on real data.

python benchmarks/precision.py --data FOLDER      # FOLDER holds adult/ and census_income_kdd/ (docs/guide/data.md)
python benchmarks/precision.py                    # bytes and ns alone
"""
# U = unique ids, D = embedding dim

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
import numpy as np

HERE = Path(__file__).resolve().parent
EXAMPLES = {"adult": "adult", "census": "census_income_kdd"}
COUNTERS = 2
"""Words of a row that tables with an expiry have in addition."""
ROWS, BATCH, BATCHES = 1_000_000, 8192, 32
PRECISIONS = (("fp32", "fp32"), ("fp16", "fp32"), ("bf16", "fp32"), ("int8", "fp32"))
WITH_STATE = (*PRECISIONS, ("fp32", "bf16"), ("fp16", "bf16"), ("int8", "bf16"))
TARGETS = {"fp16": 0.55, "int8": 0.35}
OPTIMIZERS = {"rowwise_adagrad": PRECISIONS, "adam": WITH_STATE}
ONE_PROCESS = ("servers=0", "workers=1", "consistency.mode=sync")  # fast, and the same bits in every run


def main() -> None:
    parser = harness.arguments(__doc__.split("\n")[0])
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--data", type=Path, help="folder of adult/ and census_income_kdd/")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    options = harness.parse(parser)
    results: dict[str, Any] = {"bytes": bytes_of_rows(options.dims), "updates": updates(options)}
    if options.data is not None:
        results["auc"] = quality(options)
    harness.write(options.json, "precision", results)


# ---- bytes -----------------------------------------------------------------------------------------------------------


def bytes_of_rows(dims: Sequence[int]) -> list[dict[str, Any]]:
    """Bytes of records, whole words of padding included, without the index."""
    from shardkeep.ps.server.table.layout import RowLayout

    found = []
    print(f"{'bytes of a row':<36}{'alone':>8}{'share':>8}{'counters':>10}{'share':>8}")
    for optimizer, dim in itertools.product(OPTIMIZERS, dims):
        plain = [0, 0]
        for rows, state in OPTIMIZERS[optimizer]:
            used = RowLayout.of(_spec(optimizer, dim, rows, state)).width
            sizes = [4 * (words + words % 2) for words in (used, used + COUNTERS)]
            plain = sizes if (rows, state) == ("fp32", "fp32") else plain
            shares = [size / whole for size, whole in zip(sizes, plain, strict=True)]
            name = f"{optimizer} D={dim} {rows}, state {state}"
            target = TARGETS.get(rows) if (optimizer, dim) == ("rowwise_adagrad", 64) else None
            wanted = "" if target is None else f"   target {target:.2f}{'' if shares[1] <= target else '   over'}"
            print(f"{name:<36}{sizes[0]:>8}{shares[0]:>8.3f}{sizes[1]:>10}{shares[1]:>8.3f}{wanted}")
            found.append({"name": name, "bytes": sizes[0], "with_counters": sizes[1], "share": shares[1]})
    return found


def _spec(optimizer: str, dim: int, rows: str, state: str) -> Any:
    from shardkeep.ps.config import TableSpec

    return TableSpec.model_validate(
        {"name": "t", "dim": dim, "optimizer": optimizer, "dtype": rows, "state_dtype": state, "init": {"scale": 0.05}}
    )


# ---- ns --------------------------------------------------------------------------------------------------------------


def updates(options: argparse.Namespace) -> dict[str, Any]:
    """Pulls and updates of random rows of a table of a million rows, in one thread."""
    found: dict[str, Any] = {}
    for optimizer, dim in itertools.product(OPTIMIZERS, options.dims):
        contestants = {
            f"{optimizer} D={dim} {rows}, state {state}": _contestant(_spec(optimizer, dim, rows, state), options.smoke)
            for rows, state in OPTIMIZERS[optimizer]
        }
        share_s = options.seconds / len(contestants)
        rounds = harness.alternate(contestants, rounds=options.rounds, seconds=share_s)
        plain = next(iter(contestants))
        for name in contestants:
            for key in ("pull_ns", "update_ns"):
                harness.show_ratio(f"{name}: {key} / fp32", harness.ratios(rounds, name, plain, key))
        found |= rounds
    return found


def _contestant(spec: Any, smoke: bool) -> harness.Contestant:
    def run(seconds: float) -> harness.Figures:
        from shardkeep.ps.jagged import Gradients, SectionIds
        from shardkeep.ps.server.tables import Tables

        harness.pin(0)
        rng, tables = np.random.default_rng(0), Tables([spec], seed=1)
        rows = ROWS // 20 if smoke else ROWS

        def sections(ids_U: Any) -> SectionIds:
            return SectionIds(np.zeros(1, np.int64), np.array([0, ids_U.size]), ids_U)

        for begin in range(0, rows, BATCH):
            ids_U = np.arange(begin, min(begin + BATCH, rows))
            tables.apply([Gradients(sections(ids_U), np.zeros(ids_U.size * spec.dim, np.float32))], step=0)
        pushes = [sections(np.unique(rng.integers(0, rows, BATCH))) for _ in range(BATCHES)]
        grads = (rng.normal(size=BATCH * spec.dim) * 1e-3).astype(np.float32)
        values, spent, end = np.empty_like(grads), {"pull_ns": [0.0], "update_ns": [0.0]}, time.perf_counter() + seconds
        for step in itertools.count(1):
            push = pushes[step % BATCHES]
            size = push.ids_V.size * spec.dim
            times = [time.perf_counter()]
            pulled = tables.pull(push, values[:size])
            times.append(time.perf_counter())
            tables.apply([Gradients(push, grads[:size], pulled)], step=step)
            times.append(time.perf_counter())
            for key, spent_s in zip(spent, np.diff(times), strict=True):
                spent[key].append(float(spent_s) / push.ids_V.size * 1e9)
            if times[-1] > end:
                break
        # The median: the machine may have other work.
        figures = {key: float(np.median(each[len(each) // 4 :])) for key, each in spent.items()}
        return figures | {"bytes_per_row": tables[0].size_bytes / tables[0].num_rows}

    return run


# ---- AUC -------------------------------------------------------------------------------------------------------------


def quality(options: argparse.Namespace) -> dict[str, Any]:
    """AUC of whole jobs: the same seed, the same data in the same order, another precision of all tables."""
    found: dict[str, Any] = {}
    for example in EXAMPLES:
        aucs: dict[str, list[float]] = {}
        for seed, (rows, state) in itertools.product(
            options.seeds[: 1 if options.smoke else None], _jobs(options.smoke)
        ):
            name, optimizer = _named(rows, state)
            auc = _auc(example, seed, rows, state, optimizer, options)
            aucs.setdefault(name, []).append(auc)
            print(f"{example} seed {seed} {name:<34} AUC {auc:.5f}", flush=True)
        found[example] = aucs
        for name, each in aucs.items():
            plain = aucs["adam fp32" if name.startswith("adam") else "fp32"]
            cost = harness.spread([a - b for a, b in zip(each, plain, strict=True)])
            mean, of_fp32 = np.mean(each), np.mean(plain)
            print(
                f"{example:<8}{name:<34} mean {mean:.5f}, {mean - of_fp32:+.5f} beside fp32, "
                f"pairs {cost['min']:+.5f} / {cost['median']:+.5f} / {cost['max']:+.5f}"
            )
    return found


def _jobs(smoke: bool) -> list[tuple[str, str]]:
    jobs = [*PRECISIONS, ("fp32", "adam"), ("fp32", "bf16"), ("int8", "bf16")]
    return jobs[1:2] + jobs[:1] if smoke else jobs


def _named(rows: str, state: str) -> tuple[str, str]:
    """The name of a job, and its row optimizer; `state` adam = fp32 state of Adam."""
    if state == "fp32":
        return rows, "rowwise_adagrad"
    return ("adam fp32" if state == "adam" else f"adam {rows}, state bf16"), "adam"


def _auc(example: str, seed: int, rows: str, state: str, optimizer: str, options: argparse.Namespace) -> float:
    import shardkeep
    from shardkeep.config import load_config

    settings = [f"seed={seed}", f"data.root={(options.data / EXAMPLES[example]).resolve()}", *ONE_PROCESS]
    settings += [f"tables.default.dtype={rows}", f"tables.default.state_dtype={state if state == 'bf16' else 'fp32'}"]
    if optimizer == "adam":
        settings.append("tables.default.optimizer={name: adam, lr: 0.002}")
    if options.smoke:
        settings.append("train.max_steps=12")
    config = load_config(HERE.parent / "examples" / f"{example}.yaml", settings)
    with tempfile.TemporaryDirectory() as folder:
        summary = shardkeep.train(config, run_dir=Path(folder) / "run", quiet=True)
    assert summary.eval is not None
    return float(summary.eval.auc)


if __name__ == "__main__":
    main()
