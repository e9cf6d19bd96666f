"""What a role imports: the kernels that its config names, and no library that it does not need."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

import shardkeep
from shardkeep.assembly.kernel_needs import Role, needed_kernels
from shardkeep.base.compiling.sources import kernel_modules
from shardkeep.config import parse_config
from shardkeep.inference.export.writing import export_run
from tests.support import kernel_loads
from tests.support.cases import every
from tests.support.click_files import click_job, click_rows, write_csv
from tests.support.kernel_loads import Loads

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ids, pools and int8": {
        "ids": "coded",
        "push": {"keep": 0.5, "pool_rows": 100, "values": "int8"},
        "pull": {"cache_rows": 100, "lease": 2, "values": "fp16"},
    },
    "the largest values": {"push": {"select": "top_k", "keep": 0.5, "pool_rows": 100}},
    "packed rows": {},
}
TABLES = {"packed rows": {"default": {"dtype": "int8"}}}
COMMANDS = {
    "evaluate": ["evaluate", "{run}"],
    "predict": ["predict", "{run}", "--data", "{folder}/train.csv", "--out", "{folder}/scores.csv"],
    "predict by an export": ["predict", "{out}", "--data", "{folder}/train.csv", "--out", "{folder}/same.csv"],
    "export": ["export", "{run}", "{folder}/again"],
    "serve": ["serve", "{run}", "--model", "99"],  # there is none: it ends
    "estimate": ["estimate", "{folder}/job.yaml"],
    "train": ["train", "{folder}/job.yaml", "--run-dir", "{folder}/trained"],
    "train a file": ["train", "{folder}/train.csv", "--run-dir", "{folder}/of-file"],
    "init": ["init", "{folder}/train.csv", "--out", "{folder}/of-file.yaml"],
}
ROLES: tuple[Role, ...] = ("server", "worker")


def job(name: str) -> str:
    return json.dumps(
        {
            "servers": 0,
            "workers": 1,
            "consistency": "bounded",
            "data": {"source": "synthetic", "synthetic": {"train_samples": 300, "eval_samples": 100}},
            "train": {"batch_size": 100},
            "tower": {"compile": "off"},
            "compression": CONFIGS[name],
            "tables": TABLES.get(name, {}),
        }
    )


@pytest.fixture(scope="module")
def loads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Loads]:
    """By role and by name of a config: one fresh process for each, forked from one that has imported torch."""
    folder = tmp_path_factory.mktemp("loads")
    jobs = {name: job(name) for name in CONFIGS}
    (folder / "job.yaml").write_text(job("plain"))
    run, out = folder / "run", folder / "exported"
    small = click_job(write_csv(folder / "train.csv", click_rows(300)))
    shardkeep.train(shardkeep.JobConfig.model_validate(small), run_dir=run, quiet=True)
    export_run(run, out)
    commands = {name: [text.format(folder=folder, run=run, out=out) for text in COMMANDS[name]] for name in COMMANDS}
    command = [sys.executable, "-m", kernel_loads.__name__, str(folder), json.dumps(jobs), json.dumps(commands), *ROLES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return {name: kernel_loads.read(folder, name, done.stderr) for name in (*ROLES, *CONFIGS, *COMMANDS)}


@pytest.mark.slow
@pytest.mark.waits_for_processes
@every(
    ("role", "suspects"),
    [
        ("server", ("torch._dynamo", "pyarrow", "shardkeep.workers.data.", "shardkeep.workers.models.")),
        ("worker", ("pyarrow", "sklearn", "rich")),
    ],
)
def test_the_module_of_a_role_imports_the_kernels_that_every_such_role_needs_and_no_library_besides(
    role: Role, suspects: tuple[str, ...], loads: dict[str, Loads]
) -> None:
    assert sorted(loads[role].kernels) == sorted(needed_kernels(None, role))
    assert f"shardkeep.roles.{role}" in loads[role].modules
    assert loads[role].loaded(*suspects) == []


@pytest.mark.slow
@pytest.mark.waits_for_processes
@every("name", CONFIGS)
def test_a_job_imports_the_kernels_that_its_config_names_and_compiles_none_in_a_step(
    name: str, loads: dict[str, Loads]
) -> None:
    assert not loads[name].kernels_too_early
    assert sorted(loads[name].kernels) == sorted(needed_kernels(parse_config(job(name)), *ROLES))


@pytest.mark.slow
@pytest.mark.waits_for_processes
@every("name", COMMANDS)
def test_a_command_looks_which_kernels_are_compiled_before_it_loads_one(name: str, loads: dict[str, Loads]) -> None:
    assert loads[name].kernels_too_early == []
    assert loads[name].kernels and (name != "init" or len(loads[name].kernels) < 9), "init splits an excerpt"


def test_a_plain_job_needs_no_kernels_of_compression_but_varints() -> None:
    names = needed_kernels(parse_config("{data: {source: synthetic}}"), "server", "worker")
    assert [name for name in names if ".compression." in name] == ["shardkeep.compression.ids.bit_kernels"]
    assert set(names) < set(kernel_modules())
    assert not [name for name in names if "packed" in name or "precision" in name]
