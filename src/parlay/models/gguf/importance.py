"""How much an error in each input of a matrix counts: the mean square of that input on a text.

The output of a matrix is a sum of inputs times weights. So an error e in a weight adds e^2 times the input's mean
square to the expected squared error, as far as errors are independent of each other. llama.cpp calls these numbers an
importance matrix. Layers are computed one by one, so that one alone is in memory as float32.

Shapes: C chunks of T tokens, H hidden, I inputs of a matrix, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from parlay.models.config import DecoderConfig, LayerForm, UnsupportedModel
from parlay.models.gguf.weights import gguf_name
from parlay.models.rope import cosines_and_sines
from parlay.models.weights.fused import as_tensor, rows_of
from parlay.models.weights.shapes import Weight
from parlay.system.threads import torch_on_all
from parlay.types import ParlayError

CHUNK, MOST_TOKENS = 512, 8192
"""Tokens that see each other, and tokens that are read of a text."""
_LEAST_TOKENS = 16


class _Layer:
    """One layer with Llama's names, and the sums of squares of what its matrices read."""

    def __init__(self, config: DecoderConfig, form: LayerForm, weights: Mapping[str, Weight], start: str) -> None:
        self._config, self._form = config, form
        self._weights = {
            name.removeprefix(start): as_tensor(weight, torch.float32)
            for name, weight in weights.items()
            if name.startswith(start)
        }
        self.sums: dict[str, Tensor] = {}

    def __call__(self, x_TH: Tensor) -> Tensor:
        """The rows of one chunk, after the layer."""
        normed = self._normed(x_TH, "input_layernorm")
        x_TH = x_TH + self._product("self_attn.o_proj", self._mixed(normed))
        normed = self._normed(x_TH, "post_attention_layernorm")
        gated = F.silu(self._product("mlp.gate_proj", normed)) * self._product("mlp.up_proj", normed)
        return x_TH + self._product("mlp.down_proj", gated)

    def _mixed(self, normed_TH: Tensor) -> Tensor:
        """Attend, ``[T, heads * D]``."""
        heads = {part: self._heads(normed_TH, part) for part in "qkv"}
        group = self._config.num_heads // self._config.num_kv_heads
        key, value = (heads[part].repeat_interleave(group, 0) for part in "kv")
        mixed = F.scaled_dot_product_attention(heads["q"], key, value, is_causal=True)
        return mixed.transpose(0, 1).flatten(1)

    def _heads(self, normed_TH: Tensor, part: str) -> Tensor:
        """Queries, keys or values ``[heads, T, D]``, turned by position."""
        flat = self._product(f"self_attn.{part}_proj", normed_TH)
        split = flat.view(len(flat), -1, self._config.head_dim).transpose(0, 1)
        if part == "v":
            return split
        if self._form.qk_norm:
            split = self._normed(split, f"self_attn.{part}_norm")
        cosines, sines = cosines_and_sines(self._form.rope, self._config.head_dim, len(flat)).unbind(1)
        first, second = split.chunk(2, -1)
        return torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1)

    def _product(self, name: str, x_TI: Tensor) -> Tensor:
        weight = f"{name}.weight"
        self.sums[weight] = self.sums.get(weight, 0) + x_TI.square().sum(0)
        return F.linear(x_TI, self._weights[weight], self._weights.get(f"{name}.bias"))

    def _normed(self, x: Tensor, name: str) -> Tensor:
        """Norm ``x`` of any shape over its last dimension."""
        weight = self._weights[f"{name}.weight"]
        return F.rms_norm(x, weight.shape, weight, self._config.rms_norm_eps)


@torch_on_all()
@torch.inference_mode()
def importance(config: DecoderConfig, weights: Mapping[str, Weight], ids: Sequence[int]) -> dict[str, Tensor]:
    """Mean squares ``[I]`` of the inputs of all layers' matrices, by GGUF's names of these.

    ``weights`` bear the decoder's names. Of ``ids`` the first `MOST_TOKENS` are read. Raises ParlayError for too few,
    and UnsupportedModel for diffusion models, whose rows see what they write later.
    """
    if config.canvas is not None or any(form != config.llama for form in config.forms):
        raise UnsupportedModel(f"{config.architecture}: an importance matrix needs a causal model without windows")
    if len(ids) < _LEAST_TOKENS:
        raise ParlayError(f"the text has {len(ids)} tokens: give at least {_LEAST_TOKENS}, better {MOST_TOKENS}")
    tokens = torch.tensor(ids[:MOST_TOKENS])
    chunks = [rows_of(weights["model.embed_tokens.weight"], part) for part in torch.split(tokens, CHUNK)]
    found: dict[str, Tensor] = {}
    for index, form in enumerate(config.forms):
        start = f"model.layers.{index}."
        layer = _Layer(config, form, weights, start)
        chunks = [layer(chunk_TH) for chunk_TH in chunks]
        found |= {gguf_name(start + name): total_I / len(tokens) for name, total_I in layer.sums.items()}
    return {name: _floored(mean_I) for name, mean_I in found.items()}


def _floored(mean_I: Tensor) -> Tensor:
    """With some weight for inputs that the text left at zero: another text may not."""
    return mean_I.clamp(min=1e-3 * float(mean_I.mean()) + torch.finfo(torch.float32).tiny)
