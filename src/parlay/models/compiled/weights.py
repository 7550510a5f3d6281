"""All weights of a model in the layout that the compiled products read, and the structs that point at them."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parlay.cache.pages import SPAN
from parlay.compiled import structs
from parlay.models.compiled.matrices import Matrices
from parlay.models.compiled.memory import Arena, RegionArena, WeightArena
from parlay.models.compiled.reading import WeightReader
from parlay.models.compiled.shelving import ExpertShelf, ExpertsOnDisk
from parlay.models.compiled.streaming import LayersOnDisk, PackedUnit, StreamedLayers, WeightRoom
from parlay.models.config import Activation, DecoderConfig, KeyHeads, LayerForm
from parlay.models.weights.formats import Format
from parlay.models.weights.fused import (
    BesideWeights,
    ExpertWeights,
    FusedWeights,
    GatedWeights,
    LayerWeights,
    Operand,
    PerLayerWeights,
    order_of_columns,
    ordered,
)
from parlay.models.weights.stored import StoredTensor
from parlay.system import threads

_log = logging.getLogger(__name__)
_ACTIVATIONS: Mapping[Activation, int] = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2}
"""The numbers of activations in core.h."""
Packed = Callable[[int, int], None]
"""Called with the count of packed parts and the count of all."""


def nobody(done: int, parts: int) -> None:
    """Ignore progress."""


class Weights:
    """A model packed for ``core``, on as many threads as decode. It owns all memory that ``model`` points to."""

    def __init__(
        self,
        core: structs.Core,
        config: DecoderConfig,
        weights: Mapping[str, Operand],
        dtype: torch.dtype,
        packed: Packed = nobody,
        *,
        logits: bool = True,
        room: WeightRoom | None = None,
        beside: Weights | None = None,
    ) -> None:
        """Without ``logits`` no LM head is packed. Layers beyond ``room`` stay on disk. Embedding rows are shared with
        ``beside``."""
        self._logits, self._room, self._packed, self._shares_with = logits, room, packed, beside
        self._core, self._config, self._dtype = core, config, dtype
        self._matrices = Matrices(core, dtype, arena := WeightArena(), ahead=room is None)
        self.streamed: StreamedLayers | None = None
        self._slots_at: int | None = None  # address of the slots for experts, if experts are on disk
        fused = FusedWeights(config, weights, torch.float32)
        self.model = self._lay_out(fused, arena)
        alone, ahead, jobs = self._matrices.alone, self._matrices.ahead, self._matrices.jobs
        if alone:
            _log.warning(
                "%d quantized matrices are multiplied in floating point, which takes longer: they reorder inputs", alone
            )
        if ahead is not None:
            jobs = [*ahead.jobs(), *jobs]
        for done in threads.run(jobs):  # only now: laying out runs Python code, which would hold these threads up
            packed(done, len(jobs))
        self._matrices.forget_uses()
        self.reader = WeightReader(core, arena, self._addresses(self.model.head))

    def _addresses(self, linear: structs.Linear) -> range:
        """Where a packed matrix lies."""
        panels = -(-linear.outputs // self._core.panel)
        size, begin = panels * self._core.panel_bytes(linear.kind, linear.inputs), linear.panels or 0
        return range(begin, begin + size)

    @property
    def tied(self) -> bool:
        """Whether the LM head shares the embedding's rows."""
        return self._tied

    def embed(self, ids: Sequence[int]) -> Tensor:
        """The embedding rows of these tokens, as the first layer reads them, float32 ``[N, H]``. Raises ValueError for
        ids outside the vocabulary."""
        if ids and not 0 <= min(ids) <= max(ids) < self.model.embedding.outputs:
            raise ValueError(f"tokens {min(ids)} to {max(ids)}: the embedding has {self.model.embedding.outputs}")
        rows_NH = torch.empty(len(ids), self._config.hidden_size)
        for row, token in zip(rows_NH, ids, strict=True):
            self._core.read(ctypes.byref(self.model.embedding), token, row.data_ptr())
        return rows_NH if self._config.embedding_scale == 1 else rows_NH * self._config.embedding_scale

    def __del__(self) -> None:
        self._core.rest()  # a late thread may still read the weights
        if self.streamed is not None:
            self.streamed.stream.close()

    def _lay_out(self, fused: FusedWeights, arena: WeightArena) -> structs.ModelStruct:
        config, beside = self._config, self._shares_with
        head = self._matrices.linear(fused.head) if self._logits else structs.Linear(kind=Format.F32.number)
        self._tied = fused.head is fused.embedding
        model = structs.ModelStruct(
            layers=config.num_layers,
            hidden=config.hidden_size,
            heads=config.num_heads,
            ffn=max(config.mlp_size_of(form) for form in config.forms),
            vocab=config.output_size,
            cached=int(self._dtype == torch.bfloat16),
            eps=config.rms_norm_eps,
            embedding=self._matrices.rows_of(fused.embedding) if beside is None else beside.model.embedding,
            final_norm=self._matrices.hold_any(fused.final_norm),
            beside_norm=self._matrices.hold_any(fused.beside_norm),
            raw_tap=int(config.head is not None),
            head=head,
            embedding_scale=config.embedding_scale,
            logit_cap=config.logit_cap,
            span=SPAN,
            **self._per_layer(fused, beside),
        )
        model.layer = (structs.LayerStruct * config.num_layers)(*self._layers(fused, arena))
        if self.streamed is not None:
            self.streamed.stream.point(model)
        return model

    def _layers(self, fused: FusedWeights, arena: WeightArena) -> Sequence[structs.LayerStruct]:
        """The structs of all layers: in memory if the room holds them, else with some layers or experts on disk."""
        if self._room is not None:
            resident = arena.taken + sum(kept.nbytes for kept in self._matrices.kept)
            self.streamed = self._on_disk(fused, self._room, resident)
        if self.streamed is not None:
            return self.streamed.structs
        return self._in_memory(fused)

    def _in_memory(self, fused: FusedWeights) -> list[structs.LayerStruct]:
        return [self._layer(fused.layer(index), form) for index, form in enumerate(self._config.forms)]

    def _on_disk(self, fused: FusedWeights, room: WeightRoom, resident: int) -> StreamedLayers | None:
        """Put experts or layers on disk if the room does not hold them beside ``resident`` bytes; None if it holds all.

        In a mixture only experts go to disk if the rest fits, as a row reads only the experts that it chooses.
        """
        experts = self._experts_on_disk(fused, room, resident)
        if experts is not None and experts.serves:
            return self._with_shelf(fused, experts)
        lay_out, least = partial(self._laid, fused), None if experts is None else experts.least
        layers = LayersOnDisk(self._core, lay_out, self._config.num_layers, room, resident, otherwise=least)
        return layers.load(self._packed) if layers.split.streamed else None

    def _experts_on_disk(self, fused: FusedWeights, room: WeightRoom, resident: int) -> ExpertsOnDisk | None:
        """The experts of a mixture; None for other models."""
        counts = [form.experts.count if form.experts else 0 for form in self._config.forms]
        if not sum(counts):
            return None
        self._slots_at, kept = 0, len(self._matrices.kept)
        for layer in range(len(counts)):
            self._laid(fused, layer, rest := RegionArena())
            resident += rest.taken
        resident += sum(each.nbytes for each in self._matrices.kept[kept:])
        del self._matrices.kept[kept:]
        self._slots_at = None
        layers = [(fused.mlp(layer), form) for layer, form in enumerate(self._config.forms)]
        found = [(each, form) for mlp, form in layers if isinstance(mlp, ExpertWeights) for each in mlp.experts]
        return ExpertsOnDisk(self._core, partial(self._laid_expert, found), counts, room, resident)

    def _with_shelf(self, fused: FusedWeights, experts: ExpertsOnDisk) -> StreamedLayers:
        """All layers in memory except for their experts, some of which are in memory at a time."""
        file, slots = experts.file(self._packed), experts.slots()
        self._slots_at = slots.data_ptr()
        layers = self._in_memory(fused)
        return StreamedLayers(layers, [slots], ExpertShelf(file, slots, experts.slot_bytes, layers))

    def _laid(self, fused: FusedWeights, layer: int, arena: Arena) -> PackedUnit[structs.LayerStruct]:
        """One layer in an arena of its own, with the jobs that pack it; see `LayOut`."""
        return self._matrices.laid_in(arena, lambda: self._layer(fused.layer(layer), self._config.forms[layer]))

    def _laid_expert(
        self, experts: Sequence[tuple[GatedWeights, LayerForm]], number: int, arena: Arena
    ) -> PackedUnit[structs.Expert]:
        """One expert in an arena of its own, with the jobs that pack it; see `LayOut`. Tensors held for it are dropped
        again."""
        kept = len(self._matrices.kept)
        found = self._matrices.laid_in(arena, lambda: structs.Expert(**self._gated(*experts[number])))
        del self._matrices.kept[kept:]
        return found

    def _per_layer(self, fused: FusedWeights, beside: Weights | None) -> dict[str, Any]:
        """Model fields for per-layer inputs."""
        inputs = fused.per_layer
        if inputs is None:
            return {}
        rows = self._matrices.rows_of(inputs.embedding) if beside is None else beside.model.per_layer_embedding
        return {
            "per_layer": self._config.per_layer_size,
            "per_layer_embedding": rows,
            "per_layer_projection": self._matrices.linear(inputs.projection),
            "per_layer_norm": self._matrices.hold(inputs.norm),
            "per_layer_scale": inputs.scale,
        }

    def _layer(self, layer: LayerWeights, form: LayerForm) -> structs.LayerStruct:
        out_norms, heads = layer.out_norms or (None, None), self._config.heads_of(form)
        products = [
            self._matrices.linear(weight, None if layer.qkv_bias is None else layer.qkv_bias[part])
            for part, weight in enumerate(self._matrices.side_by_side(layer.qkv))
        ]
        return structs.LayerStruct(
            **dict(zip(("query", "key", "value"), products, strict=False)),
            out=self._matrices.linear(layer.attention_out, layer.attention_out_bias, form.residual_scale),
            attention_norm=self._matrices.hold_any(layer.attention_norm),
            feed_forward_norm=self._matrices.hold_any(layer.mlp_norm),
            attention_out_norm=self._matrices.hold_any(out_norms[0]),
            feed_forward_out_norm=self._matrices.hold_any(out_norms[1]),
            qk_norm=self._matrices.hold_any(None if layer.qk_norm is None else self._by_head(layer.qk_norm, heads)),
            value_norm=self._matrices.hold(torch.full((heads.size,), heads.size**0.5)) if form.value_norm else None,
            scale=float(1 / torch.tensor(float(heads.size)).sqrt()) if form.scale is None else form.scale,
            score_cap=form.score_cap,
            window=form.window or 0,
            activation=_ACTIVATIONS[form.activation],
            sinks=self._matrices.hold_any(layer.sinks),
            wide_norms=int(form.wide_qk_norm),
            reads_others=int(form.keys_of is not None),
            out_scale=layer.out_scale,
            **self._mlp(layer.mlp, form),
            **self._last(layer.per_layer),
        )

    def _last(self, weights: PerLayerWeights | None) -> dict[str, Any]:
        """Layer fields for per-layer inputs."""
        if weights is None:
            return {}
        return {
            "per_layer_gate": self._matrices.linear(weights.gate),
            "per_layer_out": self._matrices.linear(weights.out),
            "per_layer_norm": self._matrices.hold(weights.norm),
        }

    def _mlp(self, weights: GatedWeights | ExpertWeights, form: LayerForm) -> dict[str, Any]:
        """Layer fields of its feed-forward: three matrices, or experts."""
        if isinstance(weights, GatedWeights):
            return self._gated(weights, form)
        assert form.experts is not None, "its weights are experts"
        experts = [self._expert(each, form) for each in weights.experts]
        experts += [] if weights.shared is None else [structs.Expert(**self._gated(weights.shared, form))]
        array = (structs.Expert * len(experts))(*experts)
        return {
            "router": self._matrices.linear(weights.router, weights.router_bias),
            "expert": array,
            "experts": form.experts.count,
            "chosen": form.experts.chosen,
            "shared": 0 if weights.shared is None else 2 if form.experts.shared_gate else 1,
            "normalized": int(form.experts.normalized),
            "groups": form.experts.groups,
            "top_groups": form.experts.top_groups,
            "expert_scale": form.experts.scale,
            "choice_bias": self._matrices.hold_any(weights.choice_bias),
            **({} if weights.beside is None else self._beside(weights.beside, form)),
        }

    def _expert(self, weights: GatedWeights, form: LayerForm) -> structs.Expert:
        """Lay out an expert: beside the others, or in the first slot if experts are read on demand."""
        if self._slots_at is None:
            return structs.Expert(**self._gated(weights, form))
        slot = RegionArena(self._slots_at)
        return self._matrices.laid_in(slot, lambda: structs.Expert(**self._gated(weights, form))).struct

    def _beside(self, weights: BesideWeights, form: LayerForm) -> dict[str, Any]:
        """Layer fields of a feed-forward that runs beside the experts."""
        return {
            **self._gated(weights.dense, form),
            "expert_scales": self._matrices.hold(weights.scales),
            "router_norm": self._matrices.hold(weights.router_norm),
            "experts_norm": self._matrices.hold(weights.experts_norm),
            "dense_out_norm": self._matrices.hold(weights.dense_out_norm),
            "experts_out_norm": self._matrices.hold(weights.experts_out_norm),
        }

    def _gated(self, weights: GatedWeights, form: LayerForm) -> dict[str, structs.Linear]:
        """Lay out gate, up and down; if the columns of ``down`` are permuted, the rows of gate and up are permuted
        instead, at no cost."""
        down, order = weights.down, order_of_columns([weights.down])
        if isinstance(down, StoredTensor):
            down = replace(down, columns=None)
        gate, up = (ordered(weight, order) for weight in self._matrices.side_by_side((weights.gate, weights.up)))
        gate_bias, up_bias = (
            bias if bias is None or order is None else bias[order] for bias in (weights.biases[0], weights.biases[1])
        )
        return {
            "gate": self._matrices.linear(gate, gate_bias),
            "up": self._matrices.linear(up, up_bias),
            "down": self._matrices.linear(down, weights.biases[2], form.residual_scale),
        }

    def _by_head(self, norms: Sequence[Tensor], heads: KeyHeads) -> Tensor:
        """The query and key norms, each ``[D]`` or ``[heads * D]``, as ``[query and key heads, D]``."""
        counts = (self._config.num_heads, heads.heads)
        return torch.cat(
            [norm.view(-1, heads.size).expand(count, -1) for norm, count in zip(norms, counts, strict=False)]
        )
