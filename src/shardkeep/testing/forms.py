"""check_form: whether your own sum of dense gradients keeps the promises of `DenseForm`. Ranks share one thread."""

# W = world size, R = bytes of a packet

from __future__ import annotations

import copy
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from shardkeep.base.errors import CorruptMessage, UserError, first_line
from shardkeep.compression.tower.exchange import Exchange, Ranks, Sum
from shardkeep.compression.tower.memory import Memory, Tensors, merged
from shardkeep.compression.tower.own_form import OwnForm

SHAPES: dict[str, tuple[int, ...]] = {"wide": (40, 90), "bias": (40,), "tall": (130, 33), "one": (), "empty": (0, 5)}
"""Of the parameters whose gradients are summed."""
TOGETHER: tuple[tuple[str, ...], ...] = (tuple(SHAPES),)
APART: tuple[tuple[str, ...], ...] = (("one", "tall"), ("empty", "bias", "wide"))
State = list[tuple[Tensors, Tensors]]
"""By rank: what is shared, and the residuals."""
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

    Raises:
        AssertionError: one line that names the form, what it does and what is expected. What the form itself raises for
            sound packets is raised as it is.
    """
    name = f"{form.__module__}:{form.__qualname__}"
    try:
        for world_size in (1, 2, 3):
            job = _Job(name, form, options, world_size)
            job.check_sums()
            job.check_state()
            job.check_extremes()
        job = _Job(name, form, options, 2)
        for damage in _damaged():
            for at in range(2):
                wrong = _outcome(job, damage, at)
                job.require(not wrong, f"damaged packets of rank 1 {wrong}")
    except UserError as error:
        raise AssertionError(str(error)) from error


def drive(sums: Sequence[Sum]) -> tuple[list[torch.Tensor], Counter[str]]:
    """Runs the sums of all ranks round by round. Returns the totals, and the bytes that each rank sends, in all and by
    part. Raises AssertionError where the packets of ranks differ in size."""
    world_size, sent = len(sums), Counter[str]()
    exchanges = [next(one) for one in sums]
    while True:
        sizes = {(tuple(e.packets.shape), str(dict(e.parts))) for e in exchanges}
        if len(sizes) > 1:
            raise AssertionError(f"packets of ranks differ: {sorted(sizes)}; expected: one size and the same parts")
        for part, size in {**exchanges[0].parts, "all": exchanges[0].packets.shape[-1]}.items():
            sent[part] += (world_size - 1) * size
        found: list[Any] = []
        for rank, one in enumerate(sums):
            rows = [e.packets[rank] if e.packets.ndim == 2 else e.packets for e in exchanges]
            try:
                found.append(one.send(torch.stack(rows)))
            except StopIteration as done:
                found.append(done.value)
        if len({isinstance(one, Exchange) for one in found}) > 1:
            raise AssertionError("ranks make different numbers of exchanges; expected: the same")
        if not isinstance(found[0], Exchange):
            return found, sent
        exchanges = found


def draw(step: int, rank: int, size: float = 1.0) -> dict[str, torch.Tensor]:
    """Gradients of a rank in a step, of low rank and noise."""
    drawn = torch.Generator().manual_seed(100 * step + rank)
    grads = {name: torch.randn(shape, generator=drawn) * size for name, shape in SHAPES.items()}
    grads["wide"] += torch.randn(40, 1, generator=drawn) @ torch.randn(1, 90, generator=drawn) * size
    return grads


class _Job:
    """Some ranks of one form."""

    def __init__(self, name: str, form: Any, options: dict[str, Any], world_size: int) -> None:
        self._made = name, form, options
        self._name, self._depends_on_groups = name, getattr(form, "depends_on_groups", False)
        self.memories = [Memory(SHAPES, _CPU) for _ in range(world_size)]
        self.forms = [OwnForm(name, form, SHAPES, memory, options) for memory in self.memories]

    def twin(self) -> _Job:
        """The same job before its first step."""
        return _Job(*self._made, len(self.forms))

    def require(self, holds: bool, what: str) -> None:
        if not holds:
            raise AssertionError(f"{self._name}: with world size {len(self.forms)}, {what}")

    def step(
        self, grads: Sequence[Tensors], groups: Sequence[Sequence[str]] = TOGETHER, *, applied: bool = True
    ) -> dict[str, torch.Tensor]:
        """One step of all ranks; what all of them get, by name."""
        got: dict[str, torch.Tensor] = {}
        for memory in self.memories:
            memory.begin()
        for names in groups:
            ranks = [Ranks(rank, len(self.forms)) for rank in range(len(self.forms))]
            own = [[one[name].clone() for name in names] for one in grads]
            try:
                totals, _ = drive([f.sum(names, g, r) for f, g, r in zip(self.forms, own, ranks, strict=True)])
            except AssertionError as error:
                raise AssertionError(f"{self._name}: {error}") from None
            self.require(len({total.numpy().tobytes() for total in totals}) == 1, "their sums differ in a bit")
            got |= zip(names, torch.split(totals[0], [grads[0][name].numel() for name in names]), strict=True)
        for memory in self.memories:
            memory.settle(applied)
        shared = [memory.state_dict() for memory in self.memories]
        self.require(all(_equal(one, shared[0]) for one in shared), "what the memory shares differs in a bit")
        return got

    def residuals(self) -> dict[str, torch.Tensor]:
        """Those of all ranks together, float64."""
        return merged({name: t.double() for name, t in one.local_state_dict().items()} for one in self.memories)

    def state(self) -> State:
        """Copies of what each memory has."""
        return copy.deepcopy([(memory.state_dict(), memory.local_state_dict()) for memory in self.memories])

    def check_sums(self) -> None:
        apart = self.twin()
        for step in range(3):
            grads, before = self.draw(step), self.residuals()
            got = self.step(grads)
            same = self._depends_on_groups or (_equal(got, apart.step(grads, APART)) and self.has_state_of(apart))
            self.require(
                same, "sums of parameters together and apart differ; expected: no bit, or depends_on_groups = True"
            )
            for name, after in self.residuals().items():
                due = torch.stack([one[name].double().view(-1) for one in grads]).sum(0) + before.get(name, 0.0)
                off = float((got[name].double() + after - due).abs().sum())
                kept = off <= TOLERANCE * max(1.0, float(due.abs().sum()))
                self.require(kept, f"sum and residuals of {name!r} are not all gradients: {off:.3g} off")

    def check_state(self) -> None:
        before = self.state()
        self.step(self.draw(7), applied=False)
        self.require(_same(self.state(), before), "a step that does not count changes the memory")
        loaded = self.twin()
        for memory, (shared, local) in zip(loaded.memories, before, strict=True):
            memory.load_state_dict(shared)
            memory.load_local_state_dict(local)
        for step in (3, 4):
            same = _equal(self.step(self.draw(step)), loaded.step(self.draw(step))) and self.has_state_of(loaded)
            self.require(same, "a form with a loaded state differs; expected: all state in the memory")

    def check_extremes(self) -> None:
        for bad in (math.nan, math.inf, -math.inf):
            grads = self.draw(5)
            grads[-1]["tall"][5, 5] = bad
            got = torch.cat(list(self.step(grads, applied=False).values()))
            self.require(not bool(torch.isfinite(got).all()), f"the sum is finite where one rank's gradient has {bad}")
        zeros = [{name: torch.zeros(shape) for name, shape in SHAPES.items()}] * len(self.forms)
        for job in (self, self.twin()):
            got = torch.cat(list(job.step(zeros).values()))
            self.require(bool(torch.isfinite(got).all()), "the sum of gradients of zeros is not finite")

    def draw(self, step: int) -> list[dict[str, torch.Tensor]]:
        return [draw(step, rank) for rank in range(len(self.forms))]

    def has_state_of(self, other: _Job) -> bool:
        return _same(self.state(), other.state())


def _same(one: State, other: State) -> bool:
    return all(_equal(a, b) for pair in zip(one, other, strict=True) for a, b in zip(*pair, strict=True))


def _equal(one: Tensors, other: Tensors) -> bool:
    """Whether they have the same names, shapes and bits."""
    bits = [{name: (t.shape, t.dtype, t.numpy().tobytes()) for name, t in each.items()} for each in (one, other)]
    return bits[0] == bits[1]


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


def _outcome(job: _Job, damage: Callable[[torch.Tensor], torch.Tensor], at: int) -> str:
    """Has rank 0 of two read its own packets as those of rank 1, damaged in one round; what is wrong then, or ""."""
    expected = "; expected: CorruptMessage within packet_of(1), or a sum"
    job.memories[0].begin()
    rounds = job.forms[0].sum(list(SHAPES), list(draw(at, 0).values()), Ranks(0, 2))
    try:
        exchange = next(rounds)
        for number in range(MAX_ROUNDS):
            own = exchange.packets if exchange.packets.ndim == 1 else exchange.packets[0]
            exchange = rounds.send(torch.stack([own, damage(own) if number == at else own]))
    except StopIteration:
        return ""
    except CorruptMessage as error:
        fits = str(error).startswith("the dense gradient of worker 1: ") and "\n" not in str(error)
        return "" if fits else f"raise CorruptMessage: {first_line(error)}{expected}"
    except UserError:
        raise
    except Exception as error:
        return f"raise {type(error).__name__}: {first_line(error)}{expected}"
    return f"take more than {MAX_ROUNDS} rounds{expected}"
