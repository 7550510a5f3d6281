"""Parts of every layout, and what their mappings share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from parlay.heads.artefact import BadHead, HeadArtefact
from parlay.models.config import DecoderConfig
from parlay.models.families.reading import config_of
from parlay.types import ParlayError

Json = Mapping[str, Any]
EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
NEED_LM_HEAD = frozenset({"eagle", "eagle3", "mtp", "block-drafter"})
"""Methods whose drafters read an LM head: the target's, where a head in a published layout brings none."""
NO_WITNESS = torch.zeros(0)
"""Of heads that know nothing of their target."""
MOST_HEADS = 64
LAYOUT = "layout"
"""A setting: in which layout a head was published. Nothing in such a head says how often it should be right."""
USUAL_ACCEPTANCE = (0.5, 0.14, 0.07, 0.05, 0.035, 0.03, 0.025, 0.02, 0.015, 0.01)
"""For static trees of heads that don't say: how often each rank of a guess is right. A level keeps 0.8 of this."""


class TargetShape(Protocol):
    """A head's view of its target: read from a runner's spec, or from a checkpoint's config."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def max_context(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Foreign:
    """Contents of a folder in one of the layouts: its config, and the head's tensors by their names there."""

    folder: Path
    config: Json
    tensors: Mapping[str, Tensor]

    def refuse(self, field: str, value: object, asked: object) -> BadHead:
        """The error for a field of its config that names a form of the head which Parlay does not run."""
        return BadHead(f"{self.folder}: {field} is {value!s:.60}, and Parlay runs such heads only where it is {asked}")

    def require(self, said: Json, **asked: object) -> None:
        """Raises BadHead for the first of these fields that says something else; one that says nothing is as asked."""
        for field, value in asked.items():
            if said.get(field) not in (None, value):
                raise self.refuse(field, said[field], value)

    def number(self, said: Json, field: str, least: int = 1, most: float = math.inf) -> int:
        """An integer of its config. Raises BadHead where it is none, smaller or larger."""
        value = said.get(field)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise BadHead(f"{self.folder}: config.json says {field} {value!s:.40}: expected an integer from {least} on")
        if value > most:
            raise self.refuse(field, value, f"at most {most}")
        return value


@dataclass(frozen=True, slots=True)
class Layout:
    """One published layout.

    ``recognises`` reads config and names of tensors, ``owns`` says which tensors are the head's.

    ``read`` makes a head of these for a target, whose shape says what the file leaves open. The head's tensors bear
    Parlay's names; those that no rule renames keep their own, so that what is left over is seen later. It may hold the
    head's own `EMBEDDING`, and may lack `LM_HEAD`, for which the target's stands then. Raises BadHead.
    """

    name: str
    recognises: Callable[[Json, frozenset[str]], bool]
    read: Callable[[Foreign, TargetShape], HeadArtefact]
    owns: Callable[[Json, str], bool] = lambda config, name: True


def decoder_layer(foreign: Foreign, said: Json, target: TargetShape, architecture: str) -> DecoderConfig:
    """The shape of a head's layers as ``said`` gives it. Raises BadHead for what Parlay's layers do not compute.

    Its longest text is the target's: positions turn, and have no end.
    """
    try:
        layer = config_of(foreign.folder, said, architecture)
    except ParlayError as error:
        raise BadHead(f"{foreign.folder}: {str(error).removeprefix(f'{foreign.folder}: ')}") from error
    sizes, asked = (layer.vocab_size, layer.hidden_size), (target.vocab_size, target.hidden_size)
    if sizes != asked:  # told before anything is made of so many
        raise BadHead(
            f"{foreign.folder} was trained for a target of {sizes[0]} tokens and {sizes[1]} numbers, "
            f"not {asked[0]} and {asked[1]}: choose a head that was trained for this model"
        )
    if said.get("attention_bias"):
        raise BadHead(f"{foreign.folder}: attention_bias is not supported in a head's layers")
    if layer.layers:
        raise BadHead(f"{foreign.folder}: the head's layers are not Llama's (sliding windows, say): they can't be run")
    biased = any(name.endswith("q_proj.bias") for name in foreign.tensors)
    return replace(
        layer, max_context=max(layer.max_context, target.max_context), qkv_bias=biased, num_layers=target.num_layers
    )


def published_head(
    method: str,
    layer: DecoderConfig,
    target: TargetShape,
    tensors: Mapping[str, Tensor],
    *,
    settings: Json,
    ids_D: Tensor | None = None,
) -> HeadArtefact:
    """A head that drafts the tokens ``ids_D`` of the target, or all; it reads its last layer unless ``taps`` are given.

    ``tensors`` are all but the two that say which tokens these are.
    """
    ids_D = torch.arange(target.vocab_size) if ids_D is None else ids_D
    known_V = torch.zeros(target.vocab_size, dtype=torch.bool)
    known_V[ids_D] = True
    tensors = {**tensors, "d2t": ids_D - torch.arange(len(ids_D)), "t2d": known_V}
    usual = {"taps": [target.num_layers], "draft_vocab_size": len(ids_D)}
    return HeadArtefact(method, layer, {**usual, **settings}, tensors, NO_WITNESS)


def several_heads(
    method: str,
    target: TargetShape,
    heads: int,
    tensors: Mapping[str, Tensor],
    *,
    settings: Json,
    ids_D: Tensor | None = None,
) -> HeadArtefact:
    """Heads without decoder layers, which share no more than sizes with their target."""
    shared_sizes = DecoderConfig(
        architecture="LlamaForCausalLM",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.hidden_size,
        num_layers=target.num_layers,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        rms_norm_eps=1e-6,
        max_context=target.max_context,
    )
    settings = {"heads": heads, "acceptance": usual_acceptance(heads), **settings}
    return published_head(method, shared_sizes, target, tensors, settings=settings, ids_D=ids_D)


def renamed(tensors: Mapping[str, Tensor], *rules: tuple[str, str]) -> dict[str, Tensor]:
    """With the first rule's beginning that fits in place of the name's own. Rotations, which follow, are left out."""
    found = {}
    for name, tensor in tensors.items():
        if not name.endswith("rotary_emb.inv_freq"):
            rule = next((rule for rule in rules if name.startswith(rule[0])), ("", ""))
            found[rule[1] + name.removeprefix(rule[0])] = tensor
    return found


def offset_ids(foreign: Foreign, size: int, vocab_size: int) -> Tensor:
    """The target's token of each of ``size`` draft ids, which the file holds as offsets, or all. Raises BadHead."""
    if "d2t" not in foreign.tensors:
        if size != vocab_size:
            raise BadHead(f"{foreign.folder} lacks d2t, which says what its {size} draft tokens stand for")
        return torch.arange(size)
    offsets_D = foreign.tensors["d2t"]
    if offsets_D.shape != (size,) or offsets_D.is_floating_point():
        raise foreign.refuse("d2t", list(offsets_D.shape), f"{size} integers, by draft_vocab_size")
    return checked_ids(foreign, "d2t", offsets_D.long() + torch.arange(size), vocab_size)


def checked_ids(foreign: Foreign, name: str, ids_D: Tensor, vocab_size: int) -> Tensor:
    """Raises BadHead unless these are different tokens of the target."""
    ids = set(ids_D.tolist())
    if len(ids) < len(ids_D) or not ids <= set(range(vocab_size)):
        raise BadHead(f"{foreign.folder}: {name} does not name different tokens of a target of {vocab_size}")
    return ids_D


def usual_acceptance(levels: int) -> list[list[float]]:
    """Acceptance by rank from which static trees are built where nothing was measured."""
    return [[share * 0.8**level for share in USUAL_ACCEPTANCE] for level in range(levels)]
