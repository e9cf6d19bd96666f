"""DenseFigures: what the dense model of a worker costs, for telemetry and the summary. Counts nothing itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardkeep.workers.dense.compile import Compilation
from shardkeep.workers.reporting.counters import StepCounters
from shardkeep.workers.timing.clock import PARTS


@dataclass(frozen=True, slots=True)
class DenseFigures:
    """The figures of one worker's dense model since its process began."""

    compilation: Compilation
    counters: StepCounters

    def figures(self) -> dict[str, Any]:
        """Counts so far, as JSON types. Any thread may ask for them. `flops_s`: the seconds that the `flops` took."""
        products, memory = self.compilation.products, self.compilation.rss_bytes
        return {
            "flops": round(products.flops),
            "flops_s": products.seconds(self.counters.watch.seconds),
            "compile_s": self.compilation.compile_s,
            "compile_rss_bytes": memory[1] - memory[0] if memory else 0,
        }

    def total(self) -> dict[str, Any]:
        """What the summary says under `tower`; what is not known is left out."""
        products, memory = self.compilation.products, self.compilation.rss_bytes
        found: dict[str, Any] = {"compile_s": self.compilation.compile_s}
        if memory is not None:
            found["rss_bytes"] = {"eager": memory[0], "compiled": memory[1]}
        steps, step_s = self.counters.counts.steps, products.seconds(self.counters.step_ms()) / 1e3
        if steps and step_s and products.flops:
            found["flops_per_sample"] = products.per_sample
            found["flops_per_s"] = products.flops / steps / step_s
        return found


def step_share(step_ms: Mapping[str, float]) -> dict[str, float]:
    """Each part's share of a step, 0 to 1. Empty where no step was timed."""
    total = sum(step_ms[part] for part in PARTS)
    return {part: round(step_ms[part] / total, 4) for part in PARTS} if total else {}
