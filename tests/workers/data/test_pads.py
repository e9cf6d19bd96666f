"""Pads: lists filled up to one length by an id that is none are read as the lists without it, and are warned of."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pytest

from shardkeep.base.errors import ConfigError
from shardkeep.workers.data.conversion.chunk import Chunk
from shardkeep.workers.data.conversion.hashing import MISSING_ID
from shardkeep.workers.data.conversion.teaching import filled_end
from shardkeep.workers.data.fitting.inputs import Inputs
from tests.support.cases import every
from tests.support.data_files import batch_of
from tests.support.history_files import Rows, open_histories, write_csv, write_parquet

ROWS, WIDTH = 60, 6


def rows_of(side: str, fill: Any, name: Any = lambda item: item) -> Rows:
    """Rows with lists of 0 to 5 entries of the items 1 to 9, filled up to 6 at one side, or both, or with holes; "" =
    not at all. The first row has no item: it has the one that fills lists."""
    random = np.random.default_rng(0)
    lengths = [0, 1, *random.integers(0, WIDTH, ROWS - 2).tolist()]
    items = [random.integers(1, 10, length).tolist() for length in lengths]

    def filled(entries: list[Any], own: Any) -> list[Any]:
        count = WIDTH - len(entries)
        before = {"": 0, "start": count, "end": 0, "both": count // 2, "holes": 0}[side]
        if side == "holes":
            entries = [each for entry in entries for each in (own, entry)]
        return [own] * before + entries + [own] * (0 if not side or side == "holes" else count - before)

    return {
        "clicked": [i % 2 for i in range(ROWS)],
        "item": [fill if side else None, *(name(i % 9 + 1) for i in range(ROWS - 1))],
        "category": [i % 4 for i in range(ROWS)],
        "seen_item": [filled([name(item) for item in each], fill) for each in items],
        "seen_category": [filled([item % 4 for item in each], 77) for each in items],
        "seen_age": [filled([item / 8 for item in each], 1e6) for each in items],
        "tags": [filled([name(item) for item in each], fill) for each in items],
    }


def opened(path: Path, rows: Rows, *pad: Any) -> Any:
    own = {} if not pad else {"pad": pad[0]}
    lists = {"column": "tags", "table": "item", "pooling": "mean"} | own
    csv = path.suffix == ".csv"
    sparse = ["item", "category", lists | ({"separator": "|"} if csv else {})]
    return open_histories((write_csv if csv else write_parquet)(path, rows), own | {"max_length": 4}, sparse=sparse)


def named(item: int) -> str:
    return f"film {item}"


@every(
    ("side", "file", "fill", "pad", "name"),
    [
        *((side, "a.parquet", 0, 0, int) for side in ("start", "end", "both", "holes")),
        ("start", "a.parquet", -1, "-1", float),
        ("end", "a.parquet", "PAD", " PAD ", named),
        ("start", "a.parquet", None, "", int),
        ("start", "a.parquet", math.nan, "nan", float),
        ("end", "a.csv", "<pad>", "<pad>", named),
        ("start", "a.csv", "0.0", 0, str),
    ],
    ids=str,
)
def test_padded_lists_are_read_as_those_without_the_pad(
    tmp_path: Path, side: str, file: str, fill: Any, pad: Any, name: Any
) -> None:
    padded, ragged = (rows_of(each, fill, name) for each in (side, ""))
    plain, data = opened(tmp_path / f"r{file}", ragged), opened(tmp_path / file, padded, pad)
    batch, expected = batch_of(data.train), batch_of(plain.train)
    for column, ids in expected.ids.items():
        assert batch.ids[column].values_N.tolist() == ids.values_N.tolist(), column
        assert ids.lengths_B is None or batch.ids[column].lengths_B.tolist() == ids.lengths_B.tolist()
    assert batch.numbers["seen"].tobytes() == expected.numbers["seen"].tobytes(), "no number of a pad counts in a mean"
    assert data.fingerprint == plain.fingerprint and not data.notes
    assert batch.ids["item"].values_N[0] == MISSING_ID
    if file.endswith("parquet"):  # a frame or a request later
        later = Chunk("the data", np.arange(1, ROWS + 1), {n: pa.array(v) for n, v in padded.items()})
        again = batch_of(Inputs.of_json(data.inputs).samples(later))
        assert again.ids["seen_item"].values_N.tolist() == expected.ids["seen_item"].values_N.tolist()


@every(
    ("pad", "sparse", "why"),
    [
        ("PAD", ["item", "category"], "data: pad: PAD is no value of item, a column of numbers"),
        (None, [{"column": "item", "pad": 0}, "category"], "data.sparse: item: pad: 0 has no effect, each row has one"),
    ],
)
def test_a_pad_that_no_list_can_have_is_refused(tmp_path: Path, pad: Any, sparse: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        open_histories(write_parquet(tmp_path / "a.parquet", rows_of("", 0)), {"pad": pad}, sparse=sparse)


@every(("side", "fill", "shown"), [("start", 0, "0"), ("end", "PAD", "'PAD'"), ("start", None, "''"), ("", 0, "")])
def test_an_id_that_fills_one_end_of_the_lists_is_named(tmp_path: Path, side: str, fill: Any, shown: str) -> None:
    notes = opened(tmp_path / "a.parquet", rows_of(side, fill, named if fill == "PAD" else int)).notes
    told = [note for note in notes if "fills" in note]
    assert len(told) == (0 if not side else 1 if fill is None else 2)  # a list in sparse drops what is missing
    assert all(
        f"{shown} fills the {side} of 100% of the lists" in note and f"set pad: {shown}" in note for note in told
    )


@every(
    ("lists", "end"),
    [
        ([[0] * (5 - n % 5) + [7] * (n % 5) for n in range(50)], "start"),
        ([[3, 4] * 4] * 30 + [[n, 5, 0, 0] if n % 2 else [n, 0, 0, 0] for n in range(1, 21)], "end"),  # longer ones
        ([[0] * (5 - n % 5) + [0, 7] * (n % 5) for n in range(50)], None),  # an item like others
        ([[9, n, n + 1] for n in range(50)], None),  # each list begins with one id
        ([[9] * (1 + n % 4) + [n] for n in range(50)], None),  # lists of several lengths
        ([[4] * 5] * 50, None),
        ([[]] * 50, None),
        ([[0] * (5 - n % 5) + [7] * (n % 5) for n in range(9)], None),  # few
    ],
)
def test_only_an_id_that_fills_lists_up_to_one_length_is_a_pad(lists: list[list[int]], end: str | None) -> None:
    ids_V, lengths_N = np.array([i for each in lists for i in each], np.int64), np.array([len(each) for each in lists])
    found = filled_end(ids_V, lengths_N)
    assert (found and found[0]) == end
    assert found is None or ids_V[found[1]] == 0
