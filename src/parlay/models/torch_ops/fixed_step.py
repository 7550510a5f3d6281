"""A step of fixed shape: rows are written to fixed memory, and layers run over it without waiting for the host.

This can be recorded as a CUDA graph, in which each operator always reads and writes the same addresses. Only numbers in
this memory change from step to step: tokens, positions, the slots that rows see, and the places of pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from parlay.cache import Rows
from parlay.cache.pages import CacheShape, Page, PageTable, zeros
from parlay.models.forward import Taps
from parlay.models.rope import Rotations
from parlay.models.torch_ops.attention import Attend
from parlay.models.torch_ops.attention_form import Heads, LayerRopes
from parlay.models.torch_ops.decoder import EagerDecoder
from parlay.models.triton_ops.attention import PagedAttention
from parlay.models.triton_ops.row_table import FIELDS, RowNumbers, RowTable
from parlay.types import NO_SKIP, Skip

_LISTS = 1 << 17
"""Most pages of the step's texts plus slots on paths of their trees."""


class StepShape(NamedTuple):
    """A step with ``rows`` rows at positions below ``bound``, the tapped layers, and the skipped sub-layers."""

    rows: int
    bound: int
    taps: tuple[int, ...] = ()
    skip: Skip = NO_SKIP


class StepInputs(NamedTuple):
    """The first layer's inputs ``rows_NH``, and the inputs that some heads' attention reads beside them."""

    rows_NH: Tensor
    beside_NH: Tensor | None


class FixedStep:
    """The memory for a decoder's steps of up to ``rows`` rows, and the layers that run over it.

    Padding rows are texts of one token, which are written to a page of their own.
    """

    def __init__(
        self,
        decoder: EagerDecoder,
        attention: PagedAttention,
        ropes: LayerRopes,
        shapes: tuple[CacheShape, CacheShape | None],
        *,
        rows: int,
    ) -> None:
        """``shapes`` are the cache shapes of layers that see all keys, and of the others."""
        self._decoder, self._attention, self._ropes = decoder, attention, ropes
        device, embedding = decoder.embedding.device, decoder.embedding
        self._numbers = torch.zeros(rows * (2 + FIELDS) + _LISTS, dtype=torch.int64, device=device)
        count, size = 2 + (decoder.beside_norm is not None), embedding.shape[1]
        states = torch.zeros(count, rows, size, dtype=embedding.dtype, device=device)
        self._inputs, self._hidden, *beside = states.unbind()
        self._beside = beside[0] if beside else None
        self._rotations = ropes.room(rows)
        self._taps: dict[int, Tensor] = {}
        self._spare = _spare_rows(*shapes)

    def takes(self, rows: RowNumbers) -> bool:
        """Whether these rows' lists fit into the memory."""
        return len(rows.lists) <= _LISTS

    @property
    def bytes(self) -> int:
        """The bytes of this memory."""
        rotations = [each for pair in {id(pair): pair for pair in self._rotations}.values() for each in pair]
        buffers = [self._numbers, self._inputs, self._hidden, *rotations, *self._taps.values()]
        buffers += [] if self._beside is None else [self._beside]
        pages = [table[0].memory for table in (self._spare.table, self._spare.recent) if table is not None]
        return sum(each.nbytes for each in (*buffers, *pages))

    def place(self, shape: StepShape, ids: list[int], rows: RowNumbers) -> Tensor:
        """Write tokens and rows to the memory in one transfer; returns the ids ``[N]`` of all rows of the shape."""
        filled = rows.filled(shape.rows, self._spare)
        more = shape.rows - len(ids)
        flat = torch.tensor([*ids, *ids[:1] * more, *filled.flat()], dtype=torch.int64)
        self._numbers[: len(flat)].copy_(flat)
        self._ropes.fill(self._rotations, self._table(shape).positions, filled.last)
        for layer in shape.taps:
            if layer not in self._taps:
                self._taps[layer] = torch.zeros_like(self._hidden)
        return self._numbers[: shape.rows]

    def enter(self, inputs: StepInputs) -> None:
        """Write the first layer's inputs to the memory."""
        count = len(inputs.rows_NH)
        self._inputs[:count].copy_(inputs.rows_NH)
        if self._beside is not None and inputs.beside_NH is not None:
            self._beside[:count].copy_(inputs.beside_NH)

    def run(self, shape: StepShape) -> None:
        """Run all layers over the memory. Graphs record this, so nothing here depends on a number in it."""
        decoder, rows, last = self._decoder, shape.rows, len(self._decoder.layers)
        inputs_NH, ids_N = self._inputs[:rows], self._numbers[:rows]
        hidden_NH = self._hidden[:rows].copy_(inputs_NH)
        taps = Taps(shape.taps)
        decoder.run(
            hidden_NH,
            partial(self._attends, shape),
            taps,
            shape.skip,
            embedded_NH=None if self._beside is None else self._beside[:rows],
            numbers_NLP=None if decoder.per_layer is None else decoder.per_layer(ids_N, inputs_NH),
        )
        normed_NH = decoder.last(hidden_NH)
        if last in shape.taps:
            taps.states[last] = hidden_NH if decoder.raw_tap else normed_NH
        for layer, states_NH in taps.states.items():
            self._taps[layer][:rows].copy_(states_NH)
        if normed_NH is not hidden_NH:
            hidden_NH.copy_(normed_NH)

    def hidden(self, shape: StepShape) -> Tensor:
        """The last layer's output ``[rows, H]``, normed for the LM head; the next step overwrites it."""
        return self._hidden[: shape.rows]

    def tap(self, shape: StepShape, taps: Taps, count: int) -> None:
        """Copy the tapped states of the first ``count`` rows."""
        with taps.timed():
            taps.states = {layer: self._taps[layer][:count].clone() for layer in shape.taps}

    def _table(self, shape: StepShape) -> RowTable:
        """The rows as the kernels read them."""
        rows = shape.rows
        behind = rows * (2 + FIELDS)
        fields = self._numbers[2 * rows : behind].view(-1, FIELDS)
        return RowTable(slice(0, rows), self._numbers[rows : 2 * rows], fields, self._numbers[behind:], shape.bound)

    def _attends(self, shape: StepShape, out: Mapping[Heads, Tensor]) -> Sequence[Attend]:
        rotations = [Rotations(*(each[: shape.rows] for each in pair)) for pair in self._rotations]
        return [self._attention.by_table(self._table(shape), rotations, out)]


def _spare_rows(shape: CacheShape, recent: CacheShape | None) -> Rows:
    """The only row of a text of one token, with pages of its own."""
    own = _spare_table(shape)
    return Rows(own, 0, 1, recent=None if recent is None else _spare_table(recent))


def _spare_table(shape: CacheShape) -> PageTable:
    memory = zeros((*shape.size[:3], 1, *shape.size[3:]), shape.dtype, shape.device)
    table = PageTable()
    table.append(Page(memory))
    return table
