"""Changed manifests of exports, with the right checksum: one line at opening that names what is wrong."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import shardkeep
from shardkeep.base.errors import CheckpointError, DataError, ShardkeepError
from shardkeep.inference.server.served_model import ServedModel
from tests.support.cases import every
from tests.support.served_clicks import texts

Record = dict[str, Any]
Place = tuple[Any, ...]
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 7, 2**31, 2**63, 2**70, -(2**70), 0.5, -0.5, 1e39, 1e308, float("inf"), float("-inf"),
    float("nan"), "", "x", "a" * 300, "\n\n", "\0", "None", [], [1], ["x"], [None], [[]], {}, {"x": 1}, [{}],
    {"column": "zzz"},
]  # fmt: skip
ANSWERS_MAY_CHANGE = {
    ("inputs", "scales"), ("inputs", "missing"), ("inputs", "sparse"), ("inputs", "dense"),
    ("inputs", "scale"), ("settings", "seed"), ("settings", "tower"), ("settings", "eval"), ("settings", "train"),
    ("settings", "model"), ("tables",), ("settings", "tables"), ("inputs",), ("settings",),
}  # fmt: skip
"""Parts that may hold other valid values. A change of others leaves the answers as they are, or is refused."""


def resealed(exported: Path, to: Path, change: Any) -> Path:
    """A copy of an export whose manifest is changed, with the right checksum."""
    shutil.copytree(exported, to, copy_function=os.link)
    record = json.loads((to / "manifest.json").read_text())
    del record["checksum"]
    change(record)
    checksum = xxhash.xxh3_128_hexdigest(json.dumps(record, sort_keys=True).encode())
    (to / "manifest.json").unlink()
    (to / "manifest.json").write_text(json.dumps(record | {"checksum": checksum}, indent=1) + "\n")
    return to


def repeat_table(record: dict[str, Any]) -> None:
    record["tables"].append(record["tables"][0])
    for kind in ("index", "rows"):
        first = next(f for f in record["files"] if f"table-0.{kind}" in f["path"])
        record["files"].append({**first, "path": first["path"].replace("table-0", "table-3")})


@every(
    ("change", "text"),
    [
        (lambda r: r, None),
        (lambda r: r["settings"]["model"].update(sync_norm=False), None),
        (repeat_table, "two tables have the same name"),
        (lambda r: r.update(folder="../elsewhere"), "folder ../elsewhere"),
        (lambda r: r.update(files=[]), "its list of files is not that of an export"),
        (lambda r: r["files"][0].update(path="/etc/passwd"), "its list of files is not that of an export"),
        (lambda r: r["files"][0].update(size=float("inf")), "files.0.size: is of type float; allowed: int"),
        (lambda r: r["settings"].update(data={"root": "/"}), "settings data"),
        (lambda r: r["settings"]["model"].update(name="os:system"), "names a model of the user's own"),
        (lambda r: r["tables"][0]["spec"].update(dim=-1), "dim"),
        (lambda r: r["tables"].reverse(), "table"),
        (lambda r: r["tables"][1].update(bits=True), "tables.1.bits: is of type bool; allowed: int"),
        (lambda r: r.update(tower="fp4"), "tower fp4"),
        (lambda r: r.pop("inputs"), "inputs: is missing"),
        (lambda r: r["inputs"].pop("kinds"), "inputs: kinds: Field required"),
        (lambda r: r["inputs"]["sparse"][2].update(pooling="median"), "sparse.2.pooling: Input should be 'sum'"),
        (lambda r: r["inputs"]["kinds"].update(user="colours"), "inputs: kinds.user: Input should be 'texts'"),
        (lambda r: r["inputs"]["kinds"].update(other="texts"), "inputs: kinds: 'other' is no sparse column"),
        (lambda r: r["inputs"].update(lists=[]), "inputs: lists: lacks 'tags', which has several values a row"),
        (lambda r: r["inputs"].update(lists=["tags", "x"]), "inputs: lists: 'x' is no sparse column"),
        (lambda r: r["inputs"]["missing"].append(None), "6: Input should be a valid string"),
        (lambda r: r["inputs"]["scales"].pop("age"), "inputs: scales: 'age' is no dense column, or has no scale"),
        (lambda r: r["inputs"]["scales"].update(age=0), "scales.age: Input should be a valid tuple"),
        (lambda r: r["inputs"]["scales"]["age"].append(1), "scales.age: Tuple should have at most 4 items"),
        (lambda r: r["inputs"]["scales"]["age"].__setitem__(2, 1e39), "scales.age.2: is no number of float32"),
        (lambda r: r["inputs"]["dense"].append(dict(r["inputs"]["dense"][0], column="new")), "'new' is no dense"),
        (lambda r: r["inputs"]["dense"][0].update(column="age"), "inputs: data.dense: names column age twice"),
        (lambda r: r["inputs"]["label"].update(column="user"), "inputs: data.sparse: names user, which is the label"),
        (lambda r: r["inputs"]["reading"].update(form="tea"), "inputs: reading: Input tag 'tea' found"),
        (lambda r: r["inputs"]["reading"].update(delimiter=7), "reading.csv.delimiter: Input should be a valid"),
        (lambda r: r["settings"]["eval"].update(batch_size=0), "settings.eval.batch_size: Input should be greater"),
    ],
)
def test_a_crafted_manifest_is_refused_by_the_name_of_what_is_wrong(
    exported: Path, tmp_path: Path, change: Any, text: Any
) -> None:
    crafted = resealed(exported, tmp_path / "crafted", change)
    if text is None:
        assert shardkeep.load(crafted, verify=True).step
        return
    with pytest.raises(CheckpointError) as raised:
        shardkeep.load(crafted)
    assert text in str(raised.value) and "\n" not in str(raised.value) and "manifest.json" in str(raised.value)


def places(value: Any, place: Place = ()) -> Iterator[Place]:
    if place:
        yield place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in items:
        yield from places(below, (*place, key))


def at(record: Record, place: Place) -> Any:
    found: Any = record
    for key in place:
        found = found[key]
    return found


def mutated(record: Record, chance: random.Random) -> Place:
    """Drops, doubles, renames, copies or replaces one value. Returns where."""
    every = list(places(record))
    place = chance.choice(every)
    parent, key, kind = at(record, place[:-1]), place[-1], chance.randrange(6)
    if kind == 0:
        del parent[key]
    elif kind == 1 and isinstance(parent, list):
        parent.insert(key, copied(parent[key]))
    elif kind == 2 and isinstance(parent, dict):
        parent[key + "x"] = parent.pop(key)
    elif kind == 3:
        parent[key] = copied(at(record, chance.choice(every)))
    else:
        parent[key] = copied(chance.choice(VALUES))
    return place


def copied(value: Any) -> Any:
    return json.loads(json.dumps(value))


@pytest.mark.parametrize("count", [80, pytest.param(6000, marks=pytest.mark.chaos)])
def test_no_change_of_a_manifest_gives_a_raw_error(exported: Path, tmp_path: Path, count: int) -> None:
    columns, outcomes = texts(20), Counter[str]()
    expected = shardkeep.load(exported).predict(columns)
    crafted = tmp_path / "crafted"
    for seed in range(count):
        chance, where = random.Random(seed), list[Place]()
        shutil.rmtree(crafted, ignore_errors=True)

        def change(record: Record, chance: random.Random = chance, where: list[Place] = where) -> None:
            where.extend(mutated(record, chance) for _ in range(chance.choice([1, 1, 2])))

        resealed(exported, crafted, change)
        try:
            predictor = shardkeep.load(crafted)
        except ShardkeepError as error:
            assert str(crafted) in str(error) and "\n" not in str(error) and len(str(error)) < 800, (where, error)
            outcomes["refused"] += 1
            continue
        ServedModel(predictor)
        try:
            scores = predictor.predict(columns)
        except DataError as error:  # it reads another column, or subtracts a huge number
            assert "\n" not in str(error), (where, error)
            outcomes["refused later"] += 1
            continue
        same = np.array_equal(scores, expected)
        assert same or any(place[:n] in ANSWERS_MAY_CHANGE for place in where for n in (1, 2)), where
        outcomes["same" if same else "changed"] += 1
    assert outcomes["same"] > count // 30 and outcomes["refused"] > count // 3, outcomes
