"""Bytes of compressed dense gradients: what the formulas say, and what a rank refuses of another's."""

from __future__ import annotations

import math

import pytest
import torch

from shardkeep.base.errors import CorruptMessage
from shardkeep.compression.config import TowerCompressionConfig
from shardkeep.compression.tower import formats as dense_values
from shardkeep.compression.tower.compressor import DenseCompression
from shardkeep.compression.tower.exchange import Ranks, Sum
from shardkeep.compression.tower.forms import (
    coded_bytes,
    decode_positions,
    encode_positions,
)
from tests.support.cases import every
from tests.support.dense_sums import CONFIGS, CPU, SHAPES, draw, drive, members


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
            packet = encode_positions(positions, num_values)
            assert packet.numel() == coded_bytes(num_values, num_kept)
            assert decode_positions(packet, num_values, num_kept).equal(positions)
    if num_kept:
        assert 8 * coded_bytes(num_values, num_kept) <= num_kept * (math.log2(num_values / num_kept) + 2.5) + 8


def test_positions_of_a_damaged_packet_are_refused_or_as_many_others() -> None:
    packet = encode_positions(torch.arange(0, 1000, 100), 1000)
    for size in range(packet.numel()):
        with pytest.raises(CorruptMessage, match=f"^{size} bytes are not 10 positions of 1000$"):
            decode_positions(packet[:size], 1000, 10)
    refused = 0
    for place in range(8 * packet.numel()):
        damaged = packet.clone()
        damaged[place // 8] ^= 1 << place % 8
        try:
            found = decode_positions(damaged, 1000, 10).tolist()
        except CorruptMessage as error:
            assert f"{error}" == "11 damaged bytes of 10 positions of 1000"
            refused += 1
        else:
            assert found == sorted(set(found)) and 0 <= found[0] <= found[-1] < 1000
            assert found != list(range(0, 1000, 100))
    assert refused >= 28, "six low bits of each position, and a one for each"


def damage_of(how: int | str, packet: torch.Tensor, drawn: torch.Generator) -> torch.Tensor:
    """`how`: a byte for all, "random", or "bit": one of them is wrong."""
    if how == "random":
        return torch.randint(0, 256, packet.shape, generator=drawn, dtype=torch.uint8)
    if how == "bit":
        damaged, place = packet.clone(), int(torch.randint(0, 8 * packet.shape[-1], (1,), generator=drawn))
        damaged[..., place // 8] ^= 1 << place % 8
        return damaged
    return torch.full_like(packet, how)


@every("how", [0, 127, 128, 255, "random", "bit"])
@every("config", CONFIGS)
def test_any_bytes_of_another_rank_are_numbers_or_refused_by_its_name(config: str, how: int | str) -> None:
    drawn = torch.Generator().manual_seed(5)
    num_values = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    for number in range(8 if isinstance(how, str) else 1):
        one = members(config, 1)[0]
        one.begin(number)
        summing = one.sum(list(SHAPES), list(draw(number, 0).values()), Ranks(0, 2))
        exchange, round_ = next(summing), 0
        # damage in the first round often hides what it would do in the second
        damaged_round = number % 2 if config == "lossless" or config.startswith("powersgd") else 0
        try:
            while True:
                theirs = exchange.packets
                if how != "bit" or round_ == damaged_round:
                    theirs = damage_of(how, exchange.packets, drawn)
                exchange, round_ = summing.send(torch.stack([exchange.packets, theirs])), round_ + 1
        except StopIteration as done:
            assert done.value.shape == (num_values,)
        except CorruptMessage as error:
            assert str(error).startswith("the dense gradient of worker 1: ") and "\n" not in str(error)
            assert config == "lossless" or config.startswith("topk"), "only these have something to refuse"


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
        coded = encode_positions(torch.tensor(positions), 4007)
        return torch.cat([packet[:at], coded, packet[at + coded.numel() :]])

    assert top_k_total(with_positions({}), *names).shape == (4007,)
    for changes in ({10: 2006}, {9: 2006}, {9: 2008, 10: 2100}):  # of `small`, twice, and eleven of `b`
        with pytest.raises(CorruptMessage, match=r"^the dense gradient of worker 1: positions \d+ to \d+ are not all"):
            top_k_total(with_positions(changes), *names)
    end = at + coded_bytes(4007, 20)
    for size in range(at, end - 1):  # cut off within its positions
        cut = torch.cat([packet[:size], torch.zeros(packet.numel() - size, dtype=torch.uint8)])
        if not cut.equal(packet):
            with pytest.raises(CorruptMessage, match=r"^the dense gradient of worker 1: "):
                top_k_total(cut, *names)
