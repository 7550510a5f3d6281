"""Importance: how much an error in each input column of a matrix matters, the mean square of that input on a text.

A matrix's output is a sum of inputs times weights. So an error e in a weight adds e^2 times the input's mean square to
the expected squared error, if errors are independent. llama.cpp calls these numbers an importance matrix. Layers are
computed one by one, so that only one is in memory as float32.

Shapes: T tokens of a chunk, H hidden, I inputs of a matrix, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parlay.cache import Rows
from parlay.cache.pages import PageTable
from parlay.models.config import DecoderConfig
from parlay.models.forward import Taps
from parlay.models.gguf.metadata import gguf_form
from parlay.models.gguf.weights import gguf_name
from parlay.models.torch_ops.attention_form import AttentionKind, LayerRopes
from parlay.models.torch_ops.attention_masked import MaskedAttention
from parlay.models.torch_ops.decoder import DecoderLayer, EagerDecoder
from parlay.models.torch_ops.linear import MIN_ROWS, Linear, RecordedLinear
from parlay.models.torch_ops.mlp import GatedMlp, MixtureMlp
from parlay.models.torch_ops.packing import build_layer
from parlay.models.torch_ops.step_rows import uncached
from parlay.models.weights.fused import rows_of
from parlay.models.weights.regrouped import matrices_in
from parlay.models.weights.shapes import Weight
from parlay.system.threads import torch_on_all
from parlay.types import ParlayError, Tokenizer

CHUNK, MOST_TOKENS = 512, 8192
"""Tokens per chunk, which see each other, and most tokens read of a text."""
_LEAST_TOKENS = 16
_CPU = torch.device("cpu")
Sums = dict[str, Tensor]
"""Sums of squared inputs ``[I]`` of each product of a layer; for experts ``[E, I]``."""


@dataclass(frozen=True, slots=True)
class ReadText:
    """A text's tokens, read in chunks that each start with the tokens ``begin``, which models expect."""

    ids: Sequence[int]
    begin: Sequence[int] = ()

    @staticmethod
    def of(text: str, tokenizer: Tokenizer, most: int | None = None) -> ReadText:
        """At most the first ``most`` tokens of a text; ``begin`` is what the tokenizer puts before a text."""
        ids, begin = tokenizer.encode(text)[:most], tokenizer.encode("")
        return ReadText(ids, begin if ids[: len(begin)] == begin else ())


@torch_on_all()
@torch.inference_mode()
def importance(config: DecoderConfig, weights: Mapping[str, Weight], text: ReadText) -> dict[str, Tensor]:
    """Mean squares ``[I]`` of the inputs of all layers' matrices (of experts ``[E, I]``), by their GGUF names.

    ``weights`` have the decoder's names. Only the first `MOST_TOKENS` of ``text`` are read. For a diffusion model every
    second token is masked. Raises ParlayError for too short a text, UnsupportedModel for families without GGUF files.
    """
    form = gguf_form(config)
    chunks = embedded(config, weights, text)
    tokens, found = sum(len(chunk_TH) for chunk_TH in chunks), dict[str, Tensor]()
    for index in range(config.num_layers):
        sums: Sums = {}
        layer = recorded(build_layer(config, weights, index), sums)
        chunks = [run_layer(config, layer, index, chunk_TH) for chunk_TH in chunks]
        for product, sum_I in sums.items():
            joined = product in form.names.values()
            for name in (product,) if joined else matrices_in(product):
                found[gguf_name(f"model.layers.{index}.{name}.weight", form)] = sum_I / tokens
    return {name: _floored(mean_I) for name, mean_I in found.items()}


def embedded(config: DecoderConfig, weights: Mapping[str, Weight], text: ReadText) -> list[Tensor]:
    """The embeddings of a text's first `MOST_TOKENS` tokens, in chunks ``[T, H]``.

    Each chunk starts with ``text.begin``. Raises ParlayError for too short a text.
    """
    if len(text.ids) < _LEAST_TOKENS:
        raise ParlayError(f"the text has {len(text.ids)} tokens: give at least {_LEAST_TOKENS}, better {MOST_TOKENS}")
    tokens = torch.tensor(text.ids[:MOST_TOKENS])
    if _block(config):
        assert config.canvas is not None, "others have no blocks"
        tokens[::2] = config.canvas.mask_id
    head = tokens[: len(text.begin)]
    pieces = torch.split(tokens[len(head) :], CHUNK - len(head))
    parts = [torch.cat((head, piece)) for piece in pieces if len(head) + len(piece) >= MIN_ROWS]
    return [rows_of(weights["model.embed_tokens.weight"], part) * config.embedding_scale for part in parts]


def _block(config: DecoderConfig) -> int:
    """Size of the blocks in which tokens see each other; 0 for causal attention."""
    canvas = config.canvas
    return 0 if canvas is None or canvas.text == "causal" else canvas.block if canvas.text == "block" else CHUNK


def recorded(layer: DecoderLayer, sums: Sums) -> DecoderLayer:
    """The layer with products that add their squared inputs to ``sums``."""

    def one(linear: Linear, name: str) -> Linear:
        sums[name] = torch.zeros(linear.in_features)
        return RecordedLinear(linear, sums[name])

    def gated(mlp: GatedMlp, at: str) -> GatedMlp:
        return replace(mlp, gate_up=one(mlp.gate_up, f"{at}.gate_up_proj"), down=one(mlp.down, f"{at}.down_proj"))

    mlp = layer.mlp
    if isinstance(mlp, GatedMlp):
        layer = replace(layer, mlp=gated(mlp, "mlp"))
    elif isinstance(mlp, MixtureMlp):
        shared = None if mlp.shared is None else gated(mlp.shared, "mlp.shared_expert")
        layer = replace(layer, mlp=replace(mlp, experts=_recorded_experts(mlp.experts, sums), shared=shared))
    return replace(
        layer,
        qkv=one(layer.qkv, "self_attn.qkv_proj"),
        attention_out=one(layer.attention_out, "self_attn.o_proj"),
    )


def _recorded_experts(experts: Sequence[GatedMlp], sums: Sums) -> tuple[GatedMlp, ...]:
    gate_ups = sums["mlp.experts.gate_up_proj"] = torch.zeros(len(experts), experts[0].gate_up.in_features)
    downs = sums["mlp.experts.down_proj"] = torch.zeros(len(experts), experts[0].down.in_features)
    return tuple(
        replace(expert, gate_up=RecordedLinear(expert.gate_up, into_H), down=RecordedLinear(expert.down, own_I))
        for expert, into_H, own_I in zip(experts, gate_ups, downs, strict=True)
    )


def run_layer(config: DecoderConfig, layer: DecoderLayer, index: int, chunk_TH: Tensor) -> Tensor:
    """Run the layer ``index`` alone on a chunk of rows."""
    one = replace(config, num_layers=1, layers=config.forms[index : index + 1])
    ropes = LayerRopes(one, torch.float32, _CPU)
    attention = MaskedAttention(AttentionKind(layer.heads), one.forms, ropes, [layer.sinks])
    rows, place = uncached(len(chunk_TH), _CPU), Rows(PageTable(), 0, len(chunk_TH), block=_block(config))
    alone = EagerDecoder(
        compute=torch.float32, embedding=chunk_TH, layers=(layer,), norm=None, head=layer.attention_out
    )
    return alone.run(chunk_TH.clone(), lambda mixed: [attention.plan(rows, place, 0, mixed[layer.heads])], Taps(()))


def _floored(mean: Tensor) -> Tensor:
    """Raise zeros of ``mean`` ``[..., I]``, as another text may use inputs that this one left at zero.

    Experts that no token chose weigh all inputs equally.
    """
    typical = mean.mean(-1, keepdim=True)
    return torch.where(typical > 0, torch.maximum(mean, 1e-3 * typical), torch.ones_like(mean))
