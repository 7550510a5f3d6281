"""Writes Parlay's heads in the layouts of other programs."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from parlay.heads.artefact import CARD, CONFIG, WEIGHTS, BadHead, HeadArtefact
from parlay.heads.base import draft_ids
from parlay.heads.eagle3 import NORMED
from parlay.heads.hub import front_matter
from parlay.heads.layouts.eagle3 import TAPS
from parlay.heads.layouts.layout import EMBEDDING, LM_HEAD
from parlay.heads.layouts.speculators import ARCHITECTURES, LAYER, MTP_NAMES
from parlay.heads.mtp import NORMED as MTP_NORMED
from parlay.models.config import DecoderConfig, RopeConfig
from parlay.types import ParlayError

_VERSION = "0.9.0"
_STEPS = 4
"""Number of tokens to draft with a layer that runs repeatedly."""
_ROPE_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "truncate"),
}


@dataclass(frozen=True, slots=True)
class Verifier:
    """The target as other programs find it, by name; ``embedding`` and ``lm_head`` return its matrices ``[V, H]``."""

    name: str
    embedding: Callable[[], Tensor]
    lm_head: Callable[[], Tensor]


Written = tuple[dict[str, Any], dict[str, Tensor]]
"""A config and tensors."""
Writer = Callable[[HeadArtefact, Verifier], Written]


def _eagle3(head: HeadArtefact, verifier: Verifier) -> Written:
    config = _speculator("eagle3", "Eagle3Speculator", head, verifier, layers=1, tokens=_STEPS)
    tensors = {name.replace("midlayer.", "layers.0."): each for name, each in _whole(head, verifier).items()}
    return {**config, **_taps(head)}, tensors


def _peagle(head: HeadArtefact, verifier: Verifier) -> Written:
    declared = head.settings
    config = _speculator(
        "peagle", "PEagleSpeculator", head, verifier, layers=int(declared["layers"]), tokens=int(declared["length"])
    )
    tensors = _whole(head, verifier)
    tensors["mask_hidden"] = tensors["mask_hidden"].view(1, 1, -1)
    return {**config, **_taps(head), "mask_token_id": int(declared["mask_id"])}, tensors


def _mtp(head: HeadArtefact, verifier: Verifier) -> Written:
    if "heads" in head.settings:
        raise BadHead("heads beside each other have no place in this format: it knows one module that is used again")
    if not head.settings.get(MTP_NORMED):
        raise BadHead(
            "this module was trained by an earlier version, to read its own states before their norm, and the format's "
            "readers norm them: train it again with parlay train mtp"
        )
    if not head.layer.qk_norm:
        raise BadHead("the format's modules have layers like Qwen3's, which norm queries and keys; this head's do not")
    config = _speculator("mtp", "MTPDraftModel", head, verifier, layers=head.layer.num_layers, tokens=_STEPS)
    left_out = ("d2t", "t2d", LM_HEAD, EMBEDDING)  # readers use the verifier's
    tensors = {_renamed(name): each for name, each in head.tensors.items() if name not in left_out}
    return {**config, "num_nextn_predict_layers": 1}, tensors


def _renamed(name: str) -> str:
    theirs, ours = next(rule for rule in MTP_NAMES if name.startswith(rule[1]))
    return theirs + name.removeprefix(ours)


def _medusa(head: HeadArtefact, verifier: Verifier) -> Written:
    """Write Medusa heads over the whole vocabulary, since vLLM loads no ``token_map`` for heads with an LM head each.

    A token that the head can't draft gets the mean of all rows, whose logit never exceeds the best row's.
    """
    del verifier
    heads, layer, ids_D = int(head.settings["heads"]), head.layer, draft_ids(head.tensors["d2t"])
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": layer.hidden_size,
        "vocab_size": layer.vocab_size,
        "num_heads": heads,
        "num_hidden_layers": 1,
        "medusa_fc_bias": True,
    }
    tensors = {}
    for place in range(heads):
        for part in ("weight", "bias"):
            tensors[f"blocks.{place}.layers.0.{part}"] = head.tensors[f"blocks.{place}.linear.{part}"]
        rows_DH = head.tensors[f"lm_heads.{place}.weight"]
        whole_VH = rows_DH.float().mean(0).to(rows_DH.dtype).repeat(layer.vocab_size, 1)
        whole_VH[ids_D] = rows_DH
        tensors[f"lm_heads.{place}.weight"] = whole_VH
    return config, tensors


def _speculator(
    kind: str, architecture: str, head: HeadArtefact, verifier: Verifier, *, layers: int, tokens: int
) -> dict[str, Any]:
    """Return the config fields that all kinds have."""
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": _VERSION,
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        LAYER: _layer(head.layer, layers),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens, "verifier_accept_k": 1}],
            "verifier": {"name_or_path": verifier.name, "architectures": [head.layer.architecture]},
        },
    }


def _taps(head: HeadArtefact) -> dict[str, Any]:
    return {
        "draft_vocab_size": int(head.settings["draft_vocab_size"]),
        "norm_before_residual": bool(head.settings.get(NORMED)),
        "norm_before_fc": False,
        TAPS: list(head.settings["taps"]),
    }


def _layer(layer: DecoderConfig, layers: int) -> dict[str, Any]:
    """Return the config of ``layers`` decoder layers in transformers' format."""
    if layer.qkv_bias:
        raise BadHead("this head's layers have biases of queries, keys and values, for which the format has no place")
    kind = "qwen3" if layer.qk_norm else "llama"
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": layer.vocab_size,
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": layer.rms_norm_eps,
        "max_position_embeddings": layer.max_context,
        "rope_parameters": _rope(layer.rope),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


def _rope(rope: RopeConfig) -> dict[str, Any]:
    if rope.kind not in _ROPE_FIELDS:
        raise BadHead("this head's positions turn by the divisors of a GGUF file, for which the format has no place")
    declared: Mapping[str, Any] = asdict(rope)
    found = {name: declared[name] for name in _ROPE_FIELDS[rope.kind]}
    original = {"original_max_position_embeddings": rope.original_max_context} if rope.original_max_context else {}
    return {"rope_type": rope.kind, "rope_theta": rope.theta, **found, **original}


def _whole(head: HeadArtefact, verifier: Verifier) -> dict[str, Tensor]:
    """Return the head's tensors plus those of the target that it lacks; a full draft vocabulary is left out.

    The package `speculators` replaces a missing embedding by the target's only if uninitialized memory happens to
    contain NaN, so the embedding is always written.
    """
    found, ids_D = dict(head.tensors), draft_ids(head.tensors["d2t"])
    if LM_HEAD not in found:
        found[LM_HEAD] = verifier.lm_head()[ids_D].to(torch.bfloat16)
    if EMBEDDING not in found:
        found[EMBEDDING] = verifier.embedding().to(torch.bfloat16)
    if len(ids_D) == head.layer.vocab_size:
        del found["d2t"], found["t2d"]
    return found


WRITERS: Mapping[str, Mapping[str, Writer]] = {
    "speculators": {"eagle3": _eagle3, "block-drafter": _peagle, "mtp": _mtp},
    "vllm": {"medusa": _medusa},
}
"""Writers by format, then by method."""


def export(head: HeadArtefact, card: str, layout: str, out: Path, verifier: Verifier) -> None:
    """Write a head into the folder ``out``. ``card`` is the text of the head's card, and ``layout`` a key of `WRITERS`.

    Raises BadHead for a head that the layout can't represent, ValueError for a folder that is not empty, and
    ParlayError if it can't be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is there already: name a folder that is empty, or none")
    writer = WRITERS[layout].get(head.method)
    if writer is None:
        fitting = [name for name, writers in WRITERS.items() if head.method in writers]
        remedy = f"write --format {fitting[0]}" if fitting else "no format holds such heads"
        methods = ", ".join(WRITERS[layout])
        raise BadHead(f"--format {layout} is for {methods}, and this is a head for {head.method}: {remedy}")
    config, tensors = writer(head, verifier)
    text = card or front_matter(head.method, head.origin, (), {}) + f"\n# {head.method} for {head.origin.target}\n"
    try:
        _write(config, tensors, f"{text.rstrip()}\n\nThis folder is in the layout of {layout}.\n", out)
    except (OSError, SafetensorError) as error:
        raise ParlayError(f"can't write {out}: {error}") from error


def _write(config: Mapping[str, Any], tensors: Mapping[str, Tensor], card: str, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".exporting-", dir=out.parent) as started:
        part = Path(started) / out.name
        part.mkdir()
        save_file({name: each.contiguous() for name, each in tensors.items()}, part / WEIGHTS, {"format": "pt"})
        (part / WEIGHTS).chmod(0o644)
        (part / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (part / CARD).write_text(card, encoding="utf-8")
        part.replace(out)
