"""How many seconds from a push to a changed score, while a job trains a table of 1 M rows?

    python benchmarks/freshness.py                      # with increments, and with full checkpoints alone
    python benchmarks/freshness.py --seconds 600 --only increments   # ten minutes under load

A job trains (one server, one worker) and writes a checkpoint about every five seconds. `shardkeep serve --follow`
serves its run, and clients send requests all the time. The step of a push is known from metrics.jsonl; when its model
answers, from the version in the replies. Figures: seconds from the oldest push that a checkpoint has, and from the
newest one, to the first reply by that model; errors; the server's anonymous memory.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
import numpy as np

from shardkeep.base.yaml_text import write_yaml

USERS = 1_000_000
ROWS, BATCH, DIM = 4_000_000, 2048, 16
TARGET_S = 8.0
START_S = 240.0


def write_data(path: Path) -> None:
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    random = np.random.default_rng(1)
    user = random.permutation(np.concatenate([np.arange(USERS), random.integers(0, USERS, ROWS - USERS)]))
    price = random.normal(size=ROWS).astype(np.float32)
    label = (random.random(ROWS) < 1 / (1 + np.exp(-price - (user % 3)))).astype(np.int8)
    pq.write_table(pa.table({"user": user, "price": price, "clicked": label}), path)


def job(folder: Path, every_steps: int, full_every: int) -> dict[str, Any]:
    return {
        "name": "fresh",
        "servers": 1,
        "workers": 1,
        "data": {"train": str(folder / "train.parquet"), "label": "clicked", "dense": ["price"], "sparse": ["user"]},
        "model": {"bottom": [32], "hidden": [64, 32]},
        "tables": {"default": {"dim": DIM, "optimizer": {"name": "rowwise_adagrad", "lr": 0.05}}},
        "tower": {"amp": "off", "compile": "off"},
        "train": {"batch_size": BATCH, "epochs": 100_000, "report_every_s": 0.1},
        "checkpoint": {"every_steps": every_steps, "full_every": full_every, "keep": 2},
    }


@contextlib.contextmanager
def process(command: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    path = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")]))
    child = subprocess.Popen(
        [sys.executable, "-m", "shardkeep", *command], env={**os.environ, "PYTHONPATH": path}, text=True, **options
    )
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(60)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def progress(run: Path) -> list[tuple[int, float]]:
    """Steps and the times at which they were reported, seconds since 1970."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for line in (run / "metrics.jsonl").read_text().splitlines():
            record = json.loads(line)
            if record.get("kind") == "progress":
                found.append((record["step"], datetime.datetime.fromisoformat(record["time"]).timestamp()))
    return found


def when(step: int, reported: list[tuple[int, float]]) -> float:
    """The time of a step, between two reports."""
    steps, times = np.array(reported).T
    return float(np.interp(step, steps, times))


def last_checkpoint(run: Path) -> int:
    names = [re.fullmatch(r"step-(\d+)(\.\d+)?", path.name) for path in (run / "checkpoints").glob("step-*")]
    return max((int(name[1]) for name in names if name), default=0)


@dataclass
class Client(threading.Thread):
    """Sends one row after the other, and notes when each version first answers."""

    address: str
    stop: threading.Event
    first: dict[int, float] = field(default_factory=dict)
    requests: int = 0
    errors: list[str] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(daemon=True)

    __hash__ = threading.Thread.__hash__

    def run(self) -> None:
        import grpc

        from shardkeep.proto import inference_pb2 as pb

        request = pb.ModelInferRequest(model_name="fresh")
        for name, datatype, values in (("user", "INT64", np.array([7])), ("price", "FP32", np.zeros(1, np.float32))):
            request.inputs.add(name=name, datatype=datatype, shape=[1])
            request.raw_input_contents.append(values.tobytes())
        content = request.SerializeToString()
        with grpc.insecure_channel(self.address) as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            while not self.stop.wait(0.005):
                began = time.perf_counter()
                try:
                    reply = pb.ModelInferResponse.FromString(call(content, timeout=30))
                except grpc.RpcError as error:
                    self.errors.append(str(error.code()))
                    continue
                self.latencies_s.append(time.perf_counter() - began)
                self.requests += 1
                self.first.setdefault(int(reply.model_version), time.time())


def anonymous_mb(pid: int) -> float:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+)", text)[1]) / 1e3  # type: ignore[index]


def measured(folder: Path, *, every_steps: int, full_every: int, seconds: float) -> dict[str, Any]:

    run, config = folder / f"run-{full_every}", folder / f"job-{full_every}.yaml"
    config.write_text(write_yaml(job(folder, every_steps, full_every)))
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with process(["train", str(config), "--run-dir", str(run)], **quiet) as training:
        deadline = time.monotonic() + START_S
        while not progress(run) or progress(run)[-1][0] < 1.2 * ROWS / BATCH or last_checkpoint(run) < ROWS / BATCH:
            if training.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the job has not seen all users after {START_S} s (ended: {training.poll()})")
            time.sleep(0.5)
        command = [
            "serve",
            str(run),
            "--follow",
            str(run),
            "--listen",
            "127.0.0.1:0",
            "--http",
            "off",
            "--name",
            "fresh",
        ]
        with process(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as server:
            assert server.stdout is not None
            line = server.stdout.readline()
            found = re.search(r"gRPC (\S+?)(,|$)", line.strip())
            if found is None:
                raise RuntimeError(f"the server said {line!r}")
            drain = threading.Thread(target=lambda: [lines.append(text) for text in server.stdout], daemon=True)
            lines: list[str] = []
            drain.start()
            stop = threading.Event()
            clients = [Client(found[1], stop) for _ in range(2)]
            for client in clients:
                client.start()
            memory = []
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                time.sleep(min(5.0, max(0.1, end - time.monotonic())))
                memory.append(anonymous_mb(server.pid))
            stop.set()
            for client in clients:
                client.join(60)
        reported = progress(run)
    return figures(clients, reported, memory, lines)


def figures(
    clients: list[Client], reported: list[tuple[int, float]], memory: list[float], lines: list[str]
) -> dict[str, Any]:
    first: dict[int, float] = {}
    for client in clients:
        for step, at in client.first.items():
            first[step] = min(at, first.get(step, at))
    steps = sorted(first)[1:]  # the first one was loaded before
    before = dict(zip(steps, sorted(first)[:-1], strict=True))
    oldest = [first[step] - when(before[step] + 1, reported) for step in steps]
    newest = [first[step] - when(step, reported) for step in steps]
    latencies = np.array([s for client in clients for s in client.latencies_s])
    return {
        "models": len(steps),
        "oldest_push_s": harness.spread(oldest),
        "newest_push_s": harness.spread(newest),
        "interval_s": harness.spread([when(s, reported) - when(before[s], reported) for s in steps]),
        "requests": sum(client.requests for client in clients),
        "errors": sum(len(client.errors) for client in clients),
        "p50_ms": float(np.percentile(latencies, 50) * 1e3),
        "p99_ms": float(np.percentile(latencies, 99) * 1e3),
        "longest_ms": float(latencies.max() * 1e3),
        "anonymous_mb": memory,
        "server": lines[-3:],
    }


def main() -> None:
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--every-steps", type=int, default=200, help="steps between two checkpoints")
    parser.add_argument("--only", choices=["increments", "full"], nargs="+", default=["increments", "full"])
    options = harness.parse(parser)
    seconds = 20.0 if options.smoke else max(options.seconds, 60.0)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="freshness-") as name:
        write_data(Path(name) / "train.parquet")
        for kind, full_every in (("increments", 20), ("full", 1)):
            if kind in options.only:
                found = measured(Path(name), every_steps=options.every_steps, full_every=full_every, seconds=seconds)
                results[kind] = found
                oldest, newest = found["oldest_push_s"], found["newest_push_s"]
                print(f"{kind:<11} {found['models']} models, a checkpoint each {found['interval_s']['median']:.1f} s")
                for push, spread, target in (("oldest", oldest, f"   target {TARGET_S:g}"), ("newest", newest, "")):
                    shown = " / ".join(f"{spread[key]:.1f}" for key in ("min", "median", "max"))
                    print(f"  {push} push {shown} s{target}")
                print(
                    f"  {found['requests']:,} requests, {found['errors']} errors, p99 {found['p99_ms']:.1f} ms",
                    flush=True,
                )
    harness.write(options.json, "freshness", results)


if __name__ == "__main__":
    main()
