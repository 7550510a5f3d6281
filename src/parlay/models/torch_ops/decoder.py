"""The decoder of Llama-like models as a function of rows: weights arranged for speed, and the loop over layers.

Rows of all sequences are in one matrix ``[N, H]``; only attention knows their sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from parlay.models.config import Activation
from parlay.models.forward import SegmentFeatures, Taps
from parlay.models.part import Group
from parlay.models.torch_ops.adapters import NO_ADAPTERS, OUT, QKV, RowAdapters
from parlay.models.torch_ops.attention import Attend
from parlay.models.torch_ops.attention_form import Heads, capped
from parlay.models.torch_ops.linear import Linear, moved, summed
from parlay.models.torch_ops.mlp import GatedMlp, MixtureMlp, MlpBesideExperts, gated_product
from parlay.types import Skip


@dataclass(frozen=True, slots=True)
class PrescaledRmsNorm:
    """RMS norm x / sqrt(mean(x^2) + eps) * weight over the last n numbers, computed as x / hypot(|x|, sqrt(n eps)) *
    (sqrt(n) weight).

    ``floor`` ``[]`` is sqrt(n eps), and ``weight`` ``[n]`` or ``[heads, n]`` includes sqrt(n).
    """

    floor: Tensor
    weight: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Norm ``x`` ``[..., n]``; the result has its dtype."""
        length = torch.linalg.vector_norm(x, 2, -1, True, dtype=self.floor.dtype).hypot_(self.floor)
        return torch.div(x, length).mul_(self.weight).to(x.dtype)

    def inplace(self, x: Tensor) -> None:
        """Norm ``x`` ``[..., n]`` in place; it must have the norm's dtype."""
        x.div_(torch.linalg.vector_norm(x, 2, -1, True).hypot_(self.floor)).mul_(self.weight)


@dataclass(frozen=True, slots=True)
class PerLayerProducts:
    """Gate, projection and norm of a layer's per-layer inputs."""

    gate: Linear
    out: Linear
    norm: PrescaledRmsNorm
    activation: Activation

    def __call__(self, hidden_NH: Tensor, numbers_NP: Tensor) -> Tensor:
        """The ``[N, H]`` that is added at the end of the layer."""
        gated_NP = gated_product(torch.cat((self.gate(hidden_NH), numbers_NP), 1), self.activation)
        return self.norm(self.out(gated_NP))


@dataclass(frozen=True, slots=True)
class PerLayerEmbedding:
    """Computes per-layer inputs; see `PerLayerInputs`."""

    embedding: Tensor
    projection: Linear
    norm: PrescaledRmsNorm
    scale: float

    def __call__(self, ids_N: Tensor, inputs_NH: Tensor) -> Tensor:
        """The per-layer inputs ``[N, layers, P]`` of rows with the first layer's inputs ``inputs_NH``."""
        projected_NLP = self.projection(inputs_NH).view(len(ids_N), -1, len(self.norm.weight))
        return F.embedding(ids_N, self.embedding).view_as(projected_NLP) * self.scale + self.norm(projected_NLP)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer; query, key and value weights form one product.

    ``qk_norm`` norms each head of queries and keys (and of values if the model does); two norms apply to all query
    heads and all key heads together. ``sinks`` are ``[heads]``. ``out_scale`` multiplies the layer's output. With a
    ``group``, each of its processes has some of the heads.
    """

    heads: Heads

    attention_norm: PrescaledRmsNorm | None
    qkv: Linear
    qk_norm: tuple[PrescaledRmsNorm, ...]
    attention_out: Linear
    mlp_norm: PrescaledRmsNorm | None
    mlp: GatedMlp | MixtureMlp | MlpBesideExperts
    out_norms: tuple[PrescaledRmsNorm, PrescaledRmsNorm] | None
    residual_scale: float = 1.0
    sinks: Tensor | None = None
    per_layer: PerLayerProducts | None = None
    out_scale: float = 1.0
    group: Group | None = None

    @property
    def mixture(self) -> MixtureMlp | None:
        """The layer's experts; None if it has none."""
        if isinstance(self.mlp, MlpBesideExperts):
            return self.mlp.mixture
        return self.mlp if isinstance(self.mlp, MixtureMlp) else None

    def with_mixture(self, mixture: MixtureMlp) -> DecoderLayer:
        """The same layer with other experts."""
        if isinstance(self.mlp, MlpBesideExperts):
            return replace(self, mlp=replace(self.mlp, mixture=mixture))
        return replace(self, mlp=mixture)

    def with_weights(self, move: Callable[[Tensor], Tensor]) -> DecoderLayer:
        """The same layer with ``move`` applied to each matrix except those of norms and routers."""
        last = self.per_layer
        return replace(
            self,
            qkv=moved(self.qkv, move),
            attention_out=moved(self.attention_out, move),
            mlp=self.mlp.with_weights(move),
            per_layer=last and replace(last, gate=moved(last.gate, move), out=moved(last.out, move)),
        )

    def add(self, hidden_NH: Tensor, given_NH: Tensor, half: int) -> None:
        """Add the output of attention (0) or feed-forward (1), normed and scaled if the layer does so."""
        if self.residual_scale != 1:
            given_NH = given_NH.mul(self.residual_scale)
        hidden_NH.add_(given_NH if self.out_norms is None else self.out_norms[half](given_NH))

    def feed_forward(self, hidden_NH: Tensor, adapters: RowAdapters, layer: int) -> Tensor:
        """Run the feed-forward half of layer number ``layer``; returns its output ``[N, H]``, before it is added."""
        x_NH = hidden_NH if self.mlp_norm is None else self.mlp_norm(hidden_NH)
        if isinstance(self.mlp, MlpBesideExperts):
            return self.mlp(hidden_NH, x_NH, adapters, layer)
        return self.mlp(x_NH, adapters, layer)

    def end(self, hidden_NH: Tensor, numbers_NP: Tensor | None) -> None:
        """Run what follows the feed-forward; ``numbers_NP`` are the layer's per-layer inputs, if it has any."""
        if self.per_layer is not None and numbers_NP is not None:
            hidden_NH.add_(self.per_layer(hidden_NH, numbers_NP))
        if self.out_scale != 1:
            hidden_NH.mul_(self.out_scale)


@dataclass(frozen=True, slots=True)
class EagerDecoder:
    """The weights of a whole model. ``compute`` is the dtype of norms, rotations and exact attention.

    ``embedding`` is ``[V, H]``.
    """

    compute: torch.dtype
    embedding: Tensor
    layers: tuple[DecoderLayer, ...]
    norm: PrescaledRmsNorm | None
    head: Linear
    beside_norm: PrescaledRmsNorm | None = None
    """The norm of embeddings that the first layer's attention reads beside the rows' inputs; see `HeadForm`."""
    raw_tap: bool = False
    embedding_scale: float = 1.0
    logit_cap: float = 0.0
    per_layer: PerLayerEmbedding | None = None
    in_order: Callable[[Sequence[DecoderLayer]], Iterator[tuple[int, DecoderLayer]]] = enumerate
    """Iterates over the layers in order, some of which may be on their way to the device."""
    streamed_bytes: int = 0
    """Bytes of layers that every forward copies to the device."""

    @property
    def resident_bytes(self) -> int:
        """Bytes of embeddings and LM head, which stay on the device."""
        extra = 0 if self.per_layer is None else self.per_layer.embedding.nbytes
        head = self.head.in_features * self.head.out_features * self.head.dtype.itemsize
        return self.embedding.nbytes + head + extra

    def embed(self, ids_N: Tensor) -> Tensor:
        """The rows' embeddings ``[N, H]``, in memory of their own."""
        embedded_NH = F.embedding(ids_N, self.embedding)
        return embedded_NH if self.embedding_scale == 1 else embedded_NH.mul_(self.embedding_scale)

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Logits ``[N, V]`` of rows that are normed for the LM head."""
        logits_NV = self.head(hidden_NH)
        for row in logits_NV if self.logit_cap else ():  # one by one, or its number would show in its last bits
            capped(row, self.logit_cap)
        return logits_NV

    def run(
        self,
        hidden_NH: Tensor,
        plan: Callable[[Mapping[Heads, Tensor]], Sequence[Attend]],
        taps: Taps,
        skip: Skip = frozenset(),
        *,
        embedded_NH: Tensor | None = None,
        numbers_NLP: Tensor | None = None,
        joining: Sequence[SegmentFeatures] = (),
        adapters: RowAdapters = NO_ADAPTERS,
        count: int | None = None,
    ) -> Tensor:
        """Run the layers on rows; returns the hidden states ``[N, H]`` after the last one. The inputs of tapped layers
        are put into ``taps``.

        ``hidden_NH`` are the rows' inputs, which are overwritten. ``plan`` gets the matrices ``[N, heads * D]`` into
        which attention writes, by heads, and returns each layer's attention. The sub-layers in ``skip`` do not run.
        ``embedded_NH`` is for decoders with a ``beside_norm``, ``numbers_NLP`` for those with ``per_layer``. Rows of
        ``joining`` run in all layers, but nothing sees their state before the layer at which they join. ``adapters``
        are those of the rows. Rows from ``count`` on are padding, equal to the first row so that they choose its
        experts.
        """
        kinds = {layer.heads for layer in self.layers}
        mixed = {heads: hidden_NH.new_zeros(len(hidden_NH), heads.num_heads * heads.head_dim) for heads in kinds}
        attends = plan(mixed)
        for index, layer in self.in_order(self.layers):
            _join(hidden_NH, [given for given in joining if given.features.join and given.features.join.layer == index])
            taps.take(index, hidden_NH)
            if ("attention", index) not in skip:
                qkv = self._qkv(index, hidden_NH, embedded_NH if index == 0 else None, adapters)
                for attend in attends:
                    attend(index, qkv)
                own = mixed[layer.heads]
                own[len(own) if count is None else count :] = own[0]
                given = layer.attention_out(own)
                adapters.add((index, None, OUT), own, given)
                layer.add(hidden_NH, summed(given, layer.group), 0)
            if ("mlp", index) not in skip:
                layer.add(hidden_NH, layer.feed_forward(hidden_NH, adapters, index), 1)
                layer.end(hidden_NH, None if numbers_NLP is None else numbers_NLP[:, index])
        return hidden_NH

    def summed(self, group: Group) -> EagerDecoder:
        """The same decoder as part of a group, whose sub-layers' outputs are summed over all processes."""
        layers: list[DecoderLayer] = []
        for layer in self.layers:
            mlp = layer.mlp
            if isinstance(mlp, GatedMlp | MixtureMlp):
                mlp = replace(mlp, group=group)
            layers.append(replace(layer, group=group, mlp=mlp))
        return replace(self, layers=tuple(layers))

    def last(self, hidden_NH: Tensor) -> Tensor:
        """Apply the final norm, if the model has one."""
        return hidden_NH if self.norm is None else self.norm(hidden_NH)

    def _qkv(self, index: int, hidden_NH: Tensor, embedded_NH: Tensor | None, adapters: RowAdapters) -> Tensor:
        """Query, key and value heads ``[N, qkv_heads, D/2]`` as complex pairs, normed if the model does so."""
        layer = self.layers[index]
        heads = layer.heads
        normed = hidden_NH if layer.attention_norm is None else layer.attention_norm(hidden_NH)
        if self.beside_norm is not None and embedded_NH is not None:
            normed = torch.cat((self.beside_norm(embedded_NH), normed), -1)
        flat = layer.qkv(normed)
        adapters.add((index, None, QKV), normed, flat)
        if flat.dtype != self.compute:
            flat = flat.to(self.compute)
        if len(layer.qk_norm) == 1:
            rows = flat.view(len(flat), -1, heads.head_dim)
            layer.qk_norm[0].inplace(rows.narrow(1, 0, len(layer.qk_norm[0].weight)))
        elif layer.qk_norm:
            query, key = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
            layer.qk_norm[0].inplace(flat.narrow(1, 0, query))
            layer.qk_norm[1].inplace(flat.narrow(1, query, key))
        return torch.view_as_complex(flat.view(len(flat), -1, heads.head_dim // 2, 2))


def _join(hidden_NH: Tensor, joining: Sequence[SegmentFeatures]) -> None:
    """Set the state of rows that join at this layer; see `Join`."""
    for _, first, features, anchors in joining:
        assert features.join is not None, "only such rows join"
        down_RH, up_RH = features.join.down_RH.to(hidden_NH.device), features.join.up_RH.to(hidden_NH.device)
        for row, (anchor, given_H) in enumerate(zip(anchors, features.rows_KH.to(hidden_NH.device), strict=True)):
            state_H = hidden_NH[anchor].float()  # one by one, as rows must not depend on each other
            hidden_NH[first + row] = (given_H + state_H + (down_RH @ state_H) @ up_RH).to(hidden_NH.dtype)
