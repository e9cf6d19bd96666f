"""The JSON schema of config models as a tree to walk: what may stand below a place."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

Schema = Mapping[str, Any]


@functools.cache
def schema_of(model: type[BaseModel]) -> Schema:
    """The schema of what a model reads."""
    return model.model_json_schema()


def branches(schema: Schema, definitions: Schema) -> Iterator[Schema]:
    """All that a schema may be, references resolved; a union first, then its members."""
    if "$ref" in schema:
        target = definitions[schema["$ref"].rsplit("/", 1)[1]]
        yield from branches({**target, **{k: v for k, v in schema.items() if k != "$ref"}}, definitions)
        return
    yield schema
    for key in ("anyOf", "oneOf", "allOf"):
        for branch in schema.get(key, ()):
            yield from branches(branch, definitions)


def child(schema: Schema, part: Any) -> Schema | None:
    """What may stand at a key or index of one branch; None where the branch has no such place."""
    if isinstance(part, int) and not isinstance(part, bool):
        places = schema.get("prefixItems", ())
        found = places[part] if part < len(places) else schema.get("items")
        if isinstance(found, Mapping):
            return found
    if part in schema.get("properties", {}):
        return schema["properties"][part]  # type: ignore[no-any-return]
    other = schema.get("additionalProperties")
    return other if isinstance(other, Mapping) else None


def kinds(schemas: Sequence[Schema]) -> list[str]:
    """The kinds of the unions among `schemas`, as their `name` says them."""
    return [tag for schema in schemas for tag in schema.get("discriminator", {}).get("mapping", {})]
