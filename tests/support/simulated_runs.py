"""Run folders that look like those of real jobs, written in a moment: the same files with the same keys.

For the page, its pictures and its tests. tests/support/simulated_telemetry.py has the figures of a process; a folder is
the same for the same scene. tests/page/test_real_jobs.py holds a folder against one of a real job.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from shardkeep.config import JobConfig
from tests.support.simulated_telemetry import GIGABYTE, Figures, bytes_of, sum_of

Record = dict[str, Any]
State = Literal["begun", "forming", "running", "recovering", "finished", "failed", "stopped", "killed"]
STATES: tuple[State, ...] = ("begun", "forming", "running", "recovering", "finished", "failed", "stopped", "killed")
STATUS = {"finished": "completed", "failed": "failed", "stopped": "stopped"}
NOON = datetime(2026, 11, 20, 12, 0, 0)
FIRST_PID = 4_194_000
"""Close to the kernel's highest one: such a process is rarely there."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One job, as its folder is at `now`.

    `begun`: the folder is new and has no coordinator. `killed`: all processes, so there is no summary.
    `recovering`: the last server is lost, and no other has come. `through`: the share of the steps that are done.
    `restarted_server`, `slow_worker`: an index. `rate_too_high`: the loss rises after a fifth of the run.
    """

    servers: int = 2
    workers: int = 2
    state: State = "finished"
    through: float = 0.6
    steps: int = 3000
    step_ms: float = 150.0
    batch_size: int = 2048
    slow_worker: int | None = None
    restarted_server: int | None = None
    rate_too_high: bool = False
    evaluations: int = 30
    tables: int = 26
    compression: bool = False
    host: str = "127.0.0.1"
    coordinator_pid: int = FIRST_PID
    now: datetime = NOON
    seed: int = 7

    @property
    def over(self) -> bool:
        return self.state in STATUS

    @property
    def done(self) -> int:
        """Steps that are done."""
        if self.state in ("begun", "forming"):
            return 0
        return self.steps if self.state == "finished" else int(self.through * self.steps)

    @property
    def lost_server(self) -> int | None:
        """The server that is lost at some time in the run."""
        if self.state == "recovering" and self.servers:
            return self.servers - 1
        return self.restarted_server

    @property
    def lost_at(self) -> int:
        """The step at which the server is lost."""
        return self.done if self.state == "recovering" else int(0.4 * self.done)

    @property
    def began(self) -> datetime:
        return self.at(0) - timedelta(seconds=6)

    def at(self, step: float) -> datetime:
        """The time at which `step` is done; the last one is done a second before now."""
        behind_s = 1.0 + (self.done - step) * self.step_ms / 1000
        return self.now - timedelta(seconds=behind_s)


def write_simulated_run(folder: Path, scene: Scene) -> Path:
    """Writes the run folder of a scene. Returns `folder`."""
    folder.mkdir(parents=True)
    config = config_of(scene)
    (folder / "config.yaml").write_text(config.to_yaml())
    (folder / ".lock").touch()
    _write_json(folder / "code.json", {"digests": {"shardkeep": "0123456789abcdef"}})
    _write_json(folder / "starts.json", [_start(scene)])
    if scene.state == "begun":
        return folder
    if scene.servers:
        address = {
            "address": f"{scene.host}:41863",
            "pid": scene.coordinator_pid,
            "started": "1",
            "pid_space": "simulated pid:[1]",
        }
        for name in ("coordinator.json", "coordinator.1.json"):
            (folder / name).write_text(json.dumps(address) + "\n")
        (folder / "page.json").write_text(json.dumps({"address": f"{scene.host}:41864", "secure": False}) + "\n")
    if scene.state == "forming":
        _write_lines(folder / "metrics.jsonl", _registrations(scene)[:1])
        _write_logs(folder / "logs", scene)
        return folder
    if scene.servers:
        generation = 2 if scene.lost_server is not None and scene.state != "recovering" else 1
        _write_json(folder / "members.json", {"generation": generation, "members": _members(scene, generation)})
    _write_lines(folder / "metrics.jsonl", sorted(_records(scene), key=lambda record: str(record["time"])))
    _write_lines(folder / "telemetry.jsonl", _telemetry(scene))
    _write_logs(folder / "logs", scene)
    for step in _checkpoint_steps(scene):
        _write_checkpoint(folder / "checkpoints" / f"step-{step:08d}", scene, step)
    if scene.over:
        for name in ("summary.json", "summary.1.json"):
            _write_json(folder / name, _summary(scene, config))
    return folder


@contextlib.contextmanager
def led(run: Path) -> Iterator[Path]:
    """A launcher is in the run folder inside the `with`: its job is alive."""
    with (run / ".lock").open("ab") as file:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        yield run


def config_of(scene: Scene) -> JobConfig:
    """The config of a scene's job."""
    samples = scene.steps * scene.batch_size * max(1, scene.workers)
    raw: Record = {
        "name": "simulated",
        "seed": scene.seed,
        "servers": scene.servers,
        "workers": max(1, scene.workers),
        "data": {"synthetic": {"train_samples": samples, "eval_samples": 60_000, "table_sizes": [1000] * scene.tables}},
        "tower": {"optimizer": {"name": "adam", "lr": 0.5 if scene.rate_too_high else 0.002}},
        "train": {"batch_size": scene.batch_size, "epochs": 1},
        "eval": {"every_steps": max(1, scene.steps // max(1, scene.evaluations))},
        "checkpoint": {"every_steps": max(1, scene.steps // 5)},
    }
    if scene.compression:
        raw["compression"] = {"push": {"values": "int8"}, "pull": {"values": "fp16"}}
    return JobConfig.model_validate(raw)


def _time(at: datetime) -> str:
    return at.isoformat(timespec="milliseconds")


def _pid(scene: Scene, role: str, index: int, generation: int) -> int:
    if role == "coordinator":
        return scene.coordinator_pid
    again = generation > 1 and role == "server" and index == scene.lost_server
    return FIRST_PID + 1 + index + (scene.workers if role == "server" else 0) + (1000 if again else 0)


def _named(scene: Scene, role: str, index: int, generation: int = 1) -> str:
    return f"{role} {index} (pid {_pid(scene, role, index, generation)} on {scene.host})"


def _everyone(scene: Scene) -> list[tuple[str, int]]:
    return [("worker", i) for i in range(scene.workers)] + [("server", i) for i in range(scene.servers)]


def _members(scene: Scene, generation: int) -> list[Record]:
    rows = [("coordinator", 0), *sorted(_everyone(scene))]
    return [
        {
            "role": role,
            "index": index,
            "host": scene.host,
            "pid": _pid(scene, role, index, generation),
            "port": 41863 if role == "coordinator" else None,
            "generation": generation,
            **({} if role == "coordinator" else {"started": "1"}),
        }
        for role, index in rows
    ]


KILLED = "killed by SIGKILL"
COORDINATOR: Record = {"role": "coordinator", "index": 0}
WORKER: Record = {"role": "worker", "index": 0}


def _registrations(scene: Scene) -> list[Record]:
    times = [scene.began + timedelta(seconds=2 + 0.01 * i) for i in range(len(_everyone(scene)))]
    return [_registered(scene, at, role, index, 1) for at, (role, index) in zip(times, _everyone(scene), strict=True)]


def _registered(scene: Scene, at: datetime, role: str, index: int, generation: int) -> Record:
    text, member = f"{_named(scene, role, index, generation)} registered", {"role": role, "index": index}
    return {"time": _time(at), "kind": "event", "text": text, "phase": "registered", "member": member, **COORDINATOR}


def _formed(scene: Scene, at: datetime, generation: int) -> Record:
    tables = [{"name": f"C{i + 1}", "dim": 16, "optimizer": "rowwise_adagrad"} for i in range(scene.tables)]
    text = f"generation {generation} formed"
    return {"time": _time(at), "kind": "event", "text": text, "phase": "formed", "tables": tables, **COORDINATOR}


def _records(scene: Scene) -> Iterator[Record]:
    figures = Figures(scene)
    if scene.servers:
        yield from _registrations(scene)
        yield _formed(scene, scene.began + timedelta(seconds=4), 1)
    text = "amp bf16: this CPU computes in bf16; compile off: on this CPU compiling was not measured with AMX"
    yield {"time": _time(scene.at(0)), "kind": "phase", "phase": "tower", "text": text, **WORKER}
    for step in _progress_steps(scene):
        yield {"time": _time(scene.at(step)), "kind": "progress", **figures.progress(step), **WORKER}
    for step in _evaluation_steps(scene):
        yield {"time": _time(scene.at(step + 0.5)), "kind": "eval", **figures.evaluation(step), **WORKER}
    for step in _checkpoint_steps(scene):
        record = figures.checkpoint(step)
        yield {"time": _time(scene.at(step + 0.9)), "kind": "phase", "phase": "checkpoint", **record, **WORKER}
    if scene.lost_server is not None:
        yield from _loss(scene, scene.lost_server)
    if scene.state == "failed":
        text = "worker 0: the loss of step 1,800 is not finite"
        yield {"time": _time(scene.now), "kind": "event", "text": f"failed: {text}", "phase": "failed", **COORDINATOR}
    if scene.state == "stopped":
        yield {
            "time": _time(scene.now),
            "kind": "event",
            "text": f"stopped at step {scene.done}",
            "phase": "stopped",
            "figures": {},
            **WORKER,
        }
    if scene.over and scene.servers:
        for role, index in _everyone(scene):
            code = int(scene.state == "failed")
            facts = {"phase": "left", "member": {"role": role, "index": index}, "code": code}
            text = f"{_named(scene, role, index, 2)} left with code {code}"
            yield {"time": _time(scene.now), "kind": "event", "text": text, **facts, **COORDINATOR}


def _loss(scene: Scene, server: int) -> Iterator[Record]:
    """The records of a server's loss, and of the recovery if it is complete."""
    at, cause = scene.at(scene.lost_at), _cause(scene, server)
    lost = {"phase": "lost", "reason": KILLED, "lost": "server", "lost_index": server}
    recovering = {"phase": "recovering", "reason": cause}
    yield {"time": _time(at), "kind": "event", "text": cause, **lost, **COORDINATOR}
    yield {"time": _time(at), "kind": "event", "text": f"recovering: {cause}", **recovering, **COORDINATOR}
    if scene.state == "recovering":
        return
    later = at + timedelta(milliseconds=100)
    yield _registered(scene, later, "server", server, 2)
    yield _formed(scene, later, 2)
    recovery = {k: v for k, v in _recovery(scene, server).items() if k != "time"}
    text = f"{cause}; training resumes at step {scene.lost_at} from the members' own state, after 2.4 s"
    yield {"time": _time(later), "kind": "phase", "phase": "recovery", **recovery, "text": text, **COORDINATOR}


def _cause(scene: Scene, server: int) -> str:
    return f"{_named(scene, 'server', server)} ended: {KILLED}, the job was at step {scene.lost_at}"


def _recovery(scene: Scene, server: int) -> Record:
    cause = _cause(scene, server)
    return {
        "time": _time(scene.at(scene.lost_at) + timedelta(milliseconds=100)),
        "cause": cause,
        "died": [{"role": "server", "index": server, "cause": cause, "reason": KILLED, "lost_from": None}],
        "generation": 2,
        "step": scene.lost_at,
        "seconds": 2.4,
        "went_back": False,
        "anew": False,
        "lost_steps": 0,
        "lost_unsent_rows": 0,
    }


def _progress_steps(scene: Scene) -> list[int]:
    each = max(1, round(5000 / scene.step_ms))
    steps = list(range(each, scene.done + 1, each))
    return steps if not scene.over or scene.done in steps else [*steps, scene.done]


def _evaluation_steps(scene: Scene) -> list[int]:
    if not scene.evaluations:
        return []
    each = max(1, scene.steps // scene.evaluations)
    steps = list(range(each, scene.done + 1, each))
    return steps if scene.state != "finished" or scene.done in steps else [*steps, scene.done]


def _checkpoint_steps(scene: Scene) -> list[int]:
    each = max(1, scene.steps // 5)
    return list(range(each, scene.done + 1, each))


def _telemetry(scene: Scene) -> Iterator[Record]:
    """The records of all processes in order of time; a server that restarts counts from 0."""
    figures = Figures(scene)
    count = 1 + scene.workers + scene.servers
    every_s = max(5.0, count / 10)
    elapsed_s = scene.done * scene.step_ms / 1000
    for tick in range(1, int(elapsed_s / every_s) + 1):
        step = int(tick * every_s * 1000 / scene.step_ms)
        after = scene.lost_server is not None and step > scene.lost_at
        generation = (2 if after else 1) if scene.servers else 0
        for place, (role, index) in enumerate(_reporters(scene)):
            head: Record = {
                "time": _time(scene.at(step) + timedelta(seconds=every_s * place / count / 2)),
                "kind": "telemetry",
                "role": role,
                "index": index,
                "pid": _pid(scene, role, index, generation),
                "host": scene.host,
                "every_s": every_s,
                "generation": generation,
            }
            yield head | figures.telemetry(role, index, step, every_s=every_s, restarted=after)


def _reporters(scene: Scene) -> list[tuple[str, int]]:
    """The roles with telemetry; in a job of one process, its tables report as server 0."""
    return [("coordinator", 0), *_everyone(scene)] if scene.servers else [("worker", 0), ("server", 0)]


def _write_checkpoint(folder: Path, scene: Scene, step: int) -> None:
    """A checkpoint as the page lists it: its manifest, with files that are empty."""
    names = [f"server-{i}/rows-00000.safetensors" for i in range(max(1, scene.servers))] + ["tower/tower.safetensors"]
    size = Figures(scene).checkpoint(step)["bytes"] // len(names)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    files = [{"path": name, "size": size, "checksum": "0" * 32} for name in names]
    facts = {
        "samples": step * scene.batch_size * scene.workers,
        "epoch_samples": scene.steps * scene.batch_size * scene.workers,
        "data": "0" * 16,
        "servers": scene.servers,
        "workers": scene.workers,
        "seed": scene.seed,
        "versions": {"shardkeep": "0.1.0"},
        "inputs": None,
    }
    manifest = {"format": 3, "step": step, "files": files, "facts": facts, "checksum": "0" * 32}
    _write_json(folder / "manifest.json", manifest)
    written = scene.at(step + 0.9).timestamp()
    os.utime(folder / "manifest.json", (written, written))


def _write_logs(folder: Path, scene: Scene) -> None:
    folder.mkdir()
    if not scene.servers:
        return
    formed = _time(scene.began + timedelta(seconds=4))
    for role, index in _everyone(scene):
        what = f"0 training generation=1 at={formed}" if role == "worker" else f"- serving generation=1 at={formed}"
        lines = [f"{role}/{index} {what}"]
        if scene.lost_server is not None and scene.state != "recovering":
            at = f"at={_time(scene.at(scene.lost_at))}"
            lines.append(
                f"{role}/{index} {scene.lost_at} {'training' if role == 'worker' else 'serving'} generation=2 {at}"
            )
        (folder / f"{role}-{index}.log").write_text("\n".join(lines) + "\n")
    events = [r for r in _records(replace(scene, state="running")) if r["kind"] == "event"] if scene.done else []
    told = "".join(f"coordinator/0 - {record['text']} at={record['time']}\n" for record in events)
    (folder / "coordinator-0.log").write_text(told)


def _start(scene: Scene) -> Record:
    clock = {"boot": "simulated", "monotonic": 1000.0}
    return {"began": _time(scene.began), "from_step": 0, "from_samples": 0, "clock": clock}


def _summary(scene: Scene, config: JobConfig) -> Record:
    figures, status = Figures(scene), STATUS[scene.state]
    message = {"failed": "worker 0: the loss of step 1,800 is not finite", "stopped": f"stopped at step {scene.done}"}
    evaluations = _evaluation_steps(scene)
    wall_s = (scene.now - scene.began).total_seconds()
    samples = scene.done * scene.batch_size * scene.workers
    traffic = bytes_of(sum_of(figures.worker_bytes(i, scene.done) for i in range(scene.workers)))
    traffic["per_sample"] = (traffic["total"] - sum(traffic["read"].values())) / samples
    fp32 = [figures.fp32_bytes(i, scene.done) for i in range(scene.workers)]
    traffic["fp32"] = {way: sum(one[way] for one in fp32) for way in ("push", "pull", "tower")}
    speed = scene.workers * scene.batch_size / scene.step_ms * 1000
    step_ms = figures.mean_step_ms()
    totals = {
        "samples": samples,
        "wall_s": wall_s,
        "samples_per_s": speed,
        "step_ms": step_ms,
        "bytes": traffic,
    }
    recoveries = [] if scene.lost_server is None else [_recovery(scene, scene.lost_server)]
    start = {"began": _time(scene.began), "from_step": 0, "to_step": scene.done, "status": status, **totals}
    evaluation = figures.evaluation(evaluations[-1]) if evaluations else None
    not_metrics = ("step", "train_samples", "train_bytes")
    processes: list[Record] = [{**COORDINATOR, "peak_rss_bytes": int(0.3 * GIGABYTE)}] if scene.servers else []
    for role, index in sorted(_everyone(scene)):
        known: Record = {"role": role, "index": index, "peak_rss_bytes": figures.rss(role, index, scene.done)}
        own = {"kernels_s": 0.02, "cores": "0-1"}
        if role == "server":
            processes.append({**known, **own, "control_bytes": 30_098, "applied_steps": scene.done})
        else:
            processes.append({**known, **own, "compile_s": 0.0, "step_ms": figures.step_ms(index)})
    return {
        "status": status,
        **({"message": message[scene.state]} if scene.state in message else {}),
        "steps": scene.done,
        "samples": samples,
        "wall_s": wall_s,
        "samples_per_s": speed,
        "step_ms": step_ms,
        "step_share": {part: round(ms / step_ms["total"], 4) for part, ms in step_ms.items() if part != "total"},
        "cpu_ms": {"steps": scene.done, "worker": 31.1, "waited": 0.4, "server": 13.5 if scene.servers else 0.0},
        "eval": evaluation and {k: v for k, v in evaluation.items() if k not in not_metrics},
        "bytes": traffic,
        "sockets": {},
        "staleness": figures.staleness(scene.done, workers=scene.workers),
        "recoveries": recoveries,
        "warnings": [],
        "ids_per_step": {"by_rank": [26.0 * scene.batch_size] * scene.workers, "largest_over_mean": 1.0},
        "tables": figures.summary_tables(scene.done),
        "processes": processes,
        "state_digest": "0" * 64 if scene.state == "finished" else None,
        "dropped_rows": 0,
        "skipped_steps": 0,
        "tower": {"chosen": {"amp": "bf16", "compile": "off"}, "compile_s": 0.0, **figures.products()},
        "starts": [start],
        "job": {
            "starts": 1,
            "steps": scene.done,
            **totals,
            "bytes_unknown_of_starts": 0,
            "recoveries": len(recoveries),
        },
        "versions": {"python": "3.11.7", "torch": "2.13.0+cpu", "shardkeep": "0.1.0"},
        "machine": {"system": "Linux", "processor": "simulated", "cores": 2, "memory_gb": 25.3},
        "commit": "0" * 40,
    }


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def _write_lines(path: Path, records: Iterator[Record] | list[Record]) -> None:
    with path.open("w") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")
