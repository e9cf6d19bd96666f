"""How many bits does a coded id take beside the least that is possible, and how many nanoseconds?

A step's ids per table, as a pull carries them: Zipf ids of Criteo's 26 tables, evenly spread ids of some densities,
64-bit hashes. Coded and decoded in one thread.
"""
# S = sections, V = ids of all sections

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import harness
import numpy as np
import workload

TABLES = 26
TARGET_MS = 2.0  # 50,000 ids in 26 sections, both directions


def measure(sections: Sequence[np.ndarray], room_S: Sequence[int], seconds: float) -> harness.Figures:
    """Bits and nanoseconds an id; `room`: how many ids there could be in each section."""
    from shardkeep.compression.ids.codes import decode_ids, encode_ids

    starts_S1, ids_V = np.cumsum([0, *map(len, sections)]), np.concatenate(sections)
    code = encode_ids(starts_S1, ids_V)
    rows_S = np.diff(starts_S1)
    decode = functools.partial(decode_ids, code.formats_S, rows_S, code.sizes_S, code.area, ids_V.size)
    if not np.array_equal(decode(), ids_V):
        raise RuntimeError("other ids came back")
    bound = sum(bits_bound(room, len(ids)) * len(ids) for room, ids in zip(room_S, sections, strict=True))
    return figures(
        ids_V.size,
        code.area.size,
        bound / ids_V.size,
        functools.partial(encode_ids, starts_S1, ids_V),
        decode,
        seconds,
    )


def bits_bound(room: int, count: int) -> float:
    """log2 of the number of ways to choose `count` of `room` ids, for each of the `count`: on the average no code of
    evenly spread ids goes below."""
    if count == 0:
        return 0.0
    i = np.arange(count, dtype=np.float64)
    return float(np.log2((room - i) / (count - i)).sum()) / count


def figures(
    count: int, size: int, bound: float, encode: Callable[[], Any], decode: Callable[[], Any], seconds: float
) -> harness.Figures:
    encode_s, decode_s = fastest(encode, seconds / 2), fastest(decode, seconds / 2)
    return {
        "ids": count,
        "bits_per_id": 8 * size / count,
        "bound": bound,
        "encode_ns_per_id": encode_s / count * 1e9,
        "decode_ns_per_id": decode_s / count * 1e9,
        "both_ms": (encode_s + decode_s) * 1e3,
    }


def fastest(call: Callable[[], Any], seconds: float) -> float:
    """The least seconds a call took."""
    least, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        call()
        least = min(least, time.perf_counter() - started)
    return least


def zipf(batch: int, seconds: float) -> harness.Figures:
    ids_FB = workload.draw_ids(1, seed=1, batch=batch)[0]
    return measure([np.unique(ids_B) for ids_B in ids_FB], workload.TABLE_SIZES, seconds)


def even(mean_gap: int, seconds: float) -> harness.Figures:
    """2000 ids a table, one of `mean_gap` rows."""
    rng, room = np.random.default_rng(1), 2000 * mean_gap
    sections = [np.sort(rng.choice(room, 2000, replace=False)) for _ in range(TABLES)]
    return measure(sections, [room] * TABLES, seconds)


def hashed(seconds: float) -> harness.Figures:
    rng = np.random.default_rng(1)
    sections = [np.unique(rng.integers(-(2**63), 2**63, 2000)) for _ in range(TABLES)]
    return measure(sections, [2**64] * TABLES, seconds)


def contestants() -> dict[str, harness.Contestant]:
    return {
        **{f"Zipf {workload.ZIPF}, batch {b}": functools.partial(zipf, b) for b in (512, 2048, 8192)},
        **{f"1 of {gap:,} rows": functools.partial(even, gap) for gap in (4, 10, 100, 1000, 33_763)},
        "64-bit hashes": hashed,
    }


def report(found: dict[str, list[harness.Figures]]) -> dict[str, Any]:
    print(f"{'':<22} {'ids':>7} {'bits/id':>8} {'bound':>8} {'encode ns':>10} {'decode ns':>10} {'both ms':>8}")
    for name, rounds in found.items():
        best = {key: min(figures[key] for figures in rounds) for key in rounds[0]}
        print(
            f"{name:<22} {best['ids']:7,.0f} {best['bits_per_id']:8.2f} {best['bound']:8.2f}"
            f" {best['encode_ns_per_id']:10.1f} {best['decode_ns_per_id']:10.1f} {best['both_ms']:8.2f}"
        )
    largest = max(
        min(f["both_ms"] / f["ids"] for f in rounds) * 50_000 for rounds in found.values() if rounds[0]["ids"] > 20_000
    )
    print(f"50,000 ids both ways: at most {largest:.2f} ms, target {TARGET_MS:.1f} ms")
    return {"rounds": found, "both_ms_50k": largest}


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.set_defaults(seconds=1.0)
    options = harness.parse(parser)
    if options.device != "cpu":
        parser.error(f"--device {options.device}: ids are coded on the CPU")
    harness.pin(0)
    found = harness.alternate(contestants(), rounds=options.rounds, seconds=options.seconds)
    harness.write(options.json, "id_codes", report(found))


if __name__ == "__main__":
    main()
