"""check_form: the examples and the guide's form pass, and each kind of wrong form is named in one line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkeep.base.errors import CorruptMessage, UserError
from shardkeep.compression.config import TowerCompressionConfig
from shardkeep.compression.tower.compressor import DenseCompression
from shardkeep.compression.tower.exchange import Exchange, Ranks
from shardkeep.examples.compression.lossless import Lossless
from shardkeep.examples.compression.powersgd_adaptive import AdaptivePowerSGD
from shardkeep.testing.forms import SHAPES, check_form, draw, drive
from tests.support.cases import every
from tests.support.guide import block_of

CPU = torch.device("cpu")


def test_the_examples_keep_all_promises() -> None:
    check_form(Lossless)
    check_form(AdaptivePowerSGD, miss=0.3)


def test_a_rank_follows_what_products_miss_and_is_the_same_after_a_step_that_does_not_count() -> None:
    config = TowerCompressionConfig(
        name="shardkeep.examples.compression.powersgd_adaptive:AdaptivePowerSGD", options={"miss": 0.6, "max_rank": 3}
    )
    ranks = [DenseCompression(config, SHAPES, CPU) for _ in range(2)]

    def widths_after(step: int, applied: bool, **others: torch.Tensor) -> list[int]:
        for one in ranks:
            one.begin(step)
        grads = [draw(step, rank) | others for rank in range(2)]
        drive([one.sum(list(SHAPES), list(grads[r].values()), Ranks(r, 2)) for r, one in enumerate(ranks)])
        for one in ranks:
            one.memory.settle(applied)
        return [one.memory.shared["tall"].shape[1] for one in ranks]

    assert [widths_after(step, step != 2) for step in range(5)] == [[2, 2], [3, 3], [3, 3], [3, 3], [3, 3]]
    low = torch.ones(130, 1) @ torch.ones(1, 33)
    for step in range(5, 30):
        widths = widths_after(step, True, tall=1000.0 * low)
    assert widths == [1, 1]


class Plain:
    """What wrong forms change: fp32, one packet for all, added in rank order."""

    def __init__(self, shapes: Any, memory: Any) -> None:
        self.shapes, self.memory = shapes, memory

    def sum(self, names: Any, grads: Any, ranks: Any) -> Any:
        values = self.values(names, grads, ranks)
        packets_WR = yield Exchange(self.packet(values, ranks), self.parts())
        return self.total([self.decode(p, rank) for rank, p in enumerate(packets_WR)], values, ranks)

    def values(self, names: Any, grads: Any, ranks: Any) -> torch.Tensor:
        return torch.cat([grad.reshape(-1) for grad in grads])

    def packet(self, values: torch.Tensor, ranks: Any) -> torch.Tensor:
        return values.view(torch.uint8)

    def parts(self) -> dict[str, int]:
        return {}

    def decode(self, packet: torch.Tensor, rank: int) -> torch.Tensor:
        return packet.clone().view(torch.float32)

    def total(self, decoded: Any, values: torch.Tensor, ranks: Any) -> Any:
        return sum(decoded[1:], decoded[0])


def wrong(**changes: Any) -> type[Plain]:
    return type("Mine", (Plain,), changes)


def keeps_nothing(self: Any, names: Any, grads: Any, ranks: Any) -> torch.Tensor:
    added = self.memory.add(names, grads)
    self.memory.keep(names, [torch.zeros_like(part) for part in added])
    return torch.cat(added) / 2


def remembers(self: Any, names: Any, grads: Any, ranks: Any) -> torch.Tensor:
    last = self.__dict__.setdefault("last", {})
    added = [(grad + last.get(name, 0.0)).view(-1) for name, grad in zip(names, grads, strict=True)]
    last.update(zip(names, grads, strict=True))
    return torch.cat(added)


def changes_what_it_shares(self: Any, names: Any, grads: Any, ranks: Any) -> torch.Tensor:
    self.memory.share("mine", self.memory.shared.get("mine", torch.zeros(1)).add_(1.0))
    return Plain.values(self, names, grads, ranks)


def shares_its_own(self: Any, names: Any, grads: Any, ranks: Any) -> torch.Tensor:
    self.memory.share("mine", torch.tensor([ranks.rank]))
    return Plain.values(self, names, grads, ranks)


def refuses_outside(self: Any, packet: torch.Tensor, rank: int) -> torch.Tensor:
    if (packet == 255).all():
        raise CorruptMessage("ones")
    return Plain.decode(self, packet, rank)


def unguarded(self: Any, packet: torch.Tensor, rank: int) -> torch.Tensor:
    try:
        return refuses_outside(self, packet, rank)
    except CorruptMessage:
        raise ValueError("a packet of ones") from None


def without_exchange(self: Any, names: Any, grads: Any, ranks: Any) -> Any:
    return (yield from ())


def of_tensors(self: Any, names: Any, grads: Any, ranks: Any) -> Any:
    return (yield Plain.values(self, names, grads, ranks))


IN_BYTES = "on cpu; expected uint8 (R,) or (1, R) on cpu, R above 0"
GOT, SUM = "float32 (7931,) on cpu", "on cpu; expected float32 (7931,) on cpu"
WRONG: list[tuple[Any, str]] = [
    (wrong(sum=None), "has no method sum; expected sum(names: Sequence[str], grads: "),
    (wrong(__init__=lambda self: None), "cannot be made with options {}: TypeError: "),
    (wrong(sum=Plain.values), f"sum returned {GOT}; expected a generator that yields an Exchange"),
    (wrong(sum=without_exchange), "sum yielded nothing; expected an Exchange"),
    (wrong(sum=of_tensors), f"sum yielded {GOT}; expected an Exchange"),
    (wrong(packet=lambda self, v, r: v), f"sum yielded packets float32 (7931,) {IN_BYTES}"),
    (wrong(packet=lambda self, v, r: v.view(torch.uint8).view(4, -1)), f"packets uint8 (4, 7931) {IN_BYTES}"),
    (wrong(packet=lambda self, v, r: v[:0].view(torch.uint8)), f"sum yielded packets uint8 (0,) {IN_BYTES}"),
    (wrong(packet=lambda self, v, r: b""), "sum yielded packets bytes; expected uint8 (R,)"),
    (wrong(parts=lambda self: {"norms": 4}), "sum yielded parts {'norms': 4}; expected ids"),
    (wrong(total=lambda self, d, v, r: d[0].double()), f"sum returned float64 (7931,) {SUM}"),
    (wrong(total=lambda self, d, v, r: d[0][1:]), f"sum returned float32 (7930,) {SUM}"),
    (wrong(total=lambda self, d, v, r: None), "sum returned NoneType; expected float32 (7931,) on cpu"),
    (wrong(total=lambda self, d, v, r: v), "the sums of ranks differ in a bit (world size 2)"),
    (wrong(packet=lambda self, v, r: v[r.rank :].view(torch.uint8)), "expected one size and the same parts"),
    (wrong(values=shares_its_own), "what the memory shares differs in a bit (world size 2)"),
    (wrong(values=changes_what_it_shares, depends_on_groups=True), "a step that does not count changes the memory"),
    (wrong(values=keeps_nothing), "sum and residuals of 'wide' are not all gradients: "),
    (wrong(values=remembers), "loaded state differs; expected: all state in the memory (world size 1)"),
    (wrong(total=lambda self, d, v, r: torch.nan_to_num(d[0])), "the sum is finite where one rank's gradient has nan"),
    (wrong(total=lambda self, d, v, r: d[0] / d[0].abs().max()), "sums of parameters together and apart differ"),
    (wrong(total=lambda self, d, v, r: d[0] * (d[0] / d[0])), "the sum of gradients of zeros is not finite"),
    (wrong(decode=unguarded), "ValueError: a packet of ones; expected CorruptMessage or a result (damaged"),
    (wrong(decode=refuses_outside), "sum raises CorruptMessage: ones; expected it within packet_of(1) (damaged"),
]  # fmt: skip


@every(("form", "text"), WRONG, ids=[text for _, text in WRONG])
def test_a_wrong_form_is_named_in_one_line(form: Any, text: str) -> None:
    with pytest.raises(AssertionError) as caught:
        check_form(form)
    assert text in str(caught.value) and "\n" not in str(caught.value)
    assert "tests.compression.tower.test_check_form:Mine: " in str(caught.value)


def test_a_form_is_found_in_the_folder_of_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "form_of_mine.py").write_text(block_of("python my_form.py"))

    def load(name: str, **options: Any) -> None:
        config = TowerCompressionConfig(name=name, options=options)
        DenseCompression(config, SHAPES, CPU, import_from=tmp_path)

    load("form_of_mine:Sign")
    with pytest.raises(UserError, match=r"^compression.tower: form_of_mine:Sign: cannot be made with .*'bits': 2"):
        load("form_of_mine:Sign", bits=2)
