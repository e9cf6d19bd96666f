"""Data sets that repositories carry, as csv files: train, eval and test of fixed rows, each with a header.

adult      adult.data and adult.test (UCI); a tenth of the training rows evaluates
census     census-income.test.gz (UCI Census-Income KDD); rows by chance, 80/10/10
frappe     train.csv, validation.csv, test.csv and meta_app.csv of a log of app starts (Baltrunas et al. 2015), as
           repositories of papers hold it: its distinct rows, and two apps by chance for each that this user did not
           start in this context, as He & Chua (2017) drew them; 70/20/10 as BARS divides it. Its published rows are
           other draws, so its AUC is not that of the tables of BARS
ml-100k    ml-100k.inter, .user and .item (MovieLens 100K, as RecBole has it); a rating of 4 or 5 is 1; the newest
           tenth is the test, the tenth before it evaluates
planted    the synthetic stream of shardkeep, of which no file is read; 200,000 rows train, 25,000 and 25,000 are held
           out
"""

from __future__ import annotations

import csv
import gzip
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from shardkeep.base.yaml_text import read_yaml
from shardkeep.config import DataConfig
from shardkeep.workers.data.sources.registry import open_data
from shardkeep.workers.data_config import SyntheticConfig

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
LABELS = {"adult": "salary", "census": "income", "frappe": "label", "ml-100k": "label", "planted": "label"}
LEFT_OUT = ("instance_weight",)
"""How many people a row of census stands for: no property of a person (docs/guide/data.md)."""
PARTS = ("train", "eval", "test")
NEGATIVES = 2
PLANTED = [20_000, 5_000, 1_000, 300, 100, 50, 20, 10]
Row = Sequence[str]
Parts = tuple[list[str], Sequence[Sequence[Row]]]
"""The header, and the rows of each part."""


def write_parts(name: str, folder: Path, out: Path) -> None:
    """Writes train.csv, eval.csv and test.csv of a data set whose files are in `folder`."""
    header, parts = SETS[name](folder)
    for part, rows in zip(PARTS, parts, strict=True):
        with (out / f"{part}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([header, *rows])


def adult(folder: Path) -> Parts:
    header, *rows = _rows(folder / "adult.data")
    _, *tested = _rows(folder / "adult.test")
    train, held = _by_chance(rows, (0.9, 1.0))
    return header, (train, held, [[*row[:-1], row[-1].rstrip(".")] for row in tested])


def census(folder: Path) -> Parts:
    header: list[str] = read_yaml((EXAMPLES / "census.yaml").read_text())["data"]["columns"]
    kept = [at for at, column in enumerate(header) if column not in LEFT_OUT]
    with gzip.open(folder / "census-income.test.gz", "rt") as file:
        rows = [[row[at].strip() for at in kept] for row in csv.reader(file)]
    return [header[at] for at in kept], _by_chance(rows, (0.8, 0.9, 1.0))


def frappe(folder: Path) -> Parts:
    header, *_ = _rows(folder / "train.csv")
    kept = [header.index(column) for column in header if column not in ("item", "cnt")]
    found = [row for part in ("train", "validation", "test") for row in _rows(folder / f"{part}.csv")[1:]]
    log = list(dict.fromkeys((row[header.index("item")], *(row[at] for at in kept)) for row in found))
    price = {row[0]: row[4] for row in _rows(folder / "meta_app.csv")[1:]}
    started, apps, random = set(log), sorted({app for app, *_ in log}), np.random.default_rng(2017)
    rows = [["1", app, price[app], *context] for app, *context in log]
    for _, *context in log:
        left = NEGATIVES
        while left:
            app = apps[random.integers(len(apps))]
            if (app, *context) not in started:
                rows.append(["0", app, price[app], *context])
                left -= 1
    return ["label", "item", "cost", *(header[at] for at in kept)], _by_chance(rows, (0.7, 0.9, 1.0))


def ml_100k(folder: Path) -> Parts:
    (_, *users), (_, *items), (_, *ratings) = (
        _rows(folder / f"ml-100k.{kind}", "\t") for kind in ("user", "item", "inter")
    )
    of_user, of_item = {row[0]: row[1:] for row in users}, {row[0]: row[2:] for row in items}
    rows = [
        [str(int(float(rating) >= 4)), user, item, time, *of_user[user], *of_item[item]]
        for user, item, rating, time in sorted(ratings, key=lambda row: float(row[3]))
    ]
    ends = [len(rows) * tenths // 10 for tenths in (0, 8, 9, 10)]
    header = "label user_id item_id timestamp age gender occupation zip_code release_year genres"
    return header.split(), [rows[start:end] for start, end in itertools.pairwise(ends)]


def planted(_folder: Path) -> Parts:
    source = SyntheticConfig(train_samples=250_000, num_dense=4, table_sizes=PLANTED, ids="numbered")
    batch = open_data(DataConfig(source="synthetic", synthetic=source), seed=7).train.gather(np.arange(250_000))
    columns = [batch.label_BT[:, 0].astype(int), *batch.dense_BI.T, *(ids.values_N for ids in batch.ids.values())]
    rows = list(zip(*(map(str, column.tolist()) for column in columns), strict=True))
    header = ["label", *(f"number_{at}" for at in range(4)), *(f"code_{at}" for at in range(len(PLANTED)))]
    return header, (rows[:200_000], rows[200_000:225_000], rows[225_000:])


def _rows(path: Path, separator: str = ",") -> list[list[str]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.split(separator)] for line in lines if line.strip()]


def _by_chance(rows: Sequence[Row], ends: Sequence[float]) -> list[list[Row]]:
    order = np.random.default_rng(7).permutation(len(rows))
    return [[rows[at] for at in part] for part in np.split(order, [int(end * len(rows)) for end in ends[:-1]])]


SETS: dict[str, Callable[[Path], Parts]] = {
    "adult": adult,
    "census": census,
    "frappe": frappe,
    "ml-100k": ml_100k,
    "planted": planted,
}
