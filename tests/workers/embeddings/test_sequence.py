"""Sequence: its operations beside loops over samples, with gradients, for lengths from none to the longest."""

from __future__ import annotations

import torch

from shardkeep.workers.embeddings.sequence import Sequence
from tests.support.cases import every

LONGEST, WIDTH = 17, 3
LENGTHS = {
    "mixed": (0, 1, 15, 16, 17, 3),
    "all empty": (0, 0, 0),
    "all of length 1": (1, 1, 1),
    "all of the longest": (17, 17),
    "empty at both ends": (0, 2, 0),
    "one sample": (5,),
}


def drawn(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def sequence_of(lengths: tuple[int, ...]) -> tuple[Sequence, torch.Tensor, list[torch.Tensor]]:
    """A sequence, some entries, and the entries of each sample."""
    x_NC = drawn(sum(lengths), WIDTH)
    sequence = Sequence({}, torch.zeros(len(x_NC), 0), torch.tensor(lengths), LONGEST)
    return sequence, x_NC, list(torch.split(x_NC, list(lengths)))


def agrees(found: torch.Tensor, expected: torch.Tensor, *inputs: torch.Tensor) -> None:
    """Equal values and gradients."""
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(found)
    pairs = zip(
        torch.autograd.grad((found * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum() + 0.0 * inputs[0].sum(), inputs),
        strict=True,
    )
    for grad, other in pairs:
        torch.testing.assert_close(grad, other)


def place(entries_LC: torch.Tensor, last: bool) -> torch.Tensor:
    zeros = entries_LC.new_zeros(LONGEST - len(entries_LC), WIDTH)
    return torch.cat([zeros, entries_LC] if last else [entries_LC, zeros])


@every("lengths", LENGTHS.values(), ids=LENGTHS)
@every("last", [False, True])
def test_padded_has_the_entries_of_each_sample_in_order_and_flat_undoes_it(
    lengths: tuple[int, ...], last: bool
) -> None:
    sequence, x_NC, parts = sequence_of(lengths)
    padded = sequence.padded(x_NC, last=last)
    agrees(padded, torch.stack([place(part, last) for part in parts]), x_NC)
    assert torch.equal(
        sequence.mask(last=last), torch.stack([place(torch.ones_like(p), last)[:, 0] > 0 for p in parts])
    )
    x_BLC = drawn(len(lengths), LONGEST, WIDTH)
    expected = x_BLC[sequence.mask(last=last)]
    agrees(sequence.flat(x_BLC, last=last), expected, x_BLC)


@every("lengths", LENGTHS.values(), ids=LENGTHS)
def test_samples_are_summed_averaged_and_spread_in_the_order_of_their_entries(lengths: tuple[int, ...]) -> None:
    sequence, x_NC, parts = sequence_of(lengths)
    agrees(sequence.summed(x_NC), torch.stack([part.sum(0) for part in parts]), x_NC)
    agrees(sequence.mean(x_NC), torch.stack([part.sum(0) / max(len(part), 1) for part in parts]), x_NC)
    of_samples = drawn(len(lengths), WIDTH)
    expected = torch.cat([row.expand(length, -1) for row, length in zip(of_samples, lengths, strict=True)])
    agrees(sequence.spread(of_samples), expected, of_samples)
    for scoring in (False, True):
        with torch.inference_mode(scoring):
            assert sequence.mean(sequence.numbers).shape == (len(lengths), 0), "a group without numbers"


@every("lengths", LENGTHS.values(), ids=LENGTHS)
def test_the_newest_entry_is_each_samples_last_and_one_more_may_follow(lengths: tuple[int, ...]) -> None:
    sequence, x_NC, parts = sequence_of(lengths)
    agrees(sequence.newest(x_NC), torch.stack([p[-1] if len(p) else x_NC.new_zeros(WIDTH) for p in parts]), x_NC)
    after = drawn(len(lengths), WIDTH)
    longer, joined = sequence.followed(x_NC, after)
    pairs = zip(parts, after, strict=True)
    expected = torch.cat([torch.cat([part, row[None]]) for part, row in pairs])
    agrees(joined, expected, x_NC, after)
    assert longer.max_length == LONGEST + 1 and torch.equal(longer.lengths, sequence.lengths + 1)
    assert torch.equal(longer.newest(joined), after)
    assert sequence.distances().tolist() == [n for length in lengths for n in reversed(range(length))]
