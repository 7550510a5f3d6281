"""Weights in the layout that the compiled products read, and the structures that point at them."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parlay.cache.pages import SPAN
from parlay.compiled import structs
from parlay.models.compiled.memory import Arena, WeightArena
from parlay.models.compiled.streaming import LayersOnDisk, PackedLayer, StreamedLayers, WeightRoom
from parlay.models.config import Activation, DecoderConfig, KeyHeads, LayerForm
from parlay.models.gguf.packing_ahead import PackingAhead
from parlay.models.weights.formats import DamagedWeights, Format
from parlay.models.weights.fused import (
    BesideWeights,
    ExpertWeights,
    FusedWeights,
    GatedWeights,
    LayerWeights,
    Operand,
    PerLayerWeights,
    as_tensor,
    order_of_columns,
    ordered,
)
from parlay.models.weights.grids import packable
from parlay.models.weights.quantize import Int8Weight
from parlay.models.weights.stored import StoredTensor
from parlay.system import threads

_log = logging.getLogger(__name__)
_INT8 = 24
"""The number of `Int8Weight` among the formats of stored weights: ggml's for int8."""
_PLAIN = {torch.float32: Format.F32.number, torch.bfloat16: Format.BF16.number}
_ACTIVATIONS: Mapping[Activation, int] = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2}
"""As core.h counts them."""
_PART = 1 << 22
"""Bytes of a file's blocks that a job packs, or one panel's."""

Packed = Callable[[int, int], None]
"""Told how many parts are packed, of how many."""


def nobody(done: int, parts: int) -> None:
    """For those who do not watch."""


class Weights:
    """A model packed for ``core``, by as many threads as decode. Owns all memory that ``model`` points to."""

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
        """Without ``logits`` there is no LM head. Layers beyond ``room`` stay on disk. Embeddings are ``beside``'s."""
        self._logits, self._room, self._packed, self._shares_with = logits, room, packed, beside
        self._core, self._config, self._dtype = core, config, dtype
        self._panel = int(core.panel)
        self._memory: Arena = (arena := WeightArena())
        self._held: list[Tensor] = []
        self.streamed: StreamedLayers | None = None
        self._ahead: PackingAhead | None = None
        self._alone = 0  # matrices that become numbers, for their order is not that of those beside them
        fused = FusedWeights(config, weights, torch.float32)
        self._jobs: list[Callable[[], object]] = []
        self._linears: dict[int, tuple[Operand, structs.Linear]] = {}
        self.model = self._lay_out(fused, arena)
        if self._alone:
            _log.warning(
                "%d matrices are multiplied as numbers, for each has an order of inputs of its own", self._alone
            )
        if self._ahead is not None:
            self._jobs = [*self._ahead.jobs(), *self._jobs]
        with ThreadPoolExecutor(threads.count()) as pool:  # begun now, because Python runs one thread at a time
            for done, job in enumerate([pool.submit(job) for job in self._jobs], start=1):
                job.result()
                packed(done, len(self._jobs))
        del self._jobs, self._linears

    @property
    def tied(self) -> bool:
        """Whether the LM head has the rows of the embedding."""
        return self._tied

    def embed(self, ids: Sequence[int]) -> Tensor:
        """Read the rows of these tokens as the first layer does, float32 ``[N, H]``."""
        rows_NH = torch.empty(len(ids), self._config.hidden_size)
        for row, token in zip(rows_NH, ids, strict=True):
            self._core.read(ctypes.byref(self.model.embedding), token, row.data_ptr())
        return rows_NH if self._config.embedding_scale == 1 else rows_NH * self._config.embedding_scale

    def __del__(self) -> None:
        self._core.rest()  # a late thread may still read them
        if self.streamed is not None:
            self.streamed.stream.close()

    def _lay_out(self, fused: FusedWeights, arena: WeightArena) -> structs.ModelStruct:
        config, beside = self._config, self._shares_with
        head = self._linear(fused.head) if self._logits else structs.Linear(kind=Format.F32.number)
        self._tied = fused.head is fused.embedding
        model = structs.ModelStruct(
            layers=config.num_layers,
            hidden=config.hidden_size,
            heads=config.num_heads,
            ffn=max(config.mlp_size_of(form) for form in config.forms),
            vocab=config.output_size,
            cached=int(self._dtype == torch.bfloat16),
            eps=config.rms_norm_eps,
            embedding=self._rows_of(fused.embedding) if beside is None else beside.model.embedding,
            final_norm=self._hold_any(fused.final_norm),
            beside_norm=self._hold_any(fused.beside_norm),
            raw_tap=int(config.head is not None),
            head=head,
            embedding_scale=config.embedding_scale,
            logit_cap=config.logit_cap,
            span=SPAN,
            **self._per_layer(fused, beside),
        )
        model.layer = (structs.LayerStruct * config.num_layers)(*self._layers(fused, arena))
        model.stream = None if self.streamed is None else self.streamed.stream.address
        return model

    def _layers(self, fused: FusedWeights, arena: WeightArena) -> Sequence[structs.LayerStruct]:
        """All layers, in memory if the room holds them: else some will be read from disk."""
        if self._room is not None:
            resident = arena.taken + sum(held.nbytes for held in self._held)
            lay_out, count = partial(self._laid, fused), self._config.num_layers
            on_disk = LayersOnDisk(self._core, lay_out, count, self._room, resident)
            if on_disk.split.streamed:
                self.streamed = on_disk.load(self._packed)
                return self.streamed.structs
        return [self._layer(fused.layer(index), form) for index, form in enumerate(self._config.forms)]

    def _laid(self, fused: FusedWeights, layer: int, arena: Arena) -> PackedLayer:
        """One layer in memory of its own, and what packs it; see `LayOut`."""
        before = self._memory, self._jobs, self._linears, self._alone
        self._memory, self._jobs, self._linears = arena, [], {}
        found = PackedLayer(self._layer(fused.layer(layer), self._config.forms[layer]), self._jobs)
        self._memory, self._jobs, self._linears, self._alone = before
        return found

    def _per_layer(self, fused: FusedWeights, beside: Weights | None) -> dict[str, Any]:
        """Fields of a model whose layers read numbers of their own."""
        inputs = fused.per_layer
        if inputs is None:
            return {}
        rows = self._rows_of(inputs.embedding) if beside is None else beside.model.per_layer_embedding
        return {
            "per_layer": self._config.per_layer_size,
            "per_layer_embedding": rows,
            "per_layer_projection": self._linear(inputs.projection),
            "per_layer_norm": self._hold(inputs.norm),
            "per_layer_scale": inputs.scale,
        }

    def _layer(self, layer: LayerWeights, form: LayerForm) -> structs.LayerStruct:
        out_norms, heads = layer.out_norms or (None, None), self._config.heads_of(form)
        products = [
            self._linear(weight, None if layer.qkv_bias is None else layer.qkv_bias[part])
            for part, weight in enumerate(self._side_by_side(layer.qkv))
        ]
        return structs.LayerStruct(
            **dict(zip(("query", "key", "value"), products, strict=False)),
            out=self._linear(layer.attention_out, layer.attention_out_bias, form.residual_scale),
            attention_norm=self._hold_any(layer.attention_norm),
            feed_forward_norm=self._hold_any(layer.mlp_norm),
            attention_out_norm=self._hold_any(out_norms[0]),
            feed_forward_out_norm=self._hold_any(out_norms[1]),
            qk_norm=self._hold_any(None if layer.qk_norm is None else self._by_head(layer.qk_norm, heads)),
            value_norm=self._hold(torch.full((heads.size,), heads.size**0.5)) if form.value_norm else None,
            scale=float(1 / torch.tensor(float(heads.size)).sqrt()) if form.scale is None else form.scale,
            score_cap=form.score_cap,
            window=form.window or 0,
            activation=_ACTIVATIONS[form.activation],
            sinks=self._hold_any(layer.sinks),
            wide_norms=int(form.wide_qk_norm),
            reads_others=int(form.keys_of is not None),
            out_scale=layer.out_scale,
            **self._mlp(layer.mlp, form),
            **self._last(layer.per_layer),
        )

    def _last(self, weights: PerLayerWeights | None) -> dict[str, Any]:
        """Fields of a layer that reads numbers of its own."""
        if weights is None:
            return {}
        return {
            "per_layer_gate": self._linear(weights.gate),
            "per_layer_out": self._linear(weights.out),
            "per_layer_norm": self._hold(weights.norm),
        }

    def _mlp(self, weights: GatedWeights | ExpertWeights, form: LayerForm) -> dict[str, Any]:
        """Fields of a layer: its three matrices, or its experts."""
        if isinstance(weights, GatedWeights):
            return self._gated(weights, form)
        assert form.experts is not None, "its weights are experts"
        experts = [*weights.experts, *([] if weights.shared is None else [weights.shared])]
        array = (structs.Expert * len(experts))(*(structs.Expert(**self._gated(each, form)) for each in experts))
        return {
            "router": self._linear(weights.router, weights.router_bias),
            "expert": array,
            "experts": form.experts.count,
            "chosen": form.experts.chosen,
            "shared": 0 if weights.shared is None else 2 if form.experts.shared_gate else 1,
            "normalized": int(form.experts.normalized),
            "groups": form.experts.groups,
            "top_groups": form.experts.top_groups,
            "expert_scale": form.experts.scale,
            "choice_bias": self._hold_any(weights.choice_bias),
            **({} if weights.beside is None else self._beside(weights.beside, form)),
        }

    def _beside(self, weights: BesideWeights, form: LayerForm) -> dict[str, Any]:
        """Fields of a layer with a feed-forward beside its experts."""
        return {
            **self._gated(weights.dense, form),
            "expert_scales": self._hold(weights.scales),
            "router_norm": self._hold(weights.router_norm),
            "experts_norm": self._hold(weights.experts_norm),
            "dense_out_norm": self._hold(weights.dense_out_norm),
            "experts_out_norm": self._hold(weights.experts_out_norm),
        }

    def _gated(self, weights: GatedWeights, form: LayerForm) -> dict[str, structs.Linear]:
        """Lay the units out in the order in which blocks of ``down`` have them: rows of gate and up move at no cost."""
        down, order = weights.down, order_of_columns([weights.down])
        if isinstance(down, StoredTensor):
            down = replace(down, columns=None)
        gate, up = (ordered(weight, order) for weight in self._side_by_side((weights.gate, weights.up)))
        gate_bias, up_bias = (
            bias if bias is None or order is None else bias[order] for bias in (weights.biases[0], weights.biases[1])
        )
        return {
            "gate": self._linear(gate, gate_bias),
            "up": self._linear(up, up_bias),
            "down": self._linear(down, weights.biases[2], form.residual_scale),
        }

    def _side_by_side(self, weights: Sequence[Operand]) -> Sequence[Operand]:
        """Weights that read the same rows: as numbers those in blocks whose columns lie in orders of their own."""
        if order_of_columns(weights) is not None:
            return weights
        return [self._in_columns(weight) for weight in weights]

    def _in_columns(self, weight: Operand) -> Operand:
        """A weight as numbers where the columns of its blocks lie in another order."""
        if order_of_columns([weight]) is None:
            return weight
        self._alone += 1
        return as_tensor(weight, self._dtype)

    def _by_head(self, norms: Sequence[Tensor], heads: KeyHeads) -> Tensor:
        """The norms of queries and keys, each ``[D]`` or ``[heads * D]``, as ``[query and key heads, D]``."""
        counts = (self._config.num_heads, heads.heads)
        return torch.cat(
            [norm.view(-1, heads.size).expand(count, -1) for norm, count in zip(norms, counts, strict=False)]
        )

    def _rows_of(self, weight: Operand) -> structs.Linear:
        """Lay out an embedding. Plain numbers lie in rows; of blocks, single rows are read where they are packed.

        The rows are copied: a process that reads a mapped file ends when somebody cuts the file short.
        """
        embedding = self._in_columns(weight)
        if isinstance(embedding, StoredTensor) and embedding.format.plain is None:
            return self._linear(embedding)
        kind = self._kind(embedding)
        out, inputs = embedding.shape
        rows = self._rows(embedding, kind).clone()
        return structs.Linear(panels=self._hold(rows), inputs=inputs, outputs=out, kind=kind)

    def _linear(self, weight: Operand, bias_O: Tensor | None = None, scale: float = 1.0) -> structs.Linear:
        """``weight`` is ``[O, I]``; outputs are multiplied by ``scale``. A job packs it, once if it has two uses."""
        bare = bias_O is None and scale == 1
        if bare and id(weight) in self._linears:
            return self._linears[id(weight)][1]
        linear = self._packed_linear(weight, bias_O, scale)
        if bare:
            self._linears[id(weight)] = weight, linear  # which keeps the id
        return linear

    def _packed_linear(self, weight: Operand, bias_O: Tensor | None, scale: float) -> structs.Linear:
        (out, inputs), kind = weight.shape, self._kind(weight)
        linear = structs.Linear(inputs=inputs, outputs=out, kind=kind, order=self._hold_order(weight))
        if bias_O is not None:
            linear.bias = self._padded(bias_O * scale).data_ptr()
        if scale != 1:
            linear.scale = self._padded(torch.full((out,), scale)).data_ptr()
        if self._is_packed_ahead(linear, weight):
            return linear
        panels = -(-out // self._panel)
        linear.panels = self._memory.take(panels * int(self._core.panel_bytes(kind, inputs)))
        if isinstance(weight, Int8Weight):
            linear.scale = self._memory.take(panels * self._panel * torch.float32.itemsize)
            self._jobs.append(lambda: self._pack(linear, _rounded(weight, linear.scale, scale)))
        elif isinstance(weight, StoredTensor):
            self._pack_stored(linear, weight)
        else:
            self._jobs.append(lambda: self._pack(linear, weight.to(self._dtype)))
        return linear

    def _is_packed_ahead(self, linear: structs.Linear, weight: Operand) -> bool:
        """Whether others pack this matrix in the form wanted here; ``linear`` then points at its panels."""
        if not isinstance(weight, StoredTensor) or weight.ahead is None or weight.order is not None or self._room:
            return False
        panels = weight.ahead.panels(int(weight.data.storage_offset()))
        if panels is None or weight.ahead.core.name != self._core.name or weight.format.number != linear.kind:
            return False
        linear.panels, self._ahead = panels, weight.ahead
        return True

    def _kind(self, weight: Operand) -> int:
        """The format to pack in: that of the file, but bfloat16 only where it is computed in."""
        if isinstance(weight, Int8Weight):
            return _INT8
        if isinstance(weight, StoredTensor) and (weight.format is not Format.BF16 or self._dtype == torch.bfloat16):
            return weight.format.number
        return _PLAIN[self._dtype]

    def _rows(self, weight: Operand, kind: int) -> Tensor:
        if isinstance(weight, StoredTensor) and weight.format.number == kind:
            return weight.rows
        return as_tensor(weight, self._dtype)

    def _pack_stored(self, linear: structs.Linear, weight: StoredTensor) -> None:
        """In parts, so that little of a file is in memory beside what is made of it."""
        row_bytes = weight.format.row_bytes(linear.inputs)
        first = 0
        for part in weight.parts(max(_PART // (row_bytes * self._panel), 1) * self._panel):
            self._jobs.append(partial(self._pack_part, linear, part, first))
            first += part.shape[0]

    def _pack_part(self, linear: structs.Linear, part: StoredTensor, first: int) -> None:
        if part.format.number != linear.kind:
            with part.reading():
                self._pack(linear, self._rows(part, linear.kind), first)
        elif not self._pack(linear, packable(part), first):
            raise DamagedWeights(part.origin)
        else:
            part.give_back()

    def _pack(self, linear: structs.Linear, rows: Tensor, first: int = 0) -> bool:
        """``rows`` ``[O, I]`` numbers or ``[O, bytes]`` of blocks, outputs from ``first`` on: a panel begins there.

        Returns whether all numbers, or the scales of blocks, are finite.
        """
        rows = rows.contiguous()
        panels = linear.panels + first // self._panel * self._core.panel_bytes(linear.kind, linear.inputs)
        return bool(self._core.pack(linear.kind, rows.data_ptr(), len(rows), linear.inputs, panels))

    def _padded(self, numbers_O: Tensor) -> Tensor:
        """With zeros up to a whole panel; float32."""
        padded = F.pad(numbers_O.float(), (0, -len(numbers_O) % self._panel)).contiguous()
        self._held.append(padded)
        return padded

    def _hold(self, tensor: Tensor) -> int:
        """The address of ``tensor``, of any shape, which lives as long as the weights."""
        self._held.append(tensor.contiguous())
        return self._held[-1].data_ptr()

    def _hold_order(self, weight: Operand) -> int | None:
        """The address of the order of its columns, int32, if they have one of their own."""
        order = order_of_columns([weight])
        return None if order is None else self._hold(order.int())

    def _hold_any(self, tensor: Tensor | None) -> int | None:
        """The address of ``tensor``, of any shape, if there is one; see `_hold`."""
        return None if tensor is None else self._hold(tensor)


def _rounded(weight: Int8Weight, steps_O: int, scale: float) -> Tensor:
    """The weight's whole numbers ``[O, I]``; their step sizes, times ``scale``, go to the address ``steps_O``."""
    numbers, found = weight.quantized()
    steps = (found * scale).float().contiguous()
    ctypes.memmove(steps_O, steps.data_ptr(), steps.nbytes)
    return numbers
