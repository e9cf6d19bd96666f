"""The role of each column: on public data sets from memory, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from shardkeep.automl.init import Plan, plan_of
from shardkeep.automl.roles import doubts
from shardkeep.base.errors import DataError
from tests.support.cases import every
from tests.support.planted_schemas import plan
from tests.support.public_schemas import SCHEMAS, Schema


def uses(found: Plan) -> dict[str, str]:
    """The roles as a schema has them; the surest column of users is the user."""
    users = sorted((role.user, role.name) for role in found.roles if role.user is not None)
    roles = {role.name: "out" if role.use == "left out" else role.use for role in found.roles}
    return roles | ({users[0][1]: "user"} if users else {})


def of_schema(schema: Schema, path: Path) -> tuple[dict[str, str], str]:
    if schema.asked is None:
        return uses(plan(path, schema.table())), ""
    with pytest.raises(DataError) as asked:
        plan(path, schema.table())
    return uses(plan(path, schema.table(), schema.asked)) if schema.asked else {}, str(asked.value)


def check_vital(schema: Schema, tmp_path: Path) -> tuple[int, list[str]]:
    """Checks label, time and user; the number of other columns, and those in a wrong role."""
    found, asked = of_schema(schema, tmp_path / f"data.{'parquet' if schema.parquet else 'csv'}")
    expected = {name: role.split("/") for name, role in schema.roles().items()}
    if asked and not schema.asked:
        return 0, []
    vital = {name for name in found if {"label", "time", "user"} & {found[name], *expected[name]}}
    assert {name: found[name] for name in vital if found[name] not in expected[name]} == {}, schema.name
    assert not schema.asked or f"candidates: {schema.asked} (" in asked or f", {schema.asked} (" in asked
    others = found.keys() - vital
    return len(others), [f"{schema.name}.{name}" for name in others if found[name] not in expected[name]]


@pytest.mark.slow
def test_label_time_and_user_of_public_data_sets_are_right_or_asked_for_and_few_others_wrong(tmp_path: Path) -> None:
    assert len(SCHEMAS) >= 40
    total, wrong = 0, list[str]()
    for schema in SCHEMAS:
        count, some = check_vital(schema, tmp_path)
        total, wrong = total + count, wrong + some
    assert len(wrong) <= 0.03 * total, f"{len(wrong)} of {total}: {wrong}"


@every("name", ["movielens-1m", "microvideo"])
def test_a_public_data_set_of_each_kind_is_right(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.public_schemas.ROWS", 600)
    _, wrong = check_vital(next(schema for schema in SCHEMAS if schema.name == name), tmp_path)
    assert len(wrong) <= 1


ROWS = 400


def clicks(**columns: list[object]) -> pa.Table:
    plain: dict[str, list[object]] = {
        "user": [n % 37 for n in range(ROWS)],
        "click": [n * n % 7 % 2 for n in range(ROWS)],
    }
    return pa.table(plain | columns)


@every(
    ("column", "values", "why"),
    [
        ("a", ["x"] * ROWS, "constant"),
        ("a", [None] * ROWS, "empty"),
        ("a", [f"key{n}" for n in range(ROWS)], "one value a row"),
        ("Unnamed: 0", [n % 50 for n in range(ROWS)], "an index without a name"),
        ("state_code", [["view", "tap"][n * n % 7 % 2] for n in range(ROWS)], "it knows the answer"),
        ("score_7", [n * n % 7 % 2 + n / 10_000 for n in range(ROWS)], "it knows the answer"),
        ("note", [f"{n % 200} men went to mow a meadow number {n * n % 400}" for n in range(ROWS)], "free text"),
        ("parts", [[0.5] * (n % 4) for n in range(ROWS)], "fractions in lists of several lengths"),
        ("both", [{"x": 1}] * ROWS, "a struct"),
        ("both", [f'[{{"a": 1, "b": {n % 4}}}]' for n in range(ROWS)], "a struct, JSON"),
        ("both", [[[1, 2], [n]] for n in range(ROWS)], "lists of lists"),
        ("both", [float("inf") if n % 2 else n / 2 for n in range(ROWS)], "infinite numbers"),
    ],
)
def test_a_column_is_left_out_with_its_reason(column: str, values: list[object], why: str, tmp_path: Path) -> None:
    found = {role.name: role for role in plan(tmp_path / "a.parquet", clicks(**{column: values})).roles}[column]
    assert (found.use, why in found.why) == ("left out", True), found.why


def test_a_column_that_almost_tells_the_label_is_kept_with_a_question_unless_it_is_popular(tmp_path: Path) -> None:
    told = [n * n % 7 % 2 if n % 20 else n // 20 % 2 for n in range(ROWS)]  # right in 39 of 40 rows
    table = clicks(device=told, other=[n * 7 % 13 for n in range(ROWS)])
    found = {role.name: role for role in plan(tmp_path / "a.parquet", table).roles}
    assert found["device"].use == "sparse" and found["device"].doubt[0].startswith("alone it has an AUC")
    assert not found["other"].doubt[0]
    ones = table["click"].to_pylist()
    late = {name: [n % 5 + 1 if one and n % 3 else 0 for n, one in enumerate(ones)] for name in ("fee_1", "fee_2")}
    late |= {"next": [f"2024-0{2 + 3 * one}-{1 + n % 28:02d}" for n, one in enumerate(ones)]}
    made = plan(tmp_path / "b.csv", clicks(**late, at=[f"2024-06-{1 + n // 20:02d}" for n in range(ROWS)]))
    (asked,) = doubts(made.roles)
    assert asked.count("rows that are not 0") == 2 and "1; are they known before the label? Leave out" in asked
    assert [role.why for role in made.roles if role.name == "next"] == [
        "alone it has an AUC of 1.0000: it knows the answer"
    ]
    random = np.random.default_rng(1)
    click, other = random.random(20 * ROWS) < 0.5, random.random(20 * ROWS) < 0.04
    items = 300 * (click ^ other) + random.integers(0, 300, len(click))
    table = pa.table({"click": click.astype(int), "item": [f"item{item}" for item in items]})
    shown = {role.name: role for role in plan(tmp_path / "a.parquet", table).roles}["item"]
    assert shown.use == "sparse" and not shown.doubt[0]


@every(
    ("table", "label", "told"),
    [
        (clicks(item=[n % 50 for n in range(ROWS)]).drop(["click"]), None, "candidates: item (50 values, 0 to 49)"),
        (clicks(item_id=[n % 50 for n in range(ROWS)]).drop(["click"]), None, "has no column that could be a label"),
        (clicks(click=[1] * ROWS), None, "the label click has one value in the rows read (1); both classes are needed"),
        (clicks(a=[1] * ROWS).drop(["user"]), None, "all columns beside the label click are left out (a: constant)"),
        (clicks(), "clik", "has no column clik; did you mean click?"),
        (clicks(a=["xyz"[n % 3] for n in range(ROWS)]), "a", "say which mean 1: --set 'data.label.positive=[x]'"),
        (clicks(visit=[n % 2 for n in range(ROWS)], fraud=[n % 2 for n in range(ROWS)]).drop(["click"]), None,
         "2 columns could be the label; candidates: visit (0, 1), fraud (0, 1); name one: --label visit"),
        (clicks(**{"Sent back?": ["a\nb", "c"] * (ROWS // 2), "a": [*"wxyz"] * (ROWS // 4)}).drop(["click"]), None,
         "candidates: Sent back? (a b, c), a (w, x, y, ...); name one: --label 'Sent back?'"),
    ],
)  # fmt: skip
def test_a_file_without_a_clear_label_or_columns_is_refused_in_one_line(
    table: pa.Table, label: str | None, told: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as refused:
        plan(tmp_path / "a.csv", table, label)
    assert told in str(refused.value) and len(str(refused.value).splitlines()) == 1


def test_hashes_of_64_bits_are_codes_and_what_means_a_missing_number_is_told(tmp_path: Path) -> None:
    table = clicks(
        hash=[n % 60 * 7**22 % 2**63 for n in range(ROWS)], price=["-" if n % 9 else f"{n}.5" for n in range(ROWS)]
    )
    found = plan(tmp_path / "a.parquet", table)
    assert [role.use for role in found.roles[2:]] == ["sparse", "dense"]
    assert "missing: {price: ['-']}" in found.yaml(tmp_path)
    gaps = plan(tmp_path / "b.csv", clicks(click=["\\N" if n % 9 == 0 else str(n * n % 7 % 2) for n in range(ROWS)]))
    assert gaps.roles[1].settings == {"missing": "skip"} and "'null', \\N]" in gaps.yaml(tmp_path)


@every(
    ("values", "use"),
    [
        (pa.array([n % 5 for n in range(ROWS)]).cast(pa.decimal128(22, 2)), "sparse"),
        (pa.array([n % 77 for n in range(ROWS)], pa.duration("s")), "dense"),
        (pa.array([2**64 - 1 - n % 9 for n in range(ROWS)], pa.uint64()), "sparse"),
        (pa.array(["a", "b", "c", "d"] * (ROWS // 4)).dictionary_encode(), "sparse"),
        (pa.array([b"\xff%d" % (n % 9) for n in range(ROWS)]), "sparse"),
        (pa.array(range(ROWS), pa.timestamp("s", "Europe/Rome")), "time"),
        (pa.array([n // 9 for n in range(ROWS)], pa.date32()), "time"),
    ],
)
def test_a_column_of_any_type_has_a_role(values: pa.Array, use: str, tmp_path: Path) -> None:
    found = plan(tmp_path / "a.parquet", clicks().append_column("a", values))
    assert found.roles[2].use == use, found.roles[2].why


@every(
    ("name", "use"),
    [("Kunde", "user"), ("Kunden-Nr", "user"), ("Nutzer", "user"), ("Datum", "time"), ("Zeit", "time"),
     ("Artikelnummer", "sparse"), ("Menge", "dense"), ("Anzahl Besuche", "dense"), ("Betrag", "dense")],
)  # fmt: skip
def test_german_names_have_the_roles_of_english_ones(name: str, use: str, tmp_path: Path) -> None:
    values = [n + 1_700_000_000 if use == "time" else n * n % 97 for n in range(ROWS)]
    table = pa.table({name: values, "Klick": [n * n % 7 % 2 for n in range(ROWS)], "x": [n % 9 for n in range(ROWS)]})
    found = uses(plan(tmp_path / "a.csv", table))
    assert (found[name], found["Klick"]) == (use, "label")


def test_what_databases_write_for_a_missing_value_or_an_array_is_known(tmp_path: Path) -> None:
    texts = ["\\N" if n % 5 == 0 else "abc"[n % 3] for n in range(ROWS)]
    lists = ["\\N" if n % 5 == 0 else f"[{n % 4}, {n % 7}]" for n in range(ROWS)]
    found = plan(tmp_path / "a.csv", clicks(city=texts, tags=lists))
    facts = {role.name: role.facts for role in found.roles}
    assert [(facts[name].distinct, facts[name].missing) for name in ("city", "tags")] == [(3, 0.2), (7, 0.2)]
    assert "missing: ['', '?', NA, nan, NaN, 'null', \\N]" in found.yaml(tmp_path)

    arrays = plan(tmp_path / "a.csv", clicks(tags=[f"{{{n % 4},{n % 7}}}" for n in range(ROWS)])).roles[2]
    assert (arrays.facts.kind, arrays.facts.distinct) == ("list", 7)
    assert arrays.settings == {"separator": ",", "pooling": "mean"}


def test_the_id_that_fills_lists_up_to_one_length_is_their_pad(tmp_path: Path) -> None:
    lists = [[0] * (5 - n % 5) + [7 + n % 9] * (n % 5) for n in range(ROWS)]
    flags = [[False] * (5 - n % 5) + [True] * (n % 5) for n in range(ROWS)]
    found = plan(tmp_path / "a.parquet", clicks(seen=lists, flags=flags))
    assert [role.settings for role in found.roles[2:]] == [{"pooling": "mean", "pad": 0}, {"pooling": "mean"}]
    assert found.yaml(tmp_path).count("pad: 0") == 1 == found.yaml(tmp_path).count("pad:"), "of the history of both"


def test_a_label_takes_the_texts_that_mean_1_and_numbers_are_cut_in_two_halves(tmp_path: Path) -> None:
    table = clicks(event=[["view", "cart", "buy"][n % 3] for n in range(ROWS)]).drop(["click"])
    found = plan(tmp_path / "a.csv", table, "event", "data.label.positive=[buy, cart]")
    assert "label: {column: event, positive: [buy, cart]}" in found.yaml(tmp_path)
    for positive, shown in (("[4]", "[4]"), ("{above: 3.5}", "{above: 3.5}")):
        known = clicks(stars=[n % 5.0 for n in range(ROWS)], twin=[float(n % 5 == 4) for n in range(ROWS)])
        found = plan(tmp_path / "a.csv", known.drop(["click"]), "stars", f"data.label.positive={positive}")
        assert "it knows the answer" in found.roles[-1].why and f"positive: {shown}" in found.yaml(tmp_path)
    table = clicks(stars=[n % 5 for n in range(ROWS)]).drop(["click"])
    assert "positive: {above: 1.0}" in plan(tmp_path / "a.csv", table, "stars").yaml(tmp_path)


@every(
    ("values", "one"),
    [(["yes", "no"], "yes"), (["n", "y"], "y"), (["Ja", "Ja", "Nein"], "Ja"), ([-1, 1], "1"), ([1, 2], "2"),
     (["often", "often", "seldom"], "seldom")],
)  # fmt: skip
def test_one_of_two_values_means_1(values: list[object], one: str, tmp_path: Path) -> None:
    table = clicks(click=[values[n * n % 7 % len(values)] for n in range(ROWS)])
    assert plan(tmp_path / "a.csv", table).roles[1].settings == {"positive": [one]}


def test_a_list_column_of_two_kinds_is_refused(tmp_path: Path) -> None:
    mixed = clicks(tags=["[a, b]" if n % 2 else "a|b" for n in range(ROWS)])
    with pytest.raises(DataError, match="column tags: 50% of its texts are lists in brackets, the others are not"):
        plan(tmp_path / "a.csv", mixed)
    pq.write_table(clicks(tags=[[1]] * ROWS), tmp_path / "a.parquet")
    pq.write_table(clicks(tags=[1] * ROWS), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b.parquet, column tags: holds int64, and list<.*> in .*a.parquet"):
        plan_of([str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")], label=None, overrides=[])
