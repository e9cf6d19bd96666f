"""What is written beside scores and grouped by: any type of column, any bytes, any place; right output or one line."""

from __future__ import annotations

import datetime
import decimal
import os
import re
import resource
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.csv as pacsv  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

import shardkeep
from shardkeep.base.errors import ShardkeepError
from shardkeep.inference.export.writing import export_run
from shardkeep.inference.scoring import evaluate_run, predict_files
from tests.support.cases import every
from tests.support.click_files import click_job, click_rows, write_csv
from tests.support.invoked import invoke

LATIN = b"caf\xe9"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export, which opens faster than its run."""
    folder = tmp_path_factory.mktemp("written")
    job = click_job(write_csv(folder / "train.csv", click_rows(100)))
    job["data"] |= {"scale": "none", "quote": "none"}
    job["tower"] |= {"optimizer": {"lr": 1e6}}
    shardkeep.train(shardkeep.JobConfig.model_validate(job), run_dir=folder / "run", quiet=True)
    export_run(folder / "run", folder / "model")
    return folder / "model"


def refusal_of(call: Callable[[], object]) -> str:
    with pytest.raises(ShardkeepError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def csv_of(path: Path, extra: list[bytes], **changes: str) -> Path:
    names = list(click_rows(1)[0])
    rows = [row | changes for row in click_rows(len(extra))]
    lines = [
        ",".join(row[name] for name in names).encode() + b"," + value for row, value in zip(rows, extra, strict=True)
    ]
    path.write_bytes(b"\n".join([",".join([*names, "extra"]).encode(), *lines]) + b"\n")
    return path


def parquet_of(path: Path, columns: Mapping[str, pa.Array]) -> Path:
    rows = click_rows(len(next(iter(columns.values()))))
    pq.write_table(pa.table({name: [row[name] for row in rows] for name in rows[0]} | columns), path)
    return path


def test_a_csv_keeps_bytes_that_are_no_utf8_and_parquet_refuses_them_by_name(model: Path, tmp_path: Path) -> None:
    data = csv_of(tmp_path / "data.csv", [LATIN, b'a"b', "é".encode(), b""] * 10)
    assert predict_files(model, [data], tmp_path / "s.csv", keep=["extra"]).rows == 40
    lines = (tmp_path / "s.csv").read_bytes().splitlines()
    assert [line.rsplit(b",", 1)[0] for line in lines[1:5]] == [b'"caf\xe9"', b'"a""b"', '"é"'.encode(), b'""']
    done = invoke("predict", model, "--data", data, "--out", tmp_path / "s.parquet", "--keep", "extra")
    assert done[0] in (1, 2) and not done[1] and done[2].startswith("error: ") and done[2].count("\n") == 1
    assert "column extra: holds binary; allowed: texts in UTF-8, or --out FILE.csv" in done[2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.csv", "s.csv"]


D = decimal.Decimal
WHEN = datetime.datetime(2024, 5, 6, 7, 8, 9)
VALUES: dict[str, pa.Array] = {
    "texts": pa.array(["a", None, "b"]),
    "large texts": pa.array(["a", None, "b"], pa.large_string()),
    "views": pa.array(["a", None, "b"], pa.string_view()),
    "bytes": pa.array([LATIN, None, b"\x00\xff"]),
    "fixed bytes": pa.array([b"\xff\xfe", None, b"ab"], pa.binary(2)),
    "dictionary": pa.array(["a", None, "b"]).dictionary_encode(),
    "dictionary of bytes": pa.array([LATIN, None, b"b"]).dictionary_encode(),
    "whole numbers": pa.array([1, None, 2**63 - 1]),
    "unsigned": pa.array([1, None, 2**64 - 1], pa.uint64()),
    "floats": pa.array([1.5, None, float("nan")]),
    "half": pa.array([1.5, None, float("inf")], pa.float16()),
    "truth": pa.array([True, None, False]),
    "decimals": pa.array([D("1.50"), None, D("-2.25")]),
    "long decimals": pa.array([D("1.50"), None, D("-2.25")], pa.decimal256(50, 2)),
    "dates": pa.array([WHEN.date(), None, WHEN.date()]),
    "times": pa.array([WHEN, None, WHEN]),
    "times in a zone": pa.array([WHEN, None, WHEN], pa.timestamp("us", "Europe/Berlin")),
    "times of day": pa.array([5, None, 7], pa.time64("us")),
    "durations": pa.array([5, None, 7], pa.duration("s")),
    "nothing": pa.nulls(3),
}
NESTED: dict[str, pa.Array] = {
    "lists": pa.array([[1], None, [2, 3]]),
    "lists of texts": pa.array([["a"], None, []]),
    "vectors": pa.array([[1.0, 2.0]] * 3, pa.list_(pa.float32(), 2)),
    "structs": pa.array([{"a": 1}, None, {"a": 2}]),
    "maps": pa.array([[("a", 1)], None, []], pa.map_(pa.string(), pa.int64())),
}


def test_columns_of_one_value_a_row_are_kept_and_grouped_by(model: Path, tmp_path: Path) -> None:
    data = parquet_of(tmp_path / "data.parquet", VALUES)
    predict_files(model, [data], tmp_path / "s.parquet", keep=list(VALUES))
    stored, kept = pq.read_table(data), pq.read_table(tmp_path / "s.parquet")
    code, out, _ = invoke("predict", model, "--data", data, "--out", tmp_path / "s.csv", "--keep", ",".join(VALUES))
    lines = (tmp_path / "s.csv").read_bytes().split(b"\n")
    assert code == 0 and len(lines) == 5 and lines[2].startswith(b"," * len(VALUES))
    assert out.startswith("3 rows scored")
    for kind in VALUES:
        assert list(map(repr, kept[kind].to_pylist())) == list(map(repr, stored[kind].to_pylist())), kind
        groups = evaluate_run(model, files=[data], by=kind)["by"]["groups"]
        assert sum(group["samples"] for group in groups) == 3 and None in [group["value"] for group in groups], kind
        assert len(groups) == len(set(map(str, stored[kind].to_pylist()))), kind
    for kind in ("fixed bytes", "times in a zone", "nothing"):
        assert invoke("evaluate", model, "--data", data, "--by", kind)[0] == 0


def test_columns_of_several_values_a_row_are_kept_in_parquet_alone(model: Path, tmp_path: Path) -> None:
    data = parquet_of(tmp_path / "data.parquet", NESTED)
    predict_files(model, [data], tmp_path / "s.parquet", keep=list(NESTED))
    kept, struct = pq.read_table(tmp_path / "s.parquet"), "is a struct with the fields a; flatten it"
    for kind, values in NESTED.items():
        assert kept[kind].to_pylist() == values.to_pylist(), kind
        line = refusal_of(lambda kind=kind: predict_files(model, [data], tmp_path / "s.csv", keep=[kind]))
        assert f"data.parquet, column {kind}: " in line and ("or --out FILE.parquet" in line or struct in line)
        line = refusal_of(lambda kind=kind: evaluate_run(model, files=[data], by=kind))
        assert f"data.parquet, column {kind}: " in line and ("one value a row" in line or struct in line)


PAIRS = {
    "numbers, texts": (pa.array([1, 2]), pa.array(["00042", "b"])),
    "texts, numbers": (pa.array(["00042", "b"]), pa.array([1, 2])),
    "small, large": (pa.array([1, 2], pa.int8()), pa.array([1, 2**40])),
    "whole, fractions": (pa.array([1, 2]), pa.array([1.5, 2.0])),
    "dictionary, texts": (pa.array(["a", "b"]).dictionary_encode(), pa.array(["c", "d"])),
    "texts, large texts": (pa.array(["a", "b"]), pa.array(["c", "d"], pa.large_string())),
    "large lists, lists": (pa.array([["a"], []], pa.large_list(pa.large_string())), pa.array([["b"], None])),
    "texts, nothing": (pa.array(["a", "b"]), pa.nulls(2)),
    "nothing, texts": (pa.nulls(2), pa.array(["a", "b"])),
    "lists, numbers": (pa.array([[1], [2]]), pa.array([1, 2])),
}
FITTING = ("dictionary, texts", "texts, large texts", "large lists, lists", "texts, nothing", "nothing, texts")


def test_types_that_differ_between_files_are_written_as_they_are_or_refused(model: Path, tmp_path: Path) -> None:
    names = {case: f"c{number}" for number, case in enumerate(PAIRS)}  # a comma separates names of --keep
    files = [
        parquet_of(tmp_path / f"{file}.parquet", {names[case]: pair[at] for case, pair in PAIRS.items()})
        for at, file in enumerate("ab")
    ]
    values = {case: [*first.to_pylist(), *then.to_pylist()] for case, (first, then) in PAIRS.items()}
    predict_files(model, files, tmp_path / "s.parquet", keep=[names[case] for case in FITTING])
    for case in FITTING:
        assert pq.read_table(tmp_path / "s.parquet")[names[case]].to_pylist() == values[case]
    command = ("predict", model, "--data", files[0], "--data", files[1], "--keep")
    for case in PAIRS.keys() - FITTING:
        line = refusal_of(lambda case=case: predict_files(model, files, tmp_path / "t.parquet", keep=[names[case]]))
        assert f"b.parquet, column {names[case]}: holds" in line and "in the files before" in line, case
    single = [case for case in PAIRS if "lists" not in case]
    assert invoke(*command, ",".join(names[case] for case in single), "--out", tmp_path / "s.csv")[0] == 0
    lines = [line.replace('"', "").split(",") for line in (tmp_path / "s.csv").read_text().splitlines()[1:]]
    for at, case in enumerate(single):
        kept = ["" if value is None else str(value).removesuffix(".0") for value in values[case]]
        assert [line[at] for line in lines] == kept, case
        groups = evaluate_run(model, files=files, by=names[case])["by"]["groups"]
        assert sum(group["samples"] for group in groups) == 4, case


def test_any_bytes_are_the_name_of_a_group_of_their_own(model: Path, tmp_path: Path) -> None:
    odd = ["[/b]", "\\", "a\x1bb", "x" * 500]
    names = [LATIN] * 30 + [b"caf\xe8"] * 20 + ["café".encode()] * 10 + [name.encode() for name in odd]
    data = csv_of(tmp_path / "data.csv", names)
    groups = evaluate_run(model, files=[data], by="extra")["by"]["groups"]
    told = [(group["value"], group["samples"]) for group in groups]
    assert told[:3] == [("caf\\xe9", 30), ("caf\\xe8", 20), ("café", 10)] and len(told) == 3 + len(odd)
    code, out, _ = invoke("evaluate", model, "--data", data, "--by", "extra")
    assert code == 0 and all(name[:7] in out or not name.isprintable() for name in odd)


@every(
    ("keep", "text"),
    [
        (["user", "item", "user"], "--keep user: is named twice"),
        (["score"], "--keep score: is named twice, or is the name of a column of scores"),
        (["nosuch"], "has no column nosuch"),
        (["user", " item"], "has no column  item; did you mean item"),
    ],
)
def test_names_that_cannot_be_kept_are_one_line(model: Path, tmp_path: Path, keep: list[str], text: str) -> None:
    data = csv_of(tmp_path / "data.csv", [b"a"] * 3)
    assert text in refusal_of(lambda: predict_files(model, [data], tmp_path / "s.csv", keep=keep))
    assert [path.name for path in tmp_path.iterdir()] == ["data.csv"]


@every("out", ["s.csv", "s.parquet"])
def test_a_file_without_rows_has_all_columns(model: Path, tmp_path: Path, out: str) -> None:
    data = csv_of(tmp_path / "data.csv", [])
    assert predict_files(model, [data], tmp_path / out, keep=["extra", "user"]).rows == 0
    table = pacsv.read_csv(tmp_path / out) if out == "s.csv" else pq.read_table(tmp_path / out)
    assert table.column_names == ["extra", "user", "score"] and table.num_rows == 0


@every("link", [Path.symlink_to, Path.hardlink_to], ids=["symbolic", "hard"])
def test_an_input_by_another_name_is_not_written_over(model: Path, tmp_path: Path, link: Any) -> None:
    data = csv_of(tmp_path / "data.csv", [b"a"] * 3)
    before = data.read_bytes()
    link(tmp_path / "link.csv", data)
    for out in (tmp_path / "link.csv", tmp_path / ".." / tmp_path.name / "data.csv"):
        line = refusal_of(lambda out=out: predict_files(model, [data], out))
        assert "is one of the files to score" in line
    assert data.read_bytes() == before


@every("out", ["s.csv", "s.parquet"])
def test_a_folder_that_goes_or_takes_nothing_is_one_line(model: Path, tmp_path: Path, out: str) -> None:
    data = csv_of(tmp_path / "data.csv", [os.urandom(900).hex().encode() for _ in range(200)])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))  # no file of this process grows beyond that
    try:
        line = refusal_of(lambda: predict_files(model, [data], tmp_path / out, keep=["extra", "user", "item"]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert f"{out}: cannot be written (File too large)" in line
    assert [path.name for path in tmp_path.iterdir()] == ["data.csv"]
    (tmp_path / "gone").mkdir()
    line = refusal_of(
        lambda: predict_files(
            model,
            [csv_of(tmp_path / "data.csv", [b"a"] * 3)],
            tmp_path / "gone" / out,
            told=lambda _text, _share: shutil.rmtree(tmp_path / "gone", ignore_errors=True),
        )
    )
    assert "cannot be written (No such file or directory)" in line


def test_scores_that_are_not_finite_are_written_counted_and_fail(model: Path, tmp_path: Path) -> None:
    good, bad = csv_of(tmp_path / "good.csv", [b"a"] * 20), tmp_path / "bad.csv"
    csv_of(bad, [b"b"] * 3, price="3e38", age="3e38")
    both = ("--data", good, "--data", bad)
    code, out, error = invoke("predict", model, *both, "--keep", "extra", "--out", tmp_path / "s.csv")
    assert code == 1 and out.startswith("23 rows scored")
    assert error == f"error: 3 predictions in {tmp_path / 's.csv'} are not finite (NaN or infinite)\n"
    scores_N = pacsv.read_csv(tmp_path / "s.csv")["score"].to_numpy()
    assert np.isfinite(scores_N).tolist() == [True] * 20 + [False] * 3
    for options in ((), ("--json",), ("--by", "extra")):
        code, out, error = invoke("evaluate", model, *both, *options)
        assert code == 1 and "3 of 23 predictions are not finite" in out
        assert error == "error: 3 predictions are not finite (NaN or infinite)\n"
    assert invoke("evaluate", model, "--data", good)[0] == 0


def test_later_files_are_read_in_the_dialect_of_training_and_rows_that_a_quote_joins_never_scored(
    model: Path, clicks: Path, tmp_path: Path
) -> None:
    data = csv_of(tmp_path / "data.csv", [b'"lone'] + [b"a"] * 9 + [b'"lone'] + [b"b"] * 9)
    done = predict_files(model, [data], tmp_path / "s.parquet", keep=["extra"])
    assert done.rows == 20 and pq.read_table(tmp_path / "s.parquet")["extra"].to_pylist()[10] == '"lone'
    assert evaluate_run(model, files=[data])["samples"] == 20
    of_quoted = (lambda: predict_files(clicks, [data], tmp_path / "s.csv"), lambda: evaluate_run(clicks, files=[data]))
    for act in of_quoted:
        assert re.search(r"data.csv, row 1: a quote .* data.quote: none", refusal_of(act))
    assert not (tmp_path / "s.csv").exists()


def test_names_of_files_need_not_be_utf8(model: Path, tmp_path: Path) -> None:
    data = csv_of(Path(os.fsdecode(bytes(tmp_path) + b"/caf\xe9.csv")), [b"a"] * 3)
    out = Path(os.fsdecode(bytes(tmp_path) + b"/out\xe9.csv"))
    code, told, _ = invoke("predict", model, "--data", data, "--out", out)
    assert code == 0 and "out\ufffd.csv" in told and out.is_file()
