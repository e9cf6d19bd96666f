"""How many requests a second does `shardkeep serve` answer, beside FastAPI with the same model in plain PyTorch?

    benchmarks/peers/install                     # once; FastAPI is in an environment of its own
    python benchmarks/serving.py --rounds 3 --seconds 10 --json serving.json
    python benchmarks/serving.py --rounds 3 --seconds 10 --equal-p99 --json serving-equal-p99.json

A DLRM of Criteo's shape: 13 numbers, 26 texts, dim 16, bottom and hidden 512-256. The server has core 0, its clients
core 1. Every client has a connection and waits for each reply. The bytes of all requests are made before the first one.
Requests are tensors in binary for shardkeep, over gRPC and HTTP, and JSON for FastAPI.

With `--equal-p99`, FastAPI has 8 clients and ours 8 to 32; the loads count whose p99 is not above FastAPI's.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import harness
import numpy as np
import psutil

DENSE, SPARSE, IDS, DIM = 13, 26, 10_000, 16
HIDDEN = [512, 256]
NAMES = [*(f"d{i}" for i in range(DENSE)), *(f"s{i}" for i in range(SPARSE))]
BODIES = 512
"""Different requests of a run."""
HERE = Path(__file__).resolve().parent
PEERS = HERE.parent / ".venv-peers" / "bin" / "python"
SIDES = ("shardkeep gRPC", "shardkeep HTTP", "FastAPI")
FEWEST, LOADS = 8, (8, 16, 24, 32)
"""Clients of FastAPI, and of ours, with --equal-p99."""


def text_of(ids: Any, feature: int) -> Any:
    return [f"{i * 2_654_435_761 % 2**32:08x}{feature:02d}" for i in ids.tolist()]


def columns(rows: int, seed: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    dense = {f"d{i}": np.round(random.normal(size=rows), 4).astype(np.float32) for i in range(DENSE)}
    sparse = {f"s{i}": text_of((random.zipf(1.2, rows) * (i + 7)) % IDS, i) for i in range(SPARSE)}
    return dense | sparse


def train(folder: Path) -> Path:
    """A run with rows for most ids, and the same model as plain arrays for FastAPI. Returns the run's folder."""
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]
    from safetensors.numpy import save_file

    import shardkeep

    found = columns(60_000, seed=1)
    chance = 1 / (1 + np.exp(-found["d0"]))
    label = (np.random.default_rng(0).random(len(chance)) < chance).astype(np.int8)
    pq.write_table(pa.table(found | {"label": label}), folder / "train.parquet")
    config: dict[str, Any] = {
        "name": "criteo",
        "servers": 0,
        "workers": 1,
        "data": {
            "train": str(folder / "train.parquet"),
            "label": "label",
            "dense": NAMES[:DENSE],
            "sparse": NAMES[DENSE:],
            "scale": "none",
        },
        "model": {"name": "dlrm", "bottom": HIDDEN, "hidden": HIDDEN},
        "tables": {"default": {"dim": DIM}},
        "tower": {"amp": "off"},
        "train": {"batch_size": 512},
    }
    shardkeep.train(shardkeep.JobConfig.model_validate(config), run_dir=folder / "run", quiet=True)
    predictor = shardkeep.load(folder / "run")
    tensors = {f"tower.{name}": value.numpy() for name, value in predictor.module.state_dict().items()}
    texts = {f"s{i}": text_of(np.arange(IDS), i) for i in range(SPARSE)}
    tensors |= {f"rows.{name}": predictor.rows(name, known) for name, known in texts.items()}
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, folder / "model.safetensors")
    (folder / "vocabulary.json").write_text(json.dumps(texts))
    rows = columns(BODIES, seed=2)
    np.save(folder / "expected.npy", predictor.predict(rows))
    return folder / "run"


def bodies(side: str, rows: int) -> tuple[list[bytes], dict[str, str]]:
    """The bytes of the requests of one side, and the HTTP headers."""
    found = columns(BODIES, seed=2) if rows == 1 else columns(rows * 64, seed=3)
    count = BODIES if rows == 1 else 64
    parts = [{name: values[k * rows : (k + 1) * rows] for name, values in found.items()} for k in range(count)]
    if side == "FastAPI":
        as_lists = [{n: v.tolist() if isinstance(v, np.ndarray) else v for n, v in part.items()} for part in parts]
        return [json.dumps({"columns": part}).encode() for part in as_lists], {"content-type": "application/json"}
    if side == "shardkeep gRPC":
        return [_message(part) for part in parts], {}
    made = [_binary(part) for part in parts]
    assert len({length for _, length in made}) == 1  # all texts are of one length
    return [body for body, _ in made], {"inference-header-content-length": str(made[0][1])}


def _tensors(part: dict[str, Any]) -> Iterator[tuple[str, str, int, bytes]]:
    """Name, datatype, elements, raw bytes."""
    for name, values in part.items():
        if isinstance(values, np.ndarray):
            yield name, "FP32", len(values), values.tobytes()
        else:
            texts = [text.encode() for text in values]
            yield name, "BYTES", len(texts), b"".join(len(t).to_bytes(4, "little") + t for t in texts)


def _message(part: dict[str, Any]) -> bytes:
    from shardkeep.proto import inference_pb2 as pb

    request = pb.ModelInferRequest(model_name="criteo")
    for name, datatype, count, raw in _tensors(part):
        request.inputs.add(name=name, datatype=datatype, shape=[count])
        request.raw_input_contents.append(raw)
    return request.SerializeToString()


def _binary(part: dict[str, Any]) -> tuple[bytes, int]:
    inputs, behind = [], []
    for name, datatype, count, raw in _tensors(part):
        parameters = {"binary_data_size": len(raw)}
        inputs.append({"name": name, "datatype": datatype, "shape": [count], "parameters": parameters})
        behind.append(raw)
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    return head + b"".join(behind), len(head)


@contextlib.contextmanager
def serving(side: str, folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """The server of one side, on core 0: HOST:PORT, and its process."""
    script = [sys.executable, __file__, "--server", side, str(folder)]
    if side == "FastAPI":
        script = [str(PEERS), str(HERE / "peers" / "fastapi_server.py"), str(folder)]
        if not PEERS.exists():
            raise harness.CannotRun("benchmarks/peers/install makes its environment")
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(script, stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line:
            raise harness.CannotRun(f"the server ended with code {process.wait(10)}")
        yield line, psutil.Process(process.pid)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def serve(side: str, folder: Path) -> None:
    """Our server, in this process. Prints its address."""
    harness.pin(0)
    import torch

    import shardkeep
    from shardkeep.inference.server.serve import Addresses, ServerSettings, serve_until_signal
    from shardkeep.inference.server.served_model import ServedModel

    torch.set_num_threads(1)
    served = ServedModel(shardkeep.load(folder / "run"))
    harness.settle_garbage_collector()

    def ready(addresses: Addresses) -> None:
        print(addresses.grpc if side == "shardkeep gRPC" else addresses.http, flush=True)

    serve_until_signal("criteo", served, ServerSettings("127.0.0.1:0", "127.0.0.1:0"), ready=ready)


PATHS = {"shardkeep HTTP": "/v2/models/criteo/infer", "FastAPI": "/predict"}


def measure(side: str, folder: Path, rows: int, clients: int, seconds: float) -> harness.Figures:
    """Figures of a window, with fresh processes for server and clients."""
    with serving(side, folder) as (address, server):
        _clients(side, address, rows, clients, min(2.0, seconds), folder)
        before = server.cpu_times()
        figures = _clients(side, address, rows, clients, seconds, folder)
        after = server.cpu_times()
        cpu_s = after.user + after.system - before.user - before.system
        return figures | {"server_cpu_us": 1e6 * cpu_s / figures.pop("all_requests")}


def _clients(side: str, address: str, rows: int, clients: int, seconds: float, folder: Path) -> harness.Figures:
    """Figures of a process of clients."""
    command = [sys.executable, __file__, "--client", side, address, str(rows), str(clients), str(seconds), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120 + 2 * seconds, check=False)
    if done.returncode:
        raise SystemExit(f"{side}: {done.stderr.strip().splitlines()[-1]}")
    figures: harness.Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def client(side: str, address: str, rows: int, clients: int, seconds: float, folder: Path) -> None:
    """The clients of one side, in this process on core 1. Prints the figures."""
    from serving_clients import GrpcClient, HttpClient, run

    harness.pin(1)
    made, headers = bodies(side, rows)
    host, _, port = address.rpartition(":")
    if side == "shardkeep gRPC":
        connections: Sequence[Any] = [GrpcClient(host, int(port), made, start=k * 61) for k in range(clients)]
    else:
        path = PATHS[side]
        connections = [HttpClient(host, int(port), path, headers, made, start=k * 61) for k in range(clients)]
    if rows == 1:
        _check(side, connections[0].first(), float(np.load(folder / "expected.npy")[0]))
    figures = run(connections, seconds)
    figures["rows_per_s"] = figures["requests_per_s"] * rows
    print(json.dumps(figures))


def _check(side: str, reply: bytes, expected: float) -> None:
    """The first score of both sides is that of `Predictor.predict`."""
    found = json.loads(reply)["score"][0] if side == "FastAPI" else float(np.frombuffer(reply[-4:], np.float32)[0])
    if abs(found - expected) > 1e-5:
        raise SystemExit(f"{side}: the first score is {found}; expected {expected}")


def main() -> int:
    if sys.argv[1:2] == ["--server"]:
        serve(sys.argv[2], Path(sys.argv[3]))
        return 0
    if sys.argv[1:2] == ["--client"]:
        side, address, rows, clients, seconds, folder = sys.argv[2:]
        client(side, address, int(rows), int(clients), float(seconds), Path(folder))
        return 0
    parser = harness.arguments((__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 100], help="rows of a request")
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 8, 32], help="connections at the same time")
    parser.add_argument("--equal-p99", action="store_true", help="ours with more clients, up to FastAPI's p99 with 8")
    parser.add_argument("--only", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--folder", type=Path, help="keep or use the trained model here")
    options = harness.parse(parser)
    if options.smoke:
        options.clients = [2]
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = options.folder or Path(name)
        if not (folder / "expected.npy").exists():
            folder.mkdir(parents=True, exist_ok=True)
            train(folder)
        for rows in options.rows:
            if options.equal_p99:
                print(f"{rows} rows, equal p99", flush=True)
                results[f"{rows} rows, equal p99"] = _at_equal_p99(options, folder, rows)
                continue
            for clients in options.clients:
                print(f"{rows} rows, {clients} clients", flush=True)
                results[f"{rows} rows, {clients} clients"] = _compared(options, folder, rows, clients)
    harness.write(options.json, "serving", results)
    return 0


def _compared(options: Any, folder: Path, rows: int, clients: int) -> dict[str, Any]:
    sides = {side: lambda seconds, side=side: measure(side, folder, rows, clients, seconds) for side in options.only}
    found = harness.alternate(sides, rounds=options.rounds, seconds=options.seconds)
    result: dict[str, Any] = {"found": found}
    target = _target(rows) if clients >= 8 or rows > 1 else None
    for side in SIDES[:2]:
        ratio = harness.ratios(found, side, "FastAPI", "requests_per_s")
        harness.show_ratio(f"  requests/s, {side} / FastAPI", ratio, target)
        p99 = harness.ratios(found, side, "FastAPI", "p99_ms")
        harness.show_ratio(f"  p99, {side} / FastAPI", p99)
        result[side] = {"requests_ratio": ratio, "p99_ratio": p99}
    return result


def _target(rows: int) -> float:
    return 2.0 if rows == 1 else 1.2


def _at_equal_p99(options: Any, folder: Path, rows: int) -> dict[str, Any]:
    """Ratios beside FastAPI with `FEWEST` clients for each of our loads; and the best one whose median p99 is not above
    FastAPI's."""
    loads = {f"{side}, {n}": (side, n) for side in SIDES[:2] if side in options.only for n in LOADS}
    cases = {"FastAPI": ("FastAPI", FEWEST)} | loads
    contestants = {
        name: lambda seconds, side=side, n=n: measure(side, folder, rows, n, seconds)
        for name, (side, n) in cases.items()
    }
    found = harness.alternate(contestants, rounds=options.rounds, seconds=options.seconds)
    result: dict[str, Any] = {"found": found}
    for side in SIDES[:2]:
        names = [name for name, (of, _) in loads.items() if of == side]
        compared = {
            name: {f"{key}_ratio": harness.ratios(found, name, "FastAPI", key) for key in ("requests_per_s", "p99_ms")}
            for name in names
        }
        equal = [n for n, each in compared.items() if each["p99_ms_ratio"] and each["p99_ms_ratio"]["median"] <= 1]
        best = max(equal, key=lambda name: compared[name]["requests_per_s_ratio"]["median"], default=None)
        for name, each in compared.items():
            harness.show_ratio(f"  p99, {name} clients / FastAPI, {FEWEST} clients", each["p99_ms_ratio"])
            target = _target(rows) if name == best else None
            harness.show_ratio("    requests/s", each["requests_per_s_ratio"], target)
        result[side] = {"compared": compared, "best": best}
        if names:
            print(
                f"  at equal p99: {best} clients" if best else f"  {side}: its p99 is above FastAPI's with any clients"
            )
    return result


if __name__ == "__main__":
    sys.exit(main())
