"""Bytes of compressed dense gradients: what the formulas say, and what a rank refuses of another's."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from shardkeep.base.errors import CorruptMessage
from shardkeep.compression.config import TowerCompressionConfig
from shardkeep.compression.tower import formats as dense_values
from shardkeep.compression.tower.compressor import DenseCompression
from shardkeep.compression.tower.exchange import Ranks, Sum
from shardkeep.compression.tower.top_k import coded_bytes, decode_positions, encode_positions
from shardkeep.testing.forms import drive
from tests.support.cases import every

CPU = torch.device("cpu")


def summed(
    config: TowerCompressionConfig, world_size: int, *grads: torch.Tensor
) -> tuple[torch.Tensor, dict[str, int]]:
    """The total of ranks with equal gradients, and the bytes of each by part."""
    names = [str(number) for number in range(len(grads))]
    shapes = {name: tuple(grad.shape) for name, grad in zip(names, grads, strict=True)}
    ranks = [DenseCompression(config, shapes, CPU) for _ in range(world_size)]
    totals, sent = drive([one.sum(names, list(grads), Ranks(rank, world_size)) for rank, one in enumerate(ranks)])
    return totals[0], sent


@every(("name", "values"), [
    ("topk", "fp16"), ("topk", "int8"), ("fp16", None), ("powersgd", None), ("powersgd", "fp16"), ("powersgd", "int8"),
])  # fmt: skip
def test_bytes_are_what_the_formulas_say(name: str, values: str | None) -> None:
    config = TowerCompressionConfig(name=name, values=values)  # type: ignore[arg-type]
    _, sent = summed(config, 2, torch.randn(512, 256), torch.randn(512))
    if name == "topk":
        kept = 1311  # 1 % of 131072, rounded up
        assert sent["scales"] == 4
        assert 8.0 < 8 * sent["indices"] / kept < 9.0
        assert sent["all"] == 4 + (kept + 512) * (2 if values == "fp16" else 1) + sent["indices"]
    elif name == "fp16":
        assert sent == {"scales": 2 * 131584 // 64, "all": 2 * 131584 + 2 * 131584 // 64}
    elif values is None:
        assert sent == {"all": 4 * (2 * (512 + 256) + 512)}
    else:
        count = 2 * (512 + 256) + 512
        assert sent == {"scales": 2 * count // 64, "all": (2 if values == "fp16" else 1) * count + 2 * count // 64}


def test_small_parameters_are_sent_whole_without_what_fills_up_their_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    big = torch.arange(2000.0) - 1999.5
    total, _ = summed(TowerCompressionConfig(name="topk", keep=1e-6), 2, big, torch.ones(1023))
    assert total[:2000].nonzero().view(-1).tolist() == [0] and float(total[0]) == pytest.approx(-3999.0, rel=1e-3)
    assert total[2000:].allclose(torch.full((1023,), 2.0), rtol=1e-3)
    total, _ = summed(TowerCompressionConfig(name="topk"), 2, torch.ones(5000))
    assert int((total != 0).sum()) == 50, "of equal values no more than k"

    # four ranks, shards: 3 values and a scale each for 10 values, 25 and one for 100, not a block of 64
    monkeypatch.setattr(dense_values, "ONE_ROUND_BYTES", 0)
    grads = [torch.randn(10), torch.randn(0), torch.randn(100)]
    total, sent = summed(TowerCompressionConfig(name="fp16"), 4, *grads)
    assert sent == {"scales": 2 * 3 * 4, "all": 2 * 3 * (2 * (3 + 25) + 4)}
    torch.testing.assert_close(total, 4 * torch.cat(grads), rtol=0, atol=0.1)


@every(("num_values", "num_kept"), [(1, 1), (5, 5), (1000, 1), (1000, 10), (4096, 41), (131072, 1311), (7, 0)])
def test_positions_come_back_and_take_the_bytes_all_ranks_expect(num_values: int, num_kept: int) -> None:
    for seed in range(3):
        chosen = torch.randperm(num_values, generator=torch.Generator().manual_seed(seed))[:num_kept].sort().values
        for positions in (chosen, torch.arange(num_kept), torch.arange(num_values - num_kept, num_values)):
            packet = encode_positions(positions.numpy(), num_values)
            assert len(packet) == coded_bytes(num_values, num_kept)
            assert decode_positions(packet, num_values, num_kept).tolist() == positions.tolist()
    if num_kept:
        assert 8 * coded_bytes(num_values, num_kept) <= num_kept * (math.log2(num_values / num_kept) + 2.5) + 8


def top_k_of(*names: str) -> tuple[Sum, torch.Tensor]:
    """Rank 0's sum of two, waiting for packets, and its own. Ten values are kept of `a` and `b`, `small` is whole."""
    shapes = {"a": (2000,), "small": (7,), "b": (2000,)}
    one = DenseCompression(TowerCompressionConfig(name="topk", keep=0.005, values="int8"), shapes, CPU)
    drawn = torch.Generator().manual_seed(2)
    one.begin(0)
    summing = one.sum(names, [torch.randn(shapes[name], generator=drawn) for name in names], Ranks(0, 2))
    return summing, next(summing).packets


def top_k_total(theirs: torch.Tensor, *names: str) -> torch.Tensor:
    """What rank 0 makes of its own packet and rank 1's."""
    summing, mine = top_k_of(*names)
    with pytest.raises(StopIteration) as done:
        summing.send(torch.stack([mine, theirs]))
    total: torch.Tensor = done.value.value
    return total


def test_top_k_refuses_positions_of_another_parameter_and_those_cut_off_at_any_byte() -> None:
    names = ("a", "small", "b")
    packet = top_k_of(*names)[1]
    at = 2 * 3 + 2 * 10 + 7  # behind scales and values

    def with_positions(changes: dict[int, int]) -> torch.Tensor:
        positions = [*range(0, 2000, 200), *range(2007, 4007, 200)]
        for place, position in changes.items():
            positions[place] = position
        coded = torch.from_numpy(encode_positions(np.array(positions), 4007))
        return torch.cat([packet[:at], coded, packet[at + coded.numel() :]])

    assert top_k_total(with_positions({}), *names).shape == (4007,)
    for changes in ({10: 2006}, {9: 2006}, {9: 2008, 10: 2100}):  # of `small`, twice, and eleven of `b`
        with pytest.raises(CorruptMessage, match=r"^the dense gradient of worker 1: positions are not all"):
            top_k_total(with_positions(changes), *names)
    end = at + coded_bytes(4007, 20)
    for size in range(at, end - 1):  # cut off within its positions
        cut = torch.cat([packet[:size], torch.zeros(packet.numel() - size, dtype=torch.uint8)])
        if not cut.equal(packet):
            with pytest.raises(CorruptMessage, match=r"^the dense gradient of worker 1: "):
                top_k_total(cut, *names)
