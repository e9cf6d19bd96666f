"""What does each number format cost: ns per row to encode and decode, beside the time that raw rows take on a link?"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import harness
import numpy as np
import torch

from shardkeep.base.arrays import Rows
from shardkeep.compression.values.codec import RowCodec
from shardkeep.compression.values.codecs import built_in
from shardkeep.compression.values.draws import Draws
from shardkeep.compression.values.registry import FORMATS

# Encode + decode may take this share of the time to send raw fp32 rows over a link of so many Gbit/s.
STRICT = {"fp16", "int8"}
STRICT_SHARE, STRICT_GBIT = 0.6, 10.0
SHARE, GBIT = 0.2, 1.0
NO_DRAWS = Draws(np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.int64), step=0)


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--rows", type=int, default=50_000, help="rows in a call")
    parser.add_argument("--dims", type=int, nargs="+", default=[16])
    options = harness.parse(parser)
    harness.pin(0)
    torch.set_num_threads(1)  # as a role has it
    results = {f"D={dim}": measure(dim, options) for dim in options.dims}
    harness.write(options.json, "codecs", results)


def measure(dim: int, options: argparse.Namespace) -> dict[str, Any]:
    rows_KD = np.random.default_rng(0).normal(size=(options.rows, dim)).astype(np.float32)
    contestants = {
        f"{name}{f'/{scale}' if scale else ''}": _contestant(built_in(tag).codec, rows_KD)
        for name, entry in FORMATS.items()
        for scale, tag in entry.config.items()
    }
    share_s = options.seconds / len(contestants)
    found = harness.alternate(contestants, rounds=options.rounds, seconds=share_s)
    raw_ns = {gbit: 4 * dim * 8 / gbit for gbit in (GBIT, STRICT_GBIT)}
    fast, slow = f"{raw_ns[STRICT_GBIT]:.1f} ns at {STRICT_GBIT:g} Gbit/s", f"{raw_ns[GBIT]:.1f} ns at {GBIT:g} Gbit/s"
    print(f"\nD = {dim}: a raw row takes {fast}, {slow}")
    print(f"{'format':<28}{'bytes':>6}{'encode':>9}{'decode':>9}{'sum ns':>9}{'limit':>8}   of raw at 10 G, 1 G")
    return {"rounds": found, "limits": [_show(name, rounds, raw_ns) for name, rounds in found.items()]}


def _contestant(codec: RowCodec, rows_KD: Rows) -> harness.Contestant:
    def run(seconds: float) -> harness.Figures:
        num_rows, dim = rows_KD.shape
        encoded = codec.encode(rows_KD, NO_DRAWS)
        encode_s = _best_s(lambda: codec.encode(rows_KD, NO_DRAWS), seconds / 2)
        decode_s = _best_s(lambda: codec.decode(encoded, dim), seconds / 2)
        relative = np.linalg.norm(codec.decode(encoded, dim) - rows_KD, axis=1) / np.linalg.norm(rows_KD, axis=1)
        return {
            "row_bytes": float(codec.row_bytes(dim)),
            "encode_ns": encode_s / num_rows * 1e9,
            "decode_ns": decode_s / num_rows * 1e9,
            "relative_error": float(relative.mean()),
        }

    return run


def _best_s(call: Callable[[], object], seconds: float) -> float:
    """The fastest of the calls that fit in: what others do on the machine only adds."""
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def _show(name: str, rounds: list[harness.Figures], raw_ns: dict[float, float]) -> dict[str, Any]:
    """A line of the table: the fastest round, as within a round."""
    best = {key: min(figures[key] for figures in rounds) for key in rounds[0]}
    total_ns = best["encode_ns"] + best["decode_ns"]
    strict = name.split("/")[0] in STRICT
    limit_ns = STRICT_SHARE * raw_ns[STRICT_GBIT] if strict else SHARE * raw_ns[GBIT]
    print(
        f"{name:<28}{best['row_bytes']:>6.0f}{best['encode_ns']:>9.1f}{best['decode_ns']:>9.1f}{total_ns:>9.1f}"
        f"{limit_ns:>8.1f}   {total_ns / raw_ns[STRICT_GBIT]:>6.0%} {total_ns / raw_ns[GBIT]:>6.0%}"
        f"{'' if total_ns <= limit_ns else '   over'}"
    )
    return {"format": name, "sum_ns": total_ns, "limit_ns": limit_ns, "met": total_ns <= limit_ns}


if __name__ == "__main__":
    main()
