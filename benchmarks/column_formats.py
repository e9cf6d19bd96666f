#!/usr/bin/env python3
"""Which form of columns on disk is written and read at random for the least CPU, and takes the least room?

A million rows in memory are written, and gathered in the orders of both shuffles. Files are in the page cache: what a
disk takes is the question of `out_of_memory.py`. Lance comes from `--lance`, a folder with its package.
"""

# B = rows of a batch, N = rows, F = columns of ids, I = columns of numbers, K = entries of a dictionary

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import harness
import numba
import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from shardkeep.workers.data.batch import Values
from shardkeep.workers.data.columns.column import ColumnWriter, StoredColumn
from shardkeep.workers.data.columns.dataset import StoredDataset
from shardkeep.workers.data.columns.scaling import Scale
from shardkeep.workers.data.sampling import Blocks, StepSlices
from shardkeep.workers.data.schema import Feature, Schema
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.data_config import DataConfig, DenseColumn

ROWS, BATCH, PART = 1_000_000, 1_024, 1 << 16
NUM_DENSE, NUM_WHOLE, NUM_IDS, MAX_ENTRIES = 13, 6, 26, 20
LARGEST_DICTIONARY = 1 << 16
READ = "Array({}, 1, 'C', readonly=True)"
SLOTS = 1 << 18
"""Of the hash table that finds an id's code; a power of two."""
LINES = {
    "shardkeep's store": "656: column.py, column_kernels.py and dataset.py, as they are",
    "flat files": "about 330: writer 70, footer and checks 60, dataset 120, kernels 60, prefetch 20",
    "flat files, coded": "about 410: as flat files, dictionary 60, codes of each width in the kernels 20",
    "arrow, table": "about 230: writer 60, checks 40, dataset 110, lists 20; no kernels",
    "arrow, columns": "about 230: as arrow, table",
    "arrow, one chunk": "about 260: as arrow, table, and a writer that joins chunks",
    "lance": "about 170: writer 40, checks 20, dataset 110; a dependency of 200 MB",
}
"""Lines of ours that each form takes, counted for the first and estimated for the others."""


@dataclass(frozen=True)
class Part:
    """Decoded rows: label, numbers (N, I), ids (N, F), and the entries of a list with their counts."""

    label_N: NDArray[np.uint8]
    dense_NI: NDArray[np.float32]
    single_NF: NDArray[np.int64]
    entries_V: NDArray[np.int64]
    lengths_N: NDArray[np.int32]


class Form(Protocol):
    """A form of columns: written to a folder, then read."""

    def write(self, folder: Path, parts: list[Part]) -> None: ...

    def open(self, folder: Path) -> Callable[[NDArray[np.int64]], Any]: ...


@numba.njit(
    [
        "void(Array(uint8, 1, 'C', readonly=True), int64[::1], int64[::1], int64[::1])",
        "void(Array(uint16, 1, 'C', readonly=True), int64[::1], int64[::1], int64[::1])",
    ]
)
def gather_coded(
    code_N: NDArray[Any], id_K: NDArray[np.int64], rows_B: NDArray[np.int64], out_B: NDArray[np.int64]
) -> None:
    for b in range(len(rows_B)):
        out_B[b] = id_K[code_N[rows_B[b]]]


@numba.njit(["void(Array(int64, 1, 'C', readonly=True), int64[::1], int64[::1])"])
def gather_column(value_N: NDArray[np.int64], rows_B: NDArray[np.int64], out_B: NDArray[np.int64]) -> None:
    for b in range(len(rows_B)):
        out_B[b] = value_N[rows_B[b]]


@numba.njit(["void(Array(float32, 1, 'C', readonly=True), int64[::1], int64, float32[:,::1])"])
def gather_numbers(
    value_N: NDArray[np.float32], rows_B: NDArray[np.int64], place: int, out_BI: NDArray[np.float32]
) -> None:
    for b in range(len(rows_B)):
        x = value_N[rows_B[b]]
        out_BI[b, place] = np.float32(0.0) if np.isnan(x) else (x - np.float32(0.5)) * np.float32(2.0)


@numba.njit(["int64(Array(int64, 1, 'C', readonly=True), int64[::1], int32[::1])"])
def gather_lengths(offset_N: NDArray[np.int64], rows_B: NDArray[np.int64], out_B: NDArray[np.int32]) -> int:
    total = 0
    for b in range(len(rows_B)):
        out_B[b] = offset_N[rows_B[b] + 1] - offset_N[rows_B[b]]
        total += out_B[b]
    return total


@numba.njit(["void(Array(int64, 1, 'C', readonly=True), Array(int64, 1, 'C', readonly=True), int64[::1], int64[::1])"])
def gather_entries(
    offset_N: NDArray[np.int64], value_V: NDArray[np.int64], rows_B: NDArray[np.int64], out_V: NDArray[np.int64]
) -> None:
    n = 0
    for b in range(len(rows_B)):
        for j in range(offset_N[rows_B[b]], offset_N[rows_B[b] + 1]):
            out_V[n] = value_V[j]
            n += 1


@numba.njit(
    [
        f"void({READ.format('int64')}, {READ.format('uint8')}, int64[::1], int64[::1], int64[::1])",
        f"void({READ.format('int64')}, {READ.format('uint16')}, int64[::1], int64[::1], int64[::1])",
    ]
)
def gather_coded_entries(
    offset_N: NDArray[np.int64],
    code_V: NDArray[Any],
    id_K: NDArray[np.int64],
    rows_B: NDArray[np.int64],
    out_V: NDArray[np.int64],
) -> None:
    n = 0
    for b in range(len(rows_B)):
        for j in range(offset_N[rows_B[b]], offset_N[rows_B[b] + 1]):
            out_V[n] = id_K[code_V[j]]
            n += 1


@numba.njit(["int64(int64[::1], int64[::1], int32[::1], int64[::1], int64, uint16[::1])"])
def encode(
    value_N: NDArray[np.int64],
    slot_ids: NDArray[np.int64],
    slot_codes: NDArray[np.int32],
    id_K: NDArray[np.int64],
    count: int,
    out_N: NDArray[np.uint16],
) -> int:
    """Codes of ids, each in the order of its first row; returns how many ids there are, -1 = too many."""
    mask = len(slot_ids) - 1
    for i in range(len(value_N)):
        value = value_N[i]
        at = ((value * -7046029254386353131) >> 40) & mask
        while slot_codes[at] >= 0 and slot_ids[at] != value:
            at = (at + 1) & mask
        if slot_codes[at] < 0:
            if count == len(id_K):
                return -1
            slot_ids[at], slot_codes[at], id_K[count] = value, count, value
            count += 1
        out_N[i] = slot_codes[at]
    return count


def hashed_write(path: Path, arrays: Iterator[NDArray[Any]]) -> str:
    """Writes arrays one after the other; their checksum."""
    checksum = xxhash.xxh3_128()
    with path.open("wb") as file:
        for array in arrays:
            file.write(array.data)
            checksum.update(array.data)
    return checksum.hexdigest()


class Store:
    """What `data.cache` holds."""

    def write(self, folder: Path, columns: Mapping[str, list[NDArray[Any]]]) -> None:
        lengths = columns["lengths"]
        for name, arrays in columns.items():
            if name != "lengths":
                writer = ColumnWriter("ids" if name[0] in "Ct" else "numbers", folder / name)
                for part, array in enumerate(arrays):
                    own_N = lengths[part].astype(np.int64) if name == "tags" else None
                    writer.add(Values(array if name[0] in "Ct" else array.astype(np.float64), own_N))
                writer.close({})

    def open(self, folder: Path) -> Callable[[NDArray[np.int64]], Any]:
        features = [Feature(f"C{f}", f"C{f}") for f in range(NUM_IDS)] + [Feature("tags", "tags", pooling="sum")]
        dense = [f"I{i}" for i in range(NUM_DENSE)]
        names = {"label": "label"} | {f"numbers:{name}": name for name in dense}
        names |= {f"ids:{feature.name}": feature.name for feature in features}
        columns = {key: StoredColumn.open(folder / name) for key, name in names.items()}
        transform = [(False, Scale(0.0, 0.0, 0.5, 2.0))] * NUM_DENSE
        numbers = tuple(DenseColumn(column=name) for name in dense)
        return StoredDataset(Schema(tuple(dense), tuple(features)), numbers, columns, transform).gather


def columns_of(parts: list[Part]) -> dict[str, list[NDArray[Any]]]:
    """Arrays of each column, as a store of columns gets them from the decoders."""
    columns: dict[str, list[NDArray[Any]]] = {"label": [part.label_N for part in parts]}
    columns |= {f"I{i}": [np.ascontiguousarray(part.dense_NI[:, i]) for part in parts] for i in range(NUM_DENSE)}
    columns |= {f"C{f}": [np.ascontiguousarray(part.single_NF[:, f]) for part in parts] for f in range(NUM_IDS)}
    columns["tags"] = [part.entries_V for part in parts]
    columns["lengths"] = [part.lengths_N for part in parts]
    return columns


class Flat:
    """A file of each column. `coded`: ids by a dictionary of up to 65,536."""

    def __init__(self, *, coded: bool) -> None:
        self._coded = coded

    def write(self, folder: Path, columns: Mapping[str, list[NDArray[Any]]]) -> None:
        for name, arrays in columns.items():
            if name == "lengths":
                hashed_write(folder / name, iter([offsets_of(arrays)]))
            elif not (
                self._coded and (name.startswith("C") or name == "tags") and self._write_coded(folder, name, arrays)
            ):
                hashed_write(folder / name, iter(arrays))

    def _write_coded(self, folder: Path, name: str, arrays: list[NDArray[Any]]) -> bool:
        slot_ids, slot_codes = np.empty(SLOTS, np.int64), np.full(SLOTS, -1, np.int32)
        id_K, count, codes = np.empty(LARGEST_DICTIONARY, np.int64), 0, list[NDArray[np.uint16]]()
        for array in arrays:
            code_N = np.empty(len(array), np.uint16)
            if (count := encode(array, slot_ids, slot_codes, id_K, count, code_N)) < 0:
                return False
            codes.append(code_N)
        width = np.uint8 if count <= 256 else np.uint16
        hashed_write(folder / f"{name}.{np.dtype(width).name}", (code_N.astype(width, copy=False) for code_N in codes))
        hashed_write(folder / f"{name}.ids", iter([id_K[:count]]))
        return True

    def open(self, folder: Path) -> Callable[[NDArray[np.int64]], Any]:
        numbers = [mapped(folder / f"I{i}", np.float32) for i in range(NUM_DENSE)]
        ids = [self._ids(folder, f"C{f}") for f in range(NUM_IDS)]
        tags, offset_N, label_N = (
            self._ids(folder, "tags"),
            mapped(folder / "lengths", np.int64),
            mapped(folder / "label", np.uint8),
        )

        def gather(rows_B: NDArray[np.int64]) -> Any:
            dense_BI = np.empty((len(rows_B), NUM_DENSE), np.float32)
            for i, value_N in enumerate(numbers):
                gather_numbers(value_N, rows_B, i, dense_BI)
            ids_FB = np.empty((NUM_IDS, len(rows_B)), np.int64)
            for f, (value_N, id_K) in enumerate(ids):
                gather_ids(value_N, id_K, rows_B, ids_FB[f])
            lengths_B = np.empty(len(rows_B), np.int32)
            total = gather_lengths(offset_N, rows_B, lengths_B)
            entries_V = np.empty(total, np.int64)
            value_V, id_K = tags
            if id_K is None:
                gather_entries(offset_N, value_V, rows_B, entries_V)
            else:
                gather_coded_entries(offset_N, value_V, id_K, rows_B, entries_V)
            return dense_BI, ids_FB, lengths_B, entries_V, label_N[rows_B].astype(np.float32)

        return gather

    def _ids(self, folder: Path, name: str) -> tuple[NDArray[Any], NDArray[np.int64] | None]:
        for width in ("uint8", "uint16"):
            if (folder / f"{name}.{width}").exists():
                return mapped(folder / f"{name}.{width}", np.dtype(width)), np.fromfile(
                    folder / f"{name}.ids", np.int64
                )
        return mapped(folder / name, np.int64), None


def gather_ids(
    value_N: NDArray[Any], id_K: NDArray[np.int64] | None, rows_B: NDArray[np.int64], out_B: NDArray[np.int64]
) -> None:
    if id_K is None:
        gather_column(value_N, rows_B, out_B)
    else:
        gather_coded(value_N, id_K, rows_B, out_B)


def mapped(path: Path, dtype: Any) -> NDArray[Any]:
    return np.memmap(path, dtype, "r").view(np.ndarray)


def offsets_of(lengths: list[NDArray[Any]]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(np.concatenate(lengths), dtype=np.int64)])


def batches_of(parts: list[Part]) -> Iterator[pa.RecordBatch]:
    """Batches of single columns, as Arrow and Lance take them."""
    columns = columns_of(parts)
    for part, _ in enumerate(parts):
        lengths_N = columns["lengths"][part]
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths_N)]).astype(np.int32))
        arrays = {name: pa.array(values[part]) for name, values in columns.items() if name not in ("tags", "lengths")}
        yield pa.record_batch(arrays | {"tags": pa.ListArray.from_arrays(offsets, pa.array(columns["tags"][part]))})


class Arrow:
    """Arrow IPC files that pyarrow maps and takes from.

    `whole`: all columns are taken at once. `chunks`: the file has chunks of 65,536 rows, else one."""

    def __init__(self, *, whole: bool, chunks: bool = True) -> None:
        self._whole, self._chunks = whole, chunks

    def write(self, folder: Path, batches: list[pa.RecordBatch]) -> None:
        if not self._chunks:
            batches = pa.Table.from_batches(batches).combine_chunks().to_batches()
        checksum = xxhash.xxh3_128()
        with pa.OSFile(str(folder / "train.arrow"), "wb") as sink, pa.ipc.new_file(sink, batches[0].schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
                for column in batch.columns:
                    for buffer in filter(None, column.buffers()):
                        checksum.update(buffer)

    def open(self, folder: Path) -> Callable[[NDArray[np.int64]], Any]:
        table = pa.ipc.open_file(pa.memory_map(str(folder / "train.arrow"))).read_all()
        columns = {name: table[name] for name in table.schema.names}
        if not self._chunks:
            columns = {name: column.chunk(0) for name, column in columns.items()}

        def gather(rows_B: NDArray[np.int64]) -> Any:
            rows = pa.array(rows_B)
            if self._whole:
                return of_table(table.take(rows))
            return of_columns({name: column.take(rows) for name, column in columns.items()})

        return gather


def of_table(table: pa.Table) -> Any:
    return of_columns({name: table[name] for name in table.schema.names})


def of_columns(columns: Mapping[str, Any]) -> Any:
    """The arrays of a batch."""
    arrays = {
        name: column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        for name, column in columns.items()
    }
    dense_BI = np.stack([np.asarray(arrays[f"I{i}"]) for i in range(NUM_DENSE)], axis=1)
    dense_BI = np.where(np.isnan(dense_BI), np.float32(0.0), (dense_BI - np.float32(0.5)) * np.float32(2.0))
    ids_FB = np.stack([np.asarray(arrays[f"C{f}"]) for f in range(NUM_IDS)])
    lengths_B = np.asarray(arrays["tags"].value_lengths()).astype(np.int32)
    return (
        dense_BI,
        ids_FB,
        lengths_B,
        np.asarray(arrays["tags"].flatten()),
        np.asarray(arrays["label"]).astype(np.float32),
    )


class Lance:
    """Lance, without a checksum of ours."""

    def __init__(self, package: Path | None) -> None:
        if package is not None:
            sys.path.append(str(package))

    def write(self, folder: Path, batches: list[pa.RecordBatch]) -> None:
        import lance

        lance.write_dataset(pa.RecordBatchReader.from_batches(batches[0].schema, batches), str(folder / "train"))

    def open(self, folder: Path) -> Callable[[NDArray[np.int64]], Any]:
        import lance

        dataset = lance.dataset(str(folder / "train"))

        def gather(rows_B: NDArray[np.int64]) -> Any:
            return of_table(dataset.take(rows_B))

        return gather


def make(rows: int) -> list[Part]:
    """Rows of the synthetic clicks in parts, some numbers whole, with a list of ids."""
    config = {"source": "synthetic", "synthetic": {"train_samples": rows, "eval_samples": 2, "num_dense": NUM_DENSE}}
    train, random, parts = open_data(DataConfig.model_validate(config), seed=1).train, np.random.default_rng(1), []
    for start in range(0, rows, PART):
        batch = train.gather(np.arange(start, min(start + PART, rows)))
        dense_NI = batch.dense_BI.copy()
        dense_NI[:, :NUM_WHOLE] = np.floor(dense_NI[:, :NUM_WHOLE] * 100)
        single_NF = np.stack([ragged.values_N for ragged in batch.ids.values()], axis=1)
        lengths_N = random.integers(0, MAX_ENTRIES + 1, len(batch)).astype(np.int32)
        entries_V = np.resize(single_NF[:, 15], int(lengths_N.sum()))
        parts.append(Part(batch.label_BT[:, 0].astype(np.uint8), dense_NI, single_NF, entries_V, lengths_N))
    return parts


def sum_of(batch: Any) -> float:
    """What a batch holds, alike for all forms."""
    if isinstance(batch, tuple):
        dense_BI, ids_FB, lengths_B, entries_V, label_B = batch
    else:
        *ids, tags = batch.ids.values()
        ids_FB, lengths_B, entries_V = np.stack([ragged.values_N for ragged in ids]), tags.lengths_B, tags.values_N
        dense_BI, label_B = batch.dense_BI, batch.label_BT
    words = int(ids_FB.sum(dtype=np.int64) ^ entries_V.sum(dtype=np.int64)) + int(lengths_B.sum()) + int(label_B.sum())
    return float(np.asarray(dense_BI, np.float64).sum()) + words % 1_000_003


# `at_most`: batches that are measured, of all that a pass has; the seconds are those of a pass
def run(form: Any, given: Any, rows: int, at_most: int, top: Path | None, _seconds: float) -> harness.Figures:
    """CPU seconds of one write and of all rows gathered in both orders; bytes."""
    folder = Path(tempfile.mkdtemp(dir=top))
    try:
        began = time.process_time()
        form.write(folder, given)
        figures = {"write_s": time.process_time() - began}
        figures["mb"] = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6
        gather = form.open(folder)
        for start in range(0, rows, PART):  # into the page cache and this process
            gather(np.arange(start, min(start + PART, rows)))
        for shuffle in ("rows", "blocks"):
            slices = StepSlices(rows, batch_size=BATCH, shuffle=Blocks() if shuffle == "blocks" else True, seed=3)
            batches = [slices.rows(step, 0) for step in range(min(at_most, slices.num_steps))]
            began = time.process_time()
            for rows_B in batches:
                gather(rows_B)
            figures[f"{shuffle}_s"] = (time.process_time() - began) * slices.num_steps / len(batches)
        figures["sum"] = sum_of(gather(batches[0]))
        return figures
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--lance", type=Path, help="folder with the package lance")
    parser.add_argument("--folder", type=Path, help="where files are written")
    parser.add_argument("--only", nargs="+", default=list(LINES), choices=list(LINES))
    options = harness.parse(parser)
    rows = 2 * PART if options.smoke else ROWS
    pa.set_cpu_count(1)
    parts = make(rows)
    columns, batches = columns_of(parts), list(batches_of(parts))
    forms: dict[str, tuple[Any, Any, int]] = {
        "shardkeep's store": (Store(), columns, rows),
        "flat files": (Flat(coded=False), columns, rows),
        "flat files, coded": (Flat(coded=True), columns, rows),
        "arrow, table": (Arrow(whole=True), batches, 40),
        "arrow, columns": (Arrow(whole=False), batches, 40),
        "arrow, one chunk": (Arrow(whole=False, chunks=False), batches, 40),
        "lance": (Lance(options.lance), batches, 40),
    }
    contestants = {
        name: partial(run, form, given, rows, most, options.folder)
        for name, (form, given, most) in forms.items()
        if name in options.only
    }
    found = harness.alternate(contestants, rounds=options.rounds, seconds=0.0)
    if len({round(figures[0]["sum"], 2) for figures in found.values()}) > 1:
        raise SystemExit("the forms give other batches")
    medians = {
        name: {key: harness.spread([figures[key] for figures in rounds])["median"] for key in rounds[0]}
        for name, rounds in found.items()
    }
    for name, median in medians.items():
        print(f"{name:20}", *(f"{key} {value:,.3f}" for key, value in median.items()), f"lines {LINES[name]}")
    harness.write(options.json, "column_formats", {"rows": rows, "lines": LINES, "medians": medians, "rounds": found})


if __name__ == "__main__":
    main()
