"""Run folders that look like those of real jobs, in any state, written in a moment.

recorded_run.json has a record of each kind as a real job writes it, without what depends on a scene. A folder is the
same for the same scene. tests/page/test_real_jobs.py holds its files and keys against those of a real job.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from shardkeep.config import JobConfig

Record = dict[str, Any]
State = Literal["begun", "forming", "running", "recovering", "finished", "failed", "stopped", "killed"]
STATES: tuple[State, ...] = ("begun", "forming", "running", "recovering", "finished", "failed", "stopped", "killed")
STATUS = {"finished": "completed", "failed": "failed", "stopped": "stopped"}
RECORDED: dict[str, Record] = json.loads(Path(__file__).with_name("recorded_run.json").read_text())
BATCH_SIZE = 2048
FIRST_PID = 4_194_000
"""Close to the kernel's highest one: such a process is rarely there."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One job, as its folder is at `now`.

    `begun`: the folder is new and has no coordinator. `killed`: all processes, so there is no summary.
    `recovering`: the last server is lost, and no other has come. `restarted_server`, `slow_worker`: an index.
    `rate_too_high`: the loss rises after a fifth of the run. A job that has not finished is at 60 % of its steps.
    """

    servers: int = 2
    workers: int = 2
    state: State = "finished"
    steps: int = 3000
    step_ms: float = 150.0
    slow_worker: int | None = None
    restarted_server: int | None = None
    rate_too_high: bool = False
    evaluations: int = 30
    tables: int = 26
    compression: bool = False
    now: datetime = datetime(2026, 11, 20, 12, 0, 0)
    seed: int = 7

    @property
    def done(self) -> int:
        if self.state in ("begun", "forming"):
            return 0
        return self.steps if self.state == "finished" else self.steps * 6 // 10

    @property
    def lost_server(self) -> int | None:
        """The server that is lost at some time in the run."""
        return self.servers - 1 if self.state == "recovering" and self.servers else self.restarted_server

    @property
    def lost_at(self) -> int:
        return self.done if self.state == "recovering" else int(0.4 * self.done)

    @property
    def began(self) -> datetime:
        return self.at(0) - timedelta(seconds=6)

    @property
    def samples_per_s(self) -> float:
        return self.workers * BATCH_SIZE / self.step_ms * 1000

    @property
    def members(self) -> list[tuple[str, int]]:
        return [("worker", i) for i in range(self.workers)] + [("server", i) for i in range(self.servers)]

    def at(self, step: float) -> datetime:
        """The time at which `step` is done; the last one is done a second before now."""
        return self.now - timedelta(seconds=1.0 + (self.done - step) * self.step_ms / 1000)

    def every(self, steps: int, *, end: bool = False) -> list[int]:
        """Each so many steps that are done. `end`: and the last one."""
        found = list(range(max(1, steps), self.done + 1, max(1, steps)))
        return [*found, self.done] if end and self.done not in found else found

    def evaluated(self) -> list[int]:
        return self.every(self.steps // self.evaluations, end=self.state == "finished")

    def checkpoints(self) -> list[int]:
        return self.every(self.steps // 5)

    def pid(self, role: str, index: int, generation: int = 1) -> int:
        again = generation > 1 and role == "server" and index == self.lost_server
        return FIRST_PID + ["coordinator", "worker", "server"].index(role) * 100 + index + 1000 * again

    def named(self, role: str, index: int, generation: int = 1) -> str:
        return f"{role} {index} (pid {self.pid(role, index, generation)} on 127.0.0.1)"


def write_simulated_run(folder: Path, scene: Scene) -> Path:
    folder.mkdir(parents=True)
    config = config_of(scene)
    (folder / "config.yaml").write_text(config.to_yaml())
    (folder / ".lock").touch()
    _write_lines(folder / "code.json", [{"digests": {"shardkeep": "0123456789abcdef"}}])
    (folder / "starts.json").write_text(json.dumps([{"began": _time(scene.began), **RECORDED["starts"]}]))
    if scene.state == "begun":
        return folder
    if scene.servers:
        _write_lines(folder / "coordinator.json", [RECORDED["coordinator address"]])
        _write_lines(folder / "coordinator.1.json", [RECORDED["coordinator address"]])
        _write_lines(folder / "page.json", [{"address": "127.0.0.1:41864", "secure": False}])
    records = sorted(_records(scene), key=lambda record: str(record["time"]))
    _write_lines(folder / "metrics.jsonl", records)
    _write_logs(folder / "logs", scene, records)
    if scene.state == "forming":
        return folder
    if scene.servers:
        generation = 2 if scene.lost_server is not None and scene.state != "recovering" else 1
        members = [_member(scene, *each, generation) for each in [("coordinator", 0), *sorted(scene.members)]]
        _write_lines(folder / "members.json", [{"generation": generation, "members": members}])
    _write_lines(folder / "telemetry.jsonl", _telemetry(scene))
    for step in scene.checkpoints():
        _write_checkpoint(folder / "checkpoints" / f"step-{step:08d}", scene, step)
    if scene.state in STATUS:
        for name in ("summary.json", "summary.1.json"):
            _write_lines(folder / name, [_summary(scene)])
    return folder


@contextlib.contextmanager
def led(run: Path) -> Iterator[Path]:
    """A launcher is in the run folder inside the `with`: its job is alive."""
    with (run / ".lock").open("ab") as file:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        yield run


def config_of(scene: Scene) -> JobConfig:
    samples = scene.steps * BATCH_SIZE * scene.workers
    raw: Record = {
        "name": "simulated",
        "seed": scene.seed,
        "servers": scene.servers,
        "workers": scene.workers,
        "data": {"synthetic": {"train_samples": samples, "eval_samples": 60_000, "table_sizes": [1000] * scene.tables}},
        "tower": {"optimizer": {"name": "adam", "lr": 0.5 if scene.rate_too_high else 0.002}},
        "train": {"batch_size": BATCH_SIZE, "epochs": 1},
        "eval": {"every_steps": max(1, scene.steps // scene.evaluations)},
        "checkpoint": {"every_steps": max(1, scene.steps // 5)},
    }
    if scene.compression:
        raw["compression"] = {"push": {"values": "int8"}, "pull": {"values": "fp16"}}
    return JobConfig.model_validate(raw)


def _time(at: datetime) -> str:
    return at.isoformat(timespec="milliseconds")


def _record(kind: str, at: datetime, **facts: Any) -> Record:
    return {**RECORDED[kind], "time": _time(at), **facts}


def _member(scene: Scene, role: str, index: int, generation: int) -> Record:
    known = {"role": role, "index": index, "host": "127.0.0.1", "pid": scene.pid(role, index, generation)}
    own = {"port": 41863} if role == "coordinator" else {"port": None, "started": "1"}
    return {**known, **own, "generation": generation}


def _records(scene: Scene) -> Iterator[Record]:
    end: dict[str, Any] = {"role": "worker" if scene.state == "stopped" else "coordinator", "index": 0}
    if scene.servers:
        for role, index in scene.members if scene.state != "forming" else [("worker", 0)]:
            yield _registered(scene, scene.began, role, index, 1)
    if scene.state == "forming":
        return
    if scene.servers:
        yield _formed(scene, at := scene.began + timedelta(seconds=4), 1)
        yield _record("journal", at)
    yield _record("tower", scene.at(0))
    for step in scene.every(round(5000 / scene.step_ms), end=scene.state in STATUS):
        facts = _trained(scene, step) | {"total_steps": scene.steps, "step_ms": _step_ms(scene, 0)}
        yield _record("progress", scene.at(step), **facts)
    for step in scene.evaluated():
        yield _record("eval", scene.at(step + 0.5), **_evaluation(scene, step))
    for step in scene.checkpoints():
        yield _record("checkpoint", scene.at(step + 0.9), step=step, text=f"step {step} in step-{step:08d}")
    if scene.lost_server is not None:
        yield from _loss(scene, scene.lost_server)
    if scene.state in ("failed", "stopped"):
        yield {"time": _time(scene.now), "kind": "event", "phase": scene.state, "text": _message(scene), **end}
    if scene.state in STATUS and scene.servers:
        for role, index in scene.members:
            code, member = int(scene.state == "failed"), {"role": role, "index": index}
            text = f"{scene.named(role, index, 2)} left with code {code}"
            yield _record("left", scene.now, text=text, member=member, code=code)


def _registered(scene: Scene, at: datetime, role: str, index: int, generation: int) -> Record:
    text, member = f"{scene.named(role, index, generation)} registered", {"role": role, "index": index}
    return _record("registered", at, text=text, member=member)


def _formed(scene: Scene, at: datetime, generation: int) -> Record:
    tables = [{"name": f"C{i + 1}", "dim": 16, "optimizer": "rowwise_adagrad"} for i in range(scene.tables)]
    return _record("formed", at, text=f"generation {generation} formed", tables=tables, journal="os")


def _message(scene: Scene) -> str:
    return "worker 0: the loss is not finite" if scene.state == "failed" else f"stopped at step {scene.done}"


def _loss(scene: Scene, server: int) -> Iterator[Record]:
    """The records of a server's loss, and of the recovery if it is complete."""
    at, recovery = scene.at(scene.lost_at), _recovery(scene, server)
    cause = recovery["cause"]
    yield _record("lost", at, text=cause, lost_index=server)
    yield _record("recovering", at, text=f"recovering: {cause}", reason=cause)
    if scene.state != "recovering":
        later = at + timedelta(milliseconds=100)
        yield _registered(scene, later, "server", server, 2)
        yield _formed(scene, later, 2)
        yield {**recovery, "text": f"{cause}; training resumes at step {scene.lost_at}"}


def _recovery(scene: Scene, server: int) -> Record:
    cause = f"{scene.named('server', server)} ended: killed by SIGKILL, the job was at step {scene.lost_at}"
    died = {"role": "server", "index": server, "cause": cause, "reason": "killed by SIGKILL"}
    died |= {"lost_from": None, "lost_steps": 0}
    at = scene.at(scene.lost_at) + timedelta(milliseconds=100)
    return _record("recovery", at, cause=cause, died=[died], step=scene.lost_at)


def _telemetry(scene: Scene) -> Iterator[Record]:
    """The records of all processes in order of time. In a job of one process, its tables report as server 0."""
    reporters = [("coordinator", 0), *scene.members] if scene.servers else [("worker", 0), ("server", 0)]
    every_s = max(5.0, len(reporters) / 10)
    for step in scene.every(round(every_s * 1000 / scene.step_ms)):
        again = scene.lost_server is not None and step > scene.lost_at
        generation = (2 if again else 1) if scene.servers else 0
        for place, (role, index) in enumerate(reporters):
            at = scene.at(step) + timedelta(seconds=every_s * place / len(reporters) / 2)
            head = {"index": index, "pid": scene.pid(role, index, generation), "generation": generation}
            own: Record = {"every_s": every_s}
            if role == "worker":
                own |= _of_worker(scene, index, step) | {"steps": round(every_s * 1000 / scene.step_ms)}
            if role == "server":
                own |= _of_server(scene, step, since=scene.lost_at if again and index == scene.lost_server else 0)
            yield _record(role, at, **head, **own)


def _of_worker(scene: Scene, worker: int, step: int) -> Record:
    times, sent = _step_ms(scene, worker), _bytes(scene, step)
    waits = {f"server {i}": times["pull_wait"] / scene.servers for i in range(scene.servers)}
    return _trained(scene, step) | {"step_ms": times, "wait_ms": waits, "bytes": sent, "fp32_bytes": _fp32(step)}


def _fp32(steps: int) -> Record:
    """The bytes of so many steps without compression."""
    return {"push": 2_246_400 * steps, "pull": 2_246_400 * steps, "tower": 0}


def _of_server(scene: Scene, step: int, *, since: int) -> Record:
    """`since`: the step from which it counts."""
    last = max([0, *(each for each in scene.checkpoints() if each <= step)])
    checkpoint = {"step": last, "seconds": 0.87, "time": _time(scene.at(last + 0.9))} if last else None
    requests = (step - since) * scene.workers
    tables = [{**table, "created": table["rows"]} for table in _tables(scene, step)]
    return {"step": step, "tables": tables, "pulls": requests, "pushes": requests, "checkpoint": checkpoint}


def _trained(scene: Scene, step: int) -> Record:
    samples = step * BATCH_SIZE * scene.workers
    return {"step": step, "samples": samples, "loss": _loss_of(scene, step), "samples_per_s": scene.samples_per_s}


def _evaluation(scene: Scene, step: int) -> Record:
    sent = {kind: sum(_bytes(scene, step, scene.workers)[kind].values()) for kind in ("push", "pull", "tower")}
    return {
        "step": step,
        "auc": 1.17 - 0.75 * _loss_of(scene, step),
        "logloss": _loss_of(scene, step),
        "normalized_entropy": _loss_of(scene, step) / 0.7,
        "unseen": {f"C{i + 1}": [600, 60_000] for i in range(scene.tables)},
        "train_samples": step * BATCH_SIZE * scene.workers,
        "train_bytes": {**sent, "total": sum(sent.values())},
    }


def _loss_of(scene: Scene, step: int) -> float:
    """From 0.69 to 0.44 with some noise; upwards again, if the rate is too high."""
    done, noise = step / scene.steps, zlib.crc32(f"{scene.seed} {step}".encode()) / (1 << 32)
    rises = 1 - math.exp(-4 * (done - 0.2)) if scene.rate_too_high and done > 0.2 else 0.0
    return 0.44 + 0.25 * math.exp(-6 * done) + 1.4 * rises + 0.004 * noise


def _step_ms(scene: Scene, worker: int) -> dict[str, float]:
    """The parts of a step; all workers' steps end together, with the slowest one's."""
    parts = {name: share * scene.step_ms for name, share in RECORDED["summary"]["step_share"].items()}
    if scene.slow_worker not in (None, worker):
        for name in ("forward", "backward"):
            parts["dense_reduce"] += 0.6 * parts[name]
            parts[name] *= 0.4
    return {"total": scene.step_ms, **parts}


def _bytes(scene: Scene, step: int, workers: int = 1) -> Record:
    """What so many workers sent and received until a step, by kind and in sum."""
    ids = 250_000 * step * workers
    push, pull = (ids * 2, ids * 4) if scene.compression else (ids * 8, ids * 8)
    kinds: Record = {
        "push": {"framing": 200 * step, "ids": ids, "rpc": 2000 * step, "values": push},
        "pull": {"framing": 400 * step, "ids": ids, "rpc": 2100 * step, "values": pull},
        "tower": {"values": 460_000 * step * workers} if scene.workers > 1 else {},
        "read": {"framing": 2304, "ids": 1_840_464, "metrics": 243_552, "rpc": 11_280, "values": 14_723_712},
    }
    sums = {kind: sum(parts.values()) for kind, parts in kinds.items()}
    return {
        **kinds,
        "control": 24_528,
        "to_servers": sums["push"] + ids,
        "from_servers": sums["pull"] - ids + sums["read"],
        "between_workers": sums["tower"],
        "total": sum(sums.values()) + 24_528,
    }


def _tables(scene: Scene, step: int) -> list[Record]:
    """The tables of one server, one larger than the other."""
    rows = [(i + 1) ** 2 * step // max(1, scene.servers) for i in range(scene.tables)]
    return [{"name": f"C{i + 1}", "rows": count, "bytes": count * 92} for i, count in enumerate(rows)]


def _write_checkpoint(folder: Path, scene: Scene, step: int) -> None:
    """A checkpoint as the page lists it: its manifest alone."""
    files = [{"path": f"server-{i}/rows-00000.safetensors", "size": 700_000} for i in range(max(1, scene.servers))]
    facts = {"servers": scene.servers, "workers": scene.workers, "seed": scene.seed, "inputs": None}
    folder.mkdir(parents=True)
    _write_lines(folder / "manifest.json", [{"format": 3, "step": step, "files": files, "facts": facts}])
    written = scene.at(step + 0.9).timestamp()
    os.utime(folder / "manifest.json", (written, written))


def _write_logs(folder: Path, scene: Scene, records: list[Record]) -> None:
    folder.mkdir()
    if scene.servers:
        events = [record["text"] for record in records if record["kind"] == "event"]
        (folder / "coordinator-0.log").write_text("".join(f"coordinator/0 - {text}\n" for text in events))
        formed = [1] if scene.lost_server is None or scene.state == "recovering" else [1, 2]
        for role, index in scene.members:
            lines = [f"{role}/{index} - serving generation={generation}\n" for generation in formed]
            (folder / f"{role}-{index}.log").write_text("".join(lines))


def _summary(scene: Scene) -> Record:
    status, steps, sent = STATUS[scene.state], scene.done, _bytes(scene, scene.done, scene.workers)
    samples = steps * BATCH_SIZE * scene.workers
    totals: Record = {
        "samples": samples,
        "wall_s": (scene.now - scene.began).total_seconds(),
        "samples_per_s": scene.samples_per_s,
        "step_ms": _step_ms(scene, scene.slow_worker or 0),
        "bytes": {**sent, "per_sample": sent["total"] / samples, "fp32": _fp32(steps * scene.workers)},
    }
    recoveries = [] if scene.lost_server is None else [_recovery(scene, scene.lost_server)]
    evaluation = RECORDED["eval"] | _evaluation(scene, scene.evaluated()[-1])
    of_records = ("kind", "phase", "role", "index", "step", "train_samples", "train_bytes")
    members = [("coordinator", 0), *sorted(scene.members)] if scene.servers else scene.members
    processes = [RECORDED[f"process {role}"] | {"role": role, "index": index} for role, index in members]
    start = {"began": _time(scene.began), "from_step": 0, "to_step": steps, "status": status, **totals}
    return {
        **RECORDED["summary"],
        **({} if scene.state == "finished" else {"message": _message(scene)}),
        "status": status,
        "steps": steps,
        **totals,
        "eval": {key: value for key, value in evaluation.items() if key not in of_records},
        "recoveries": [{k: v for k, v in each.items() if k == "step" or k not in of_records} for each in recoveries],
        "tables": [
            {**table, "rows": table["rows"] * max(1, scene.servers), "load_factor": 0.4}
            for table in _tables(scene, steps)
        ],
        "processes": processes,
        "starts": [start],
        "job": {"starts": 1, "steps": steps, **totals, "bytes_unknown_of_starts": 0, "recoveries": len(recoveries)},
    }


def _write_lines(path: Path, records: Iterable[Record]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
