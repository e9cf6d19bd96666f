"""Every sentence of the library that judges a number is silent where the number is NaN, infinite or missing."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterator

import numpy as np

from shardkeep.analysis.differences import Difference
from shardkeep.analysis.significance import UNDEFINED, Estimate, verdict
from shardkeep.workers.config import EarlyStoppingConfig
from shardkeep.workers.data.batch import Batch, Ragged
from shardkeep.workers.data.samples import doubtful_weights
from shardkeep.workers.data.schema import Feature, Schema
from shardkeep.workers.evaluation.history import EvaluationHistory
from shardkeep.workers.metrics.quality import loses_to_the_mean
from tests.support.cases import every
from tests.support.shape import ROOMS, ROOT

WORDS = re.compile(r"\b(better|worse|higher|lower|rises|falls|guesses|no loss|no difference|improved|too long)\b")
"""By which a sentence is found. Warnings of the page have a registry, and their test stands beside it."""


def weighs(bad: float | None) -> bool:
    """Whether weights are called too large."""
    weights_N = np.full(9, bad or 0.0, np.float32)
    schema, bag = Schema((), (Feature("tags", "tags", "weighted"),)), Ragged(np.arange(9), None, weights_N)
    batch = Batch(np.empty((9, 0), np.float32), {"tags": bag}, np.ones((9, 1), np.float32))
    data = type("Data", (), {"schema": schema, "gather": lambda _, rows_B: batch, "__len__": lambda _: 9})
    return bool(doubtful_weights(data()))


def is_best(bad: float | None) -> bool:
    """Whether a finite evaluation after the bad one, or before it, is not the best."""
    best = []
    for values in ((bad, 0.6), (0.6, bad)):
        history = EvaluationHistory(EarlyStoppingConfig(metric="logloss"))
        history.load([[step, {"logloss": value}] for step, value in enumerate(values)])
        best.append(values[history.step or 0])
    return best != [0.6, 0.6]


JUDGES: dict[str, Callable[[float | None], bool]] = {
    "src/shardkeep/analysis/differences.py texts": lambda bad: bad is not None and any(
        Difference("auc", *ends, "").texts("b - a")[4] != UNDEFINED
        for ends in ((bad, 0.1, 0.2), (0.15, bad, 0.2), (0.15, 0.1, bad))),
    "src/shardkeep/analysis/significance.py verdict": lambda bad: bad is not None and any(
        verdict(Estimate(3, mean, 0.1), p) != UNDEFINED
        for mean, p in ((bad, 0.01), (0.1, bad), (bad, 0.9))),
    "workers/data/samples.py doubtful_weights": weighs,
    "workers/evaluation/evaluate.py after": lambda bad: any(
        loses_to_the_mean({"mse": error, "baseline_mse": mean}) for error, mean in ((bad, 1.0), (2.0, bad))
        if (error, mean) != (2.0, -math.inf)),
    "src/shardkeep/run/origin/resume.py _early_end": is_best,
    "workers/reporting/report.py lowered_rates": is_best,
}  # fmt: skip
"""By the function that writes the sentence: whether what decides about it takes a bad number for a judgement."""
OTHERS = {
    "src/shardkeep/cli/report_commands.py _scores_of": "of rows that were trained on, without a number",
    "src/shardkeep/inference/scoring.py evaluate": "the same",
    "src/shardkeep/experiments/pictures.py sweep_pictures": "a place in a picture",
}


def sentences() -> Iterator[str]:
    """The functions that write a sentence with one of the words; neither errors nor docstrings."""
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            inside = path.relative_to(ROOT)
            linked = any((ROOT / above).is_symlink() for above in inside.parents)
            if linked or "_pb2" in path.name or "page/warnings" in inside.as_posix():
                continue
            source = path.read_text(encoding="utf-8")
            for function in ast.walk(ast.parse(source if WORDS.search(source) else "")):
                if isinstance(function, ast.FunctionDef):
                    silent = [
                        each
                        for each in ast.walk(function)
                        if isinstance(each, ast.Raise | ast.Expr)
                        and not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Call | ast.Yield))
                    ]
                    left_out = {id(part) for each in silent for part in ast.walk(each)}
                    texts = [each.value for each in ast.walk(function)
                             if isinstance(each, ast.Constant) and id(each) not in left_out]  # fmt: skip
                    if any(isinstance(text, str) and " " in text and WORDS.search(text) for text in texts):
                        yield f"{inside.as_posix()} {function.name}"


@every("bad", [math.nan, math.inf, -math.inf, None], ids=str)
@every("judges", JUDGES.values(), ids=JUDGES)
def test_a_number_that_is_not_finite_is_not_judged(judges: Callable[[float | None], bool], bad: float | None) -> None:
    assert not judges(bad)


def test_every_sentence_that_judges_is_known() -> None:
    assert set(sentences()) == JUDGES.keys() | OTHERS.keys()
