"""LoRA adapters in PEFT's format (Hu et al. 2021): read strictly, and merged into a model's weights on request.

A product y = W x becomes W x + scale * B (A x), with A ``[R, I]`` and B ``[O, R]``. Only safetensors are read; pickles
are never opened.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from parlay.models.config import DecoderConfig, RopeConfig, read_json
from parlay.models.lora_layout import CONFIG, PRODUCTS, WEIGHTS, BadAdapter, LowRank, read_matrices, refusal
from parlay.models.rope import row_order
from parlay.models.weights.shapes import Weight
from parlay.models.weights.stored import StoredTensor
from parlay.types import Adapter, CanvasSpec, Segment

MASKS = "mask_rows.json"
TURNED = PRODUCTS[:2]
"""Products whose outputs are rotated."""
_LONGEST_BLOCK = 256


def in_order(up_OR: Tensor, product: str, rope: RopeConfig | None, head_dim: int) -> Tensor:
    """The rows of a product's outputs, in the order in which the decoder rotates queries and keys."""
    order = row_order(rope, head_dim) if product in TURNED else None
    return up_OR if order is None else up_OR.view(-1, head_dim, up_OR.shape[1])[:, order].flatten(0, 1)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LowRankAdapter(Adapter):
    """A LoRA adapter: ``matrices``, float32, by the decoder's name of the weight that they add to. ``path`` is its
    folder."""

    matrices: Mapping[str, LowRank]
    path: Path


def read_adapter(folder: Path, config: DecoderConfig, name: str, *, merging: bool = False) -> LowRankAdapter:
    """Read the adapter in ``folder`` for a decoder; with ``merging`` it may change routers and the LM head, too.

    Raises BadAdapter if it can't be honoured.
    """
    digest, declared = digest_of(folder), read_json(folder / CONFIG)
    if reason := refusal(declared):
        raise BadAdapter(f"{folder}: {reason}")
    try:
        matrices = read_matrices(folder, declared, config, _read(folder / WEIGHTS), merging=merging)
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, OverflowError) as error:
        raise BadAdapter(f"{folder}: {CONFIG} is not a description of an adapter: {error!s:.80}") from None
    for layer, form in enumerate(config.forms):
        key = matrices.get(f"model.layers.{layer}.self_attn.k_proj.weight")
        if form.keys_as_values and key is not None:
            matrices[f"model.layers.{layer}.self_attn.v_proj.weight"] = key
    return LowRankAdapter(name=name, salt=f"lora {digest}", matrices=matrices, path=folder)


def digest_of(folder: Path) -> str:
    """The SHA-256 of an adapter's two files. Raises BadAdapter for a folder without an adapter."""
    if not (folder / CONFIG).is_file():
        raise BadAdapter(f"no {CONFIG} in {folder}: name the folder of an adapter in PEFT's layout")
    if not (folder / WEIGHTS).is_file():
        pickled = " (adapter_model.bin is pickled, and never opened)" if (folder / "adapter_model.bin").exists() else ""
        raise BadAdapter(f"no {WEIGHTS} in {folder}{pickled}: save the adapter as safetensors")
    digest = hashlib.sha256((folder / CONFIG).read_bytes())
    with (folder / WEIGHTS).open("rb") as file:
        digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def merged(weights: Mapping[str, Weight], adapter: LowRankAdapter) -> dict[str, Weight]:
    """Add the adapter's products to the weights, each in float32 and rounded once to its own dtype.

    Raises BadAdapter for a quantized matrix, as quantizing it again would change it.
    """
    found = dict(weights)
    for name, (down_RI, up_OR) in adapter.matrices.items():
        if name not in weights:  # values that are keys
            continue
        weight = weights[name]
        if isinstance(weight, StoredTensor) and weight.format.plain is None:
            raise BadAdapter(
                f"{adapter.path}: {name} is stored as {weight.format.name}, which no product can be merged into: "
                f"choose it by request (parlay serve --lora-modules NAME={adapter.path}; lora_request in Python)"
            )
        if isinstance(weight, StoredTensor):
            weight = weight.rows.clone().view(weight.format.plain or torch.float32).view(weight.shape)
        found[name] = (weight.float() + up_OR @ down_RI).to(weight.dtype)
    return found


def refuse_masks(folder: Path) -> None:
    """Raises BadAdapter for an adapter that is made for mask rows only."""
    if (folder / MASKS).is_file():
        raise BadAdapter(f"{folder} is for rows of masks: name it by --strategy set-block:adapter={folder}")


def mask_of(folder: Path, vocab_size: int) -> CanvasSpec:
    """The mask token that rows with the adapter read. Raises BadAdapter if its folder does not say."""
    if not (folder / MASKS).is_file():
        raise BadAdapter(f"no {MASKS} in {folder}: name an adapter that parlay train set-block --lora made")
    declared = read_json(folder / MASKS)
    mask_id, block = declared.get("mask_token_id"), declared.get("set_block_size")
    if not isinstance(mask_id, int) or not 0 <= mask_id < vocab_size:
        raise BadAdapter(f"{folder / MASKS}: mask_token_id {mask_id!r:.20} is not in the vocabulary of {vocab_size}")
    if not isinstance(block, int) or not 0 < block <= _LONGEST_BLOCK:
        raise BadAdapter(f"{folder / MASKS}: set_block_size {block!r:.20}: expected 1 to {_LONGEST_BLOCK}")
    return CanvasSpec(mask_id, block, shift=True)


def adapter_rows(segments: Sequence[Segment]) -> list[LowRankAdapter | None]:
    """The adapter of each row of a forward; empty if no row has one."""
    found: list[LowRankAdapter | None] = []
    for segment in segments:
        masks = 0 if segment.mask_adapter is None else segment.together
        for adapter, count in ((segment.adapter, segment.rows - masks), (segment.mask_adapter, masks)):
            if adapter is not None and not isinstance(adapter, LowRankAdapter):
                raise ValueError(f"{adapter.name} is not an adapter of low rank")
            found += [adapter] * count
    return found if any(found) else []


def _read(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            return {name: file.get_tensor(name).clone() for name in names}  # the file is not read later
    except (SafetensorError, OSError) as error:
        raise BadAdapter(f"{path} is damaged or cut short ({error}): download or copy it again") from error
