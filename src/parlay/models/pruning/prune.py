"""One-shot pruning: a model with weights at zero and narrower feed-forwards, layer by layer, with nothing trained.

Wanda (Sun et al. 2023): a weight counts as its size times the norm of its input on a text, and is compared with the
others of its output. Inputs are those of the model whose earlier layers are pruned already. ``magnitude`` takes the
size alone, and needs no text. Inner units of a feed-forward count as the sum of their last matrix's scores.

Shapes: O outputs, I inputs of a matrix, T tokens of a chunk, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parlay.models.config import DecoderConfig
from parlay.models.gguf.importance import ReadText, Sums, embedded, recorded, run_layer
from parlay.models.pruning.patterns import Pattern
from parlay.models.torch_ops.packing import build_layer
from parlay.models.weights.fused import as_tensor
from parlay.models.weights.regrouped import matrices_in
from parlay.models.weights.shapes import Weight
from parlay.system.threads import torch_on_all
from parlay.types import ParlayError

_MATRICES = tuple(f"self_attn.{part}_proj" for part in "qkvo") + tuple(f"mlp.{part}_proj" for part in ("gate", "up"))
_DOWN = "mlp.down_proj"
_STEP = 32
"""Inner units that stay are a multiple of this: whole blocks of the formats in few bits."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Says what becomes of each layer: the ``pattern`` of its zeros, and the share of inner ``width`` that stays."""

    pattern: Pattern | None
    width: float = 1.0

    def units(self, size: int) -> int:
        """How many of so many inner units stay."""
        return size if self.width == 1 else min(size, max(_STEP, round(size * self.width / _STEP) * _STEP))


@torch_on_all()
@torch.inference_mode()
def pruned(
    config: DecoderConfig,
    weights: Mapping[str, Weight],
    cut: Cut,
    text: ReadText | None,
    done: Callable[[int, int], None] = lambda layer, layers: None,
) -> tuple[DecoderConfig, dict[str, Tensor]]:
    """The pruned model, its weights in bfloat16. ``text`` is what Wanda reads; None: sizes alone count.

    ``done`` is called with how many layers are pruned, of how many. Raises what `check` raises, and ParlayError for a
    text of too few tokens.
    """
    check(config, weights, cut)
    chunks = None if text is None else embedded(config, weights, text)
    made = {name: _stored(weight) for name, weight in weights.items() if not name.startswith("model.layers.")}
    narrow = replace(config, intermediate_size=cut.units(config.intermediate_size))
    for index in range(config.num_layers):
        at = f"model.layers.{index}."
        norms = {} if chunks is None else _norms(config, weights, index, chunks)
        own = {name.removeprefix(at): as_tensor(w, torch.float32) for name, w in weights.items() if name.startswith(at)}
        layer = {at + name: _stored(weight) for name, weight in _cut(own, norms, cut).items()}
        if chunks is not None and index + 1 < config.num_layers:
            runs = build_layer(narrow, layer, index)
            chunks = [run_layer(narrow, runs, index, chunk_TH) for chunk_TH in chunks]
        made |= layer
        done(index + 1, config.num_layers)
    return narrow, made


def check(config: DecoderConfig, weights: Mapping[str, Weight], cut: Cut) -> None:
    """Raises ParlayError for a model of another form than a dense Llama, Qwen2 or Qwen3, and for rows that the pattern
    does not divide.
    """
    if config.layers or (config.canvas is not None and config.canvas.text != "causal"):
        raise ParlayError(
            f"{config.architecture}: layers that differ, experts and diffusion models can't be pruned; dense models of "
            "the forms of Llama, Qwen2 and Qwen3 can"
        )
    if cut.pattern is not None:
        for part in _MATRICES:
            name = f"model.layers.0.{part}.weight"
            cut.pattern.check(name, weights[name].shape[-1])
        cut.pattern.check(f"model.layers.0.{_DOWN}.weight", cut.units(config.intermediate_size))


def _norms(
    config: DecoderConfig, weights: Mapping[str, Weight], index: int, chunks: Sequence[Tensor]
) -> dict[str, Tensor]:
    """By matrix of a layer, the norm ``[I]`` of each of its inputs on the text."""
    sums: Sums = {}
    layer = recorded(build_layer(config, weights, index), sums)
    for chunk_TH in chunks:
        run_layer(config, layer, index, chunk_TH)
    return {name: sum_I.sqrt() for product, sum_I in sums.items() for name in matrices_in(product)}


def _cut(layer: Mapping[str, Tensor], norms: Mapping[str, Tensor], cut: Cut) -> dict[str, Tensor]:
    """The weights of a layer without the inner units that count least, and with its zeros."""
    found, norms, down = dict(layer), dict(norms), f"{_DOWN}.weight"
    size = layer[down].shape[1]
    if (units := cut.units(size)) < size:
        kept = _scores(layer[down], norms.get(_DOWN)).sum(0).topk(units).indices.sort().values
        found[down] = layer[down][:, kept]
        found |= {f"mlp.{part}_proj.weight": layer[f"mlp.{part}_proj.weight"][kept] for part in ("gate", "up")}
        if _DOWN in norms:
            norms[_DOWN] = norms[_DOWN][kept]
    if cut.pattern is not None:
        for part in (*_MATRICES, _DOWN):
            name = f"{part}.weight"
            found[name] = cut.pattern.applied(found[name], _scores(found[name], norms.get(part)))
    return found


def _scores(weight_OI: Tensor, norm_I: Tensor | None) -> Tensor:
    return weight_OI.abs() if norm_I is None else weight_OI.abs() * norm_I


def _stored(weight: Weight) -> Tensor:
    """``weight`` of any shape as it is written, in memory of its own."""
    return as_tensor(weight, torch.float32).to(torch.bfloat16, copy=True)
