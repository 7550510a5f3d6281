"""Weights in the layout that the compiled products read, and the structures that point at them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from parlay.cache.buffers import zeros
from parlay.models.arranged import Arranged, LayerWeights, halves
from parlay.models.compiled import structs
from parlay.models.config import DecoderConfig
from parlay.models.quantize import quantized
from parlay.models.shapes import Weight

_CPU = torch.device("cpu")


class Weights:
    """A model packed for ``core``. Owns all memory that ``model`` points to. ``embedding`` is ``[V, H]``."""

    def __init__(
        self,
        core: structs.Core,
        config: DecoderConfig,
        weights: Mapping[str, Weight],
        dtype: torch.dtype,
        *,
        int8: bool,
    ) -> None:
        self._core, self._dtype, self._int8 = core, dtype, int8
        self._panel = int(core.panel)
        self._held: list[Tensor] = []
        arranged = Arranged(config, weights, dtype, _CPU, order=halves)
        self.embedding = arranged.embedding.contiguous()
        layers = (structs.Layer * config.num_layers)(
            *(self._layer(arranged.layer(index)) for index in range(config.num_layers))
        )
        self.model = structs.Model(
            layers=config.num_layers,
            hidden=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            ffn=config.intermediate_size,
            vocab=config.vocab_size,
            bf16=int(dtype == torch.bfloat16),
            eps=config.rms_norm_eps,
            embedding=self._hold(self.embedding),
            layer=layers,
            final_norm=self._hold(arranged.final_norm.contiguous()),
            head=self._linear(arranged.head),
        )

    def __del__(self) -> None:
        self._core.rest()  # a late thread may still read them

    def _layer(self, layer: LayerWeights) -> structs.Layer:
        norms = None if layer.qk_norm is None else self._hold(layer.qk_norm.contiguous())
        return structs.Layer(
            qkv=self._linear(layer.qkv, layer.qkv_bias),
            out=self._linear(layer.attention_out),
            gate_up=self._linear(self._gated(layer.gate, layer.up)),
            down=self._linear(layer.down),
            qk_norm=norms,
        )

    def _gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """Half a panel of gates, then their ups, and so on; filled up with zeros."""
        half = self._panel // 2
        missing = -len(gate) % half
        parts = [torch.nn.functional.pad(part, (0, 0, 0, missing)).view(-1, half, part.shape[1]) for part in (gate, up)]
        return torch.cat(parts, 1).flatten(0, 1)

    def _linear(self, weight: Tensor, bias: Tensor | None = None) -> structs.Linear:
        out, inputs = weight.shape
        scale = None
        if self._int8:
            weight, steps = quantized(weight)
            scale = self._hold(self._padded(steps))
        kind = structs.KINDS[str(weight.dtype).removeprefix("torch.")]
        pair = self._dtype == torch.bfloat16
        words = -(-inputs // 2) * 2 if pair else inputs
        panels = zeros((-(-out // self._panel) * self._panel, words), weight.dtype, _CPU)
        weight = weight.contiguous()
        self._core.pack(kind, pair, weight.data_ptr(), out, inputs, self._hold(panels))
        added = None if bias is None else self._hold(self._padded(bias.float()))
        return structs.Linear(panels=panels.data_ptr(), scale=scale, bias=added, inputs=inputs, outputs=out, kind=kind)

    def _padded(self, numbers: Tensor) -> Tensor:
        return torch.nn.functional.pad(numbers, (0, -len(numbers) % self._panel)).contiguous()

    def _hold(self, tensor: Tensor) -> int:
        self._held.append(tensor)
        return tensor.data_ptr()
