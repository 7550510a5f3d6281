"""Keys and values of all sequences in one pool of slots, for runners over foreign runtimes.

A token may lie in any slot, a mask says which slots a row sees, and a slot in use is never overwritten. So rows of
several sequences and trees run in one forward, nothing is copied when a step begins, and `keep` only holds some slots
and frees the others. Classes with the actual arrays extend `SlotPool` and `SlotRunner`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from parlay.models.reserving import ReservingRunner
from parlay.types import NO_TREE, Runner, RunnerSpec, Segment, Tree, trees

LEAST_SLOTS = 512
"""Slots of a new pool; a full pool doubles."""
IDLE = 0
"""The slot to which padding rows write; no row sees it."""


@dataclass(frozen=True, slots=True)
class CallRows:
    """Rows of one sequence after ``cached`` tokens: ``pending`` tokens, then a tree; rows before ``base`` have run
    already."""

    pending: tuple[int, ...]
    cached: int
    tree: Tree = NO_TREE
    base: int = 0

    @staticmethod
    def of(segment: Segment, cached: int) -> CallRows:
        return CallRows(segment.pending, cached, segment.tree, segment.base)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Token ids of the rows to run."""
        return (*self.pending, *self.tree.tokens)[self.base :]

    @property
    def positions(self) -> list[int]:
        """Positions of the rows to run."""
        root = self.cached + len(self.pending) - 1
        return [*range(self.cached, root + 1), *(root + depth for depth in trees.depths(self.tree))][self.base :]

    def visible(self) -> Tensor:
        """The mask ``[rows, all rows]``: True where a row to run sees a row; pending rows come first."""
        pending, count = len(self.pending), len(self.pending) + len(self.tree)
        seen = torch.ones(count, count, dtype=torch.bool).tril()
        if self.tree:
            seen[pending:, pending:] = torch.tensor(trees.visibility(self.tree))
        return seen[self.base :]


@dataclass(frozen=True, slots=True)
class SlotRows:
    """Rows of any sequences: their token ids, positions and slots, and the slots that each sees.

    ``seen_NK`` is True where a row sees a slot.
    """

    ids: list[int]
    positions: list[int]
    slots: list[int]
    seen_NK: Tensor

    @staticmethod
    def of(
        batch: Sequence[CallRows], cached: Sequence[Sequence[int]], own: Sequence[Sequence[int]], capacity: int
    ) -> SlotRows:
        """Lay out rows of sequences with ``cached`` slots, whose new rows have the slots ``own``."""
        seen_NK = torch.zeros(sum(len(rows.tokens) for rows in batch), capacity, dtype=torch.bool)
        first = 0
        for rows, before, slots in zip(batch, cached, own, strict=True):
            part = seen_NK[first : first + len(rows.tokens)]
            part[:, torch.tensor(before, dtype=torch.long)] = True
            part[:, torch.tensor(slots)] = rows.visible()
            first += len(rows.tokens)
        return SlotRows(
            [token for rows in batch for token in rows.tokens],
            [position for rows in batch for position in rows.positions],
            [slot for rows, slots in zip(batch, own, strict=True) for slot in slots[rows.base :]],
            seen_NK,
        )

    def __len__(self) -> int:
        return len(self.ids)


class SlotPool:
    """The free slots, and how many sequences hold each of the others."""

    def __init__(self) -> None:
        self.capacity = LEAST_SLOTS
        self._free = [slot for slot in range(LEAST_SLOTS) if slot != IDLE]
        self._holders: dict[int, int] = {}

    def grow(self, capacity: int) -> None:
        """Grow to ``capacity`` slots; existing slots keep their content."""
        self.capacity = capacity

    def take(self, count: int) -> tuple[int, ...]:
        """Take ``count`` free slots, the lowest first; the pool grows if necessary."""
        if count > len(self._free):
            before, after = self.capacity, self.capacity
            while after < before + count - len(self._free):
                after *= 2
            self.grow(after)
            self._free.extend(range(before, after))  # higher than all others, so it is still a heap
        taken = tuple(heapq.heappop(self._free) for _ in range(count))
        self._holders |= dict.fromkeys(taken, 1)
        return taken

    def share(self, slots: Iterable[int]) -> None:
        """Hold slots once more, as two sequences share a beginning."""
        for slot in slots:
            self._holders[slot] += 1

    def drop(self, slots: Iterable[int]) -> None:
        """Release slots; those that nobody holds become free."""
        for slot in slots:
            self._holders[slot] -= 1
            if not self._holders[slot]:
                del self._holders[slot]
                heapq.heappush(self._free, slot)

    def check(self, slots_by_sequence: Sequence[Sequence[int]]) -> None:
        """Check that each slot is free or held as often as it occurs in ``slots_by_sequence``."""
        counts: dict[int, int] = {}
        for slots in slots_by_sequence:
            assert len(set(slots)) == len(slots), "a sequence holds a slot twice"
            for slot in slots:
                counts[slot] = counts.get(slot, 0) + 1
        assert counts == self._holders, "slots are held by others than the sequences"
        assert sorted([IDLE, *self._free, *counts]) == list(range(self.capacity)), "slots were lost"


@dataclass(frozen=True, slots=True)
class LastForward:
    """A segment, and the slots of all its rows, including those before its base."""

    segment: Segment
    slots: tuple[int, ...]


@dataclass(slots=True)
class SlotSequence:
    """A sequence; ``slots`` are those of its cached tokens, in order."""

    slots: list[int] = field(default_factory=list)
    reserved: int = 0
    step: LastForward | None = None

    @property
    def ran(self) -> Segment | None:
        """The segment of the last forward, whose rows are still in their slots."""
        return self.step.segment if self.step is not None else None


_Pool = TypeVar("_Pool", bound=SlotPool)


class SlotRunner(ReservingRunner[SlotSequence], Runner, Generic[_Pool]):
    """The base of runners over a pool of slots: everything but the forward."""

    def __init__(self, most: int | None, spec: RunnerSpec, pool: _Pool) -> None:
        super().__init__(most, spec.max_context)
        self._spec, self._pool = spec, pool

    def open(self, sequence: int, tokens: Sequence[int], salt: str = "") -> int:
        """Begin a sequence; nothing is cached of it, as prefixes are not shared."""
        self.add(sequence, SlotSequence())
        return 0

    def keep(self, sequence: int, path: Sequence[int]) -> int:
        state = self._sequences[sequence]
        step, state.step = state.step, None
        assert step is not None, f"sequence {sequence} has no forward to keep"
        pending = len(step.segment.pending)
        kept = [step.slots[row] for row in (*range(pending), *(pending + node for node in path))]
        state.slots += kept
        self._pool.drop(set(step.slots).difference(kept))
        return len(state.slots)

    def truncate(self, sequence: int, length: int) -> int:
        """Forget tokens from ``length`` on."""
        state = self._sequences[sequence]
        self._forget_step(state)
        self._pool.drop(state.slots[length:])
        del state.slots[length:]
        return len(state.slots)

    def fork(self, sequence: int, copy: int) -> None:
        slots = self._sequences[sequence].slots
        self.add(copy, SlotSequence(list(slots)))
        self._pool.share(slots)

    def release(self, sequence: int) -> None:
        if (state := self._sequences.pop(sequence, None)) is not None:
            self._forget_step(state)
            self._pool.drop(state.slots)

    def check(self) -> None:
        """Check that each slot is free or held by a sequence, and that reservations fit."""
        assert self.free_tokens() >= 0, "more is reserved than the cache holds"
        steps = [state.step.slots for state in self._sequences.values() if state.step is not None]
        self._pool.check([*(state.slots for state in self._sequences.values()), *steps])

    # ------------------------------------------------------------------------------------------------ rows of forwards

    def _placed(self, segments: Sequence[Segment]) -> SlotRows:
        """Assign a slot to each row to run, and lay out all rows. Rows before a base keep their slots."""
        for segment in segments:
            state = self._sequences[segment.sequence]
            above = state.step.slots[: segment.base] if state.step is not None else ()
            self._forget_step(state, len(above))
            state.step = LastForward(segment, (*above, *self._pool.take(segment.rows)))
        states = [self._sequences[segment.sequence] for segment in segments]
        batch = [CallRows.of(segment, len(state.slots)) for segment, state in zip(segments, states, strict=True)]
        own = [state.step.slots for state in states if state.step is not None]
        return SlotRows.of(batch, [state.slots for state in states], own, self._pool.capacity)

    def _forget_step(self, state: SlotSequence, kept: int = 0) -> None:
        """Free the slots of the last forward, except for the first ``kept``."""
        if state.step is not None:
            self._pool.drop(state.step.slots[kept:])
            state.step = None
