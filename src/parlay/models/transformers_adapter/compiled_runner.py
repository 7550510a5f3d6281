"""A causal model of transformers whose forwards are compiled: one pool of slots for all texts, and one graph.

It takes models that verify trees under a mask of ours. Logits are those of `AdapterRunner` up to rounding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor
from transformers import PreTrainedModel

from parlay.models.config import UnsupportedModel
from parlay.models.reserving import ReservingRunner
from parlay.models.transformers_adapter.call import CallRows, ModelCall
from parlay.models.transformers_adapter.graph import CompiledCall, FlatRows
from parlay.models.transformers_adapter.probe import ability
from parlay.models.transformers_adapter.runner import refuse, spec_of
from parlay.models.transformers_adapter.slots import SlotPool
from parlay.system.threads import torch_on_all
from parlay.types import NO_SKIP, Output, Runner, RunnerSpec, Segment, Skip


@dataclass(frozen=True, slots=True)
class _LastForward:
    """The slots of all rows of a segment, those before its base included."""

    segment: Segment
    slots: tuple[int, ...]


@dataclass(slots=True)
class _Sequence:
    """``slots`` hold the cached tokens, in their order."""

    slots: list[int] = field(default_factory=list)
    reserved: int = 0
    step: _LastForward | None = None


class NotCompiled(UnsupportedModel):
    """A model that has to run as it is. The message names it and the reason."""

    def __init__(self, model: str, why: str) -> None:
        super().__init__(f"{model} runs uncompiled: {why}")


class CompiledRunner(ReservingRunner[_Sequence], Runner):
    """A runner over a transformers model that torch.compile takes. Construction compiles, or reads what was compiled.

    ``max_tokens_cached`` is as for `AdapterRunner`, ``backend`` and ``clock`` as for `CompiledCall`. Raises
    NotCompiled for a model that does not verify trees under masks or gets no graph, UnsupportedModel for one that can't
    be run at all.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_tokens_cached: int | None = None,
        name: str = "",
        backend: str = "inductor",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if model.config.is_encoder_decoder:
            raise NotCompiled(type(model).__name__, "it is an encoder-decoder")
        self._call = ModelCall(model.eval())
        found = ability(self._call)
        if found.tree != "tree":
            raise NotCompiled(self._call.name, found.reason)
        self._spec = spec_of(self._call, found, name, f", compiled by {backend}")
        super().__init__(max_tokens_cached, self._spec.max_context)
        self._pool = SlotPool(self._spec.num_layers)
        self._run = CompiledCall(self._call, self._pool, backend=backend, clock=clock)
        self._prepare()

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    def open(self, sequence: int, tokens: Sequence[int], salt: str = "") -> int:
        """Begin a sequence; nothing is ever cached already, because prefixes are not shared here."""
        assert sequence not in self._sequences, f"sequence {sequence} is open already"
        self._sequences[sequence] = _Sequence()
        return 0

    @torch.no_grad()
    @torch_on_all()
    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Output:
        """Run all segments together. Raises ValueError for what can't be run, as `AdapterRunner` does."""
        for segment in segments:
            step = self._sequences[segment.sequence].step
            refuse(self._call.name, segment, skip, step.segment if step is not None else None)
        for segment in segments:
            self._place(segment)
        begins = [0, *accumulate(segment.rows for segment in segments)]
        wanted = [
            begin + row
            for begin, segment in zip(begins, segments, strict=False)
            for row in range(segment.logits_from - segment.base, segment.rows)
        ]
        found = self._run(self._rows(segments), wanted, bool(taps))
        counts = accumulate((segment.end - segment.logits_from for segment in segments), initial=0)
        return Output(found.logits_NV, tuple(counts), {layer: found.hidden[layer] for layer in taps})

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
        assert copy not in self._sequences, f"sequence {copy} is open already"
        slots = self._sequences[sequence].slots
        self._pool.share(slots)
        self._sequences[copy] = _Sequence(list(slots))

    def release(self, sequence: int) -> None:
        if (state := self._sequences.pop(sequence, None)) is not None:
            self._forget_step(state)
            self._pool.drop(state.slots)

    def check(self) -> None:
        """Prove that each slot is free or held by those who say so, and that reservations fit."""
        assert self.free_tokens() >= 0, "more is reserved than the cache holds"
        steps = [state.step.slots for state in self._sequences.values() if state.step is not None]
        self._pool.check([*(state.slots for state in self._sequences.values()), *steps])

    # ------------------------------------------------------------------------------------------------------ forwards

    @torch.no_grad()
    @torch_on_all()
    def _prepare(self) -> None:
        """Compile now, and not in the first request."""
        slots = self._pool.take(2)
        why = self._run.prepare(self._flat([CallRows((0, 0), 0)], [[]], [slots]))
        self._pool.drop(slots)
        if why:
            raise NotCompiled(self._call.name, why)

    def _place(self, segment: Segment) -> None:
        """Give each row that runs a slot. Rows before the base keep theirs."""
        state = self._sequences[segment.sequence]
        above = state.step.slots[: segment.base] if state.step is not None else ()
        self._forget_step(state, len(above))
        state.step = _LastForward(segment, (*above, *self._pool.take(segment.rows)))

    def _forget_step(self, state: _Sequence, kept: int = 0) -> None:
        """Free the slots of the last forward, but for the first ``kept``."""
        if state.step is not None:
            self._pool.drop(state.step.slots[kept:])
            state.step = None

    def _rows(self, segments: Sequence[Segment]) -> FlatRows:
        states = [self._sequences[segment.sequence] for segment in segments]
        rows = [CallRows.of(segment, len(state.slots)) for segment, state in zip(segments, states, strict=True)]
        steps = [state.step.slots for state in states if state.step is not None]
        return self._flat(rows, [state.slots for state in states], steps)

    def _flat(
        self, batch: Sequence[CallRows], cached: Sequence[Sequence[int]], own: Sequence[Sequence[int]]
    ) -> FlatRows:
        """Rows of sequences with ``cached`` slots, whose rows have slots of their ``own``."""
        count, device = sum(len(rows.tokens) for rows in batch), self._call.device
        seen_NK = torch.zeros(count, self._pool.capacity, dtype=torch.bool)
        first = 0
        for rows, before, slots in zip(batch, cached, own, strict=True):
            part = seen_NK[first : first + len(rows.tokens)]
            part[:, torch.tensor(before, dtype=torch.long)] = True
            part[:, torch.tensor(slots)] = rows.visible()
            first += len(rows.tokens)
        written = [slot for rows, slots in zip(batch, own, strict=True) for slot in slots[rows.base :]]
        return FlatRows(
            torch.tensor([token for rows in batch for token in rows.tokens], device=device),
            torch.tensor([position for rows in batch for position in rows.positions], device=device),
            torch.tensor(written, device=device),
            _additive(seen_NK.to(device), self._call.dtype),
        )


def _additive(seen_NK: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a row sees a slot, the dtype's lowest number elsewhere."""
    return torch.zeros(seen_NK.shape, dtype=dtype, device=seen_NK.device).masked_fill_(~seen_NK, torch.finfo(dtype).min)
