"""Finds out by trying what a transformers model can do as a runner, instead of trusting its type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from parlay.models.config import UnsupportedModel
from parlay.models.slots import CallRows
from parlay.models.transformers_adapter.call import ModelCall, copied, rows_selectable
from parlay.types import Tree, first_line

_BRANCHED = Tree(tokens=(5, 7, 6, 7), parents=(-1, -1, 0, 1))
"""Two paths of two nodes whose rows alternate, so that wrong masks and positions show."""
_PATHS = ((5, 6), (7, 7))
_CHAIN = Tree(tokens=_PATHS[0], parents=(-1, 0))
_PROMPT = (3, 9, 4, 8, 2, 11, 10, 9, 3, 12)


@dataclass(frozen=True, slots=True)
class Ability:
    """The most general draft that a model verifies correctly, and why it is not more general."""

    tree: Literal["tree", "chain", "none"]
    reason: str


_found: WeakKeyDictionary[PreTrainedModel, dict[str, Ability]] = WeakKeyDictionary()
"""Results by model object and attention implementation, for later callers."""


def ability(call: ModelCall) -> Ability:
    """Probe a model once per object and attention implementation; see `probe`."""
    known = _found.setdefault(call.model, {})
    attention = str(call.config._attn_implementation)
    if attention not in known:
        known[attention] = probe(call)
    return known[attention]


@torch.no_grad()
def probe(call: ModelCall) -> Ability:
    """Compare cached forwards with plain ones on a short text, from branched rows down to single ones.

    Raises UnsupportedModel if even single cached rows differ from the plain forward or raise.
    """
    try:
        return _probe(call)
    except UnsupportedModel:
        raise
    except Exception as error:  # a foreign model may fail in any way, and its user needs one line about it
        raise UnsupportedModel(f"{call.name}: a forward with a cache fails ({first_line(error)})") from error


def _probe(call: ModelCall) -> Ability:
    vocab = int(call.config.vocab_size)
    prompt = tuple(token % vocab for token in _PROMPT)
    paths = [tuple(token % vocab for token in path) for path in _PATHS]
    full_paths = [call.full(prompt + path)[len(prompt) - 1 :] for path in paths]  # rows of root and path
    noise = _serial_noise(call, prompt, paths[0], full_paths[0])
    reason = _no_tree_reason(call)
    if not reason:
        expected = torch.stack([full_paths[0][1], full_paths[1][1], full_paths[0][2], full_paths[1][2]])
        difference = _difference(_tree_rows(call, prompt), expected)
        if difference <= noise:
            return Ability("tree", "tree masks checked")
        reason = f"its tree rows differ from plain ones by {difference:.1e}"
    difference = _difference(_chain_rows(call, prompt), full_paths[0][1:])
    if difference <= noise:
        return Ability("chain", reason)
    return Ability("none", f"several cached rows at once differ from plain ones by {difference:.1e}; {reason}")


def _serial_noise(call: ModelCall, prompt: tuple[int, ...], path: tuple[int, ...], expected_RV: Tensor) -> float:
    """The largest difference that counts as rounding, from rows that are run one at a time.

    Another text runs in between, as a model with state outside its cache can't serve two sequences.
    """
    cache = call.new_cache()
    rows = [call.chain(CallRows(prompt, 0), cache, 1).logits_RV]
    for offset, token in enumerate(path):
        call.chain(CallRows(path, 0), call.new_cache(), 1)
        rows.append(call.chain(CallRows((token,), len(prompt) + offset), cache, 1).logits_RV)
    noise = _difference(torch.cat(rows), expected_RV)
    unit = torch.finfo(call.dtype).eps * float(expected_RV.abs().max())
    if not noise <= 32 * unit:
        raise UnsupportedModel(f"{call.name}: its logits with a cache differ from plain ones by {noise:.1e}")
    return 8 * (noise + unit)


def _no_tree_reason(call: ModelCall) -> str:
    """Why a model can't verify branches, as far as that is known without trying; empty if it may."""
    cache, attention = call.new_cache(), call.config._attn_implementation
    if not rows_selectable(cache):
        kinds = sorted({type(layer).__name__ for layer in cache.layers})
        return f"its cache can't drop single rows ({', '.join(kinds)})"
    if not call.takes_positions:
        return "its forward takes no position_ids"
    # GPT-Neo: the probe's texts may be too short to show it.
    if "local" in call.config.to_dict().get("attention_layers", ()):
        return "some of its layers see the last keys by their places in the cache, not by their positions"
    if attention not in ("sdpa", "eager"):
        return f"{attention} attention takes no mask of ours"
    return ""


def _tree_rows(call: ModelCall, prompt: tuple[int, ...]) -> Tensor:
    vocab = int(call.config.vocab_size)
    tree = Tree(tuple(token % vocab for token in _BRANCHED.tokens), _BRANCHED.parents)
    cache = call.new_cache()
    call.chain(CallRows(prompt[:-1], 0), cache, 0)
    rows = CallRows(prompt[-1:], len(prompt) - 1, tree)
    return call.branched([rows], copied(cache))[0].logits_RV[1:]


def _chain_rows(call: ModelCall, prompt: tuple[int, ...]) -> Tensor:
    vocab = int(call.config.vocab_size)
    path = tuple(token % vocab for token in _CHAIN.tokens)
    cache = call.new_cache()
    call.chain(CallRows(prompt[:-1], 0), cache, 0)
    rows = CallRows(prompt[-1:], len(prompt) - 1, Tree(path, _CHAIN.parents))
    return call.chain(rows, copied(cache), len(path)).logits_RV


def _difference(logits_RV: Tensor, expected_RV: Tensor) -> float:
    return float((logits_RV - expected_RV).abs().max())
