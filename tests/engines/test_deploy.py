"""The files of deploy/ for engines that no test can start, checked by those engines' schemas."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.core import TyperGroup

from shardkeep.cli.main import app
from tests.support.cases import every

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
SKY_KEYS = {
    "": {"name", "num_nodes", "workdir", "resources", "file_mounts", "volumes", "envs", "secrets", "setup", "run"},
    "resources": {"infra", "cpus", "memory", "instance_type", "use_spot", "image_id", "disk_size", "job_recovery"},
    "job_recovery": {"strategy", "max_restarts_on_errors", "recover_on_exit_codes"},
}
"""From the task's schema in `sky/utils/schemas.py` of SkyPilot 0.14.1, whose import needs 60 packages."""
COMMAND = re.compile(r"^[^#\n]*shardkeep,? node,? (.*?)(?:\]|\n(?!\s*--))", re.MULTILINE | re.DOTALL)


def documents(name: str) -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8"))}


def faults(text: str) -> Iterator[str]:
    """What the schemas of the engines find in a file. A key that they do not have is a fault."""
    jsonschema = pytest.importorskip("jsonschema")
    schemas = yaml.safe_load(Path(__file__).with_name("schemas.yaml").read_text(encoding="utf-8"))
    for document in yaml.safe_load_all(text):
        kind = document.get("kind") or document["type"]
        validator = jsonschema.Draft202012Validator({"$defs": schemas["$defs"], **schemas[kind]})
        yield from (f"{kind}: {error.json_path}: {error.message}" for error in validator.iter_errors(document))


@every(
    ("name", "keys"),
    [
        ("kubernetes.yaml", ("volumes:", "endPort:", "parallelism:")),
        ("trainingruntime.yaml", ("volumes:", "numNodes:", "runtimeRef:")),
        ("dstack.yml", ("volumes:",)),
    ],
)
def test_a_schema_knows_every_key_and_finds_a_wrong_one(name: str, keys: tuple[str, ...]) -> None:
    text = (DEPLOY / name).read_text(encoding="utf-8")
    assert list(faults(text)) == []
    for key in keys:
        assert key in text and any(f"'x{key[:-1]}'" in fault for fault in faults(text.replace(key, f"x{key}")))


@every("name", ["slurm.sbatch", "kubernetes.yaml", "trainingruntime.yaml", "sky.yaml", "dstack.yml"])
def test_a_file_starts_one_command_whose_options_exist(name: str) -> None:
    (words,) = COMMAND.findall((DEPLOY / name).read_text(encoding="utf-8"))
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    known = {option for each in group.commands["node"].params for option in each.opts}
    options = set(re.findall(r"--[a-z][\w-]*", words))
    assert "--run-dir" in options and options <= known


STUBS = {
    "srun": """while [ "${1#--}" != "$1" ]; do shift; done
most=0
for rank in $CODES; do RANK=$rank "$@"; code=$?; [ $code -le $most ] || most=$code; done
exit $most""",
    "shardkeep": 'echo "shardkeep $*" >> calls; exit $RANK',
    "scancel": 'echo "scancel $*" >> calls',
    "scontrol": 'echo "scontrol $*" >> calls',
}
"""Programs in place of Slurm. Each number in CODES is a machine, whose node ends with it."""


@every(
    ("codes", "env", "code", "requeued"),
    [
        ("0 0", {}, 0, ""),
        ("0 1", {}, 1, ""),
        ("143 2 0", {}, 2, ""),
        ("2 137", {}, 2, ""),
        ("0 143", {}, 143, "9"),
        ("143 137", {"SLURM_RESTART_COUNT": "99"}, 143, "9"),
        ("143 143", {"SLURM_RESTART_COUNT": "100"}, 143, ""),
        ("143", {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_ID": "7"}, 143, "7_3"),
    ],
)
def test_slurm_puts_only_its_own_job_into_the_queue_again_a_bounded_number_of_times_and_none_of_wrong_input(
    tmp_path: Path, codes: str, env: dict[str, str], code: int, requeued: str
) -> None:
    for name, text in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    known = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CODES": codes, "SLURM_JOB_ID": "9", "SLURM_STEP_ID": "0"}
    script = ["bash", str(DEPLOY / "slurm.sbatch")]
    assert subprocess.run(script, cwd=tmp_path, env={**known, **env}, timeout=60).returncode == code
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call for call in calls if call.startswith("scontrol")] == [f"scontrol requeue {requeued}"] * bool(requeued)
    job = "7_3" if "SLURM_ARRAY_JOB_ID" in env else "9"
    assert calls.count(f"scancel --signal=TERM {job}.0") == sum(each != "0" for each in codes.split())
    assert any(f"--run-dir runs/clicks{'-3' if job == '7_3' else ''} " in call for call in calls)


def test_sky_yaml_has_keys_of_a_task_only() -> None:
    task = yaml.safe_load((DEPLOY / "sky.yaml").read_text(encoding="utf-8"))
    assert task.keys() <= SKY_KEYS[""]
    assert task["resources"].keys() <= SKY_KEYS["resources"]
    assert task["resources"]["job_recovery"].keys() <= SKY_KEYS["job_recovery"]


@every("name", ["kubernetes.yaml", "trainingruntime.yaml"])
def test_a_job_of_kubernetes_charges_no_pod_for_a_machine_that_leaves_and_opens_torchs_ports_to_pods_alone(
    name: str,
) -> None:
    job = job_of(name)
    pod, rules = job["template"], job["podFailurePolicy"]["rules"]
    codes = {code: each["action"] for each in rules for code in each.get("onExitCodes", {}).get("values", [])}
    assert codes == {2: "FailJob", 143: "Ignore"}
    conditions = [(each["action"], one) for each in rules for one in each.get("onPodConditions", [])]
    assert conditions == [("Ignore", {"type": "DisruptionTarget", "status": "True"})]
    assert (job["podReplacementPolicy"], pod["spec"]["restartPolicy"]) == ("Failed", "Never")
    policy = documents("kubernetes.yaml")["NetworkPolicy"]["spec"]
    (sysctl,), (rule,) = pod["spec"]["securityContext"]["sysctls"], policy["ingress"]
    (ports,) = rule["ports"]
    assert sysctl == {"name": "net.ipv4.ip_local_port_range", "value": f"{ports['port']} {ports['endPort']}"}
    pods = {"podSelector": {"matchLabels": pod["metadata"]["labels"]}}
    assert rule["from"] == [pods] and policy["podSelector"] == pods["podSelector"]


def job_of(name: str) -> dict[str, Any]:
    found = documents(name)
    if "Job" in found:
        job = found["Job"]["spec"]
        assert job["completionMode"] == "Indexed" and job["completions"] == job["parallelism"]
        return dict(job)
    (job,) = found["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    return dict(job["template"]["spec"])
