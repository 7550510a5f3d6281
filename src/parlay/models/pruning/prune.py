"""One-shot pruning without training, layer by layer: weights become zero, and feed-forwards narrower.

Wanda (Sun et al. 2023): a weight's score is its magnitude times the norm of its input on a text, compared within its
output's row. Inputs are those of the model whose earlier layers have been pruned already. ``magnitude`` scores by
magnitude alone, and needs no text. An inner unit's score is the sum of its scores in the down projection.

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
"""The number of inner units that stay is a multiple of this, so that rows are whole quantization blocks."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A plan for each layer: the ``pattern`` of zeros, and the share ``width`` of inner units that stays."""

    pattern: Pattern | None
    width: float = 1.0

    def units(self, size: int) -> int:
        """How many of ``size`` inner units stay."""
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
    """Prune a model; the weights become bfloat16. ``text`` is read for Wanda's scores; None: scores by magnitude.

    ``done`` is called with the number of pruned layers and of all. Raises what `check` raises, and ParlayError for too
    short a text.
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
    """Raises ParlayError for a model that is not a dense Llama, Qwen2 or Qwen3, and for rows that the pattern does not
    divide."""
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
    """The norm ``[I]`` of each input on the text, by matrix of a layer."""
    sums: Sums = {}
    layer = recorded(build_layer(config, weights, index), sums)
    for chunk_TH in chunks:
        run_layer(config, layer, index, chunk_TH)
    return {name: sum_I.sqrt() for product, sum_I in sums.items() for name in matrices_in(product)}


def _cut(layer: Mapping[str, Tensor], norms: Mapping[str, Tensor], cut: Cut) -> dict[str, Tensor]:
    """A layer's weights without the inner units of lowest score, and with zeros."""
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
    """``weight``, of any shape, as bfloat16 in memory of its own."""
    return as_tensor(weight, torch.float32).to(torch.bfloat16, copy=True)
