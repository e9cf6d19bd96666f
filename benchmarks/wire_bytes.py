"""Does the byte ledger agree with the kernel? A job's own count beside its sockets' and its interfaces' counters.

W1's tables and tower, all bytes through sockets. First on this host: the ledger of all workers beside tcp_info of their
connections, both from summary.json. Then over two network namespaces, servers in one and workers in the other (needs
root): beside what the cable and the workers' loopback have carried, both with MTU 1500 and a packet for each segment.

Headers on the cable: 66 bytes a packet (Ethernet 14, IPv4 20, TCP with timestamps 32), on loopback 52, where the kernel
does not count Ethernet's. `modelled` has them by the ledger alone: full segments of 1448 bytes, and an acknowledgement
for every second one. Segments that TCP sent once more are the kernel's count (RetransSegs), taken to be full.
`--rounds` and `--seconds` have no effect: bytes do not depend on the machine's mood.
"""
# A = the servers' host, B = the workers'

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness
import two_hosts
import w1_job
from two_hosts import Host, Traffic

from shardkeep.base.yaml_text import write_yaml
from shardkeep.compression.recipes import RECIPES

SERVERS = WORKERS = 2
MSS = two_hosts.MTU - 20 - 32
CABLE, LOOPBACK = 66, 52
SOCKETS_TARGET, INTERFACES_TARGET = 0.01, 0.03
LIMIT_S = 900.0
Row = dict[str, Any]


def job_config(*, steps: int, batch: int, dim: int) -> dict[str, Any]:
    config = w1_job.job_config(
        dim=dim, servers=SERVERS, workers=WORKERS, consistency={"mode": "bounded"}, batch=batch, device="cpu",
        cores=None, report_every_s=2.0,
    )  # fmt: skip
    train = {**config["train"], "max_steps": steps}
    return {**config, "train": train, "transport": {"same_host": "sockets"}, "data": data(batch * steps)}


def data(samples: int) -> dict[str, Any]:
    """A synthetic stream: small batches of it are as skewed as large ones."""
    return {"source": "synthetic", "synthetic": {"train_samples": samples * WORKERS, "eval_samples": 2000}}


def on_this_host(config: dict[str, Any]) -> dict[str, Any]:
    """The summary of the job as `shardkeep train` runs it."""
    with tempfile.TemporaryDirectory(prefix="wire-bytes-") as name:
        folder = Path(name)
        (folder / "job.yaml").write_text(write_yaml(config), encoding="utf-8")
        command = [sys.executable, "-m", "shardkeep", "train", str(folder / "job.yaml"), "--run-dir", f"{name}/run"]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=LIMIT_S, env=two_hosts.environment()
        )
        if done.returncode:
            raise RuntimeError(f"the job failed: {done.stderr[-2000:]}")
        return dict(json.loads((folder / "run" / "summary.json").read_text(encoding="utf-8")))


def beside_sockets(summary: dict[str, Any]) -> list[Row]:
    """The ledger beside tcp_info, way by way."""
    counted, sockets = summary["bytes"], summary["sockets"]
    if "servers" not in sockets:
        raise harness.CannotRun("this kernel tells no counters of its sockets")
    pairs = {
        "to servers": (counted["to_servers"], sockets["servers"]["sent"]),
        "from servers": (counted["from_servers"], sockets["servers"]["received"]),
        "between workers": (counted["between_workers"], sockets["workers"]["sent"]),
    }
    return [row(name, ledger, kernel) for name, (ledger, kernel) in pairs.items()]


def row(name: str, ledger: float, kernel: float) -> Row:
    return {"way": name, "ledger": ledger, "kernel": kernel, "deviation": ledger / kernel - 1.0 if kernel else None}


def over_two_hosts(config: dict[str, Any]) -> dict[str, Any]:
    """The job over two namespaces: the ledger with modelled headers beside the interfaces' counters."""
    with two_hosts.two_hosts(plain_packets=True) as (a, b):
        before = carried(a, b)
        job = two_hosts.run_job(config, coordinator=a, servers=[a] * SERVERS, workers=[b] * WORKERS)
        after = carried(a, b)
    seen = {name: after[name] - before[name] for name in before}
    counted, sockets = job.summary["bytes"], job.summary["sockets"]
    resent_b = sockets["servers"]["resent"] + sockets["workers"]["resent"]
    up, down, among = counted["to_servers"], counted["from_servers"], counted["between_workers"]
    # What B has sent once more went over the cable or over its loopback; tcp_info of its workers knows which.
    share = sockets["servers"]["resent"] / resent_b if resent_b else 0.0
    resent = {
        "B to A": seen["resent B"].packets * share,
        "A to B": float(seen["resent A"].packets),
        "among B": seen["resent B"].packets * (1.0 - share),
    }
    modelled = {
        "B to A": on_wire(up, down, CABLE),
        "A to B": on_wire(down, up, CABLE),
        "among B": on_wire(among, among, LOOPBACK),
    }
    header = {"B to A": CABLE, "A to B": CABLE, "among B": LOOPBACK}
    rows = [
        row(name, modelled[name] + resent[name] * (MSS + header[name]), seen[name].num_bytes)
        | {"payload": payload, "packets": seen[name].packets, "resent_packets": resent[name]}
        for name, payload in (("B to A", up), ("A to B", down), ("among B", among))
    ]
    return {"interfaces": rows, "sockets": beside_sockets(job.summary), "bytes": counted}


def carried(a: Host, b: Host) -> dict[str, Traffic]:
    return {
        "A to B": a.sent(a.cable),
        "B to A": b.sent(b.cable),
        "among B": b.sent("lo"),
        "resent A": Traffic(0, a.resent_segments()),
        "resent B": Traffic(0, b.resent_segments()),
    }


def on_wire(payload: float, other_way: float, header: int) -> float:
    """Bytes of the packets that carry `payload`, and acknowledge what comes the other way."""
    return payload + header * (payload / MSS + other_way / MSS / 2)


def show(title: str, rows: list[Row], target: float) -> None:
    print(f"\n{title}: ledger, kernel, deviation (target within {target:.0%})")
    for found in rows:
        deviation = "-" if found["deviation"] is None else f"{found['deviation']:+.3%}"
        extra = ""
        if "packets" in found:
            extra = f"   {found['packets']:,} packets, {found['resent_packets']:,.0f} of them again"
        print(f"  {found['way']:<16} {found['ledger']:>15,.0f} {found['kernel']:>15,.0f} {deviation:>10}{extra}")


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=1024, help="samples per worker and step")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--recipe", default="fp32", choices=list(RECIPES), help="how the job compresses")
    options = harness.parse(parser)
    if options.smoke:
        options.steps, options.batch = 40, 512
    config = job_config(steps=options.steps, batch=options.batch, dim=options.dim)
    config = harness.merged(config, RECIPES[options.recipe].settings)
    results: dict[str, Any] = {}
    summary = on_this_host(config)
    results["one host"] = {"sockets": beside_sockets(summary), "bytes": summary["bytes"]}
    show("one host, sockets", results["one host"]["sockets"], SOCKETS_TARGET)
    try:
        found = results["two hosts"] = over_two_hosts(config)
        show("two hosts, sockets", found["sockets"], SOCKETS_TARGET)
        show("two hosts, interfaces", found["interfaces"], INTERFACES_TARGET)
    except harness.CannotRun as reason:
        print(f"without two hosts: {reason}")
    arguments = {name: getattr(options, name) for name in ("steps", "batch", "dim", "recipe")}
    harness.write(options.json, "wire_bytes", {"arguments": arguments, **results})


if __name__ == "__main__":
    main()
