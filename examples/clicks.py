"""Writes an invented click log as CSV, for readers who have no data at hand: `python examples/clicks.py clicks.csv`.

A click depends on user, item, tags and price by weights that are drawn once, so a model can learn it.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np

ROWS, USERS, ITEMS, TAGS = 20_000, 800, 300, ("new", "sale", "home", "toys", "books", "shoes")
COLUMNS = ("clicked", "user", "item", "seller_id", "city", "price", "tags", "shown_at")
CITIES = ("Bern", "Lyon", "Oslo", "Porto", "Turin")


def main(path: Path) -> None:
    """Writes `ROWS` samples; the same file each time."""
    random = np.random.default_rng(1)
    of_user, of_item, of_tag = (
        random.normal(0, 1.2, USERS),
        random.normal(0, 1.2, ITEMS),
        random.normal(0, 1, len(TAGS)),
    )
    prices = random.lognormal(3, 0.8, ITEMS).round(2)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for user, item in zip(random.zipf(1.3, ROWS) % USERS, random.zipf(1.3, ROWS) % ITEMS, strict=True):
            tags = random.choice(len(TAGS), random.integers(0, 4), replace=False)
            score = of_user[user] + of_item[item] + of_tag[tags].sum() - 0.02 * prices[item] - 0.5
            clicked = int(random.random() < 1 / (1 + np.exp(-score)))
            price = "" if random.random() < 0.02 else prices[item]  # a few are missing
            city, seller = CITIES[user % len(CITIES)], f"s{item % 40}"
            tag_text = "|".join(TAGS[tag] for tag in tags)
            writer.writerow((clicked, f"u{user}", f"i{item}", seller, city, price, tag_text, random.integers(24)))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "clicks.csv"))
