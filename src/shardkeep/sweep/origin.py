"""Where the figures of a sweep come from: the job, the data, versions, commit, machine, dates, and the command.

All of it is read from the run folders and the plan, so it is that of the runs, also where the report is written later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from shardkeep.base.sizes import counted
from shardkeep.config import JobConfig
from shardkeep.sweep.plan import flow
from shardkeep.sweep.results import FP32, Results

UNKNOWN = "not known"
ALWAYS = ("name", "mode", "lr", "staleness")
"""Settings that are stated also where they are the default."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a paper has to state of its figures; each value is one text for a person."""

    command: str
    """What makes them again."""
    made: Mapping[str, str]
    """When, on what, by what."""
    job: Mapping[str, str]
    """What all runs share, unless a recipe changes it."""
    sweep_file: str
    """The sweep file as it was written."""


def origin(results: Results) -> Origin:
    """The statement of a sweep, as far as its runs are done. The job is that of fp32's first run."""
    done = results.completed
    first = next((run for run in done if run.recipe == FP32), done[0] if done else None)
    config = results.plan.runs[0].config if first is None else first.planned.config
    job = _planned(config) | ({} if first is None else _trained(config, first.summary))
    return Origin(results.command, _made(results), job, results.plan.text)


def _planned(config: JobConfig) -> dict[str, str]:
    """What the config alone says."""
    rows = config.table("default")
    named = {name: config.table(name) for name in config.tables if name != "default"}
    others = [f"{name}: dim {table.dim}, {_settings(table.optimizer)}" for name, table in named.items()]
    batch, threads = config.train.batch_size * config.train.accumulate, config.threads
    each = "threads: auto" if threads == "auto" else f"{counted(threads, 'thread')} each"
    return {
        "job": config.name,
        "data": _data(config),
        "model": _settings(config.model),
        "rows": "; ".join([f"dim {rows.dim}", _settings(rows.optimizer), *others]),
        "tower": _settings(config.tower.optimizer),
        "batch": f"{batch:,} samples a worker and step, {batch * config.workers:,} in all",
        "processes": f"{counted(config.workers, 'worker')} with {each}, {counted(config.servers, 'server')}",
        "consistency": _settings(config.consistency),
    }


def _trained(config: JobConfig, summary: Mapping[str, Any]) -> dict[str, str]:
    """What a run found out besides."""
    scored, tables = summary.get("eval") or {}, summary.get("tables") or []
    chosen = (summary.get("tower") or {}).get("chosen") or {}
    rows = sum(int(table["rows"]) for table in tables)
    return {
        "steps": f"{_number(summary.get('steps'))} in {counted(config.train.epochs, 'epoch')}",
        "samples": f"{_number(summary.get('samples'))} trained, {_number(scored.get('samples'))} for evaluation",
        "tables": f"{counted(len(tables), 'table')} with {rows:,} rows at the end",
        **{f"tower's {key}": str(value).partition(":")[0] for key, value in chosen.items()},
    }


def _data(config: JobConfig) -> str:
    """The source with its files, and what is read of it."""
    data = config.data
    if data.source == "synthetic":
        made = data.synthetic
        sizes = (
            f"{counted(len(made.table_sizes), 'table')} of {_range(made.table_sizes)} ids"
            if made.table_sizes
            else "26 tables"
        )
        return f"synthetic, {sizes}, {made.num_dense} dense columns, Zipf {made.zipf:g}, {made.ids} ids"
    held = f", {data.eval_fraction:g} of the rows held out" if data.eval_fraction else ""
    held = f", {data.held_out(config.seed)}" if data.split is not None else held
    files = ", ".join([*data.train, *(f"{name} (evaluation)" for name in data.eval)])
    columns = f"{len(data.sparse)} features, {len(data.dense)} dense columns" if data.sparse else "its own columns"
    return f"{data.source}: {files or _settings(data.options)}{held}; {columns}"


def _made(results: Results) -> dict[str, str]:
    """What the runs say of themselves; where they differ, all of it."""
    done = results.completed
    days = sorted({record.time[:10] for run in done for record in run.records if record.time is not None})
    machines = [run.summary.get("machine") or {} for run in done]
    return {
        "date": " to ".join(dict.fromkeys((days[0], days[-1]))) if days else UNKNOWN,
        "runs": f"{len(done)} of {len(results.runs)} completed, seeds {', '.join(map(str, results.plan.seeds))}",
        "machine": _all(
            f"{one['processor']}; {counted(int(one['cores']), 'core')}, {one['memory_gb']} GB; {one['system']}"
            for one in machines
            if {"processor", "cores", "memory_gb", "system"} <= set(one)
        ),
        "commit": _all(str(run.summary["commit"]) for run in done if run.summary.get("commit")),
        "versions": _all(
            ", ".join(f"{name} {version}" for name, version in (run.summary.get("versions") or {}).items())
            for run in done
        ),
    }


def _all(texts: Any) -> str:
    """Different texts, each once."""
    return " | ".join(dict.fromkeys(text for text in texts if text)) or UNKNOWN


def _settings(model: BaseModel | Mapping[str, Any]) -> str:
    """Settings that are neither empty nor left out, on one line."""
    if isinstance(model, BaseModel):
        changed = model.model_dump(mode="json", exclude_defaults=True)
        model = {k: v for k, v in model.model_dump(mode="json").items() if k in changed or k in ALWAYS}
    return flow({k: v for k, v in model.items() if v not in (None, {}, [])}).strip("{}")


def _range(sizes: list[int]) -> str:
    return f"{min(sizes):,}" if min(sizes) == max(sizes) else f"{min(sizes):,} to {max(sizes):,}"


def _number(value: Any) -> str:
    return UNKNOWN if value is None else f"{int(value):,}"
