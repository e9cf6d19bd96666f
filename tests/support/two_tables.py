"""The two tables of loops in tests."""

from __future__ import annotations

from shardkeep import TableSpec

SGD = {"name": "sgd", "lr": 0.5}


TABLES = [TableSpec(name="user", dim=4, optimizer=SGD), TableSpec(name="item", dim=3)]
