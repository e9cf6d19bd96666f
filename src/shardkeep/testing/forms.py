"""check_form: whether your own sum of dense gradients keeps the promises of `DenseForm`. Ranks share one thread."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from shardkeep.base.errors import CorruptMessage, first_line
from shardkeep.compression.tower.checked import CheckedForm
from shardkeep.compression.tower.exchange import DenseForm, Exchange, Ranks, Sum
from shardkeep.compression.tower.memory import Memory, Tensors, merged
from shardkeep.testing.trial import Trial

SHAPES: dict[str, tuple[int, ...]] = {"wide": (40, 90), "bias": (40,), "tall": (130, 33), "one": (), "empty": (0, 5)}
"""Of the parameters whose gradients are summed."""
APART: tuple[tuple[str, ...], ...] = (("one", "tall"), ("empty", "bias", "wide"))
MAX_ROUNDS, TOLERANCE = 64, 1e-4
_CPU = torch.device("cpu")


def check_form(form: Any, **options: Any) -> None:
    """Checks a form of your own, with 1, 2 and 3 ranks in this process.

    - Every rank gets the same bits, also where parameters are summed in two groups (unless `depends_on_groups`).
    - With residuals, sums and residuals together are all gradients.
    - A step that does not count leaves no trace, and a form with a loaded state continues with the same bits: all state
      is in the memory.
    - NaN and infinity reach all ranks. Gradients of zeros have a finite sum.
    - Damaged packets of another rank end in a sum or in CorruptMessage that names the rank.

    Args:
        form: the class; called as form(shapes, memory, **options).

    Raises AssertionError: one line that names the form, what it does and what is expected."""
    for world_size in (1, 2, 3):
        job, *new = [_Job(form, options, world_size) for _ in range(4)]
        job.check_sums(new[0])
        job.check_state(new[1])
        job.check_extremes(new[2])
    for damage in _damaged():
        for number in range(2):
            _Job(form, options, 2).check_damage(damage, number)


def drive(sums: Sequence[Sum]) -> tuple[list[torch.Tensor], Counter[str]]:
    """Runs the sums of all ranks round by round. Returns the totals, and the bytes that each rank sends, in all and by
    part. Raises ValueError where the packets of ranks differ in size."""
    sent, received = Counter[str](), [None] * len(sums)
    while True:
        exchanges: list[Exchange] = []
        totals: list[torch.Tensor] = []
        for one, packets in zip(sums, received, strict=True):
            try:
                exchanges.append(one.send(packets))  # type: ignore[arg-type]
            except StopIteration as done:
                totals.append(done.value)
        if exchanges and totals:
            raise ValueError("ranks make different numbers of exchanges; expected the same")
        if totals:
            return totals, sent
        sizes = {(tuple(e.packets.shape), str(dict(e.parts))) for e in exchanges}
        if len(sizes) > 1:
            raise ValueError(f"packets of ranks differ: {sorted(sizes)}; expected one size and the same parts")
        for part, size in {**exchanges[0].parts, "all": exchanges[0].packets.shape[-1]}.items():
            sent[part] += (len(sums) - 1) * size
        every = [e.packets.expand(len(sums), -1) for e in exchanges]
        received = [torch.stack([packets[rank] for packets in every]) for rank in range(len(sums))]  # type: ignore[misc]


def draw(step: int, rank: int, size: float = 1.0) -> dict[str, torch.Tensor]:
    """Gradients of a rank in a step, of low rank and noise."""
    drawn = torch.Generator().manual_seed(100 * step + rank)
    grads = {name: torch.randn(shape, generator=drawn) * size for name, shape in SHAPES.items()}
    grads["wide"] += torch.randn(40, 1, generator=drawn) @ torch.randn(1, 90, generator=drawn) * size
    return grads


class _Job:
    """Some ranks of one form."""

    def __init__(self, form: Any, options: dict[str, Any], world_size: int) -> None:
        name, self._size = f"{form.__module__}:{form.__qualname__}", world_size
        self._memories = [Memory(SHAPES, _CPU) for _ in range(world_size)]
        self._trials = [Trial(form, name, DenseForm, SHAPES, memory, **options) for memory in self._memories]
        self._forms = [CheckedForm(trial, _CPU) for trial in self._trials]
        for trial in self._trials:
            trial.where = f"world size {world_size}"
        self._depends_on_groups, self._require = getattr(form, "depends_on_groups", False), self._trials[0].require

    def step(
        self, step: int, groups: Any = (tuple(SHAPES),), *, applied: bool = True, size: float = 1.0, **odd: torch.Tensor
    ) -> Tensors:
        """One step of all ranks, the last with some other gradients; what all of them get, by name."""
        got: dict[str, torch.Tensor] = {}
        grads = [draw(step, rank, size) for rank in range(self._size)]
        grads[-1] |= odd
        for memory in self._memories:
            memory.begin()
        for names in groups:
            own = [[one[name].clone() for name in names] for one in grads]
            sums = [
                f.sum(names, g, Ranks(r, self._size)) for r, (f, g) in enumerate(zip(self._forms, own, strict=True))
            ]
            try:
                totals, _ = drive(sums)
            except ValueError as error:
                self._trials[0].refuse(str(error))
            self._require(len({total.numpy().tobytes() for total in totals}) == 1, "the sums of ranks differ in a bit")
            got |= zip(names, torch.split(totals[0], [grads[0][name].numel() for name in names]), strict=True)
        for memory in self._memories:
            memory.settle(applied)
        shared = [shared for shared, _ in self.bits()]
        self._require(shared == shared[:1] * self._size, "what the memory shares differs in a bit")
        return got

    def bits(self) -> list[Any]:
        """All that each memory has."""
        return [(_bits(one.state_dict()), _bits(one.local_state_dict())) for one in self._memories]

    def residuals(self) -> dict[str, torch.Tensor]:
        """Those of all ranks together, float64."""
        return merged({name: t.double() for name, t in one.local_state_dict().items()} for one in self._memories)

    def check_sums(self, apart: _Job) -> None:
        for step in range(3):
            before, got = self.residuals(), self.step(step)
            same = self._depends_on_groups or (
                _bits(got) == _bits(apart.step(step, APART)) and self.bits() == apart.bits()
            )
            expected = "expected: no bit, or depends_on_groups = True"
            self._require(same, f"sums of parameters together and apart differ; {expected}")
            grads = [draw(step, rank) for rank in range(self._size)]
            for name, after in self.residuals().items():
                due = torch.stack([one[name].double().view(-1) for one in grads]).sum(0) + before.get(name, 0.0)
                off = float((got[name].double() + after - due).abs().sum())
                kept = off <= TOLERANCE * max(1.0, float(due.abs().sum()))
                self._require(kept, f"sum and residuals of {name!r} are not all gradients: {off:.3g} off")

    def check_state(self, loaded: _Job) -> None:
        for memory, other in zip(self._memories, loaded._memories, strict=True):
            other.load_state_dict(memory.state_dict())
            other.load_local_state_dict(memory.local_state_dict())
        self.step(7, applied=False)
        self._require(self.bits() == loaded.bits(), "a step that does not count changes the memory")
        for step in (3, 4):
            same = _bits(self.step(step)) == _bits(loaded.step(step)) and self.bits() == loaded.bits()
            self._require(same, "a form with a loaded state differs; expected: all state in the memory")

    def check_extremes(self, new: _Job) -> None:
        for bad in (math.nan, math.inf, -math.inf):
            (tall := draw(5, self._size - 1)["tall"])[5, 5] = bad
            got = torch.cat(list(self.step(5, applied=False, tall=tall).values()))
            self._require(not bool(torch.isfinite(got).all()), f"the sum is finite where one rank's gradient has {bad}")
        for job in (self, new):
            got = torch.cat(list(job.step(0, size=0.0).values()))
            self._require(bool(torch.isfinite(got).all()), "the sum of gradients of zeros is not finite")

    def check_damage(self, damage: Callable[[torch.Tensor], torch.Tensor], at: int) -> None:
        """Has rank 0 of two read its own packets as those of rank 1, damaged in one round."""
        trial, self._trials[0].hostile = self._trials[0], True
        trial.where = "damaged packets of rank 1"
        self._memories[0].begin()
        rounds = self._forms[0].sum(list(SHAPES), list(draw(at, 0).values()), Ranks(0, 2))
        try:
            exchange = next(rounds)
            for number in range(MAX_ROUNDS):
                own = exchange.packets if exchange.packets.ndim == 1 else exchange.packets[0]
                exchange = rounds.send(torch.stack([own, damage(own) if number == at else own]))
        except StopIteration:
            return
        except CorruptMessage as error:
            fits = str(error).startswith("the dense gradient of worker 1: ") and "\n" not in str(error)
            trial.require(fits, f"sum raises CorruptMessage: {first_line(error)}; expected it within packet_of(1)")
        else:
            trial.refuse(f"sum yielded more than {MAX_ROUNDS} times; expected a sum or CorruptMessage")


def _bits(tensors: Tensors) -> list[Any]:
    """Names, shapes and bits."""
    return [(name, t.shape, t.dtype, t.numpy().tobytes()) for name, t in sorted(tensors.items())]


def _damaged() -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """What may happen to a packet."""
    drawn = torch.Generator().manual_seed(5)
    for value in (0, 127, 128, 255):
        yield functools.partial(torch.full_like, fill_value=value)
    yield lambda packet: torch.cat([packet[: len(packet) // 2], torch.zeros_like(packet[len(packet) // 2 :])])
    for _ in range(4):
        yield lambda packet: torch.randint(0, 256, packet.shape, generator=drawn, dtype=torch.uint8)
    for _ in range(16):
        yield lambda packet: packet ^ 64 * (torch.rand(packet.shape, generator=drawn) < 1 / len(packet)).byte()
