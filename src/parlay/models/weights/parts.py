"""Cuts parts out of a model: some of its layers, or some heads and feed-forward units of each layer.

Nothing is read: parts of a mapped file stay mapped, and blocks are never split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from parlay.models.config import DecoderConfig, Experts, LayerForm
from parlay.models.lora_layout import LowRank
from parlay.models.weights.dequantize import dense
from parlay.models.weights.fused import Operand, as_tensor
from parlay.models.weights.quantize import Int8Weight
from parlay.models.weights.stored import StoredTensor

_WHOLE_BLOCK = 32
"""Units are assigned in groups of this size if there are enough, as products quantize their inputs in such blocks."""
_INWARD = ("o_proj", "down_proj")
"""Products of which a share has some inputs, and whose outputs are summed over all shares; of other products it has
some outputs."""


def divide(count: int, parts: int) -> list[range]:
    """Split ``count`` numbers into ranges that are as even as possible, shorter ones first."""
    ends = [count * part // parts for part in range(parts + 1)]
    return [range(begin, end) for begin, end in pairwise(ends)]


@dataclass(frozen=True, slots=True)
class Spans:
    """The ``heads`` of a share, of all key heads with ``group`` query heads each, and its ``units``.

    ``experts`` are its units of every expert, and of the shared one, by layer.
    """

    heads: range
    group: int
    size: int
    units: range
    experts: Sequence[Mapping[str, range]]

    @staticmethod
    def of(config: DecoderConfig, weights: Mapping[str, Operand], part: int, parts: int) -> Spans:
        """The spans of share number ``part`` of ``parts``."""
        heads, group = divide(config.num_kv_heads, parts)[part], config.num_heads // config.num_kv_heads
        experts = [_units_of_experts(form.experts, weights, part, parts) for form in config.forms]
        return Spans(heads, group, config.head_dim, _units(config, weights, part, parts), experts)

    def find(self, name: str) -> range | None:
        """The outputs (or inputs, for products whose outputs are summed) that a share has of a weight; None: all."""
        layer, mixture, kind = _place(name)
        if mixture:
            return self.experts[layer].get(mixture)
        if kind in ("k_proj", "v_proj"):
            return _times(self.heads, self.size)
        if kind in ("q_proj", "o_proj"):
            return _times(self.heads, self.group * self.size)
        if kind == "sinks":
            return _times(self.heads, self.group)
        return self.units if kind in ("gate_proj", "up_proj", "down_proj") else None


def share(
    config: DecoderConfig, weights: Mapping[str, Operand], part: int, parts: int
) -> tuple[DecoderConfig, dict[str, Operand]]:
    """Cut share number ``part`` of ``parts`` out of a model: some key heads of each layer with their queries, and some
    feed-forward units.

    Each share has some units of every expert. The sums of all shares' outputs of attention and feed-forward are the
    whole layer's. Heads that are normed together can't be divided.
    """
    spans, cut = Spans.of(config, weights, part, parts), dict[str, Operand]()
    for name, weight in weights.items():
        span = spans.find(name)
        if span is None:
            cut[name] = weight
        elif name.endswith(("o_proj.bias", "down_proj.bias")):  # added only once
            cut[name] = as_tensor(weight, torch.float32) * (part == 0)
        else:
            cut[name] = (_columns if _leads_back(name) else _rows)(weight, span)
    forms = [_with_units(form, own) for form, own in zip(config.forms, spans.experts, strict=True)]
    heads, units = len(spans.heads), len(spans.units)
    sizes = replace(config, num_heads=heads * spans.group, num_kv_heads=heads, intermediate_size=units)
    return replace(sizes, layers=tuple(forms)) if any(spans.experts) else sizes, cut


def adapter_part(matrices: Mapping[str, LowRank], layers: range, spans: Spans | None) -> dict[str, LowRank]:
    """The part of an adapter for a stage with these ``layers``, and for a share of it with these ``spans``.

    Names are those of the stage, and the matrices are copies.
    """
    cut: dict[str, LowRank] = {}
    for name, (down_RI, up_OR) in matrices.items():
        _, _, number, rest = name.split(".", 3)
        if int(number) not in layers:
            continue
        own = f"model.layers.{int(number) - layers.start}.{rest}"
        span = None if spans is None else spans.find(own)
        if span is not None and _leads_back(own):
            down_RI = down_RI[:, span.start : span.stop].clone()
        elif span is not None:
            up_OR = up_OR[span.start : span.stop].clone()
        cut[own] = LowRank(down_RI, up_OR)
    return cut


def stage(
    config: DecoderConfig, weights: Mapping[str, Operand], layers: range
) -> tuple[DecoderConfig, dict[str, Operand]]:
    """Cut these layers out of a model. The embedding, final norm and LM head belong to the first stage.

    Other stages map hidden states to hidden states; one row of zeros takes the place of their embedding.
    """
    cut: dict[str, Operand] = {}
    for name, weight in weights.items():
        _, _, number, *rest = name.split(".") if name.startswith("model.layers.") else ("", "", "")
        if not number:
            cut[name] = weight
        elif int(number) in layers:
            cut[f"model.layers.{int(number) - layers.start}.{'.'.join(rest)}"] = weight
    forms = config.layers[layers.start : layers.stop]
    sizes = replace(config, num_layers=len(layers), layers=forms)
    if layers.start == 0:
        return sizes, cut
    cut.pop("lm_head.weight", None)
    cut["model.embed_tokens.weight"] = torch.zeros(1, config.hidden_size)
    return replace(sizes, vocab_size=1, tie_embeddings=True), cut


def _times(span: range, size: int) -> range:
    return range(span.start * size, span.stop * size)


def _leads_back(name: str) -> bool:
    """Whether a share has some inputs of a matrix."""
    return _place(name)[2] in _INWARD


def _place(name: str) -> tuple[int, str, str]:
    """A weight's layer, the module that it belongs to there (``experts``, ``shared_expert`` or nothing), and its
    kind."""
    parts = name.split(".")
    layer = int(parts[2]) if name.startswith("model.layers.") else 0
    mixture = parts[4] if len(parts) > 5 and parts[4] in ("experts", "shared_expert") else ""
    return layer, mixture, parts[-2]


def _units_of_experts(
    experts: Experts | None, weights: Mapping[str, Operand], part: int, parts: int
) -> dict[str, range]:
    """A share's units of every expert, and of the shared one; empty for layers without experts."""
    if experts is None:
        return {}
    sizes = {"experts": experts.size, "shared_expert": experts.shared}
    return {name: _even_units(size, _together(weights, size, parts), part, parts) for name, size in sizes.items()}


def _with_units(form: LayerForm, units: Mapping[str, range]) -> LayerForm:
    """The form of a layer whose experts have only these units."""
    if form.experts is None:
        return form
    own = replace(form.experts, size=len(units["experts"]), shared=len(units["shared_expert"]))
    return replace(form, experts=own)


def _even_units(count: int, together: int, part: int, parts: int) -> range:
    blocks = divide(-(-count // together), parts)[part]
    return range(blocks.start * together, min(blocks.stop * together, count))


def _together(weights: Mapping[str, Operand], count: int, parts: int) -> int:
    """The group size in which ``count`` units are assigned: whole blocks of every matrix with these columns."""
    stored = [weight for name, weight in weights.items() if name.endswith("down_proj.weight")]
    together = max([2, *(weight.format.block for weight in stored if isinstance(weight, StoredTensor))])
    if together < _WHOLE_BLOCK <= count // parts:
        together = _WHOLE_BLOCK
    return together if count // together >= parts else 2


def _units(config: DecoderConfig, weights: Mapping[str, Operand], part: int, parts: int) -> range:
    """A share's feed-forward units, an even number."""
    count = config.intermediate_size
    together = _together(weights, count, parts)
    begin, end = _ends(config, together, parts)[part : part + 2]
    return range(begin * together, min(end * together, count))


def _ends(config: DecoderConfig, together: int, parts: int) -> list[int]:
    """The ends of shares, in groups of ``together`` units. All shares read equally many weights, as far as possible.

    Their key heads may be uneven, and the first share also has the LM head.
    """
    hidden, group = config.hidden_size, config.num_heads // config.num_kv_heads
    blocks, block = -(-config.intermediate_size // together), 3 * hidden * together
    head = 2 * (group + 1) * config.head_dim * hidden
    weights: list[float] = [len(heads) * head for heads in divide(config.num_kv_heads, parts)]
    weights[0] += config.vocab_size * hidden / config.num_layers
    even = (sum(weights) + blocks * block) / parts
    wanted = [max(even - own, block) for own in weights]
    ends = [round(blocks * sum(wanted[:part]) / sum(wanted)) for part in range(parts + 1)]
    for part in range(1, parts):  # at least one group for each
        ends[part] = min(max(ends[part], ends[part - 1] + 1), blocks - parts + part)
    return ends


def _rows(weight: Operand, span: range) -> Operand:
    """Some outputs of a matrix, or some numbers of a bias."""
    if isinstance(weight, Int8Weight):
        return Int8Weight(weight.source[span.start : span.stop])
    if isinstance(weight, Tensor):
        return weight[span.start : span.stop]
    data = weight.data[span.start : span.stop]
    order = None if weight.order is None else weight.order[span.start : span.stop] - span.start
    return replace(weight, shape=(len(data), *weight.shape[1:]), data=data, order=order, ahead=None)


def _columns(weight: Operand, span: range) -> Operand:
    """Some inputs of a matrix. If they end within blocks, or if its columns are permuted, the result is plain
    numbers."""
    if isinstance(weight, Int8Weight):
        return Int8Weight(weight.source[:, span.start : span.stop])
    if isinstance(weight, Tensor):
        return weight[:, span.start : span.stop]
    format = weight.format
    if span.start % format.block or span.stop % format.block or weight.columns is not None:
        return dense(weight, torch.float32)[:, span.start : span.stop]
    begin, end = (at // format.block * format.block_bytes for at in (span.start, span.stop))
    return replace(weight, shape=(weight.shape[0], len(span)), data=weight.data[:, begin:end], ahead=None)
