"""A checkpoint's weights, grouped as all decoders pack them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parlay.models.config import DecoderConfig, Experts, UnsupportedModel
from parlay.models.rope import row_order
from parlay.models.weights.dequantize import dense
from parlay.models.weights.formats import Format
from parlay.models.weights.quantize import Int8Weight
from parlay.models.weights.shapes import Weight
from parlay.models.weights.stored import StoredTensor

Operand = Weight | Int8Weight
"""A weight for decoders: as in the checkpoint, or to be quantized."""
ROUTERS = ("mlp.gate.weight", "mlp.shared_expert_gate.weight")
"""Suffixes of matrices that choose a row's experts, which are never quantized."""


class QuantizeRefused(UnsupportedModel):
    """Raised if the weights can't be stored in eight bits."""


@dataclass(frozen=True, slots=True)
class GatedWeights:
    """A gated feed-forward with its optional biases."""

    gate: Operand
    up: Operand
    down: Operand
    biases: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)


@dataclass(frozen=True, slots=True)
class BesideWeights:
    """A feed-forward ``dense`` next to experts, with that layer's norms and the experts' ``scales``."""

    dense: GatedWeights
    router_norm: Tensor
    experts_norm: Tensor
    dense_out_norm: Tensor
    experts_out_norm: Tensor
    scales: Tensor


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """A mixture of experts. ``router`` ``[E, H]`` has one more row if a ``shared`` expert has a gate.

    ``choice_bias`` ``[E]``, float32, is added to the sigmoids by which experts are chosen.
    """

    router: StoredTensor
    router_bias: Tensor | None
    choice_bias: Tensor | None
    experts: tuple[GatedWeights, ...]
    shared: GatedWeights | None
    beside: BesideWeights | None


@dataclass(frozen=True, slots=True)
class PerLayerWeights:
    """Gate, projection and norm of a layer's per-layer inputs."""

    gate: Operand
    out: Operand
    norm: Tensor


@dataclass(frozen=True, slots=True)
class PerLayerInputs:
    """The source of per-layer inputs: ``embedding`` ``[V, L * P]`` times ``scale``, plus a normed projection.

    ``norm`` ``[P]`` applies to each layer's outputs of ``projection`` ``[L * P, H]``; ``floor`` is its epsilon. The
    sum's factor, 1 / sqrt(2), is included in the norm and in ``scale``.
    """

    embedding: Operand
    projection: Operand
    norm: Tensor
    floor: float
    scale: float


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer. Norms over n numbers are the checkpoint's weights times sqrt(n).

    ``qkv`` are the query, key and value weights; only the query weights in layers that use other layers' keys.
    ``qkv_bias`` are their biases, ``qk_norm`` the norms of query and key heads, ``out_norms`` those of the outputs of
    attention and feed-forward, and ``sinks`` ``[heads]`` scores of keys without a value. ``out_scale`` multiplies the
    layer's output.
    """

    attention_norm: Tensor | None
    qkv: tuple[Operand, ...]
    qkv_bias: tuple[Tensor, ...] | None
    qk_norm: tuple[Tensor, ...] | None
    attention_out: Operand
    attention_out_bias: Tensor | None
    sinks: Tensor | None
    mlp_norm: Tensor | None
    mlp: GatedWeights | ExpertWeights
    out_norms: tuple[Tensor, Tensor] | None
    out_scale: float
    per_layer: PerLayerWeights | None


class FusedWeights:
    """Groups ``weights``, which have Hugging Face names; ``compute`` is the dtype of norms and biases."""

    def __init__(self, config: DecoderConfig, weights: Mapping[str, Operand], compute: torch.dtype) -> None:
        self._config, self._weights, self._compute = config, weights, compute

    @property
    def embedding(self) -> Operand:
        """The embedding ``[V, H]``."""
        return self._weights["model.embed_tokens.weight"]

    @property
    def head(self) -> Operand:
        """The LM head's weight, which is the embedding if they are tied."""
        return self._weights.get("lm_head.weight", self.embedding)

    @property
    def final_norm(self) -> Tensor | None:
        """The norm before the LM head, multiplied by the logits' scale; None if there is none."""
        return None if self._bare else self._norm("model.norm.weight") * self._config.logit_scale

    @property
    def beside_norm(self) -> Tensor | None:
        """The norm of embeddings that attention reads next to features; see `HeadForm`."""
        head = self._config.head
        return self._norm("model.layers.0.beside_layernorm.weight") if head and head.beside else None

    @property
    def _bare(self) -> bool:
        """Whether the model is a draft head without these norms; see `HeadForm`."""
        return self._config.head is not None and self._config.head.bare

    @property
    def _as_they_are(self) -> bool:
        """Whether the first layer's attention reads its inputs without a norm; see `HeadForm`."""
        return self._config.head is not None and (self._config.head.bare or self._config.head.normed)

    def layer(self, index: int) -> LayerWeights:
        """The weights of one layer."""
        of, at = self._weights, f"model.layers.{index}."
        form = self._config.forms[index]
        order = row_order(form.rope, self._config.heads_of(form).size)
        parts = "q" if form.keys_of is not None else "qkk" if form.keys_as_values else "qkv"
        names, orders = [f"{at}self_attn.{part}_proj" for part in parts], (order, order, None)
        norms = [f"{at}self_attn.{part}_norm.weight" for part in parts[:2]]
        out_norms = at + "attention_out_layernorm.weight", at + "mlp_out_layernorm.weight"
        bare = not form.pre_norms or (index == 0 and self._as_they_are)
        return LayerWeights(
            attention_norm=None if bare else self._norm(at + "input_layernorm.weight"),
            qkv=tuple(ordered(of[f"{name}.weight"], own) for name, own in zip(names, orders, strict=False)),
            qkv_bias=tuple(self._in_order(f"{name}.bias", own) for name, own in zip(names, orders, strict=False))
            if form.qkv_bias
            else None,
            qk_norm=tuple(self._norm(name, order) for name in norms) if form.qk_norm else None,
            attention_out=of[at + "self_attn.o_proj.weight"],
            attention_out_bias=self._vector(at + "self_attn.o_proj.bias") if form.out_bias else None,
            sinks=self._vector(at + "self_attn.sinks.weight") if form.sinks else None,
            mlp_norm=self._norm(at + "post_attention_layernorm.weight") if form.pre_norms else None,
            mlp=self.mlp(index),
            out_norms=(self._norm(out_norms[0]), self._norm(out_norms[1])) if form.post_norms else None,
            out_scale=float(self._vector(at + "layer_scalar.weight")) if form.out_scale else 1.0,
            per_layer=self._per_layer(at) if self._config.per_layer_size else None,
        )

    def mlp(self, index: int) -> GatedWeights | ExpertWeights:
        """The feed-forward of one layer."""
        at, experts = f"model.layers.{index}.", self._config.forms[index].experts
        return self._gated(at + "mlp.") if experts is None else self._experts(at, experts)

    @property
    def per_layer(self) -> PerLayerInputs | None:
        """The source of per-layer inputs; None if the model has none."""
        config, of = self._config, self._weights
        if not config.per_layer_size:
            return None
        return PerLayerInputs(
            embedding=of["model.embed_tokens_per_layer.weight"],
            projection=of["model.per_layer_model_projection.weight"],
            norm=self._norm("model.per_layer_projection_norm.weight") / math.sqrt(2),
            floor=config.per_layer_size * config.rms_norm_eps * config.hidden_size,
            scale=math.sqrt(config.per_layer_size / 2),
        )

    def _per_layer(self, at: str) -> PerLayerWeights:
        gate, out = (self._weights[f"{at}per_layer_{part}.weight"] for part in ("input_gate", "projection"))
        return PerLayerWeights(gate, out, self._norm(at + "per_layer_out_layernorm.weight"))

    def _gated(self, at: str, bias: bool = False) -> GatedWeights:
        parts = [f"{at}{part}_proj" for part in ("gate", "up", "down")]
        gate, up, down = (self._weights[f"{part}.weight"] for part in parts)
        if not bias:
            return GatedWeights(gate, up, down)
        gate_bias, up_bias, down_bias = (self._vector(f"{part}.bias") for part in parts)
        return GatedWeights(gate, up, down, (gate_bias, up_bias, down_bias))

    def _beside(self, at: str) -> BesideWeights:
        """The router reads x / |x| times its norm, the experts sqrt(H) x / |x| times theirs, for x of H numbers."""
        return BesideWeights(
            dense=self._gated(at + "mlp."),
            router_norm=self._vector(at + "router_layernorm.weight"),
            experts_norm=self._norm(at + "experts_layernorm.weight"),
            dense_out_norm=self._norm(at + "dense_out_layernorm.weight"),
            experts_out_norm=self._norm(at + "experts_out_layernorm.weight"),
            scales=self._vector(at + "mlp.expert_scale.weight"),
        )

    def _experts(self, layer: str, experts: Experts) -> ExpertWeights:
        """The router stays in float32 whatever the model computes in, as a row's experts depend on its last bits."""
        at = layer + "mlp."
        router = as_tensor(self._weights[at + "gate.weight"], torch.float32)
        if experts.shared_gate:
            shared_gate = as_tensor(self._weights[at + "shared_expert_gate.weight"], torch.float32)
            router = torch.cat((router, shared_gate))
        return ExpertWeights(
            router=StoredTensor(Format.F32, tuple(router.shape), router.contiguous().view(torch.uint8)),
            router_bias=self._vector(at + "gate.bias") if experts.bias else None,
            choice_bias=self._own(at + "gate.e_score_correction_bias", torch.float32) if experts.sigmoid else None,
            experts=tuple(self._gated(f"{at}experts.{index}.", experts.bias) for index in range(experts.count)),
            shared=self._gated(at + "shared_expert.") if experts.shared else None,
            beside=self._beside(layer) if experts.beside else None,
        )

    def _norm(self, name: str, order: Tensor | None = None) -> Tensor:
        """The norm ``name`` times the root of its size, with each head's numbers in the ``order`` ``[D]``."""
        weight = self._in_order(name, order)
        return weight * math.sqrt(len(weight))

    def _in_order(self, name: str, order: Tensor | None) -> Tensor:
        """The vector ``name``, with each head's numbers in the ``order`` ``[D]``."""
        vector = self._vector(name)
        return vector if order is None else vector.view(-1, len(order))[:, order].flatten()

    def _vector(self, name: str) -> Tensor:
        return self._own(name, self._compute)

    def _own(self, name: str, dtype: torch.dtype) -> Tensor:
        """A copy of a weight's numbers, as a mapped file may be truncated later."""
        return as_tensor(self._weights[name], dtype).clone()


def as_tensor(weight: Operand, dtype: torch.dtype) -> Tensor:
    """A weight as a plain tensor."""
    if isinstance(weight, Tensor):
        return weight.to(dtype)
    if isinstance(weight, StoredTensor):
        with weight.reading():
            return dense(weight, dtype)
    return weight.dense(dtype)


def ordered(weight: Operand, order: Tensor | None) -> Operand:
    """A matrix's rows ``[heads * D, ...]``, each head's in the ``order`` ``[D]``; None: unchanged."""
    if order is None:
        return weight
    rows = (torch.arange(weight.shape[0]).view(-1, len(order))[:, order]).flatten()
    if isinstance(weight, StoredTensor):
        return replace(weight, order=rows if weight.order is None else weight.order[rows])
    return weight[rows] if isinstance(weight, Tensor) else Int8Weight(weight.source[rows])


def order_of_columns(weights: Sequence[Operand]) -> Tensor | None:
    """The common column order of those weights that are in blocks; None if there is none."""
    blocks = [
        None if isinstance(weight, Int8Weight) else weight.columns
        for weight in weights
        if isinstance(weight, Int8Weight) or (isinstance(weight, StoredTensor) and weight.format.plain is None)
    ]
    first = blocks[0] if blocks else None
    return None if first is None or any(order is None or not order.equal(first) for order in blocks) else first


def orders_of_columns(weights: Mapping[str, Operand]) -> dict[str, Tensor]:
    """The column order of each weight whose columns are permuted."""
    orders = {name: order_of_columns([weight]) for name, weight in weights.items()}
    return {name: order for name, order in orders.items() if order is not None}


def chosen_rows(weight: Operand, ids_N: Tensor) -> Operand:
    """The rows with these ids, int64 ``[n]``, as a weight; quantized blocks stay quantized."""
    if isinstance(weight, StoredTensor):
        return weight.chosen(ids_N)
    return weight[ids_N] if isinstance(weight, Tensor) else weight.dense(torch.float32)[ids_N]


def rows_of(weight: Operand, ids_N: Tensor) -> Tensor:
    """The rows with these ids, int64 ``[n]``, as float32 ``[n, ...]``."""
    if isinstance(weight, Tensor):
        return weight[ids_N].float()
    if isinstance(weight, StoredTensor):
        return as_tensor(weight.chosen(ids_N), torch.float32)
    return weight.dense(torch.float32)[ids_N]


def multiplied(weights: Mapping[str, Operand]) -> dict[str, Operand]:
    """The matrices of products, except routers: those of the layers, and the LM head."""
    embedding = weights["model.embed_tokens.weight"]
    read_by_row = (embedding, weights.get("model.embed_tokens_per_layer.weight"))
    matrices = {
        name: weight
        for name, weight in weights.items()
        if len(weight.shape) == 2 and not any(weight is each for each in read_by_row) and not name.endswith(ROUTERS)
    }
    return {"lm_head.weight": embedding} | matrices


def in_eight_bits(weights: Mapping[str, Operand]) -> dict[str, Operand]:
    """The checkpoint with all plain matrices of products quantized to int8, but not the embedding.

    Quantized matrices stay as they are. Raises QuantizeRefused if all are quantized.
    """
    numbers = {
        name: weight if isinstance(weight, Tensor) else as_tensor(weight, torch.float32)
        for name, weight in multiplied(weights).items()
        if isinstance(weight, Tensor) or (isinstance(weight, StoredTensor) and weight.format.plain is not None)
    }
    if not numbers:
        found = stored_as(weights)
        raise QuantizeRefused(
            f"quantize='int8' can't be honoured: the weights are in {found} already; remove it", "quantize"
        )
    return {**weights, **{name: Int8Weight(tensor) for name, tensor in numbers.items()}}


def stored_as(weights: Mapping[str, Operand]) -> str:
    """The formats of weights that are not plain numbers, the most frequent first; empty if all are plain."""
    counts: Counter[str] = Counter()
    for weight in weights.values():
        if isinstance(weight, Int8Weight):
            counts["int8"] += math.prod(weight.shape)
        elif isinstance(weight, StoredTensor) and weight.format.plain is None:
            counts[weight.format.name] += math.prod(weight.shape)
    return ", ".join(name for name, _ in counts.most_common())
