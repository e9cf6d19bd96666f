"""What the documents name: paths, links, config keys, commands and flags exist; the README's tree has every folder."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from shardkeep.base.yaml_text import read_yaml
from shardkeep.cli.main import app
from shardkeep.config import JobConfig
from tests.support.cases import every

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ("src/shardkeep", "ps", "workers", "compression", "proto")
TOPS = (*LIBRARY, "tests", "docs", "examples", "benchmarks", "scripts", "deploy")
NOTEBOOK = "docs/research/log.md"  # its dated entries name files as they were on that day
DOCS = sorted({path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md")} - {NOTEBOOK})
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", *DOCS)
YOURS = {  # examples of files that a reader would add
    "compression/selection/newest.py",
}
PATH = re.compile(rf"(?<![\w./:-])(?:{'|'.join(TOPS)})/[\w./*-]*\w\*?/?")
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")
BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
KEY = re.compile(r"[a-z]\w*(?:\.[\w-]+)+")
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
INDENT = 2


def missing_paths(text: str, folder: Path) -> list[str]:
    """Paths from the repository's root that `text` names, and links from `folder`, that do not exist."""
    links = {link for link, _ in LINK.findall(text) if link and "://" not in link}
    missing = {path for path in PATH.findall(text) if not any(ROOT.glob(path.rstrip("/")))}
    return sorted(missing - YOURS | {link for link in links if not (folder / link).exists()})


def missing_anchors(document: Path, text: str) -> list[str]:
    """Links to headings that their page does not have."""
    missing = []
    for link, anchor in LINK.findall(text):
        page = document.parent / link if link else document
        if anchor and page.suffix == ".md" and page.exists():
            content = text if page == document else page.read_text(encoding="utf-8")
            if anchor not in anchors(content):
                missing.append(f"{link}#{anchor}")
    return missing


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", text), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


@cache
def config_keys() -> tuple[frozenset[str], tuple[re.Pattern[str], ...]]:
    """The top-level keys of a job's config, and a pattern for each dotted key, from the generated reference."""
    page = (ROOT / "docs/reference/config.md").read_text(encoding="utf-8")
    tops: set[str] = set()
    patterns = [re.compile(r"tables\.\w+")]
    for section in page.split("\n## ")[1:]:
        title, body = section.split("\n", 1)
        prefixes = {
            "Top level": [""],
            "schedule of any optimizer": ["tables.TABLE.optimizer.schedule.", "tower.optimizer.schedule."],
        }.get(title, [f"{title.split(' ')[0]}."])
        for key in re.findall(r"^\| `(\w+)` \|", body, re.MULTILINE):
            tops |= {key} if prefixes == [""] else set()
            dotted = [re.escape(prefix + key).replace("TABLE", r"(\w+|\*)") for prefix in prefixes]
            patterns += [re.compile(each) for each in dotted]
    return frozenset(tops), tuple(patterns)


def unknown_keys(text: str) -> list[str]:
    """Dotted names in code spans that begin with a section of the config and are no key of it."""
    tops, patterns = config_keys()
    found = {key for span in CODE.findall(BLOCK.sub("", text)) for key in KEY.findall(span.split("=")[0])}
    files = (".py", ".json", ".jsonl", ".yaml", ".md", ".log", ".npy", ".txt", ".csv")
    named = {key for key in found if key.split(".")[0] in tops and not key.endswith(files)}
    relative = ("", "compression.")  # recipes name the keys below `compression`
    return sorted(key for key in named if not any(each.fullmatch(top + key) for each in patterns for top in relative))


@cache
def command_line() -> dict[str, frozenset[str]]:
    """The options of each command."""
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    general = {option for parameter in group.params for option in parameter.opts}
    return {
        name: frozenset(
            general | {"--help"} | {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
        )
        for name, command in named_commands(group)
    }


def named_commands(group: Any) -> Iterator[tuple[str, Any]]:
    """Each command by the words before its options. A group's own name means its command `show`."""
    for name, command in group.commands.items():
        below = getattr(command, "commands", {"": command})
        yield from ((f"{name} {each}".strip(), one) for each, one in below.items())
        yield name, below.get("show", command)


def unknown_usage(text: str) -> list[str]:
    """Commands and options of `shardkeep` that the command line does not have."""
    commands = command_line()
    options = frozenset().union(*commands.values())
    spans = CODE.findall(BLOCK.sub("", text))
    unknown = [flag for span in spans if span.startswith("--") for flag in FLAG.findall(span) if flag not in options]
    lines = [line for block in BLOCK.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    for call in (*spans, *lines):
        if found := re.search(r"(?:^|[\s/;])shardkeep ([a-z][\w-]*)((?:\s+[^#;&|]*)?)", call):
            name, arguments = found.groups()
            if (both := f"{name} {arguments.lstrip().split(' ')[0]}") in commands:
                name = both
            arguments = arguments.split(" -- ")[0]  # what follows is another command's
            if name in commands:
                unknown += [f"{name} {flag}" for flag in FLAG.findall(arguments) if flag not in commands[name]]
            elif call in spans or re.match(r"\s*shardkeep ", call):
                unknown.append(f"shardkeep {name}")
    return sorted(set(unknown) - FOREIGN)


def refused_settings(text: str) -> list[str]:
    """The errors of YAML blocks that are a job's config or a part of one."""
    refused = []
    for language, block in re.findall(r"^```(ya?ml)[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        found = read_yaml(block.partition("\n---\n")[0]) if language else None
        if isinstance(found, dict) and found.keys() <= JobConfig.model_fields.keys():
            try:
                JobConfig.model_validate({"data": {"source": "synthetic"}} | found)
            except ValueError as error:
                refused.append(str(error))
    return refused


FOREIGN = {"--no-deps", "--extra-index-url", "--check", "--pdb", "--wait"}  # of other programs, and of our scripts


def tree_paths(text: str) -> Iterator[str]:
    """The paths of the tree in README.md: two spaces of indentation per level, then a description."""
    parents: list[str] = []
    for line in text.split("## The tree\n\n```\n", 1)[1].split("\n```", 1)[0].splitlines():
        level = (len(line) - len(line.lstrip())) // INDENT
        names = re.split(r"\s{2,}", line.strip())[0].split()
        yield from ("".join([*parents[:level], name]) for name in names)
        parents = [*parents[:level], names[0]]


every_document = every("document", [ROOT / name for name in DOCUMENTS], ids=DOCUMENTS)


@every_document
def test_every_path_in_a_document_exists(document: Path) -> None:
    assert not missing_paths(document.read_text(encoding="utf-8"), document.parent)


@every_document
def test_every_link_to_a_heading_finds_it(document: Path) -> None:
    assert not missing_anchors(document, document.read_text(encoding="utf-8"))


@every_document
def test_every_config_key_in_a_document_exists(document: Path) -> None:
    assert not unknown_keys(document.read_text(encoding="utf-8"))


@every_document
def test_every_command_and_option_in_a_document_exists(document: Path) -> None:
    assert not unknown_usage(document.read_text(encoding="utf-8"))


@every_document
def test_every_yaml_block_of_a_document_is_a_valid_config(document: Path) -> None:
    assert not refused_settings(document.read_text(encoding="utf-8"))


def test_every_limit_has_the_value_of_its_key_or_constant() -> None:
    page = (ROOT / "docs/reference/limits.md").read_text(encoding="utf-8")
    source = r"(?:`(\w+)\.(\w+)`|`(\w+)` in `(?:src/shardkeep/)?(.*).py`) \|$"
    rows = re.findall(rf"^\|[^|]+\|[^|]*?(\d+)[^|\d]*\|(?:.*\|)? {source}", page, re.MULTILINE)
    assert len(rows) == len(re.findall(r"` \|$", page, re.MULTILINE)) > 20
    for stated, section, key, constant, module in rows:
        owner = importlib.import_module(f"shardkeep.{module.replace('/', '.')}") if module else None
        found = getattr(getattr(JobConfig(), section), key) if owner is None else getattr(owner, constant)
        assert int(stated) == found, key or constant


def test_a_yaml_block_with_an_unknown_setting_is_found() -> None:
    assert refused_settings("```yaml\ntrain: {batch_size: 4, grad_clip: 1}\n```")


def test_the_log_s_index_finds_its_entries() -> None:
    assert not missing_anchors(ROOT / NOTEBOOK, (ROOT / NOTEBOOK).read_text(encoding="utf-8"))


def test_the_constants_of_the_cost_model_are_those_of_their_files() -> None:
    page = (ROOT / "docs/scale.md").read_text(encoding="utf-8")
    rows = re.findall(r"\| ([\d.,]+) \|[^|\n]*\| `(20[^`]+json)`,? `([^`]+)` \|", page)
    assert len(rows) > 15
    for shown, file, key in rows:
        found = json.loads((ROOT / "benchmarks/results" / file).read_text())["results"]
        for part in key.split("/"):
            found = found[part]
        digits = len(shown.partition(".")[2])
        assert f"{found:,.{digits}f}" == shown, f"{file}, {key}"


def test_every_path_of_the_tree_exists() -> None:
    paths = list(tree_paths((ROOT / "README.md").read_text(encoding="utf-8")))
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_the_tree_names_every_folder_of_the_library() -> None:
    files = [path for top in LIBRARY for path in (ROOT / top).rglob("*.py")]
    folders = {f"{path.resolve().parent.relative_to(ROOT).as_posix()}/" for path in files}
    outside = {
        "examples/",
        "examples/compression/",
        "examples/custom_model/",
        "examples/custom_source/",
        "benchmarks/",
        "benchmarks/peers/",
    }
    assert not folders - outside - set(tree_paths((ROOT / "README.md").read_text(encoding="utf-8")))


GENERATORS = sorted(p.name for start in ("gen-*", "draw-*", "take-*") for p in (ROOT / "scripts").glob(start))


@every("name", GENERATORS)
def test_the_contributors_guide_names_every_generator_and_check_runs_those_that_compare(name: str) -> None:
    guide, check = ((ROOT / path).read_text(encoding="utf-8") for path in ("CONTRIBUTING.md", "scripts/check"))
    compares = "--check" in (ROOT / "scripts" / name).read_text(encoding="utf-8")
    assert f"`scripts/{name}` |" in guide
    assert (f"scripts/{name} --check" in check) == compares


@every(
    "text",
    ["`ps/nowhere.py`", "see ps/nowhere/*.py.", "[the log](docs/nowhere.md)", "src/shardkeep/nowhere"],
)
def test_a_path_that_does_not_exist_is_found(text: str) -> None:
    assert missing_paths(text, ROOT)


def test_a_heading_that_does_not_exist_is_found() -> None:
    assert missing_anchors(ROOT / "README.md", "[x](docs/reference/config.md#nowhere)\n[y](#nowhere)") == [
        "docs/reference/config.md#nowhere",
        "#nowhere",
    ]


def test_a_config_key_is_known_if_it_exists() -> None:
    for text in ("`train.nothing`", "`tables.user.nothing`", "set `compression.push.nothing=1`"):
        assert unknown_keys(text), text
    for text in ("`train.epochs`", "`tables.user.optimizer.lr=0.1`", "`tower.optimizer.schedule.warmup_steps`"):
        assert not unknown_keys(text), text


@every(
    "text",
    ["`--nothing`", "`shardkeep nothing`", "```\nshardkeep train a.yaml --nothing\n```", "```\nshardkeep no\n```"],
)
def test_a_command_or_option_that_does_not_exist_is_found(text: str) -> None:
    assert unknown_usage(text)
