"""The decoder in torch operators, for every device and dtype, without anything to compile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from parlay.cache import Budget, Rows
from parlay.compiled import triton_here
from parlay.models.compiled.streaming import WeightRoom
from parlay.models.config import DecoderConfig, UnsupportedModel
from parlay.models.forward import Forward, ForwardBatch, ForwardOutput, Kernels, LayerPages, Taps, with_features
from parlay.models.lookup import NgramTable
from parlay.models.lora import LowRankAdapter
from parlay.models.part import WHOLE, Part
from parlay.models.torch_ops.adapters import TorchAdapters
from parlay.models.torch_ops.attention import Attend, ExactAttention
from parlay.models.torch_ops.attention_form import (
    AttentionKind,
    Heads,
    LayerRopes,
    SeenPrefix,
    attention_kinds,
    prefix_of,
)
from parlay.models.torch_ops.attention_masked import MaskedAttention
from parlay.models.torch_ops.fixed_step import FixedStep, StepInputs
from parlay.models.torch_ops.kernels import Judgement, judge
from parlay.models.torch_ops.linear import padded
from parlay.models.torch_ops.mlp import GatedMlp
from parlay.models.torch_ops.packing import build
from parlay.models.torch_ops.step_graphs import MOST_ROWS, Recorder, StepGraphs
from parlay.models.torch_ops.step_rows import step_rows
from parlay.models.torch_ops.streaming import Lane, Mark
from parlay.models.triton_ops.choosing import paged_attention
from parlay.models.triton_ops.row_table import PlacedRows
from parlay.models.weights.fused import Operand, stored_as
from parlay.system.threads import torch_on_all
from parlay.types import Features, Prefix


class EagerForward(Forward):
    """A `Forward` of packed linear layers and batched products, or of masked attention where these are not exact.

    On CUDA devices Triton's kernels compute attention, if they are available.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Operand],
        dtype: torch.dtype,
        device: torch.device,
        part: Part = WHOLE,
        *,
        paged: bool = True,
        streaming: tuple[WeightRoom, Lane[Mark]] | None = None,
        recorder: Callable[[], Recorder] | None = None,
    ) -> None:
        """Raises UnsupportedModel for a part with only some layers or keys, which needs the compiled decoder.

        ``paged``: whether Triton's kernels may be used. ``streaming`` is the room for weights on the device, and the
        stream that copies the other weights there. Raises ParlayError if even the least that works does not fit.
        ``recorder`` makes the recorder of CUDA graphs; None: operators are launched one by one.
        """
        if part.states or part.context is not None:
            split = "pipeline" if part.states else "context"
            raise UnsupportedModel(f"{split} parallelism needs the compiled decoder, and torch's operators decode here")
        self._config, self._dtype = config, dtype
        decoder = build(config, weights, dtype, device, streaming)
        stored = stored_as(weights)
        self._decoder = decoder if part.group is None else decoder.summed(part.group)
        self._part = part
        self._kinds = attention_kinds(config)
        ropes = LayerRopes(config, decoder.compute, device)
        sinks = [layer.sinks for layer in decoder.layers]
        find = partial(paged_attention, config, self._kinds, ropes, sinks, dtype=dtype, device=device)
        self._paged = find() if paged and part == WHOLE else None
        judged = judge(decoder, device, paged=self._paged is not None)
        self._attention = {kind: self._attend_by(kind, config, ropes, judged) for kind in dict.fromkeys(self._kinds)}
        self._device = device
        self._adapters = TorchAdapters(config, dtype, device)
        self._ngrams: NgramTable | None = None
        self._budget: Budget | None = None
        pages = LayerPages.of(config) if part == WHOLE else LayerPages.alike(config.num_layers)
        self._prefixes: WeakKeyDictionary[Prefix, tuple[Tensor, Tensor]] = WeakKeyDictionary()
        reasons = [judged.reason]
        if stored:
            reasons.append(f"{stored} weights as they are in that dtype")
        if decoder.streamed_bytes:
            reasons.append("weights copied from the host's memory in every forward")
        self._kernels = Kernels(
            exactness=judged.exactness,
            reason="; ".join(reasons),
            cache_dtype=dtype if judged.form is None else decoder.compute,
            pages=pages,
            part=None if part == WHOLE else config,
            streamed_bytes=decoder.streamed_bytes,
            chooses=part == WHOLE and self._paged is None and judged.form is not None,
        )
        self._recorder, self._graphs = recorder, None if recorder is None else self._graphs_by(recorder, ropes)

    def _graphs_by(self, recorder: Callable[[], Recorder], ropes: LayerRopes) -> StepGraphs | None:
        """Set up CUDA graphs for steps, if possible; the line about kernels mentions it."""
        graphs: StepGraphs | None = None
        if self._paged is None:
            how = "no CUDA graphs: they need attention by Triton"
        elif not all(isinstance(layer.mlp, GatedMlp) for layer in self._decoder.layers):
            how = "no CUDA graphs: the host reads which experts rows choose"
        elif self._decoder.streamed_bytes:
            how = "no CUDA graphs: layers are copied from the host's memory"
        else:
            try:
                made = recorder()
            except Exception as error:  # a driver may raise anything
                how = f"no CUDA graphs: {triton_here.reason(error)}"
            else:
                pages, recent = self._kernels.cache_shapes(self._config, self._device)
                shapes = pages, None if recent is None else recent.shape
                step = partial(FixedStep, self._decoder, self._paged, ropes, shapes, rows=MOST_ROWS)
                graphs, how = StepGraphs(step, made), f"CUDA graphs of up to {MOST_ROWS} rows"
        self._kernels = replace(self._kernels, reason=f"{self._kernels.reason}; {how}")
        return graphs

    def _attend_by(
        self, kind: AttentionKind, config: DecoderConfig, ropes: LayerRopes, judged: Judgement
    ) -> MaskedAttention | ExactAttention:
        """torch's attention for one kind of layers."""
        sinks = [layer.sinks for layer in self._decoder.layers]
        if judged.form is None:
            return MaskedAttention(kind, config.forms, ropes, sinks)
        return ExactAttention(kind, config.forms, ropes, judged.form, dtype=self._decoder.compute, sinks=sinks)

    @property
    def kernels(self) -> Kernels:
        return self._kernels

    def add_adapter(self, adapter: LowRankAdapter) -> LowRankAdapter:
        """See `Forward.add_adapter`."""
        own = self._part.cut(adapter)
        self._adapters.pack(own)
        return own

    def embed(self, ids: Sequence[int]) -> Tensor:
        with torch.inference_mode():
            return self._decoder.embed(torch.tensor(ids, device=self._device))

    def with_weights(self, weights: Mapping[str, Operand]) -> EagerForward:
        """See `Forward.with_weights`."""
        if self._part != WHOLE:
            super().with_weights(weights)
        made = EagerForward(self._config, weights, self._dtype, self._device, recorder=self._recorder)
        if self._budget is not None:
            made.attach(self._budget)
        if self._ngrams is not None:
            made.add_ngrams(self._ngrams)
        return made

    def add_ngrams(self, table: NgramTable) -> None:
        """Set the table of n-gram embeddings."""
        self._ngrams = table

    def attach(self, budget: Budget) -> None:
        """Charge CUDA graphs to a budget; see `Forward.attach`."""
        self._budget = budget
        if self._graphs is not None:
            self._graphs.attach(budget)

    @torch_on_all()
    def run(self, work: ForwardBatch) -> ForwardOutput:
        with torch.inference_mode():
            taps, inputs = Taps(work.taps), partial(self._inputs, work)
            hidden = None if self._graphs is None else self._graphs.run(work, inputs, taps)
            normed = hidden is not None
            if hidden is None:
                hidden, normed = self._by_operators(work, taps)
            hidden = self._chosen(hidden, work.wanted if self._part.logits else [])
            if not normed:
                hidden = self._decoder.last(hidden)
        with torch.no_grad():  # logits are ordinary tensors, which the caller may change
            if self._part.logits:
                logits = self._decoder.logits(hidden)[: len(work.wanted)].float()
            else:
                logits = torch.empty(len(work.wanted), 0)
        return ForwardOutput(logits, taps.states, taps.seconds)

    def _by_operators(self, work: ForwardBatch, taps: Taps) -> tuple[Tensor, bool]:
        """Run all layers; returns the last one's output ``[N, H]``, and whether it is normed for the LM head."""
        count, last = len(work.ids), len(self._decoder.layers)
        rows_N = torch.tensor(work.ids + work.ids[:1] * (padded(count) - count), device=self._device)
        inputs = self._inputs(work, rows_N)
        numbers_of = self._decoder.per_layer
        hidden = self._decoder.run(
            inputs.rows_NH,
            partial(self._plan, work),
            taps,
            work.skip,
            embedded_NH=inputs.beside_NH,
            numbers_NLP=None if numbers_of is None else numbers_of(rows_N, inputs.rows_NH),
            joining=work.features,
            adapters=self._adapters.adapt(work.adapters),
            count=count,
        )
        normed = last in work.taps and not self._decoder.raw_tap
        if last in work.taps:
            hidden = taps.states[last] = self._decoder.last(hidden) if normed else hidden
        self._part.check()
        taps.states = {layer: states_NH[:count] for layer, states_NH in taps.states.items()}
        return hidden, normed

    def _inputs(self, work: ForwardBatch, rows_N: Tensor) -> StepInputs:
        """The first layer's inputs of rows with these ids, the first of which are the work's."""
        count, embedded_NH = len(work.ids), self._decoder.embed(rows_N)
        if work.inputs is not None:
            embedded_NH[:count] = work.inputs.to(embedded_NH)
        elif self._ngrams is not None:
            embedded_NH[:count] += self._ngrams.embeddings(work.places, work.tokens).to(embedded_NH)
        beside_NH = embedded_NH.clone() if self._decoder.beside_norm is not None else None
        return StepInputs(with_features(embedded_NH, work.features), beside_NH)

    def _plan(self, work: ForwardBatch, out: Mapping[Heads, Tensor]) -> Sequence[Attend]:
        """Plan the attention of all segments, into their rows of ``out`` ``[N, heads * D]`` by heads.

        Paged kernels handle the segments without a prefix.
        """
        ends = list(accumulate(place.end - place.base for place in work.places))
        seen = {given.place: self._seen(given.features) for given in work.features}
        placed = [PlacedRows(end - place.end + place.base, place) for end, place in zip(ends, work.places, strict=True)]
        paged = [each for number, each in enumerate(placed) if self._paged is not None and seen.get(number) is None]
        attends = [self._paged.plan(paged, out)] if self._paged is not None and paged else []
        for number, (begin, place) in enumerate(placed):
            if self._paged is None or seen.get(number) is not None:
                attends.append(self._plan_one(begin, place, out, seen.get(number)))
        return attends

    def _plan_one(self, begin: int, place: Rows, out: Mapping[Heads, Tensor], seen: SeenPrefix | None) -> Attend:
        """Plan one segment's attention in torch operators."""
        rows = step_rows(place, self._device, self._kernels.pages)
        end = begin + place.end - place.base
        plans = {
            kind: attention.plan(rows, place, begin, out[kind.heads][begin:end], seen)
            for kind, attention in self._attention.items()
        }
        return partial(_attend, [plans[kind] for kind in self._kinds])

    def _seen(self, features: Features) -> SeenPrefix | None:
        prefix = features.prefix
        if prefix is None:
            return None
        if prefix not in self._prefixes:
            self._prefixes[prefix] = prefix_of(prefix, self._kernels.cache_dtype, self._device)
        return SeenPrefix(*self._prefixes[prefix], len(features))

    def _chosen(self, hidden_NH: Tensor, wanted: list[int]) -> Tensor:
        """The rows for the LM head, padded to a number that `padded` allows."""
        count = padded(len(wanted))
        if count == len(hidden_NH) and wanted[-1:] == [len(wanted) - 1]:
            return hidden_NH
        rows = wanted + (wanted[:1] or [0]) * (count - len(wanted))
        return hidden_NH[torch.tensor(rows, device=self._device)]


def _attend(plans: Sequence[Attend], layer: int, qkv_NAP: Tensor) -> None:
    """Attend by the layer's own plan."""
    plans[layer](layer, qkv_NAP)
