"""The memory of what was made lately: of headings, plans and texts."""

from __future__ import annotations

import json

from shardkeep.inference.protocol import json_form
from shardkeep.inference.recent import Recent


def test_a_value_is_made_once_and_a_full_memory_begins_again() -> None:
    made: list[int] = []

    def of(key: int) -> str:
        made.append(key)
        return str(key)

    recent = Recent(of, 2, lambda key, value: key != 9 and value != "8")
    assert [recent[key] for key in (1, 2, 1, 9, 9, 8, 8, 2)] == ["1", "2", "1", "9", "9", "8", "8", "2"]
    assert made == [1, 2, 9, 9, 8, 8]
    assert recent[3] == "3" and dict(recent) == {3: "3"}


def test_headings_of_equal_requests_are_one_key_whoever_has_read_them() -> None:
    inputs = [{"name": "price", "datatype": "FP64", "shape": [2], "data": [1.0, 2.0]}]
    body, other = (json.dumps({"inputs": inputs, "id": id}).encode() for id in ("a", "b"))
    headings = [json_form.RequestReader().read(each, None, model="m", version="").heading for each in (body, other)]
    wider = json.dumps({"inputs": [inputs[0] | {"shape": [2, 1]}]}).encode()
    headings.append(json_form.RequestReader().read(wider, None, model="m", version="").heading)
    assert len(set(headings)) == 2 and headings[0] == headings[1]
