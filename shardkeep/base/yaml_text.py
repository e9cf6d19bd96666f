"""YAML text to plain values and back, with the line of what is wrong: mappings, lists, text, numbers, true/false, null.

Scalars are those of the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema), so `yes` and dates are
text. A number that YAML 1.1 reads as another one is refused. Bounds what a text can make of itself: size, depth, and
the values that aliases multiply to.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

MAX_BYTES = 20_000_000
"""A resolved config takes some 150 bytes for each column."""
MAX_DEPTH = 100
"""Levels of nesting."""
MAX_VALUES = 50_000
"""Values that aliases may multiply a text to, if the text does not write as many itself."""
MAX_DIGITS = 1_000
"""Digits of a number; Python refuses to read or print 4,300 and more."""
_KINDS = {
    "null": "nothing",
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "seq": "a list",
    "map": "a mapping",
}
_TAG = "tag:yaml.org,2002:"
_MERGE = _TAG + "merge"
_SCALARS = {
    "null": re.compile(r"~|null|Null|NULL|"),
    "bool": re.compile(r"true|True|TRUE|false|False|FALSE"),
    "int": re.compile(r"[-+]?(0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+"),
    "float": re.compile(
        r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|0|[1-9][0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
    ),
}
"""Kinds of plain scalars; others are text. Whole numbers have no leading zeros, which mean octal in YAML 1.1."""
_NUMBERLIKE = re.compile(r"[-+]?[0-9][0-9a-fA-FxXbB_:.]{0,999}")
_PLAIN_WORDS = {
    "could not find expected ':'": "a key has no colon after it",
    "mapping values are not allowed": "a colon stands where no key can; quote a text that has one",
    "found character": "a tab, @, % or ` begins a value or an indentation; use spaces, and quote the text",
    "found unexpected end of stream": "a quote is not closed",
    "found unexpected document separator": "a quote is not closed",
    "but found another document": "--- begins a second document; a file has one",
    "expected ',' or": "a bracket is not closed, or a comma is missing",
    "expected the node content": "a bracket is not closed, or a value is missing",
    "for merging": "<< takes the name of a mapping, as in <<: *name",
    "document start": "% or a second document begins where no document can",
    "incompatible YAML": "%YAML asks for a version other than 1",
    "expected <block end>": "the indentation does not fit that of the lines above, or text follows a closed quote",
    "found undefined alias": "an asterisk begins a value, and no anchor has this name; quote the text",
    "sequence entries are not allowed": "a dash stands where no list can begin",
}
"""What PyYAML says, and what it means."""


class YamlError(ValueError):
    """The text cannot be read; one line that says where and why."""


def read_yaml(text: str) -> Any:
    """The value of a YAML text, None for an empty one. Raises YamlError."""
    if len(text) > MAX_BYTES:
        raise YamlError(f"is longer than {MAX_BYTES:,} characters")
    try:
        return _Loader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        raise YamlError(_one_line(error)) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(f"line {line}: holds the character {error.character:#x}, which no text has") from error


def write_yaml(value: Any, **style: Any) -> str:
    """A value as YAML, with the options of `yaml.dump`. `read_yaml` and readers of YAML 1.1 give an equal value."""
    return str(yaml.dump(value, Dumper=_Dumper, allow_unicode=True, **style))


def read_text(path: Path) -> str:
    """A file of text in UTF-8. Raises YamlError where it is none, OSError."""
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise YamlError(f"is larger than {MAX_BYTES:,} bytes")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise YamlError(f"is not a text file in UTF-8 (byte {error.start})") from error


def _one_line(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    if isinstance(error, _Wrong):
        return f"line {mark.line + 1}: {error.problem}" if mark else str(error.problem)
    where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    return f"is not YAML{where} ({_plain(error.problem or error.context or 'unreadable')})"


def _plain(problem: str) -> str:
    for words, plain in _PLAIN_WORDS.items():
        if words in problem:
            return plain
    return " ".join(problem.split())


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the bounds above; a key that stands twice in a mapping is an error."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._num_values = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        alias, mark = self.check_event(yaml.AliasEvent), self.peek_event().start_mark  # type: ignore[no-untyped-call]
        self._depth += 1
        self._num_values += 1
        if self._depth > MAX_DEPTH:
            raise _Wrong(f"more than {MAX_DEPTH} levels of nesting", mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is not None:
            if alias and id(node) not in self._sizes:
                raise _Wrong("an alias stands inside of what it names", mark)
            size = self._sizes.setdefault(id(node), 1 + sum(self._sizes[id(child)] for child in _children(node)))
            if size > max(MAX_VALUES, self._num_values):
                raise _Wrong(f"more than {MAX_VALUES:,} values, as aliases repeat them", mark)
        return node

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        if kind is yaml.ScalarNode and implicit[0] and value != "<<":
            return _TAG + _kinds(value)[0]
        return str(super().resolve(kind, value, implicit))  # type: ignore[no-untyped-call]

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if event.implicit[0] and (problem := _ambiguity(event.value)):
            raise _Wrong(problem, event.start_mark)
        node: yaml.ScalarNode = super().compose_scalar_node(anchor)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        tag = node.tag.removeprefix(_TAG)
        if tag not in _KINDS:
            raise _Wrong(f"the tag {tag} has no meaning here", node.start_mark)
        if tag == "int" and len(node.value) > MAX_DIGITS:
            raise _Wrong(f"a whole number of {len(node.value):,} digits", node.start_mark)
        if tag in _SCALARS and (not isinstance(node, yaml.ScalarNode) or tag not in _kinds(node.value)):
            raise _Wrong(f"{node.value!r:.40} is not {_KINDS[tag]}", node.start_mark)
        value = int(node.value, 0) if tag == "int" else super().construct_object(node, deep)
        if isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):
            raise _Wrong("half of a pair of UTF-16 surrogates", node.start_mark)
        return value

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: dict[tuple[str, str], int] = {}  # before PyYAML puts the keys of a merge among them
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _Wrong("a list or a mapping stands where a key belongs", key.start_mark)
            if key.tag == _MERGE:
                continue
            if (key.tag, key.value) in seen:
                line = seen[key.tag, key.value]
                raise _Wrong(f"the key {key.value} stands here and in line {line}", key.start_mark)
            seen[key.tag, key.value] = key.start_mark.line + 1
        return node


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper; it also quotes a text that is something else in YAML 1.2."""

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        tag = str(super().resolve(kind, value, implicit))  # type: ignore[no-untyped-call]
        plain_text = kind is yaml.ScalarNode and implicit[0] and tag == _TAG + "str"
        return _TAG + "int" if plain_text and (_kinds(value)[0] != "str" or _ambiguity(value)) else tag


def _kinds(scalar: str) -> list[str]:
    """The kinds that a plain scalar may have, the first one without a tag."""
    return [kind for kind, pattern in _SCALARS.items() if pattern.fullmatch(scalar)] or ["str"]


def _ambiguity(scalar: str) -> str:
    """What is wrong with a plain scalar that is a number in YAML 1.1 or 1.2, and something else in the other one."""
    if not _NUMBERLIKE.fullmatch(scalar) or _kinds(scalar) != ["str"]:
        return ""
    both = yaml.safe_load(scalar), int(scalar) if scalar.lstrip("+-").isdecimal() else scalar
    if not (numbers := [str(value) for value in both if not isinstance(value, str)]):
        return ""
    old, new = ("text" if isinstance(value, str) else value for value in both)
    to_do = f"write {' or '.join(numbers)}, or '{scalar}' in quotes for a text"
    return f"{scalar} is {old} in YAML 1.1 and {new} in YAML 1.2; {to_do}"


class _Wrong(yaml.MarkedYAMLError):
    """What is wrong, in our words."""

    def __init__(self, problem: str, mark: yaml.Mark | None) -> None:
        super().__init__(problem=problem, problem_mark=mark)


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []
