"""A causal model of transformers whose forwards are compiled: one pool of slots for all texts, and one graph.

It takes models that verify trees under a mask of ours. Logits are those of `AdapterRunner` up to rounding.
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
"""Rows with which the graph is made. Torch would take a number that is a size in the model, too, to be always that."""


class NotCompiled(UnsupportedModel):
    """A model that has to run as it is. The message names it and the reason."""

    def __init__(self, model: str, why: str) -> None:
        super().__init__(f"{model} runs uncompiled: {why}")


class CompiledRunner(SlotRunner[TransformersPool]):
    """A runner over a transformers model that torch.compile takes. Construction compiles, or reads what was compiled.

    ``max_tokens_cached`` is as for `AdapterRunner`, ``backend`` and ``clock`` as for `CompiledCall`. A model that is
    ``owned`` is held by nobody else: its linear layers are packed. Raises
    NotCompiled for a model that does not verify trees under masks or gets no graph, UnsupportedModel for one that can't
    be run at all.
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
        """Compile now, and not in the first request."""
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
