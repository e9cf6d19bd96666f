"""The jobs that quality.py trains: an example, what is set differently, and the AUC that it has to reach."""

from __future__ import annotations

from dataclasses import dataclass

MODES = ("sync", "bounded", "async")
ONE_PROCESS = ("servers=0", "workers=1", "consistency.mode=sync")  # fast, and the same bits in every run
LINEAR = (
    "model={name: linear_model:Linear}",
    "tables={default: {dim: 1, init: {name: zeros}, optimizer: {name: adagrad, lr: 0.1}}}",
    "tower.optimizer.lr=0.02",
)


@dataclass(frozen=True)
class Case:
    """One job: `examples/EXAMPLE.yaml` with `settings`."""

    group: str
    name: str
    example: str
    settings: tuple[str, ...]
    at_least: float | None = None
    """AUC that the issue or the golden tests ask for."""


def _real() -> list[Case]:
    targets = {"adult": 0.905, "census": 0.945}
    return [
        Case("real", f"{example} {mode}", example, (f"consistency.mode={mode}",), target)
        for example, target in targets.items()
        for mode in MODES
    ]


def _demo() -> list[Case]:
    modes = [Case("demo", f"demo {mode}", "demo", (f"consistency.mode={mode}",)) for mode in MODES]
    return [*modes, Case("demo", "demo linear", "demo", LINEAR)]


def _models() -> list[Case]:
    plain = "hidden: [64, 32]"
    models = {
        "dlrm": f"{{name: dlrm, bottom: [32], {plain}}}",
        "dcn_v2": f"{{name: dcn_v2, {plain}}}",
        "deepfm": f"{{name: deepfm, {plain}}}",
        "wide_deep": f"{{name: wide_deep, {plain}}}",
    }
    cases = [
        Case("models", f"adult {name}", "adult", (*ONE_PROCESS, f"model={text}"), 0.92) for name, text in models.items()
    ]
    return [*cases, Case("models", "adult linear", "adult", (*ONE_PROCESS, *LINEAR), 0.91)]


def _schedules(text: str) -> tuple[str, ...]:
    """The same schedule for rows and tower."""
    return (
        f"tables.default.optimizer={{name: rowwise_adagrad, lr: 0.05, schedule: {text}}}",
        f"tower.optimizer={{name: adam, lr: 0.001, schedule: {text}}}",
    )


# One epoch of adult has 255 steps in one process, so a job of 4 epochs has 1,020.
SETTINGS: dict[str, tuple[str, ...]] = {
    "as it is": (),
    "warm-up": _schedules("{warmup_steps: 100}"),
    "warm-up, cosine": _schedules("{warmup_steps: 100, decay: cosine, decay_steps: 920}"),
    "linear decay": _schedules("{decay: linear, decay_steps: 1020}"),
    "exponential decay": _schedules("{decay: exponential, decay_steps: 500, final_factor: 0.5}"),
    "inverse_sqrt decay": _schedules("{decay: inverse_sqrt, decay_steps: 200}"),
    "clip_norm 1": ("train.clip_norm=1.0",),
    "clip_norm 0.05": ("train.clip_norm=0.05",),
    "accumulate 4 of 32": ("train.batch_size=32", "train.accumulate=4"),
    "dropout 0.2": ("model.dropout=0.2",),
    "activation checkpointing": ("model.activation_checkpointing=true",),
    "tables sgd": ("tables.default.optimizer={name: sgd, lr: 1.0}",),
    "tables adagrad": ("tables.default.optimizer={name: adagrad, lr: 0.05}",),
    "tables adam": ("tables.default.optimizer={name: adam, lr: 0.002}",),
    "tables ftrl": ("tables.default.optimizer={name: ftrl, lr: 0.2, l1: 0.00001, l2: 0.00001}",),
    "tables weight decay": ("tables.default.optimizer={name: rowwise_adagrad, lr: 0.05, weight_decay: 0.0001}",),
    "tower sgd": ("tower.optimizer={name: sgd, lr: 0.05, momentum: 0.9}",),
    "tower adamw": ("tower.optimizer={name: adamw, lr: 0.001, weight_decay: 0.01}",),
    "push top 25 %, fp16": ("compression.push={keep: 0.25, pool_rows: 200000, second_moment: true, values: fp16}",),
    "push fp16": ("compression.push.values=fp16",),
    "pull fp16": ("compression.pull.values=fp16",),
}


def _settings() -> list[Case]:
    return [
        Case("settings", f"adult {name}", "adult", (*ONE_PROCESS, *changes), 0.92) for name, changes in SETTINGS.items()
    ]


COMPRESSION: dict[str, tuple[str, ...]] = {
    "push top 25 %, fp16": ("compression.push={keep: 0.25, pool_rows: 200000, second_moment: true, values: fp16}",),
    "push and pull fp16": ("compression.push.values=fp16", "compression.pull.values=fp16"),
}


def _compression() -> list[Case]:
    return [Case("compression", f"demo {name}", "demo", changes) for name, changes in COMPRESSION.items()]


GROUPS: dict[str, list[Case]] = {
    "real": _real(),
    "demo": _demo(),
    "models": _models(),
    "settings": _settings(),
    "compression": _compression(),
}
