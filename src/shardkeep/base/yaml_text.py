"""YAML text to plain values and back, with the line of what is wrong: mappings, lists, text, numbers, true/false, null.

Scalars are those of the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema), so `yes` and dates are
text. A number that YAML 1.1 reads as another one is refused, and so are anchors, aliases and tags: a text is what it
looks like. Its size and depth are bounded.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.resolver import Resolver

from shardkeep.base.printable import printable

MAX_BYTES = 20_000_000
"""A resolved config takes some 150 bytes for each column."""
MAX_DEPTH = 100
"""Levels of nesting."""
MAX_DIGITS = 1_000
"""Digits of a number; Python refuses to read or print 4,300 and more."""
_TAG = "tag:yaml.org,2002:"
_SCALARS = {
    "null": re.compile(r"~|null|Null|NULL|"),
    "bool": re.compile(r"true|True|TRUE|false|False|FALSE"),
    "int": re.compile(r"[-+]?(0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+"),
    "float": re.compile(
        r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
    ),
}
"""Kinds of plain scalars; others are text. Whole numbers have no leading zeros, which mean octal in YAML 1.1."""
_ODD = re.compile(
    "[^\n -~\u00a0-\u2027\u202a-\ud7ff\ue000-\ufefe\U00010000-\U0010ffff]|[|>][-+0-9]*#" r"|(?<!- ')\?|\?(?!'\n)"
)
"""Where libyaml reads more than PyYAML: tabs, byte order marks, ends of lines, heads of blocks, question marks."""
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
    "document start": "% or a second document begins where no document can",
    "incompatible YAML": "%YAML asks for a version other than 1",
    "expected <block end>": "the indentation does not fit that of the lines above, or text follows a closed quote",
    "sequence entries are not allowed": "a dash stands where no list can begin",
}
"""What PyYAML says, and what it means."""


class YamlError(ValueError):
    """The text cannot be read; one line that says where and why."""


def read_yaml(text: str) -> Any:
    """The value of a YAML text, None for an empty one. Raises YamlError."""
    if len(text) > MAX_BYTES:
        raise YamlError(f"is longer than {MAX_BYTES:,} characters")
    if not _ODD.search(text):
        with contextlib.suppress(yaml.YAMLError):  # PyYAML says what is wrong
            return _QuickLoader(text).get_single_data()
    try:
        return _Loader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        raise YamlError(_one_line(error)) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(f"line {line}: holds the character {error.character:#x}, which no text has") from error


def write_yaml(value: Any, **style: Any) -> str:
    """A value as YAML, with the options of `yaml.dump`. `read_yaml` and readers of YAML 1.1 give an equal value."""
    return printable(yaml.dump(value, Dumper=_Dumper, allow_unicode=True, **style), keep="\n")


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


class _Rules(Composer, Resolver):
    """The bounds above, for a safe loader; a key that stands twice in a mapping is an error."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[attr-defined]
        self._depth += 1
        if problem := _unreadable(event, self._depth):
            raise _Wrong(problem, event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        if kind is yaml.ScalarNode and implicit[0]:
            return _TAG + _kind(value)
        return str(super().resolve(kind, value, implicit))  # type: ignore[no-untyped-call]

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _Wrong("a list or a mapping stands where a key belongs", key.start_mark)
            if (key.tag, key.value) in seen:
                line = seen[key.tag, key.value]
                raise _Wrong(f"the key {key.value} stands here and in line {line}", key.start_mark)
            seen[key.tag, key.value] = key.start_mark.line + 1
        return node


class _Loader(_Rules, yaml.SafeLoader):
    """PyYAML's loader."""


_Quick: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _QuickLoader(_Rules, _Quick):  # type: ignore[misc]
    """libyaml's, four times as fast, where PyYAML was built with it."""

    def __init__(self, text: str) -> None:
        _Quick.__init__(self, text)


def _unreadable(event: Any, depth: int) -> str:
    """What no text may have where a node begins; "" = nothing."""
    if depth > MAX_DEPTH:
        return f"more than {MAX_DEPTH} levels of nesting"
    if isinstance(event, yaml.AliasEvent):
        return "an asterisk begins a value, and aliases are not allowed; repeat the value, or quote the text"
    if event.anchor is not None:
        return "an ampersand begins a value, and anchors are not allowed; leave it out, or quote the text"
    if event.tag is not None:
        return f"the tag '{event.tag.replace(_TAG, '!!')}' is not allowed; put quotes around a text"
    return _wrong_scalar(event.value, plain=event.implicit[0]) if isinstance(event, yaml.ScalarEvent) else ""


def _wrong_scalar(scalar: str, *, plain: bool) -> str:
    if any("\ud800" <= c <= "\udfff" for c in scalar):
        return "half of a pair of UTF-16 surrogates"
    if plain and len(scalar) > MAX_DIGITS and _kind(scalar) == "int":
        return f"a whole number of {len(scalar):,} digits"
    return _ambiguity(scalar) if plain else ""


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper without aliases; it also quotes a text that is something else in YAML 1.2."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        tag = str(super().resolve(kind, value, implicit))  # type: ignore[no-untyped-call]
        plain_text = kind is yaml.ScalarNode and implicit[0] and tag == _TAG + "str"
        return _TAG + "int" if plain_text and (_kind(value) != "str" or _ambiguity(value)) else tag

    def represent_scalar(self, tag: str, value: Any, style: str | None = None) -> yaml.ScalarNode:
        return super().represent_scalar(tag, value, style if value.isprintable() else '"')


def _kind(scalar: str) -> str:
    """The kind of a plain scalar."""
    return next((kind for kind, pattern in _SCALARS.items() if pattern.fullmatch(scalar)), "str")


def _ambiguity(scalar: str) -> str:
    """What is wrong with a plain scalar that is a number in YAML 1.1 or 1.2, and something else in the other one."""
    if not _NUMBERLIKE.fullmatch(scalar) or _kind(scalar) != "str":
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
