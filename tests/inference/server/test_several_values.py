"""A served model with several values a row and a weight each. Its scores: tests/inference/test_same_table.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

import shardkeep
from shardkeep.inference.protocol.datatypes import Values
from shardkeep.inference.server.served_model import ServedModel
from tests.support.click_files import click_job
from tests.support.serving import Server, raw_request, scores_of


def test_weights_that_do_not_fit_their_values_are_refused(tmp_path: Path) -> None:
    seen = [[f"s{n % 7}", f"s{n % 5}"][: n % 3] for n in range(60)]
    rows: dict[str, Any] = {"clicked": [n % 2 for n in range(60)], "seen": seen}
    pq.write_table(pa.table(rows | {"seen_weight": [[0.5] * len(row) for row in seen]}), tmp_path / "train.parquet")
    job = click_job(tmp_path / "train.parquet", model={"name": "dnn", "hidden": [5]})
    weighted = {"column": "seen", "pooling": "weighted", "weights": "seen_weight"}
    job["data"] |= {"source": "parquet", "dense": [], "sparse": [weighted]}
    shardkeep.train(shardkeep.JobConfig.model_validate(job), run_dir=tmp_path / "run", quiet=True)
    good: dict[str, Values] = {"seen.values": [b"s1", b"s2"], "seen.lengths": np.array([1, 0, 1, 0], np.int32)}

    def weights(values: Values, lengths: list[int]) -> dict[str, Values]:
        return good | {"seen_weight.values": values, "seen_weight.lengths": np.array(lengths, np.int32)}

    two, fit = np.array([0.5, 1.0], np.float32), [1, 0, 1, 0]
    with Server(ServedModel(shardkeep.load(tmp_path / "run"))) as server:
        assert scores_of(server.infer(raw_request(weights(two, fit)))).shape == (4,)
        for inputs, why in (
            (weights(two, [1, 1, 0, 0]), "row 2, column seen_weight: holds 1 weights for 0 ids of seen"),
            (weights(two[:0], [0, 0, 0, 0]), "row 1, column seen_weight: holds 0 weights for 1 ids"),
            (weights(np.array([0.5, np.nan], np.float32), fit), "row 3, column seen_weight: a weight is missing"),
            (weights(np.array([np.inf, 1], np.float32), fit), "row 1, column seen_weight: is infinite"),
            (weights([b"1", b"heavy"], fit), "'heavy' is not a number"),
            (good, "input seen_weight, or seen_weight.values and seen_weight.lengths: is missing"),
        ):
            code, details = server.refusal(raw_request(inputs))
            assert code == "INVALID_ARGUMENT" and why in details
            status, reply = server.post_binary(inputs)
            assert (status, reply["error"]) == (400, details) and "\n" not in details
