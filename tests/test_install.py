"""What a build holds, and what an installation of it does, wherever it is imported.

The rooms are links into the package. A build without them would look whole, so it is refused. The lowest versions that
pyproject.toml allows are tried on the lowest Python; torch is that of this environment, which constraints.txt pins.
"""

from __future__ import annotations

import ast
import itertools
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from shardkeep.base.plugging.packages import EXTRAS
from tests.support.builds import PROJECT, ROOMS, ROOT, Built, building, built, copied
from tests.support.cases import every
from tests.support.environments import checked, empty_environment, linked
from tests.support.requirements import closure, name_of

LOADED_IF_THERE = {"torchrec", "lightning", "transformers", "mlflow", "wandb"}
"""Packages without an extra: a user's own choice, which the code beside them needs."""
FIRST_STEPS = ["train", "demo.yaml", "--set", "train.max_steps=20", "--run-dir", "run"]
NEWEST = {"ruff", "mypy", "torchmetrics", "torch"}
"""Used in the newest version: the first two by `make check`, the third, which needs torch, by tests."""
OFFLINE = re.compile(r"NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout")
TRIED = ["tests/config", "tests/row_files", "tests/cli/test_general_options.py", "tests/test_public_names.py"]
TRIED += [f"tests/workers/data/test_{name}.py" for name in ("csv_files", "parquet_files", "input_files", "labels")]
IN_ONE_PROCESS = "not waits_for_processes and not slow and not chaos and not gpu"
"""Fast tests that use many packages: settings, data and row files in each format, the command line."""
PLACES = """
import os, sys, numba, torch
for place in sys.argv[1:]:
    if os.fork() == 0:
        os.chdir(place)
        import shardkeep
        import shardkeep.ps.client.pull, shardkeep.workers.step, shardkeep.compression.config
        import shardkeep.proto.control_pb2
        print(shardkeep.__file__)
        sys.exit()
    assert os.wait()[1] == 0, place
"""
"""Where shardkeep comes from in each folder; forks of a process that has the libraries save 4 CPU s each."""


@every(("link", "left"), zip(ROOMS, itertools.cycle(["nothing", "a text file"]), strict=False))
def test_a_checkout_without_a_link_is_refused_with_one_line(tmp_path: Path, link: str, left: str) -> None:
    package = tmp_path / "src" / "shardkeep"
    for name in ROOMS:
        (package / name).mkdir(parents=True)
    (package / link).rmdir()
    if left == "a text file":
        (package / link).write_text(f"../../{link}")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    done = building(tmp_path, "wheel", tmp_path / "dist")
    assert done.returncode == 1 and done.stderr.startswith(f"error: src/shardkeep/{link} is no folder")
    assert done.stderr.count("\n") == 1 and not list(tmp_path.glob("dist/*"))


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def declared(requirements: list[str]) -> set[str]:
    """The modules of the distributions that are named, not of what those bring."""
    names = {name_of(text.partition(";")[0].split(">")[0].split("[")[0].strip()) for text in requirements}
    owners = metadata.packages_distributions()
    return {module for module, found in owners.items() if names & {name_of(owner) for owner in found}}


def test_every_package_that_the_library_imports_is_a_dependency_or_of_an_extra() -> None:
    known = declared(PROJECT["dependencies"]) | set(EXTRAS) | LOADED_IF_THERE | set(sys.stdlib_module_names)
    optional = {"uvloop", "grpc_health", "grpc_reflection"}  # of extras; what they add is left out without them
    rooms = {"src", *ROOMS} - {"examples"}
    found = {name: path for room in rooms for path in (ROOT / room).rglob("*.py") for name in imports(path)}
    assert {name: str(path) for name, path in found.items() if name not in known | optional | {"shardkeep"}} == {}


def test_the_extra_that_an_error_names_brings_the_package() -> None:
    extras, distributions = PROJECT["optional-dependencies"], metadata.packages_distributions()
    for module, extra in EXTRAS.items():
        owners = {name_of(owner) for owner in distributions.get(module, [module])}  # or not installed
        named = {name_of(Requirement(text).name) for text in extras[extra]}
        assert owners & (closure(extras[extra]) | named), f"{module} by shardkeep[{extra}]"


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return built(tmp_path_factory)


def sources() -> set[str]:
    """The files of the package, as a build has them below `shardkeep/`."""
    kinds = {".py", ".pyi", ".proto", ".yaml", ".json", ".typed", ".js", ".css", ".html", ".txt"}
    trees = [(ROOT / "src" / "shardkeep", ""), *((ROOT / link, f"{link}/") for link in ROOMS)]
    files = [
        (path.relative_to(top), head)
        for top, head in trees
        for path in top.rglob("*")
        if path.suffix in kinds or path.name == "py.typed"
    ]
    return {f"shardkeep/{head}{path.as_posix()}" for path, head in files}


@pytest.mark.slow
def test_an_sdist_and_its_wheel_hold_the_whole_package_its_licences_and_nothing_else(builds: Built) -> None:
    with tarfile.open(builds.sdist) as archive:
        members = [member for member in archive.getmembers() if not member.isdir()]
        assert all(member.isreg() for member in members)
        shipped = {member.name.partition("/")[2] for member in members}
    assert {name.removeprefix("src/") for name in shipped if name.startswith("src/shardkeep/")} == sources()
    files = {"pyproject.toml", "setup.py", "setup.cfg", "MANIFEST.in", "README.md", "LICENSE", "PKG-INFO"}
    assert {name.partition("/")[0] for name in shipped} == {"src", *files}
    assert {"shardkeep/py.typed", "shardkeep/proto/control.proto", "shardkeep/examples/clicks.py"} < sources()
    with zipfile.ZipFile(builds.wheel) as packed:
        assert {name for name in packed.namelist() if not name.startswith("shardkeep-")} == sources()
        (path,) = (name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
        told = message_from_bytes(packed.read(path))
        for licence in told.get_all("License-File", []):
            assert packed.read(f"{path.rpartition('/')[0]}/licenses/{licence}") == (ROOT / licence).read_bytes()
    assert told["Version"] == PROJECT["version"] and told["Requires-Python"] == ">=3.11"
    assert told["Description-Content-Type"] == "text/markdown" and str(told.get_payload()).startswith("# shardkeep")
    assert told["License-Expression"] == "Apache-2.0 AND MIT" and len(told.get_all("License-File", [])) == 2


def places(folder: Path, checkout: Path) -> list[Path]:
    """Where an import could go wrong: by the folder's own name, by a folder in it, by files named like rooms."""
    named, rooms = folder / "named" / "shardkeep", folder / "rooms"
    named.mkdir(parents=True, exist_ok=True)
    for name in ("ps", "workers", "compression", "proto"):
        (rooms / name).mkdir(parents=True, exist_ok=True)
        (rooms / name / "__init__.py").write_text("raise ImportError('a room of somebody else')\n")
        (rooms / f"{name}.py").write_text("raise ImportError('a file of somebody else')\n")
    return [checkout.parent, checkout, Path("/"), named, named.parent, rooms]


@pytest.mark.waits_for_processes
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "form", [pytest.param("wheel", marks=pytest.mark.slow), pytest.param("editable", marks=pytest.mark.chaos)]
)
def test_an_installation_imports_itself_anywhere_and_trains(builds: Built, tmp_path: Path, form: str) -> None:
    environment, checkout = builds.environment, Path(builds.checkout)
    if form == "editable":
        checkout = copied(tmp_path / "home" / "shardkeep")
        environment = empty_environment(tmp_path / "environment", Path(builds.dependencies))
        environment.install("--editable", str(checkout))
    home = checkout / "src" if form == "editable" else environment.folder
    where = [str(place) for place in places(tmp_path, checkout)]
    imported = checked(environment.python, "-c", PLACES, *where, cwd=tmp_path, env=environment.variables())
    assert [path.startswith(str(home)) for path in imported.splitlines()] == [True] * len(where), imported
    work = tmp_path / "rooms"
    shutil.copy(ROOT / "examples" / "demo.yaml", work)
    command = [environment.python, "-m", "shardkeep", *FIRST_STEPS]  # -m: the folder is searched first
    assert "step 20/20" in checked(*command, cwd=work, env=environment.variables())


def bounds() -> dict[str, str]:
    """The lower bound of every requirement that has one."""
    extras = PROJECT["optional-dependencies"].values()
    wanted = [Requirement(text) for part in (PROJECT["dependencies"], *extras) for text in part]
    return {
        f"{each.name}[{','.join(sorted(each.extras))}]" if each.extras else each.name: specifier.version
        for each in wanted
        for specifier in each.specifier
        if specifier.operator == ">="
    }


def pip_into(target: Path, *requirements: str) -> None:
    """Installs wheels with what they require. Skips the test where no index answers."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", "--target", str(target)]
    done = subprocess.run([*command, *requirements], capture_output=True, text=True, timeout=900)
    if done.returncode and OFFLINE.search(done.stderr):
        pytest.skip("needs a package index")
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_lower_bound_of_torch_and_the_tests_of_the_lowest_versions_are_there() -> None:
    assert not [path for path in TRIED if not (ROOT / path).exists()]
    (pinned,) = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned in (bounds()["torch"], f"{bounds()['torch']}.0")


@pytest.mark.chaos
@pytest.mark.waits_for_processes
@pytest.mark.timeout(1500)
@pytest.mark.skipif(
    f">={sys.version_info[0]}.{sys.version_info[1]}" != PROJECT["requires-python"], reason="of the lowest Python"
)
def test_the_lowest_versions_build_train_the_demo_and_pass_fast_tests(tmp_path: Path) -> None:
    lowest = tmp_path / "lowest"
    pip_into(lowest, *(f"{name}=={version}" for name, version in bounds().items() if name not in NEWEST))
    environment = empty_environment(tmp_path / "venv", lowest, linked(tmp_path / "torch", closure(["torch"])))
    variables = {**environment.variables(), "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    demo = ["train", str(ROOT / "examples" / "demo.yaml"), "--set", "train.max_steps=20"]
    command = [environment.python, "-m", "shardkeep", *demo, "--run-dir", "run"]
    assert "step 20/20" in checked(*command, cwd=tmp_path, env=variables)
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore", "-m", IN_ONE_PROCESS]  # old packages warn of new ones
    options += ["--basetemp", str(tmp_path / "pytest")]
    checked(environment.python, "-m", "pytest", *options, *TRIED, cwd=ROOT, env=variables)
    built = building(copied(tmp_path / "checkout"), "wheel", tmp_path / "dist", python=environment.python)
    assert built.returncode == 0, built.stderr
