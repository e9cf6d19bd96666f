"""Settings: the base of every config model, frozen, with unknown keys refused; and the types that rooms share."""

from __future__ import annotations

import copy
import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from shardkeep.base.errors import did_you_mean
from shardkeep.base.files import local

DAY_S = 86_400.0
MOST_STEPS = 1_000_000_000_000
"""Steps and samples beyond any job, and far below what 64 bits hold."""
MOST_ROWS = 1_000_000_000
MOST_WIDTH = 1_000_000
"""Columns of a weight."""
_NAME_BYTES, _PATH_BYTES = 255, 4095
LEFT: dict[str, Any] = {
    "sync_norm": False,
    "probability": 1.0,
    "delete_below": None,
    "max_bytes": None,
    "pinned": [],
    "rounding": None,
    "max_age": "off",
    "keep_rows": 1.0,
    "keep_values": None,
    "dgc": None,
}
"""Settings that were removed, and the value of each that had no effect. Who removes a setting adds it."""


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("no_number", "a truth value is no number")
    return value


def _without_truth_values(schema: Any, cls: type) -> Any:
    """A model's schema in which true is no 1, and 1 and yes are no true; other models have theirs already."""
    if isinstance(schema, list | tuple):
        return type(schema)(_without_truth_values(each, cls) for each in schema)
    if not isinstance(schema, dict) or schema.get("cls", cls) is not cls:
        return schema
    if schema.get("type") in ("int", "float"):
        return {"type": "function-before", "function": {"type": "no-info", "function": _number}, "schema": schema}
    if schema.get("type") == "bool":
        return {**schema, "strict": True}
    return {key: _without_truth_values(value, cls) for key, value in schema.items()}


class Settings(BaseModel):
    """A frozen group of settings; unknown keys, NaN/inf numbers and truth values as numbers are refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=()
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        return _without_truth_values(handler(source), cls)


def first_problem(error: ValidationError) -> str:
    """What is wrong with stored settings, as one line: the keys from the top, and what pydantic says. For those that
    a person wrote, see `config/problems.py`."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"]))[:100]
    return " ".join(f"{where}{': ' if where else ''}{first['msg'].removeprefix('Value error, ')}".split())[:300]


def known(stored: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """A copy of stored settings without those that left `model` and had no effect. A run folder and an export have all
    settings of the version that wrote them."""
    found = copy.deepcopy(dict(stored))
    try:
        model.model_validate(found)
    except ValidationError as error:
        for each in error.errors(include_url=False):
            place: list[Any] = list(each["loc"])
            if each["type"] == "extra_forbidden" and each["input"] == LEFT.get(str(key := place.pop()), ...):
                node: Any = found
                for part in place:  # with the kinds of unions
                    node = node[part] if isinstance(node, list) or part in node else node
                node.pop(key, None)
    return found


class Named(Settings):
    """Settings whose first key may represent them: `adam` for `{name: adam}`, `sync` for `{mode: sync}`."""

    model_config = ConfigDict(json_schema_extra={"short": True})

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: Any) -> Any:
        return {next(iter(cls.model_fields)): value} if isinstance(value, str) else value


def bare(key: str) -> BeforeValidator:
    """The same for a union, whose kind is looked for before any of its models is."""
    return BeforeValidator(lambda value: {key: value} if isinstance(value, str) else value)


def _checked_path(text: str) -> str:
    """Refuses what no file system takes, so that it is found before a job starts."""
    if "\0" in text:
        raise ValueError("holds a NUL character; allowed: a path without one")
    if any(len(part.encode()) > _NAME_BYTES for part in text.split("/")) or len(text.encode()) > _PATH_BYTES:
        raise ValueError(f"allowed: {_PATH_BYTES:,} bytes, {_NAME_BYTES} between two slashes")
    if local(text).startswith("~"):
        try:
            Path(text).expanduser()
        except RuntimeError:
            raise ValueError(f"there is no home folder of {text[1:].split('/')[0] or 'yours'}") from None
    return text


class Origin(enum.Enum):
    """Marks a path with where it starts in a config file."""

    FILE, DATA_ROOT = "the file's folder", "data.root"


class MayDiffer(enum.Enum):
    """Marks a setting, or a group of them, that two configs of one job may have otherwise."""

    STARTS, MACHINES = "between two starts of a job", "between its machines"


FilePath = Annotated[str, AfterValidator(_checked_path), Origin.FILE]
"""Path of a file or folder, which starts at the config's folder."""
DataPath = Annotated[str, AfterValidator(_checked_path), Origin.DATA_ROOT]
"""Path of a file or folder, or a pattern, which starts at `data.root`."""
Width = Annotated[int, Field(ge=1, le=MOST_WIDTH)]


def own_code(value: str, built_in: tuple[str, ...], form: str) -> str:
    """`value` where it is built in or has the form module:name. Raises ValueError."""
    module, colon, name = value.partition(":")
    if value in built_in or (colon and all(part.isidentifier() for part in [*module.split("."), name])):
        return value
    names = f"{', '.join(built_in)} or " if built_in else ""
    raise ValueError(f"allowed: {names}{form} of your own{did_you_mean(value, built_in)}")
