"""Every command and every entry for Python where only shardkeep's dependencies are installed.

Each does its work, or names in one line what to install, and exits with 1. Packages are hidden in the process of the
command; tests/integration/test_document_commands.py runs the README in an environment that has the wheel alone.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console

from shardkeep.base.plugging.packages import EXTRAS
from shardkeep.base.yaml_text import write_yaml
from shardkeep.cli.main import app
from shardkeep.experiments.plan import load_sweep
from tests.support.builds import dependencies
from tests.support.cases import every
from tests.support.click_files import click_job, click_rows, write_csv
from tests.support.cluster import Cluster, Ended
from tests.support.requirements import modules_beside
from tests.support.trial_runs import StandIns, sweep, write_sweep

pytestmark = pytest.mark.waits_for_processes

HIDDEN = sorted({*modules_beside({*dependencies(), "shardkeep"}), *EXTRAS, "pandas", "polars"} - {"coverage"})
RIGHT = {
    "status": ("status run", 0),
    "stop": ("stop run", 1),  # it has completed
    "scale": ("scale run --workers 2", 2),  # no such job runs
    "evaluate": ("evaluate run", 0),
    "init": ("init clicks.csv --out new.yaml", 0),
    "predict": ("predict run --data clicks.csv --out scores.csv --keep user", 0),
    "export": ("export run model", 0),
    "tables": ("tables run", 0),
    "tables export": ("tables export run --table user --out user.parquet", 0),
    "config": ("config job.yaml", 0),
    "estimate": ("estimate job.yaml", 0),
    "cache": ("cache .", 0),
    "kernels": ("kernels --help", 0),  # compiling all of them takes a minute
    "report": ("report run --html run.html", 0),
}
PROCESSES = {
    "node": "node job.yaml --run-dir roles --rank 0 --nodes 1 --set servers=1",
    "sweep": "sweep sweep.yaml --out sweep",
    "with": f"with --servers 1 --run-dir loop -- {sys.executable} -c pass",
}
LACKS = {
    "view": ("view run", "the page needs starlette, uvicorn, httptools: pip install 'shardkeep[web]'"),
    "compare": ("compare run run", "an interval of a difference needs scipy: pip install 'shardkeep[report]'"),
    "tune": ("tune job.yaml", "shardkeep tune needs optuna: pip install 'shardkeep[tune]'"),
    "certs": ("certs tls", "shardkeep certs needs cryptography: pip install 'shardkeep[tls]'"),
    "serve": (
        "serve run",
        "--http 127.0.0.1:8000 needs starlette, uvicorn, httptools, prometheus_client: "
        "pip install 'shardkeep[web]'; or say --http off",
    ),
}


def without(*packages: str, function: str = "main") -> dict[str, Any]:
    main = f"tests.support.without_packages:{function}"
    return {"main": main, "env": {"WITHOUT_PACKAGES": ",".join(packages)}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a job's run; the job, too, has the dependencies alone."""
    folder = tmp_path_factory.mktemp("bare")
    job = click_job(write_csv(folder / "clicks.csv", click_rows(300)))
    (folder / "job.yaml").write_text(write_yaml(job))
    with Cluster(folder) as cluster:
        ended = cluster.command("train", "job.yaml", "--run-dir", "run", cwd=folder, **without(*HIDDEN)).end()
        assert ended.code == 0 and "page " not in ended.out, ended
    return folder


def test_each_command_does_its_work_or_names_the_extra_that_it_needs(folder: Path, cluster: Cluster) -> None:
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    below = {f"tables {name}" for name in commands["tables"].commands if name != "show"}
    by_others = {"train", "coordinator", "server", "worker", "fork-server"}  # a job in processes starts them
    assert {*commands, *below} == {*RIGHT, *LACKS, *PROCESSES, *by_others}
    words = [command.split() for command, _ in [*RIGHT.values(), *LACKS.values()]]
    several = without(*HIDDEN, function="several")
    printed = cluster.command(json.dumps(words), cwd=folder, **several).line("[")
    ends = dict(zip([*RIGHT, *LACKS], json.loads(printed), strict=True))
    for name, (_, code) in RIGHT.items():
        assert ends[name][0] == code, (name, ends[name])
    for name, (_, line) in LACKS.items():
        assert ends[name] == [1, "", f"error: {line}\n"], name


@pytest.mark.parametrize("name", ["node", "sweep", pytest.param("with", marks=pytest.mark.chaos)])
def test_a_command_with_processes_does_its_work(
    folder: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if name == "sweep":  # its jobs would not be without packages
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        plan = load_sweep(write_sweep(folder, seeds=[1]))
        sweep(plan, out=folder / "sweep", console=Console(quiet=True), jobs=2, starter=StandIns())
    ended = cluster.command(*PROCESSES[name].split(), cwd=folder, **without(*HIDDEN)).end()
    assert ended.code == 0 and "Traceback" not in ended.err, ended
    assert name != "sweep" or "pip install 'shardkeep[report]'" in ended.out


@every("package", [name for name, extra in EXTRAS.items() if extra == "web"])
def test_each_package_of_the_web_is_missed_by_its_name(folder: Path, cluster: Cluster, package: str) -> None:
    view, serve = (cluster.command(name, "run", cwd=folder, **without(package)) for name in ("view", "serve"))
    line = f"needs {package}: pip install 'shardkeep[web]'"
    assert serve.end() == Ended(1, "", f"error: --http 127.0.0.1:8000 {line}; or say --http off\n")
    if package == "prometheus_client":
        view.line("page ")
    else:
        assert view.end() == Ended(1, "", f"error: the page {line}\n")


def test_a_model_is_served_over_grpc(folder: Path, cluster: Cluster) -> None:
    address = ["--listen", "127.0.0.1:0", "--http", "off"]
    server = cluster.command("serve", "run", *address, cwd=folder, **without(*HIDDEN))
    server.line("serving ")
    server.signal(signal.SIGTERM)
    assert server.end().code == 0


ENTRIES = {
    **{
        f"import shardkeep.callbacks.{name}": f"shardkeep.callbacks.{name} needs {name}: pip install {name}"
        for name in ("lightning", "tensorboard", "transformers")
    },
    "import torch, shardkeep.torchrec as t; t.tables_of(torch.nn.Linear(1, 1))": (
        "shardkeep.torchrec needs torchrec: pip install torchrec"
    ),
}


def test_an_entry_for_python_does_its_work_or_names_what_it_needs(folder: Path, cluster: Cluster) -> None:
    """`predict` of a loaded model does."""
    row = "{'user': ['u1'], 'item': [5], 'tags': ['t1'], 'price': [1.0], 'age': [30]}"
    lines = ["import shardkeep", f"print(len(shardkeep.load('run').predict({row})))"]
    for statement in ENTRIES:
        lines += ["try:", f"  {statement}", "except shardkeep.errors.MissingPackage as error:", "  print(error)"]
    ended = cluster.command("\n".join(lines), cwd=folder, **without(*HIDDEN, function="script")).end()
    assert ended == Ended(0, "\n".join(["1", *ENTRIES.values(), ""]), "")
