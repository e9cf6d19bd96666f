"""Names and values of data that are written to be read as something else: YAML, HTML, LaTeX, signs of a terminal."""

from __future__ import annotations

import io
import logging
import re
from pathlib import Path

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.csv as pacsv  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from shardkeep.base.errors import DataError
from shardkeep.base.logs.log import LineFormat
from shardkeep.base.yaml_text import read_yaml, write_yaml
from shardkeep.cli.exits import report
from shardkeep.cli.main import app
from shardkeep.config import load_config
from shardkeep.config.overrides import flow
from shardkeep.page.document import table

HOSTILE = "x\nseed: 7\r\x1b[31m\u202e\u2028\t</td><script>\"'$\\frac$ [red]#: {*}\x7f\xa0"
OTHERS = {f"number{HOSTILE}": "dense", f"one{HOSTILE}": "left out", HOSTILE: "sparse"}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a.parquet, whose columns and values are hostile."""
    monkeypatch.chdir(tmp_path)
    random, count = np.random.default_rng(0), 300
    texts = [f"{HOSTILE}{n}" for n in random.integers(0, 5, count)]
    values = [random.integers(0, 2, count), random.random(count), [HOSTILE] * count, texts]
    pq.write_table(pa.table(dict(zip(["clicked", *OTHERS], values, strict=True))), "a.parquet")


def check(text: str) -> None:
    """No character of the text does anything, and each line is ours."""
    assert all(c.isprintable() or c == "\n" for c in text), repr(text)
    assert not re.search(r"^(seed|\x1b)", text, re.MULTILINE)


def run(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == code, done.output
    check(done.output)
    return done.output


def test_init_writes_a_job_of_the_columns_and_shows_what_it_saw() -> None:
    out = run("init", "a.parquet", "--label", "clicked")
    assert out.count("x\\nseed: 7\\r\\x1b[31m\\u202e\\u2028\\t</td>") >= 3
    text, config = Path("job.yaml").read_text(encoding="utf-8"), load_config("job.yaml")
    check(text)
    assert f"# left out: one{HOSTILE.encode('unicode_escape').decode()[:20]}" in text and config.seed != 7
    assert [[each.column for each in group] for group in (config.data.dense, config.data.sparse)] == [
        [name for name, use in OTHERS.items() if use == one] for one in ("dense", "sparse")
    ]
    refusal = run("init", "a.parquet", "--label", HOSTILE, "--out", "b.yaml", code=2)
    value = re.search(r"--set '?(data\.label\.positive=.*\])", refusal)
    assert value and read_yaml(value[1].partition("=")[2].replace("'\"'\"'", "'"))[0].startswith(HOSTILE)


def test_texts_of_every_grammar_hold_the_name_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for name in (HOSTILE, *HOSTILE, "a\u202eb", "a\xa0b", "a\nb", "\U000e0041 b"):
        assert read_yaml(write_yaml({name: [name]})) == {name: [name]} == read_yaml(flow({name: [name]}))
        check(write_yaml({name: [name]}))
    record = logging.makeLogRecord({"msg": HOSTILE, "levelno": logging.WARNING, "fields": {"column": HOSTILE}})
    check(LineFormat("worker", 0).format(record))
    assert report(DataError(f"a.csv: has no column {HOSTILE}")) == 2
    error = capsys.readouterr().err
    check(error)
    assert error.count("\n") == 1
    assert "<script>" not in table((HOSTILE,), [(HOSTILE,)])
    registry = CollectorRegistry()
    Gauge("a", "b", ["feature"], registry=registry).labels(HOSTILE).set(1)
    (family,) = text_string_to_metric_families(generate_latest(registry).decode())
    assert family.samples[0].labels == {"feature": HOSTILE}
    sink = io.BytesIO()
    pacsv.write_csv(pa.table({HOSTILE: [HOSTILE]}), sink)
    assert sink.getvalue().decode() == '"{0}"\n"{0}"\n'.format(HOSTILE.replace('"', '""'))


@pytest.mark.slow
def test_a_job_shows_names_and_values_as_texts_from_training_to_comparison() -> None:
    run("init", "a.parquet", "--label", "clicked", "--set", "train.max_steps=2", "--set", "tower.compile=off")
    run("train", "job.yaml", "--run-dir", "run")
    data = ("--data", "a.parquet")
    for words in (["evaluate", *data, "--importance"], ["evaluate", *data, "--by", HOSTILE], ["tables"], ["status"]):
        assert "<script>" in run(words[0], "run", *words[1:]) or words[0] == "status"
    run("predict", "run", *data, "--out", "s.csv", "--keep", HOSTILE.partition(",")[0])
    assert pacsv.read_csv("s.csv", parse_options=pacsv.ParseOptions(newlines_in_values=True)).column_names[0] == HOSTILE
    run("compare", "run", "run")
    run("estimate", "job.yaml")
    run("report", "run", "--html", "r.html")
    assert "<script>\"'" not in Path("r.html").read_text(encoding="utf-8")
