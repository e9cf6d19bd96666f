"""Old names of settings: refused in a user's config, with the new one; read in what is stored.

Who renames a setting adds a line to `KEYS`, or to `ZEROS`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

KEYS = {
    "model.top": "model.hidden",
    "model.second_top": "model.second_hidden",
    "model.gates.widths": "model.gates.hidden",
    "affinity": "launch.affinity",
    "processes.start": "launch.start",
    "page.listen": "web.page",
    "metrics.listen": "web.metrics",
    "journal": "recovery.journal",
    "liveness.restarts": "recovery.restarts",
    "tables.*.rows": "tables.*.dtype",
    "tables.*.state": "tables.*.state_dtype",
}
"""Old key -> new key; * is any key."""
ZEROS = {
    "checkpoint.every_steps": "off",
    "eval.every_steps": "epoch",
    "telemetry.every_s": "off",
    "profile.steps": "off",
    "compression.push.max_age": "off",
    "compression.push.dgc.clip_norm": "off",
}
"""Key -> the word for what 0 meant."""
RENAMED = "renamed"  # the type of the errors
Keys = tuple[str, ...]


def refuse_old(raw: Any, model: str) -> None:
    """Raises ValidationError of the model of that name: an error for each old key that a user wrote."""
    texts = [(old, f"is now {'.'.join(map(str, new))}") for old, new in _moves(raw)]
    texts += [(keys, f"0 is now {word}") for keys, word in _zeros(raw)]
    errors = [
        InitErrorDetails(type=PydanticCustomError(RENAMED, "{text}", {"text": text}), loc=old, input=None)
        for old, text in texts
    ]
    if errors:
        raise ValidationError.from_exception_data(model, errors)


def under_new_names(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A stored config, of this version or an earlier one, under the names of now."""
    found = copy.deepcopy(dict(stored))
    for old, new in list(_moves(found)):
        if not isinstance(found.get(new[0], {}), dict):  # damaged: whoever reads the config refuses it
            continue
        above = _below(found, old[:-1])
        value = above.pop(old[-1])
        if not above:
            _below(found, old[:-2]).pop(old[-2])
        _below(found, new[:-1]).setdefault(new[-1], value)
    for keys, word in list(_zeros(found)):
        _below(found, keys[:-1])[keys[-1]] = word
    if isinstance(model := found.get("model"), dict):  # it had the keys of all models, empty
        found["model"] = {key: value for key, value in model.items() if value not in (None, False, {})}
    return found


def _moves(raw: Any) -> Iterator[tuple[Keys, Keys]]:
    for old, new in KEYS.items():
        for keys in _places(raw, old.split(".")):
            yield keys, tuple(keys[at] if part == "*" else part for at, part in enumerate(new.split(".")))


def _zeros(raw: Any) -> Iterator[tuple[Keys, str]]:
    for key, word in ZEROS.items():
        keys = tuple(key.split("."))
        if any(_places(raw, keys)) and (value := _below(raw, keys)) == 0 and not isinstance(value, bool):
            yield keys, word


def _places(raw: Any, pattern: Sequence[str]) -> Iterator[Keys]:
    """The keys at which `raw` has what a pattern names."""
    if not pattern:
        yield ()
    elif isinstance(raw, Mapping):
        for key in list(raw) if pattern[0] == "*" else [pattern[0]]:
            if key in raw:
                yield from ((key, *below) for below in _places(raw[key], pattern[1:]))


def _below(node: Any, keys: Keys) -> Any:
    for key in keys:
        node = node.setdefault(key, {})
    return node
