"""The ops cases of a folder, for scripts/run-cases: their commands, and what is right in their transcripts.

Each runs in one work folder with clicks.csv, clicks.yaml, long.yaml, a run `runs/base` and its export `model`. The
scripts of the cases name that folder, a checkout and a Python by fixed words, which `prepare` replaces in a copy.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 1200
COMMAND = """#!{python}
import os, sys
os.environ["PYTHONPATH"] = {source!r}
os.execv({python!r}, [{python!r}, "-m", "shardkeep", *sys.argv[1:]])
"""
CLICKS = """name: clicks
servers: 1
workers: 1
data:
  train: [clicks.csv]
  split: {by: random, eval: 0.1, test: 0}
  label: clicked
  dense: [price]
  sparse:
    - user
    - item
    - city
    - {column: tags, separator: "|", pooling: mean}
model: {name: dlrm, bottom: [16], hidden: [32]}
tables: {default: {dim: 8}}
train: {batch_size: 256, epochs: 2}
"""
LONG = """name: long
servers: 1
workers: 1
data: {source: synthetic, synthetic: {train_samples: 2000000, eval_samples: 2000, table_sizes: [1000, 1000, 1000]}}
model: {bottom: [16], hidden: [16]}
tables: {default: {dim: 8}}
train: {batch_size: 512, epochs: 1}
"""
HEALTH = """
set -m; $SK serve model --listen 127.0.0.1:18021 >serve.log 2>&1 & P=$!
for i in $(seq 120); do grep -q serving serve.log && break; sleep 1; done
$PY - <<'P'
import grpc
channel = grpc.insecure_channel("127.0.0.1:18021")
try: print("health", channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=60))
except grpc.RpcError as error: print("health", error.code().name)
P
kill $P; wait $P; echo "rc $?"
"""
IN_CONTAINER = "shardkeep train clicks.yaml --run-dir run --set train.epochs=1 2>&1; echo rc $?"


@dataclass(frozen=True)
class Check:
    """A thing of a transcript: `right` as a person reads it, `came` finds it, `ok` judges it."""

    what: str
    right: str
    came: Callable[[str], str]
    ok: Callable[[str], bool]


@dataclass(frozen=True)
class Ops:
    """A command of a case. `lacks` says why it cannot run here; empty = it can."""

    case: str
    name: str
    command: str
    checks: Sequence[Check]
    lacks: Callable[[], str] = lambda: ""


def shown(what: str, pattern: str, right: str = "") -> Check:
    """A text that must come."""
    return Check(what, right or pattern, lambda text: _first(pattern, text) or _error(text), lambda came: bool(
        re.search(pattern, came)))  # fmt: skip


def absent(what: str, pattern: str) -> Check:
    """A text that must not come."""
    return Check(what, "none", lambda text: _first(pattern, text) or "none", lambda came: came == "none")


def codes(right: str, *, name: str = "rc") -> Check:
    """The exit codes that a script prints, in order; `right` is a pattern of all of them."""

    def came(text: str) -> str:
        return " ".join(re.findall(rf"\b{name} (-?\d+)", text))

    return Check(f"every {name}", right, came, lambda found: re.fullmatch(right, found) is not None)


def either(what: str, *patterns: str) -> Check:
    """One of several texts must come."""
    return shown(what, "|".join(patterns), " or ".join(patterns))


def seconds_below(limit: float) -> Check:
    """Each figure behind `seconds` or `after`."""

    def came(text: str) -> str:
        return " ".join(re.findall(r"(?:seconds|after) (\d+(?:\.\d+)?)", text))

    return Check("seconds", f"below {limit:g}", came, lambda found: bool(found) and all(
        float(each) < limit for each in found.split()))  # fmt: skip


def trained_or_refused(what: str, where: str) -> Check:
    """After the line `where`: a job that completes and a model that scores, or one line before the first step."""

    def came(text: str) -> str:
        part = text.partition(where)[2].partition("===")[0]
        code = _first(r"rc \d+", part)
        words = code, _first(r"[\d,]+ rows scored", part), _first(r"error: .{,60}", part)
        return ", ".join(word for word in words if word)

    return Check(what, "rc 0 and scored, or refused in one line", came, lambda found: bool(
        re.match(r"rc 0.*rows scored", found) or re.match(r"rc [12], error", found)))  # fmt: skip


def needs_root() -> str:
    return "" if os.geteuid() == 0 and shutil.which("unshare") else "it needs root, unshare and mount"


def needs_v1() -> str:
    return needs_root() or ("" if Path("/sys/fs/cgroup/memory").is_dir() else "it needs control groups v1")


def missing(modules: Sequence[str]) -> str:
    lacking = [name for name in modules if not importlib.util.find_spec(name)]
    return f"it needs {' and '.join(lacking)}" if lacking else ""


def needs_clean() -> str:
    return "" if os.environ.get("CLEAN_BIN") else "CLEAN_BIN names no bin folder of an environment with the wheel alone"


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match.group(0) if match else ""


def _error(text: str) -> str:
    """The first error; else the last line."""
    lines = [line for line in text.splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("error")), lines[-1] if lines else "-")


THREAD, FORK, WEAK = "$PY {c}/ops-01/thread_train.py", "$PY {c}/ops-03/", ["flock", "renamedir", "link", "mmapw"]
ENVIRONMENTS, PLACES = 10, 13
OPS = [
    Ops("ops-01", "train", f"{THREAD} train", [shown("a thread", r"thread completed")]),
    Ops("ops-01", "two", f"{THREAD} two", [shown(f"job {n}", rf"two-{n} completed") for n in (0, 1)]),
    Ops("ops-01", "serve", f"{THREAD} serve", [shown("a loop", r"loop 3 steps")]),
    Ops("ops-01", "async", f"{THREAD} async", [shown(t, f"{t} completed") for t in ("async", "to_thread")]),
    Ops("ops-01", "twoserve", f"{THREAD} twoserve", [shown("one loop", r"loop-\d 3 steps"), either(
        "the other", r"loop-\d UserError.*EmbeddingClient.*", r"loop-\d 3 steps\n.*loop-\d 3 steps"),
        seconds_below(60)]),
    Ops("ops-02", "two clients", "$PY {c}/ops-02/two_clients.py", [
        shown("the second", r"second UserError.*another EmbeddingClient.*"), seconds_below(3),
        shown("the first again", r"first again 2"), shown("a third", r"after both 1")]),
    Ops("ops-02", "two local", "$PY {c}/ops-02/two_clients.py local", [shown("the second", r"second 1")]),
    Ops("ops-02", "notebook", "$PY {c}/ops-02/notebook.py", [
        absent("a hang", "HANG"), shown("cell again", r"UserError: .*EmbeddingClient"), shown(
            "after a restart", r"left after kernel restart: nothing")], lambda: missing(["jupyter_client"])),
    *(Ops("ops-03", f"fork, {how}", f"{FORK}fork_after_predict.py model {how}", [
        shown("the child", rf"{how} 0 \[.*")]) for how in ("none", "predict", "one")),
    Ops("ops-03", "workers", f"{FORK}forked_predictor.py model", [
        *(shown(f"child {n}", rf"forked {n} \(0, 0\.0\)") for n in range(3)), shown("threads", r"differences \[\]")]),
    *(Ops("ops-04", how, f"$PY {{c}}/ops-04/loader_workers.py {how}", [
        shown("three epochs", r"epoch 2 step 120"), shown("rows", r"997 rows")])
      for how in ("fork", "spawn", "forkserver persistent")),
    *(Ops("ops-05", lack, f"bash {{c}}/ops-05/run.sh '{lack}'", [
        trained_or_refused("a model, or a refusal", f"has no: {lack}")]) for lack in (*WEAK, " ".join(WEAK))),
    *(Ops("ops-07", f"{user} {mode}", f"rm -rf {{w}}/vol; mkdir -p {{w}}/vol; cp clicks.csv clicks.yaml {{w}}/vol; "
          f"bash {{c}}/ops-07/container.sh {user} {mode} '{IN_CONTAINER}'", [either(
              "trains, or one line", r"rc 0", r"error: .*\n+rc 2"), absent("kernels first", r"(?s)kernels.*error: ")],
          needs_root) for user, mode in (("12345:12345", "0777"), ("12345:0", "2775"), ("12345:12345", "0755"))),
    Ops("ops-08", "memory limit", "bash {c}/ops-08/small_box.sh 350000000 long.yaml --run-dir runs/small", [
        shown("names the limit", r"(?i)error: .*memory.*limit.*|.*limit.*memory.*"), codes("1")], needs_v1),
    Ops("ops-08", "quota", "bash {c}/ops-08/quota.sh 50 train {c}/ops-11/env.yaml --run-dir runs/quota", [codes("0")],
        needs_v1),
    Ops("ops-08", "baked", "C={c}/ops-07/container.sh bash {c}/ops-08/baked.sh", [
        Check("times scored", "4", lambda text: str(len(re.findall(r"rows scored", text))), lambda n: n in ("3", "4")),
        Check("compiled again", "none", lambda text: _first(r"kernels.*", text.partition("##")[2]) or "none",
              lambda came: came == "none")], needs_root),
    Ops("ops-10", "namespaces", "bash {c}/ops-10/pid_namespaces.sh", [codes("0")], needs_root),
    Ops("ops-11", "environments", "bash {c}/ops-11/cluster_env.sh {c}/ops-11/env.yaml", [
        codes(" ".join(["0"] * ENVIRONMENTS))]),
    *(Ops("ops-12", net, f"bash {{c}}/ops-12/two_hosts.sh {net}", [
        either("trains, or one line", r"rc 0\nrc 0\nrc 0", r"error: .*(?:127\.0\.1\.1|loopback).*"), seconds_below(90)],
        needs_root) for net in ("ok", "debian", "v6", "v6name", "dual", "any")),
    *(Ops("ops-13", name, f"bash {{c}}/ops-13/late_name.sh {name}", [codes("0 0 0")], needs_root)
      for name in ("late", "moved")),
    Ops("ops-14", "moved", "W=$PWD/mv CSV=$PWD/clicks.csv YAML=$PWD/clicks.yaml bash {c}/ops-14/moved.sh", [
        shown("predict", r"rows scored"),
        shown("resume without data", r"epochs=2\n(?:(?!\$ ).*\n)*?error: .*clicks\.csv.*"),
        shown("resume with a relative root", r"data\.root=data2\n(?:(?!\$ ).*\n)*?.*AUC.*"),
        shown("resume with an absolute root", r"data\.root=/.*data2\n(?:(?!\$ ).*\n)*?.*(?:AUC|the job is done).*")]),
    Ops("ops-15", "health", HEALTH, [shown("grpc.health.v1", r"health b'\\x08\\x01'")]),
    Ops("ops-15", "clients", "$SK serve model --listen 127.0.0.1:18022 --http 127.0.0.1:18023 >s.log 2>&1 & P=$!; "
        "for i in $(seq 120); do grep -q serving s.log && break; sleep 1; done; "
        "$PY {c}/ops-15/clients.py 18023 18022; kill $P; wait $P; echo rc $?",
        [shown("infer", r"http infer .*\["), shown("health", r"Health/Check +b'"),
         shown("reflection", r"v1alpha.ServerReflection\S+ +b'")],
        lambda: missing(["tritonclient"])),
    Ops("ops-16", "hup", "bash {c}/ops-16/ends.sh hup", [
        shown("stopped with a checkpoint", r"step-\d+"), shown("a summary", r"(?m)^runs/e-hup/summary.json")]),
    Ops("ops-16", "nohup", "bash {c}/ops-16/ends.sh nohup", [
        shown("SIGHUP is ignored", r"(?m)^trains \w+$"), codes("1")]),
    Ops("ops-16", "ptyclose", "bash {c}/ops-16/ends.sh ptyclose", [
        shown("a summary", r"(?m)^runs/e-ptyclose/summary.json")]),
    Ops("ops-16", "head", "bash {c}/ops-16/ends.sh head", [shown("a summary", r"(?m)^runs/e-head/summary.json")]),
    *(Ops("ops-16", how, f"bash {{c}}/ops-16/ends.sh {how}", [codes("0")]) for how in ("nostdin", "noall", "cron")),
    Ops("ops-16", "pid1", "bash {c}/ops-16/ends.sh pid1", [
        shown("a summary", r"(?m)^runs/e-pid1/summary.json")], needs_root),
    # A shell as process 1 passes no signal on, so nothing ends in order before all are killed.
    Ops("ops-16", "sh1", "bash {c}/ops-16/ends.sh sh1", [shown("has begun", r"(?m)^owner-\d+")], needs_root),
    Ops("ops-17", "the wheel alone", "bash {c}/ops-17/clean.sh $CLEAN_BIN $PWD/model $PWD/runs/base", [
        shown("serve names its extra", r"(?s)\$ shardkeep serve.*?error: .*shardkeep\[.*"),
        shown("predicts", r"\[0\.\d+\]")], needs_clean),
    Ops("ops-18", "places", "bash {c}/ops-18/places.sh", [codes(" ".join(["(0|2)"] * PLACES)),
        shown("a run folder that is no UTF-8", r"(?s)## run folder that is no UTF-8\nrc (?:0|2\n+error: .*)")]),
    Ops("ops-20", "a small /tmp", "bash {c}/ops-20/run.sh 120", [shown("trains to the end", r"done 120"), codes("0")],
        needs_root),
]  # fmt: skip


def prepare(folder: Path, work: Path) -> dict[str, str]:
    """Fills the work folder; the environment of the cases."""
    python, source = sys.executable, str(ROOT / "src")
    (work / "bin").mkdir(parents=True)
    command = work / "bin" / "shardkeep"
    command.write_text(COMMAND.format(python=python, source=source))
    command.chmod(0o755)
    for case in folder.glob("ops-*"):
        if case.is_dir():
            shutil.copytree(case, work / "cases" / case.name, copy_function=_plain_copy)
    for path in (work / "cases").rglob("*.*"):
        path.write_text(_placed(path.read_text(encoding="utf-8"), work), encoding="utf-8")
    (work / "clicks.yaml").write_text(CLICKS)
    (work / "long.yaml").write_text(LONG)
    environment = {**os.environ, "PYTHONPATH": source, "SK": str(command), "PY": python, "W": str(work)}
    environment["PATH"] = os.pathsep.join([str(command.parent), str(Path(python).parent), os.environ["PATH"]])
    for line in (
        [python, str(ROOT / "examples" / "clicks.py"), "clicks.csv"],
        ["gcc", "-shared", "-fPIC", "-O1", "-o", "weakfs.so", "cases/ops-05/weakfs.c", "-ldl"],
        [str(command), "train", "clicks.yaml", "--run-dir", "runs/base", "--set", "train.epochs=1"],
        [str(command), "export", "runs/base", "model"],
    ):
        subprocess.run(line, cwd=work, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=LIMIT_S)
    return environment


def run(ops: Ops, work: Path, environment: dict[str, str]) -> str:
    """Runs a command of a case; the transcript."""
    text = ops.command.replace("{c}", shlex.quote(str(work / "cases"))).replace("{w}", shlex.quote(str(work)))
    return output_of(text, work, environment)


def output_of(script: str, folder: Path, environment: dict[str, str]) -> str:
    """What a script of bash writes; it and its children are killed after LIMIT_S."""
    process = subprocess.Popen(["bash", "-c", f"exec 2>&1\n{script}"], cwd=folder, env=environment,
                               start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)  # fmt: skip
    try:
        out, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        out = process.communicate()[0] + f"\nHANG after {LIMIT_S} s\n".encode()
    return out.decode(errors="replace")


def _plain_copy(source: str, target: str) -> str:
    """Copies a file that may be written and run, as its folder may be read-only."""
    shutil.copyfile(source, target)
    Path(target).chmod(0o755)
    return target


def renamed(text: str) -> str:
    """The text of a case with the names of today: `hidden` was `top`, and a split by chance was `eval_fraction`."""
    text = re.sub(r"\beval_fraction: *([0-9.]+)", r"split: {by: random, eval: \1, test: 0}", text)
    text = text.replace("--set data.eval_fraction=0 ", "--set data.split=null ").replace("data.eval_fraction=0 ", "")
    return re.sub(r"\b(second_)?top(\"?: *\[)", r"\1hidden\2", text)


def _placed(text: str, work: Path) -> str:
    """The text of a script with the real places."""
    inside = f"env -i PYTHONPATH={ROOT}/src PATH={work}/bin:"
    if "setpriv" in text:  # a container hides /tmp, and with it the work folder: it has the checkout's own command
        inside = f"env -i PYTHONPATH={ROOT}/src PATH={ROOT}/.venv/bin:"
    places = {"env -i PATH=/opt/clone/.venv/bin:": inside, "/opt/cases3": str(work / "cases"), "@W@": str(work),
              "/opt/clone": str(ROOT), "/opt/python": sys.base_prefix}  # fmt: skip
    for name, place in places.items():
        text = text.replace(name, place)
    return renamed(text)
