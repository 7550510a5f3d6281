"""The parts of which layouts consist, and helpers for them."""

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
"""Methods whose drafters read an LM head: the target's if a published head has none."""
NO_WITNESS = torch.zeros(0)
"""The witnesses of a head that does not identify its target."""
MOST_HEADS = 64
LAYOUT = "layout"
"""Setting: the layout in which a head was published. Such heads do not say what acceptance to expect."""
USUAL_ACCEPTANCE = (0.5, 0.14, 0.07, 0.05, 0.035, 0.03, 0.025, 0.02, 0.015, 0.01)
"""Assumed acceptance of the candidates at depth 0, by rank, if a head does not say; each depth has 0.8 of the one
before."""


class TargetShape(Protocol):
    """Facts of a target that reading a head requires, from a runner's spec or a checkpoint's config."""

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
    """A folder in a foreign layout: its config, and its tensors under their names there."""

    folder: Path
    config: Json
    tensors: Mapping[str, Tensor]

    def refuse(self, field: str, value: object, asked: object) -> BadHead:
        """Return the error for a config field that asks for a variant that Parlay does not run."""
        return BadHead(f"{self.folder}: {field} is {value!s:.60}, and Parlay runs such heads only where it is {asked}")

    def require(self, declared: Json, **asked: object) -> None:
        """Raise BadHead for the first of these fields that has another value; a missing field is accepted."""
        for field, value in asked.items():
            if declared.get(field) not in (None, value):
                raise self.refuse(field, declared[field], value)

    def number(self, declared: Json, field: str, least: int = 1, most: float = math.inf) -> int:
        """Return an integer field of the config. Raises BadHead if it is not an integer in the range."""
        value = declared.get(field)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise BadHead(f"{self.folder}: config.json says {field} {value!s:.40}: expected an integer from {least} on")
        if value > most:
            raise self.refuse(field, value, f"at most {most}")
        return value


@dataclass(frozen=True, slots=True)
class Layout:
    """A published layout.

    ``recognises`` checks config and tensor names, and ``owns`` says which tensors belong to the head.

    ``read`` makes a head from these for a target, whose shape fills in what the file leaves out. The tensors get
    Parlay's names; those without a rule keep their own, so that leftovers are noticed later. The head may have its own
    `EMBEDDING`, and may lack `LM_HEAD`; then it uses the target's. It raises BadHead if the folder can't be read.
    """

    name: str
    recognises: Callable[[Json, frozenset[str]], bool]
    read: Callable[[Foreign, TargetShape], HeadArtefact]
    owns: Callable[[Json, str], bool] = lambda config, name: True


def decoder_layer(foreign: Foreign, declared: Json, target: TargetShape, architecture: str) -> DecoderConfig:
    """Return the shape of a head's layers from the config ``declared``; their longest text is at least the target's.

    Rotary positions have no limit, so a longer text is possible. Raises BadHead for features that Parlay's layers lack.
    """
    try:
        layer = config_of(foreign.folder, declared, architecture)
    except ParlayError as error:
        raise BadHead(f"{foreign.folder}: {str(error).removeprefix(f'{foreign.folder}: ')}") from error
    sizes, asked = (layer.vocab_size, layer.hidden_size), (target.vocab_size, target.hidden_size)
    if sizes != asked:  # before anything of that size is allocated
        raise BadHead(
            f"{foreign.folder} was trained for a target of {sizes[0]} tokens and {sizes[1]} numbers, "
            f"not {asked[0]} and {asked[1]}: choose a head that was trained for this model"
        )
    if declared.get("attention_bias"):
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
    """Make a head that drafts the target's tokens ``ids_D`` (None: all), and reads its last layer unless ``taps`` are
    set.

    ``tensors`` are all tensors except for ``d2t`` and ``t2d``.
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
    """Make heads that have no decoder layers, so only the target's sizes matter in their config."""
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
    """Rename tensors by the first rule whose prefix fits; drop rotary frequencies, which are computed."""
    found = {}
    for name, tensor in tensors.items():
        if not name.endswith("rotary_emb.inv_freq"):
            rule = next((rule for rule in rules if name.startswith(rule[0])), ("", ""))
            found[rule[1] + name.removeprefix(rule[0])] = tensor
    return found


def offset_ids(foreign: Foreign, size: int, vocab_size: int) -> Tensor:
    """Return the target's token for each of ``size`` draft ids, from the file's offsets; without offsets all tokens.

    Raises BadHead for invalid offsets.
    """
    if "d2t" not in foreign.tensors:
        if size != vocab_size:
            raise BadHead(f"{foreign.folder} lacks d2t, which says what its {size} draft tokens stand for")
        return torch.arange(size)
    offsets_D = foreign.tensors["d2t"]
    if offsets_D.shape != (size,) or offsets_D.is_floating_point():
        raise foreign.refuse("d2t", list(offsets_D.shape), f"{size} integers, by draft_vocab_size")
    return checked_ids(foreign, "d2t", offsets_D.long() + torch.arange(size), vocab_size)


def checked_ids(foreign: Foreign, name: str, ids_D: Tensor, vocab_size: int) -> Tensor:
    """Return the ids. Raises BadHead unless they are distinct tokens of the target."""
    ids = set(ids_D.tolist())
    if len(ids) < len(ids_D) or not ids <= set(range(vocab_size)):
        raise BadHead(f"{foreign.folder}: {name} does not name different tokens of a target of {vocab_size}")
    return ids_D


def usual_acceptance(levels: int) -> list[list[float]]:
    """Return assumed acceptance by depth and rank, for static trees of heads without measured acceptance."""
    return [[share * 0.8**level for share in USUAL_ACCEPTANCE] for level in range(levels)]
