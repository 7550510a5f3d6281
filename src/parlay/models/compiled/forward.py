"""The compiled decoder as a `Forward`: lays out the arguments of one call of the library, and makes the call."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from parlay.compiled import structs
from parlay.compiled.library import NotLoaded, load
from parlay.models.compiled.adapters import PackedAdapters
from parlay.models.compiled.growing import GrowthCall, read_text
from parlay.models.compiled.layout import BatchLayout, Prefixes, lay_out, set_places
from parlay.models.compiled.likeliest import make_keys, tokens_of
from parlay.models.compiled.limits import refusal
from parlay.models.compiled.memory import Workspace, row_mover
from parlay.models.compiled.newest_tokens import NewestTokens, RowsOfHead
from parlay.models.compiled.short_head import ShortHead
from parlay.models.compiled.streaming import WeightRoom
from parlay.models.compiled.weights import Packed, Weights, nobody
from parlay.models.config import DecoderConfig, RopeConfig
from parlay.models.forward import (
    Forward,
    ForwardBatch,
    ForwardOutput,
    Growth,
    Kernels,
    LayerPages,
    TreeRequest,
    with_features,
)
from parlay.models.lookup import NgramTable
from parlay.models.lora import LowRankAdapter
from parlay.models.part import WHOLE, HostGroup, Part
from parlay.models.rope import cosines_and_sines
from parlay.models.weights.fused import Operand, orders_of_columns, stored_as
from parlay.system import threads
from parlay.types import Exactness, PickedRows, Skip, TappedStates

_LONGER, _SHAPES = 256, 4096  # room is made for texts this many tokens longer; most batch shapes remembered
_DIVIDED = 32  # ranks that share the texts divide the rows of a forward from this many rows per rank on

_CACHED = {"float32": (0, torch.float32), "bfloat16": (1, torch.bfloat16), "q8_0": (2, torch.uint8)}
"""Cache types: the number of each in core.h, and the dtype of the pages' tensors."""


class CompiledForward(Forward):
    """Raises NotLoaded if the library is missing or can't run this model.

    ``cached`` is the type of cached keys and values: float32, bfloat16, q8_0, or ``auto`` for ``dtype``. With a
    ``part`` of a model, ``config`` and ``weights`` are those of the part. Layers beyond ``room`` are read from disk in
    every forward, which may then raise LayersLost.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Operand],
        dtype: torch.dtype,
        packed: Packed = nobody,
        cached: str = "auto",
        *,
        part: Part = WHOLE,
        room: WeightRoom | None = None,
        beside: Weights | None = None,
    ) -> None:
        """``beside`` are weights of the same model whose embedding rows are shared, as a second copy would take
        memory."""
        if reason := refusal(config, dtype, cached):
            raise NotLoaded(reason)
        self._core = load()
        weakref.finalize(self, self._core.rest).atexit = False  # a late thread may still read what forwards were given
        pages = LayerPages.of(config) if part == WHOLE else LayerPages.alike(config.num_layers)
        self._weights = Weights(
            self._core, config, weights, dtype, packed, logits=part.logits, room=room, beside=beside
        )
        self._model = self._weights.model
        set_places(self._model, config, pages)
        self._config, self._dtype, self._part, self._cached = config, dtype, part, cached
        self._model.cached, cache_dtype = _CACHED[str(dtype).removeprefix("torch.") if cached == "auto" else cached]
        cache_lanes = int(self._core.panel) // 2
        self._prefixes = Prefixes(cache_dtype, cache_lanes)
        self._take_part(part)
        self._space, self._growing, self._lowered = (Workspace(self._core) for _ in range(3))
        self._adapters = PackedAdapters(self._core, config, dtype, self._model, orders_of_columns(weights))
        self._short, self._roomy = dict[int, ShortHead](), set[tuple[int, ...]]()
        self._newest: NewestTokens | None = None
        self._ngrams: NgramTable | None = None
        self._start = 0  # offset of the workspace
        self._rotations: dict[tuple[RopeConfig | None, int], Tensor] = {}
        self._reached = 0  # positions that have rotary cosines and sines
        self._reach(256)
        streamed = self._weights.streamed
        self._kernels = Kernels(
            exactness=Exactness.BITS,
            reason=self._reason(stored_as(weights) or str(dtype), cached),
            cache_dtype=cache_dtype,
            pages=pages,
            cache_lanes=cache_lanes,
            spread=part.spread,
            part=None if part == WHOLE else config,
            streamed_bytes=streamed.stream.bytes if streamed is not None else 0,
            chooses=part == WHOLE,
            likeliest=part == WHOLE,
            move_row=row_mover(self._core, cache_dtype),
        )

    def _reason(self, stored: str, cached: str) -> str:
        """Say in one line which kernels run; ``stored`` is the format of blocks or torch's name of the dtype."""
        plain = stored.removeprefix("torch.")
        width = plain if plain != stored else f"{stored} weights"
        if self._weights.streamed is not None:
            width += f", {self._weights.streamed.stream.describe(self._config.num_layers)}"
        caches = "" if cached == "auto" else f", keys and values in {cached}"
        lanes = self._core.name.decode().replace("_", " ")
        return f"compiled decoder ({lanes}), {width}{caches}: rows do not depend on each other"

    @property
    def loss(self) -> Callable[[], str]:
        """A function that returns why layers on disk are lost, or an empty string while they can be read."""
        streamed = self._weights.streamed
        return str if streamed is None else streamed.stream.loss.read

    def _take_part(self, part: Part) -> None:
        """Cut the model to a part, and make two more structs: for what leaves its last layer, and for what follows the
        last layer.

        Late threads of the library read these structs after a call has returned.
        """
        if part.states:
            self._model.raw_tap, self._dtype = 1, torch.float32
        if part.group is not None:
            assert isinstance(part.group, HostGroup), "processors exchange numbers in the host's memory"
            self._model.ranks = ctypes.pointer(part.group.struct)
        if part.context is not None:
            self._model.context = ctypes.pointer(part.context.struct)
        self._model.span = part.spread.span
        self._leaving = structs.ModelStruct.from_buffer_copy(self._model)
        self._leaving.raw_tap = 1
        self._behind_layers = structs.ModelStruct.from_buffer_copy(self._model)
        self._behind_layers.layers = self._behind_layers.raw_tap = 0
        self._behind_layers.ranks = self._behind_layers.context = None

    @property
    def kernels(self) -> Kernels:
        return self._kernels

    def run(self, work: ForwardBatch) -> ForwardOutput:
        if self._part.context is not None and not work.taps and len(work.ids) >= _DIVIDED * self._part.spread.ranks:
            return self._run_divided(work, self._part.context)
        logits = self._room_for_logits(0 if work.likeliest else len(work.wanted))
        layers, pointed = tuple(work.taps), list[object]()
        laid = lay_out(work, self._prefixes)
        batch = self._batch(work, laid, logits, pointed, range(len(work.ids)))
        keys = make_keys(batch, wanted=work.likeliest)
        if layers:
            states_NF = torch.empty(len(work.ids), len(layers) * self._config.hidden_size, dtype=self._dtype)
            pointed.append(self._tap(batch, layers, states_NF))
        self._call(self._model, batch)
        del pointed  # kept alive until the call has returned
        self._part.check()
        if (likeliest := tokens_of(keys)) is None:
            return self.run(work._replace(likeliest=False))  # the logits tell why
        taps = TappedStates(layers, PickedRows(states_NF, laid.order or range(len(work.ids)))) if layers else {}
        return ForwardOutput(logits, taps, likeliest=likeliest)

    def _call(self, model: structs.ModelStruct, batch: structs.Batch) -> None:
        self._core.forward(ctypes.byref(model), ctypes.byref(batch))
        if self._weights.streamed is not None:
            self._weights.streamed.stream.check()

    def _room_for_logits(self, rows: int) -> Tensor:
        return torch.empty(rows, self._config.output_size if self._part.logits else 0)

    def _run_divided(self, work: ForwardBatch, context: HostGroup) -> ForwardOutput:
        """Run this rank's share of the rows, where ranks share the texts.

        The hidden states of the wanted rows are gathered on all ranks, as one of them has the LM head.
        """
        ranks, rank = self._part.spread.ranks, self._part.spread.rank
        each = -(-len(work.ids) // ranks)
        own = range(rank * each, min((rank + 1) * each, len(work.ids)))
        pointed: list[object] = []
        leaving_NH = torch.empty(len(own) if work.wanted else 0, self._config.hidden_size)
        batch = self._batch(work._replace(wanted=[]), lay_out(work, self._prefixes), torch.empty(0), pointed, own)
        if work.wanted:
            pointed.append(self._tap(batch, (self._config.num_layers,), leaving_NH))
        self._call(self._leaving, batch)
        del pointed  # kept alive until the call has returned
        parts_RWH = torch.zeros(ranks, len(work.wanted), self._config.hidden_size)
        for place, row in enumerate(work.wanted):
            if row in own:
                parts_RWH[rank, place] = leaving_NH[row - own.start]
        if work.wanted:
            context.gather(parts_RWH)
        self._part.check()
        if not work.wanted or not self._part.logits:
            return ForwardOutput(self._room_for_logits(len(work.wanted)), {})
        hidden_WH = torch.stack([parts_RWH[row // each, place] for place, row in enumerate(work.wanted)])
        return self.finish(hidden_WH, range(len(work.wanted)), normed=False)

    def finish(self, hidden_NH: Tensor, wanted: Sequence[int], *, normed: bool) -> ForwardOutput:
        """Run what follows the last layer, on the float32 rows ``[N, H]`` that have left it.

        With ``normed`` all rows are tapped after the final norm, as layer 0.
        """
        rows, pool, model = len(hidden_NH), threads.count(), self._behind_layers
        logits, taps_NH = torch.empty(len(wanted), self._config.output_size), torch.empty_like(hidden_NH)
        wanted_rows = (ctypes.c_int32 * max(len(wanted), 1))(*wanted)
        pointers = (ctypes.c_void_p * 1)(taps_NH.data_ptr())
        batch = structs.Batch(rows=rows, wanted=len(wanted), threads=pool, inputs=hidden_NH.data_ptr())
        batch.wanted_rows, batch.logits = ctypes.addressof(wanted_rows), logits.data_ptr()
        batch.space = self._room(rows, rows, len(wanted), 1, 1, pool)
        if normed:
            batch.taps, batch.tap_stride = ctypes.addressof(pointers), hidden_NH.shape[1]
        self._call(model, batch)
        return ForwardOutput(logits, {0: taps_NH} if normed else {})

    def growing(
        self, work: ForwardBatch, growth: Growth, requests: Sequence[TreeRequest], beside: int = 0
    ) -> GrowthCall:
        """Lay out a call that grows a draft below the last row of each segment of ``work``; see `NativeRunner.grow`.

        With ``beside`` it runs on that many threads of its own, next to other models. Only one such call may run at a
        time.
        """
        self._reach(max([place.start + place.end for place in work.places]) + growth.levels)
        if growth.head is None:
            short = self.short_head(growth.short)
            model, tokens_D, newest = short.model, short.tokens_D, short.newest
        else:
            model, tokens_D, newest = self._model, growth.head.tokens_D, self._newest
        if newest is not None:
            for request in requests:
                newest.add(request.unread, request.salt)
        return GrowthCall.of(
            model,
            work,
            growth,
            requests,
            tokens_D=tokens_D,
            newest=newest,
            core=self._core,
            space=self._growing,
            threads=beside or threads.count(),
            beside=beside > 0,
        )

    def time_reading(self) -> float:
        return self._weights.reader.seconds() if self._part == WHOLE else 0.0

    def read_text(self, work: ForwardBatch, first: structs.Linear, features: Sequence[PickedRows]) -> None:
        """Store the keys and values of a draft head's rows; see `NativeRunner.read_text`."""
        self._reach(max([place.start + place.end for place in work.places]))
        read_text(self._model, work, first, features, core=self._core, space=self._growing, threads=threads.count())

    def add_adapter(self, adapter: LowRankAdapter) -> LowRankAdapter:
        """See `Forward.add_adapter`."""
        own = self._part.cut(adapter)
        self._adapters.pack(own)
        return own

    def embed(self, ids: Sequence[int]) -> Tensor:
        return self._weights.embed(ids)

    def with_weights(self, weights: Mapping[str, Operand]) -> CompiledForward:
        """See `Forward.with_weights`."""
        if self._part != WHOLE:
            super().with_weights(weights)
        made = CompiledForward(self._config, weights, self._dtype, cached=self._cached, beside=self._weights)
        if self._ngrams is not None:
            made.add_ngrams(self._ngrams)
        return made

    def add_ngrams(self, table: NgramTable) -> None:
        """Set the table of n-gram embeddings."""
        self._ngrams, self._model.ngrams = table, ctypes.pointer(table.struct)

    def short_head(self, tokens: int) -> ShortHead:
        """The model with an LM head over the ``tokens`` most frequent tokens and the newest ones; 0: over all
        tokens."""
        if tokens not in self._short:
            self._short[tokens] = ShortHead(self._core, self._weights, tokens)
        return self._short[tokens]

    def list_newest(self, tokens_D: Tensor, slot: int, rows: RowsOfHead) -> Tensor:
        """Let a draft head's outputs from ``slot`` on stand for the newest tokens of its texts, from now on.

        ``tokens_D`` are the target's tokens of all outputs. Returns those of the first call, which change in place.
        """
        if self._newest is None:
            self._newest = NewestTokens(self._core, self._model.head, tokens_D, slot, rows)
        return self._newest.tokens_D

    def _batch(
        self, work: ForwardBatch, laid: BatchLayout, logits: Tensor, pointed: list[object], own: range
    ) -> structs.Batch:
        """The work as the library's struct; ``own`` are the rows that run here, and ``logits`` ``[W, V]`` are written
        to.

        The memory that it points to is added to ``pointed``.
        """
        rows, wanted, pool, segments = len(own), len(work.wanted), threads.count(), len(laid.segments)
        ids = (ctypes.c_int64 * rows)(*laid.arranged(work.ids)[own.start : own.stop])
        wanted_rows = (ctypes.c_int32 * max(wanted, 1))(*laid.rows_of(work.wanted))
        longest = max([place.start + place.end for place in work.places])
        self._reach(max([longest, *[place.reach for place in work.places if place.places]]))
        batch = structs.Batch(
            rows=rows,
            segments=segments,
            wanted=wanted,
            threads=pool,
            ids=ctypes.addressof(ids),
            segment=laid.segments,
            wanted_rows=ctypes.addressof(wanted_rows),
            logits=logits.data_ptr(),
            space=self._room(rows, len(work.ids), wanted, longest, segments, pool),
            late=len(laid.joining),
            late_segments=laid.late_segments,
            join=laid.join,
            joining=laid.joining,
            all_rows=len(work.ids) if rows < len(work.ids) else 0,
            own=own.start,
        )
        pointed += [laid, ids, wanted_rows]
        self._add_options(batch, work, laid, pointed)
        adapters = laid.arranged(work.adapters)[own.start : own.stop] if work.adapters else []
        if any(adapters):
            batch.lowered = self._lowered.at_least(self._adapters.fill(batch, adapters, pointed))
        return batch

    def _add_options(self, batch: structs.Batch, work: ForwardBatch, laid: BatchLayout, pointed: list[object]) -> None:
        inputs = self._inputs(work, laid)
        if inputs is not None:
            batch.inputs = inputs.data_ptr()
            pointed.append(inputs)
        if work.skip:
            skipped = self._skipped(work.skip)
            batch.skip = ctypes.addressof(skipped)
            pointed.append(skipped)

    def _inputs(self, work: ForwardBatch, laid: BatchLayout) -> Tensor | None:
        """Make the input rows, float32 ``[N, H]``; None if they are the embeddings of the ids."""
        if work.inputs is not None or not work.features:
            return None if work.inputs is None else work.inputs.float().contiguous()
        given = sum([0 if each.features.added else len(each.features) for each in work.features])
        if given == len(work.ids) and self._ngrams is None:  # every row has features in place of its id
            embedded_NH = torch.empty(given, self._config.hidden_size)
        else:
            embedded_NH = self._weights.embed(work.ids)
        if self._ngrams is not None:
            embedded_NH += self._ngrams.embeddings(work.places, work.tokens)
        inputs_NH = with_features(embedded_NH, work.features)
        return inputs_NH.contiguous() if laid.order is None else inputs_NH[laid.arranged(range(len(work.ids)))]

    def _tap(self, batch: structs.Batch, layers: Sequence[int], states_NF: Tensor) -> ctypes.Array[ctypes.c_void_p]:
        """Let the batch write the hidden states that enter these layers side by side, in float32 or bfloat16.

        The result must live until the batch has run.
        """
        pointers = (ctypes.c_void_p * (self._config.num_layers + 1))()
        first, each = states_NF.data_ptr(), self._config.hidden_size * states_NF.itemsize
        for place, layer in enumerate(layers):
            pointers[layer] = first + place * each
        batch.taps, batch.tap_stride = ctypes.addressof(pointers), states_NF.shape[1]
        batch.tap_form = states_NF.dtype == torch.bfloat16
        return pointers

    def _skipped(self, skip: Skip) -> ctypes.Array[ctypes.c_uint8]:
        flags = (ctypes.c_uint8 * (2 * self._config.num_layers))()
        for part, layer in skip:
            flags[2 * layer + (part == "mlp")] = 1
        return flags

    def _room(self, rows: int, all_rows: int, wanted: int, longest: int, *others: int) -> int:
        """The address of the workspace, which is kept from call to call and grown when a call needs more.

        ``others`` are the counts of segments and threads.
        """
        shape = rows, all_rows, wanted, -(-longest // _LONGER), *others
        if shape not in self._roomy:
            needed = self._core.space_bytes(ctypes.byref(self._model), *shape[:3], shape[3] * _LONGER, *others)
            self._start = self._space.at_least(needed)
            if len(self._roomy) >= _SHAPES:
                self._roomy.clear()
            self._roomy.add(shape)
        return self._start

    def _reach(self, positions: int) -> None:
        """Compute the rotary cosines and sines ``[positions, 2, D/2]`` of so many positions."""
        if positions <= self._reached:
            return
        self._reached = max(positions, 2 * self._reached)
        kinds = [(form.rope, self._config.heads_of(form).size) for form in self._config.forms]
        self._rotations = {kind: cosines_and_sines(*kind, self._reached) for kind in set(kinds)}
        for layer, kind in zip(self._model.layer[: len(kinds)], kinds, strict=True):
            layer.rotations = self._rotations[kind].data_ptr()
