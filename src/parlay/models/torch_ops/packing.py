"""Packs a checkpoint's weights for `EagerDecoder`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parlay.models.compiled.streaming import WeightRoom
from parlay.models.config import Activation, DecoderConfig, LayerForm
from parlay.models.rope import interleave
from parlay.models.torch_ops.attention_form import Heads
from parlay.models.torch_ops.decoder import (
    DecoderLayer,
    EagerDecoder,
    PerLayerEmbedding,
    PerLayerProducts,
    PrescaledRmsNorm,
)
from parlay.models.torch_ops.experts import place_experts
from parlay.models.torch_ops.linear import pack
from parlay.models.torch_ops.mlp import GatedMlp, MixtureMlp, MlpBesideExperts
from parlay.models.torch_ops.streaming import Lane, Mark, place_layers
from parlay.models.weights.fused import (
    ExpertWeights,
    FusedWeights,
    GatedWeights,
    LayerWeights,
    Operand,
    PerLayerInputs,
    as_tensor,
)


def build(
    config: DecoderConfig,
    weights: Mapping[str, Operand],
    dtype: torch.dtype,
    device: torch.device,
    streaming: tuple[WeightRoom, Lane[Mark]] | None = None,
) -> EagerDecoder:
    """Pack a checkpoint's weights, which have Hugging Face names.

    With ``streaming``, layers beyond the room stay in the host's memory. Raises ParlayError if even the least that
    works does not fit.
    """
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    fused = FusedWeights(config, weights, compute)
    packer = _Packer(config, dtype, compute, device)
    layers = (packer.layer(fused.layer(index), form) for index, form in enumerate(config.forms))
    bare = EagerDecoder(
        compute=compute,
        embedding=packer.tensor(fused.embedding).clone(),  # not a mapped file, which someone may truncate
        layers=(),
        norm=packer.any_norm(fused.final_norm),
        head=pack(packer.tensor(fused.head), None),
        beside_norm=packer.any_norm(fused.beside_norm),
        raw_tap=config.head is not None,
        embedding_scale=config.embedding_scale,
        logit_cap=config.logit_cap,
        per_layer=packer.per_layer(fused.per_layer),
    )
    if streaming is None:
        return replace(bare, layers=tuple(layers))
    room, lane = streaming
    place = place_experts if any(form.experts is not None for form in config.forms) else place_layers
    placed = place(layers, room, bare.resident_bytes, lane, device)
    return replace(bare, layers=placed.layers, in_order=placed.in_order, streamed_bytes=placed.streamed_bytes)


def build_layer(config: DecoderConfig, weights: Mapping[str, Operand], index: int) -> DecoderLayer:
    """Pack a single layer in float32."""
    fused = FusedWeights(config, weights, torch.float32)
    packer = _Packer(config, torch.float32, torch.float32, torch.device("cpu"))
    return packer.layer(fused.layer(index), config.forms[index])


@dataclass(frozen=True, slots=True)
class _Packer:
    """Converts weights to the dtype, device and order of `EagerDecoder`."""

    config: DecoderConfig
    dtype: torch.dtype
    compute: torch.dtype
    device: torch.device

    def layer(self, weights: LayerWeights, form: LayerForm) -> DecoderLayer:
        out_norms, mlp, last = weights.out_norms, weights.mlp, weights.per_layer
        heads = Heads(self.config.num_heads, *self.config.heads_of(form))
        biases = weights.qkv_bias
        bias = None if biases is None else self._paired(biases, heads).to(self.device, self.dtype)
        return DecoderLayer(
            heads=heads,
            attention_norm=self.any_norm(weights.attention_norm),
            qkv=pack(self._paired([self.tensor(part) for part in weights.qkv], heads), bias),
            qk_norm=self._qk_norms(weights, form, heads),
            attention_out=pack(self.tensor(weights.attention_out), self._bias(weights.attention_out_bias)),
            mlp_norm=self.any_norm(weights.mlp_norm),
            mlp=self._gated(mlp, form.activation) if isinstance(mlp, GatedWeights) else self._mixture(mlp, form),
            out_norms=None if out_norms is None else (self._norm(out_norms[0]), self._norm(out_norms[1])),
            residual_scale=form.residual_scale,
            sinks=None if weights.sinks is None else weights.sinks.to(self.device),
            out_scale=weights.out_scale,
            per_layer=None
            if last is None
            else PerLayerProducts(
                gate=pack(self.tensor(last.gate), None),
                out=pack(self.tensor(last.out), None),
                norm=self._norm(last.norm),
                activation=form.activation,
            ),
        )

    def per_layer(self, inputs: PerLayerInputs | None) -> PerLayerEmbedding | None:
        """Pack the weights of per-layer inputs, if the model has any."""
        if inputs is None:
            return None
        floor = torch.tensor(inputs.floor**0.5, dtype=self.compute, device=self.device)
        return PerLayerEmbedding(
            embedding=self.tensor(inputs.embedding).clone(),  # not a mapped file, as above
            projection=pack(self.tensor(inputs.projection), None),
            norm=PrescaledRmsNorm(floor, inputs.norm.to(self.device)),
            scale=inputs.scale,
        )

    def _gated(self, weights: GatedWeights, activation: Activation) -> GatedMlp:
        gate, up, down = (self._bias(bias) for bias in weights.biases)
        gate_up = None if gate is None or up is None else torch.cat((gate, up))
        return GatedMlp(
            gate_up=pack(torch.cat((self.tensor(weights.gate), self.tensor(weights.up))), gate_up),
            down=pack(self.tensor(weights.down), down),
            activation=activation,
        )

    def _mixture(self, weights: ExpertWeights, form: LayerForm) -> MixtureMlp | MlpBesideExperts:
        mixture, beside = self._experts(weights, form), weights.beside
        if beside is None:
            return mixture
        return MlpBesideExperts(
            self._gated(beside.dense, form.activation),
            replace(mixture, scales=beside.scales.to(self.device)),
            self._norm(beside.router_norm),
            self._norm(beside.experts_norm),
            self._norm(beside.dense_out_norm),
            self._norm(beside.experts_out_norm),
        )

    def _experts(self, weights: ExpertWeights, form: LayerForm) -> MixtureMlp:
        assert form.experts is not None, "its weights are experts"
        router = as_tensor(weights.router, self.compute).to(self.device)
        bias = None if weights.router_bias is None else weights.router_bias.to(self.device, self.compute)
        return MixtureMlp(
            form=form.experts,
            router=pack(router, bias),
            experts=tuple(self._gated(expert, form.activation) for expert in weights.experts),
            shared=None if weights.shared is None else self._gated(weights.shared, form.activation),
            choice_bias=None if weights.choice_bias is None else weights.choice_bias.to(self.device),
        )

    def _bias(self, bias_O: Tensor | None) -> Tensor | None:
        return None if bias_O is None else bias_O.to(self.device, self.dtype)

    def tensor(self, weight: Operand) -> Tensor:
        return as_tensor(weight, self.dtype).to(self.device)

    def any_norm(self, weight: Tensor | None) -> PrescaledRmsNorm | None:
        """The norm of ``weight`` ``[n]``, or None if there is none."""
        return None if weight is None else self._norm(weight)

    def _norm(self, weight: Tensor) -> PrescaledRmsNorm:
        """The norm of ``weight`` ``[n]`` or ``[heads, n]``."""
        floor = (weight.shape[-1] * self.config.rms_norm_eps) ** 0.5
        return PrescaledRmsNorm(torch.tensor(floor, dtype=self.compute, device=self.device), weight.to(self.device))

    def _paired(self, parts: Sequence[Tensor], heads: Heads) -> Tensor:
        """Concatenate query, key and value rows ``[heads * D, ...]``; the first two are put in rotation order."""
        turned = [interleave(part, heads.head_dim) for part in parts[:2]]
        return torch.cat([*turned, *parts[2:]])

    def _qk_norms(self, weights: LayerWeights, form: LayerForm, heads: Heads) -> tuple[PrescaledRmsNorm, ...]:
        if weights.qk_norm is None:
            return ()
        parts = [interleave(part, heads.head_dim) for part in weights.qk_norm]
        if form.wide_qk_norm:
            return tuple(self._norm(part) for part in parts)
        counts = (heads.num_heads, heads.num_kv_heads)
        each = [part.expand(count, -1) for part, count in zip(parts, counts, strict=False)]
        if form.value_norm and form.keys_of is None:
            each.append(torch.full_like(parts[0], heads.head_dim**0.5).expand(heads.num_kv_heads, -1))
        return (self._norm(torch.cat(each)),)
