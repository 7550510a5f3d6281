"""The Llama lineage as a function of rows: weights arranged for speed, and the loop over layers.

Rows of all sequences lie in one matrix ``[N, H]``; only attention knows whose they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from parlay.models.config import Activation, DecoderConfig, LayerForm
from parlay.models.forward import Group, SegmentFeatures, Taps
from parlay.models.rope import interleave
from parlay.models.torch_ops.adapters import NO_ADAPTERS, OUT, QKV, RowAdapters
from parlay.models.torch_ops.attention import Attend
from parlay.models.torch_ops.attention_form import Heads, capped
from parlay.models.torch_ops.linear import Linear, SummedLinear, pack
from parlay.models.torch_ops.mlp import GatedMlp, MixtureMlp
from parlay.models.weights.fused import ExpertWeights, FusedWeights, GatedWeights, LayerWeights, Operand, as_tensor
from parlay.types import Skip


@dataclass(frozen=True, slots=True)
class PrescaledRmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last n numbers, as x / hypot(|x|, sqrt(n eps)) * (sqrt(n) weight).

    ``floor`` ``[]`` is sqrt(n eps), and ``weight`` ``[n]`` or ``[heads, n]`` carries sqrt(n).
    """

    floor: Tensor
    weight: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` ``[..., n]`` normed, in its own dtype."""
        length = torch.linalg.vector_norm(x, 2, -1, True, dtype=self.floor.dtype).hypot_(self.floor)
        return torch.div(x, length).mul_(self.weight).to(x.dtype)

    def inplace(self, x: Tensor) -> None:
        """Norm ``x`` ``[..., n]``, which has the dtype of the norm already."""
        x.div_(torch.linalg.vector_norm(x, 2, -1, True).hypot_(self.floor)).mul_(self.weight)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer; query, key and value weights form one product.

    ``qk_norm`` norms each head of queries and keys; with two norms, all heads of each together. ``sinks`` are
    ``[heads]``.
    """

    attention_norm: PrescaledRmsNorm | None
    qkv: Linear
    qk_norm: tuple[PrescaledRmsNorm, ...]
    attention_out: Linear
    mlp_norm: PrescaledRmsNorm | None
    mlp: GatedMlp | MixtureMlp
    out_norms: tuple[PrescaledRmsNorm, PrescaledRmsNorm] | None
    residual_scale: float = 1.0
    sinks: Tensor | None = None

    def add(self, hidden_NH: Tensor, given_NH: Tensor, half: int) -> None:
        """Add what attention (0) or feed-forward (1) gives, normed and scaled where the layer does so."""
        if self.residual_scale != 1:
            given_NH = given_NH.mul(self.residual_scale)
        hidden_NH.add_(given_NH if self.out_norms is None else self.out_norms[half](given_NH))

    def feed_forward(self, hidden_NH: Tensor, adapters: RowAdapters, layer: int) -> Tensor:
        """Run the second half of layer number ``layer``, up to what it gives: ``[N, H]``."""
        return self.mlp(hidden_NH if self.mlp_norm is None else self.mlp_norm(hidden_NH), adapters, layer)


@dataclass(frozen=True, slots=True)
class EagerDecoder:
    """Weights of a whole model. ``compute`` is the dtype of norms, rotations and exact attention.

    ``embedding`` is ``[V, H]``.
    """

    heads: Heads
    compute: torch.dtype
    embedding: Tensor
    layers: tuple[DecoderLayer, ...]
    norm: PrescaledRmsNorm | None
    head: Linear
    beside_norm: PrescaledRmsNorm | None = None
    """Of embeddings that the first layer's attention reads beside the rows' inputs; see `HeadForm`."""
    raw_tap: bool = False
    embedding_scale: float = 1.0
    logit_cap: float = 0.0

    def embed(self, ids_N: Tensor) -> Tensor:
        """The rows' embeddings ``[N, H]``, in memory of their own."""
        embedded_NH = F.embedding(ids_N, self.embedding)
        return embedded_NH if self.embedding_scale == 1 else embedded_NH.mul_(self.embedding_scale)

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """``[N, V]`` of rows that are normed for the head."""
        logits_NV = self.head(hidden_NH)
        for row in logits_NV if self.logit_cap else ():  # one by one, or its number would show in its last bits
            capped(row, self.logit_cap)
        return logits_NV

    def run(
        self,
        hidden_NH: Tensor,
        plan: Callable[[Tensor], Sequence[Attend]],
        taps: Taps,
        skip: Skip = frozenset(),
        *,
        embedded_NH: Tensor | None = None,
        joining: Sequence[SegmentFeatures] = (),
        adapters: RowAdapters = NO_ADAPTERS,
    ) -> Tensor:
        """Hidden states after the last layer ``[N, H]``. Those that enter the tapped layers go to ``taps``.

        ``hidden_NH`` are the rows' inputs, which are overwritten. ``plan`` gets the matrix ``[N, heads * D]`` that
        attention writes to, and returns how each sequence attends. The sub-layers of ``skip`` do not run.
        ``embedded_NH`` is for decoders with a ``beside_norm``. Rows of ``joining`` run in all layers; what they are
        before their own is never seen. ``adapters`` are those of the rows.
        """
        mixed = hidden_NH.new_zeros(hidden_NH.shape[0], self.heads.num_heads * self.heads.head_dim)
        attends = plan(mixed)
        for index, layer in enumerate(self.layers):
            _join(hidden_NH, [given for given in joining if given.features.join and given.features.join.layer == index])
            taps.take(index, hidden_NH)
            if ("attention", index) not in skip:
                qkv = self._qkv(index, hidden_NH, embedded_NH if index == 0 else None, adapters)
                for attend in attends:
                    attend(index, qkv)
                given = layer.attention_out(mixed)
                adapters.add((index, None, OUT), mixed, given)
                layer.add(hidden_NH, given, 0)
            if ("mlp", index) not in skip:
                layer.add(hidden_NH, layer.feed_forward(hidden_NH, adapters, index), 1)
        return hidden_NH

    def summed(self, group: Group) -> EagerDecoder:
        """The same decoder as part of a group, whose sub-layers give sums over all."""
        layers: list[DecoderLayer] = []
        for layer in self.layers:
            mlp = layer.mlp
            if isinstance(mlp, GatedMlp):
                mlp = replace(mlp, down=SummedLinear(mlp.down, group))
            else:
                mlp = replace(mlp, group=group)
            layers.append(replace(layer, attention_out=SummedLinear(layer.attention_out, group), mlp=mlp))
        return replace(self, layers=tuple(layers))

    def last(self, hidden_NH: Tensor) -> Tensor:
        """Norm the rows for the head, unless the model has no such norm."""
        return hidden_NH if self.norm is None else self.norm(hidden_NH)

    def _qkv(self, index: int, hidden_NH: Tensor, embedded_NH: Tensor | None, adapters: RowAdapters) -> Tensor:
        """``[N, qkv_heads, D/2]`` complex: query, key and value heads as pairs, normed where the model does so."""
        heads, layer = self.heads, self.layers[index]
        normed = hidden_NH if layer.attention_norm is None else layer.attention_norm(hidden_NH)
        if self.beside_norm is not None and embedded_NH is not None:
            normed = torch.cat((self.beside_norm(embedded_NH), normed), -1)
        flat = layer.qkv(normed)
        adapters.add((index, None, QKV), normed, flat)
        if flat.dtype != self.compute:
            flat = flat.to(self.compute)
        if len(layer.qk_norm) == 1:
            rows = flat.view(-1, heads.qkv_heads, heads.head_dim)
            layer.qk_norm[0].inplace(rows.narrow(1, 0, heads.num_heads + heads.num_kv_heads))
        elif layer.qk_norm:
            query, key = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
            layer.qk_norm[0].inplace(flat.narrow(1, 0, query))
            layer.qk_norm[1].inplace(flat.narrow(1, query, key))
        return torch.view_as_complex(flat.view(-1, heads.qkv_heads, heads.head_dim // 2, 2))


def _join(hidden_NH: Tensor, joining: Sequence[SegmentFeatures]) -> None:
    """Rows that begin here get their state; see `Join`."""
    for _, first, features, anchors in joining:
        assert features.join is not None, "only such rows join"
        down_RH, up_RH = features.join.down_RH.to(hidden_NH.device), features.join.up_RH.to(hidden_NH.device)
        for row, (anchor, given_H) in enumerate(zip(anchors, features.rows_KH.to(hidden_NH.device), strict=True)):
            state_H = hidden_NH[anchor].float()  # one by one: rows must not depend on each other
            hidden_NH[first + row] = (given_H + state_H + (down_RH @ state_H) @ up_RH).to(hidden_NH.dtype)


def build(
    config: DecoderConfig, weights: Mapping[str, Operand], dtype: torch.dtype, device: torch.device
) -> EagerDecoder:
    """Pack a checkpoint's weights (Hugging Face names) for `EagerDecoder`."""
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    fused = FusedWeights(config, weights, compute)
    packer = _Packer(config, dtype, compute, device)
    return EagerDecoder(
        heads=Heads(config.num_heads, config.num_kv_heads, config.head_dim),
        compute=compute,
        embedding=packer.tensor(fused.embedding).clone(),  # no mapped file, which somebody may cut short
        layers=tuple(packer.layer(fused.layer(index), form) for index, form in enumerate(config.forms)),
        norm=packer.any_norm(fused.final_norm),
        head=pack(packer.tensor(fused.head), None),
        beside_norm=packer.any_norm(fused.beside_norm),
        raw_tap=config.head is not None,
        embedding_scale=config.embedding_scale,
        logit_cap=config.logit_cap,
    )


def build_layer(config: DecoderConfig, weights: Mapping[str, Operand], index: int) -> DecoderLayer:
    """Pack one layer alone, in float32."""
    fused = FusedWeights(config, weights, torch.float32)
    packer = _Packer(config, torch.float32, torch.float32, torch.device("cpu"))
    return packer.layer(fused.layer(index), config.forms[index])


@dataclass(frozen=True, slots=True)
class _Packer:
    """Puts weights into the dtype, the device and the order in which `EagerDecoder` reads them."""

    config: DecoderConfig
    dtype: torch.dtype
    compute: torch.dtype
    device: torch.device

    def layer(self, weights: LayerWeights, form: LayerForm) -> DecoderLayer:
        out_norms, mlp = weights.out_norms, weights.mlp
        bias = None if weights.qkv_bias is None else self._paired(weights.qkv_bias).to(self.device, self.dtype)
        return DecoderLayer(
            attention_norm=self.any_norm(weights.attention_norm),
            qkv=pack(self._paired([self.tensor(part) for part in weights.qkv]), bias),
            qk_norm=self._qk_norms(weights, form),
            attention_out=pack(self.tensor(weights.attention_out), self._bias(weights.attention_out_bias)),
            mlp_norm=self.any_norm(weights.mlp_norm),
            mlp=self._gated(mlp, form.activation) if isinstance(mlp, GatedWeights) else self._mixture(mlp, form),
            out_norms=None if out_norms is None else (self._norm(out_norms[0]), self._norm(out_norms[1])),
            residual_scale=form.residual_scale,
            sinks=None if weights.sinks is None else weights.sinks.to(self.device),
        )

    def _gated(self, weights: GatedWeights, activation: Activation) -> GatedMlp:
        gate, up, down = (self._bias(bias) for bias in weights.biases)
        gate_up = None if gate is None or up is None else torch.cat((gate, up))
        return GatedMlp(
            gate_up=pack(torch.cat((self.tensor(weights.gate), self.tensor(weights.up))), gate_up),
            down=pack(self.tensor(weights.down), down),
            activation=activation,
        )

    def _mixture(self, weights: ExpertWeights, form: LayerForm) -> MixtureMlp:
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
        """Make the norm of ``weight`` ``[n]``, if there is one."""
        return None if weight is None else self._norm(weight)

    def _norm(self, weight: Tensor) -> PrescaledRmsNorm:
        """Make the norm of ``weight`` ``[n]`` or ``[heads, n]``."""
        floor = (weight.shape[-1] * self.config.rms_norm_eps) ** 0.5
        return PrescaledRmsNorm(torch.tensor(floor, dtype=self.compute, device=self.device), weight.to(self.device))

    def _paired(self, parts: Sequence[Tensor]) -> Tensor:
        """Query, key and value rows ``[heads * D, ...]`` as one; the first two are put in the order of rotations."""
        turned = [interleave(part, self.config.head_dim) for part in parts[:2]]
        return torch.cat([*turned, parts[2]])

    def _qk_norms(self, weights: LayerWeights, form: LayerForm) -> tuple[PrescaledRmsNorm, ...]:
        if weights.qk_norm is None:
            return ()
        parts = [interleave(part, self.config.head_dim) for part in weights.qk_norm]
        if form.wide_qk_norm:
            return tuple(self._norm(part) for part in parts)
        counts = (self.config.num_heads, self.config.num_kv_heads)
        heads = [part.expand(count, -1) for part, count in zip(parts, counts, strict=True)]
        return (self._norm(torch.cat(heads)),)
