"""A causal transformers model with compiled forwards: one pool of slots for all texts, and one graph.

It needs a model that can verify trees with our own mask. The logits are those of `AdapterRunner` up to rounding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from parlay.models.config import UnsupportedModel
from parlay.models.forward import wanted_rows
from parlay.models.reserving import refuse
from parlay.models.slots import CallRows, SlotRows, SlotRunner
from parlay.models.transformers_adapter.call import ModelCall
from parlay.models.transformers_adapter.graph import CompiledCall, FlatRows
from parlay.models.transformers_adapter.probe import ability
from parlay.models.transformers_adapter.runner import THROUGH, spec_of
from parlay.models.transformers_adapter.slots import TransformersPool
from parlay.system.threads import torch_on_all
from parlay.types import NO_SKIP, Output, Segment, Skip

_TRACED = 5
"""Rows with which the graph is traced; torch would treat a number that is also a size in the model as constant."""


class NotCompiled(UnsupportedModel):
    """Raised for a model that must run uncompiled; the message names it and the reason."""

    def __init__(self, model: str, why: str) -> None:
        super().__init__(f"{model} runs uncompiled: {why}")


class CompiledRunner(SlotRunner[TransformersPool]):
    """A runner over a transformers model that torch.compile can compile. The constructor compiles it, or loads what was
    compiled before.

    ``max_tokens_cached`` is that of `AdapterRunner`, ``backend`` and ``clock`` those of `CompiledCall`. If the model is
    ``owned`` nobody else holds it, and its linear layers are packed. Raises NotCompiled for a model that can't verify
    trees with masks or be compiled, UnsupportedModel for one that can't run at all.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_tokens_cached: int | None = None,
        name: str = "",
        owned: bool = False,
        backend: str = "inductor",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if model.config.is_encoder_decoder:
            raise NotCompiled(type(model).__name__, "it is an encoder-decoder")
        self._call = ModelCall(model.eval())
        found = ability(self._call)
        if found.tree != "tree":
            raise NotCompiled(self._call.name, found.reason)
        spec = spec_of(self._call, found, name, f", compiled by {backend}")
        super().__init__(max_tokens_cached, spec, TransformersPool(spec.num_layers))
        self._run = CompiledCall(self._call, self._pool, backend=backend, clock=clock)
        self._prepare(owned)

    @torch.no_grad()
    @torch_on_all()
    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Output:
        """Run all segments together. Raises ValueError for what can't be run, as `AdapterRunner` does."""
        for segment in segments:
            refuse(self._call.name, THROUGH, segment, skip, self._sequences[segment.sequence].ran)
        wanted, starts = wanted_rows(segments)
        found = self._run(self._flat(self._placed(segments)), wanted, bool(taps))
        return Output(found.logits_NV, starts, {layer: found.hidden[layer] for layer in taps})

    @torch.no_grad()
    @torch_on_all()
    def _prepare(self, owned: bool) -> None:
        """Compile now instead of in the first request."""
        slots = self._pool.take(_TRACED)
        rows = self._flat(SlotRows.of([CallRows((0,) * _TRACED, 0)], [[]], [slots], self._pool.capacity))
        if owned:
            self._run.pack(rows)
        why = self._run.prepare(rows)
        self._pool.drop(slots)
        if why:
            raise NotCompiled(self._call.name, why)

    def _flat(self, rows: SlotRows) -> FlatRows:
        return FlatRows.of(rows, self._call.dtype, self._call.device)
