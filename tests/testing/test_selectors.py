"""Selectors of the user's own: those that ship as examples pass every check, and each wrong one fails in one line."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardkeep.base.errors import ConfigError, CorruptMessage, UserError
from shardkeep.base.plugging.own import Own
from shardkeep.compression.selection.checked import CheckedSelector
from shardkeep.compression.selection.pool import ResidualPool
from shardkeep.compression.selection.registry import SELECTORS
from shardkeep.compression.selection.rows import Rows
from shardkeep.compression.selection.selector import Selector, Step
from shardkeep.compression.selection.slots import RowSlots
from shardkeep.compression.selection.top_k import TopK
from shardkeep.examples.compression.dgc import Dgc
from shardkeep.examples.compression.ef21 import Ef21
from shardkeep.examples.compression.random_k import RandomK
from shardkeep.examples.compression.threshold import Threshold
from shardkeep.testing import check_selector
from tests.support.cases import every

RIGHT: dict[str, tuple[Selector, dict[str, Any]]] = {
    **{name: (plug.load()(), {}) for name, plug in SELECTORS.items()},
    "dgc": (Dgc(), {}),
    "dgc, nesterov, no masking": (Dgc(nesterov=True, masking=False, clip_norm=1.0), {}),
    "dgc without momentum": (Dgc(momentum=0.0), {"conserves": True}),
    "random": (RandomK(), {"conserves": True}),
    "random, unbiased": (RandomK(unbiased=True), {}),
    "threshold": (Threshold(2.0), {"obeys_keep": False}),
    "ef21": (Ef21(), {}),
}


@every("name", [*RIGHT])
def test_built_in_selectors_and_examples_pass_every_check(name: str) -> None:
    selector, how = RIGHT[name]
    check_selector(selector, **how)


class Counts(Rows):
    def __init__(self) -> None:
        self.calls = 0

    def choose(self, step: Any, values_VD: Any) -> Any:
        self.calls += 1
        return np.arange(len(values_VD)) % 5 == self.calls % 5


class Forgets(Rows):
    def settle(self, state_VW: Any, values_VD: Any, sent_VD: Any, decoded_VD: Any) -> None:
        state_VW[:] = 0


class Remembers(Rows):
    def choose(self, step: Any, values_VD: Any) -> Any:
        self.chosen_V = super().choose(step, values_VD)
        return self.chosen_V

    def settle(self, state_VW: Any, values_VD: Any, sent_VD: Any, decoded_VD: Any) -> None:
        state_VW[:] = values_VD - self.chosen_V[:, None] * decoded_VD


class NoMethods:
    sends = "rows"


def changed(kind: type[Selector] = Rows, **members: Any) -> Selector:
    return type("Own", (kind,), members)()


WRONG: dict[str, tuple[Selector, dict[str, Any], str]] = {
    "no methods": (NoMethods(), {}, "NoMethods: has no method state_values; expected state_values(dim: int) -> int"),
    "sends": (changed(sends="columns"), {}, "Own: sends is 'columns'; expected 'rows' or 'values'"),
    "width": (changed(state_values=lambda self, dim: 1), {}, "Own: state_values returned 1; expected a whole"),
    "dtype": (
        changed(accumulate=lambda self, step, state_VW, grad_VD: grad_VD.astype(float)),
        {}, "Own: accumulate returned float64 (60, 4); expected float32 (60, 4)",
    ),
    "shape": (
        changed(TopK, choose=lambda self, step, values_VD: np.ones(len(values_VD), bool)),
        {}, "Own: choose returned bool (60,); expected bool (60, 4)",
    ),
    "positions": (
        changed(choose=lambda self, step, values_VD: [1, 2]), {}, "Own: choose returned list; expected bool (60,)",
    ),
    "new state": (
        changed(settle=lambda self, state_VW, values_VD, sent_VD, decoded_VD: values_VD),
        {}, "Own: settle returned float32 (60, 4); expected None: it changes state_VW in place",
    ),
    "gradients": (
        changed(accumulate=lambda self, step, state_VW, grad_VD: np.add(state_VW, grad_VD, out=grad_VD)),
        {}, "Own: accumulate of float32 (60, 4) raises ValueError: output array is read-only",
    ),
    "values": (
        changed(choose=lambda self, step, values_VD: np.multiply(values_VD, 2, out=values_VD)[:, 0] > 0),
        {}, "Own: choose of float32 (60, 4) raises ValueError: output array is read-only",
    ),
    "state of its own": (Counts(), {}, "Counts: the same calls give other bits in step 0; it has state of its own"),
    "share": (
        changed(choose=lambda self, step, values_VD: step.norms_V >= 0), {}, "Own: sent 600 of 600 rows with keep 0.25",
    ),
    "rows of an earlier step": (Remembers(), {}, "Remembers: settle of float32 (65, 4) raises ValueError"),
    "residual": (Forgets(), {"conserves": True}, "Forgets: sent + residuals differ from the sum of gradients by"),
}  # fmt: skip


@every("name", [*WRONG])
def test_a_wrong_selector_fails_in_one_line(name: str) -> None:
    selector, how, says = WRONG[name]
    with pytest.raises((AssertionError, ConfigError)) as caught:
        check_selector(selector, **how)
    assert str(caught.value).startswith(says) and "\n" not in str(caught.value)


def test_servers_receive_what_ef21_believes_that_they_have() -> None:
    rng, slots = np.random.default_rng(0), RowSlots(width=3, capacity=50, history=0)
    pool, received = ResidualPool(Ef21(), slots, dim=3, keys_T=np.zeros(1, np.uint64)), np.zeros((50, 3), np.float32)
    for step in range(20):
        ids_V = np.sort(rng.permutation(50)[:30])
        selected = pool.select(step, np.array([0, 30]), ids_V, rng.normal(size=(30, 3)).astype(np.float32), keep=0.2)
        received[selected.ids_K] += selected.rows_KD
        pool.commit(selected, selected.rows_KD)
    state = slots.state()
    received[state["ids"]] += state["rests"]
    assert state["rests"].any() and not received.any()


def test_draws_depend_on_seed_table_id_and_step() -> None:
    def drawn(number: int, key: int, ids: list[int]) -> np.ndarray:
        ends = np.array([0, len(ids)])
        return Step(number, 1.0, ends, np.array(ids), 1, np.array([key], np.uint64)).draws.uniform(4)

    once = drawn(0, 1, [3, 9])
    assert np.array_equal(drawn(0, 1, [9, 11])[0], once[1]) and np.unique(once).size == 8
    assert not np.isin(once, [*drawn(1, 1, [3, 9]), *drawn(0, 2, [3, 9])]).any()


def test_gradients_that_a_selector_hands_on_stay_as_they_are() -> None:
    own = changed(
        Threshold, __init__=lambda self: None, norm=0.0, accumulate=lambda self, step, state_VW, grad_VD: grad_VD
    )
    slots, grad_VD = RowSlots(width=2, capacity=9, history=0), np.array([[np.nan, 1], [2, 3]], np.float32)
    pool = ResidualPool(CheckedSelector(Own(lambda: own, "Own", Selector)), slots, dim=2, keys_T=np.zeros(1, np.uint64))
    assert pool.select(0, np.array([0, 2]), np.array([5, 6]), grad_VD, keep=1.0).ids_K.tolist() == [6]
    assert np.array_equal(grad_VD, [[np.nan, 1], [2, 3]], equal_nan=True)


def test_what_a_plug_raises_names_the_plug_its_method_and_its_line() -> None:
    own = Own(lambda: changed(choose=lambda self, step, values_VD: step[0]), "SETTING: mine:Own", Selector)
    with pytest.raises(
        UserError, match=r"^SETTING: mine:Own: choose raises TypeError: .*\(test_selectors\.py, line \d+\)$"
    ):
        own.call("choose", object(), np.zeros((1, 1)))
    with pytest.raises(CorruptMessage, match=r"^no rows$"):
        own.run("unpack", lambda: (_ for _ in ()).throw(CorruptMessage("no rows")))
