"""Loads config, weights and tokenizer from a model's folder or GGUF file. Loading is strict: nothing is skipped or made
up."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from parlay.models.config import DecoderConfig, read_json
from parlay.models.families import reading
from parlay.models.families.llama import LLAMA
from parlay.models.families.table import FAMILIES
from parlay.models.gguf import file as gguf_file
from parlay.models.gguf.tokenizer import load_template as gguf_template
from parlay.models.gguf.tokenizer import load_tokenizer as load_gguf_tokenizer
from parlay.models.gguf.tokenizer import tokenizer_digest as gguf_digest
from parlay.models.lookup import TABLE
from parlay.models.quantized.reading import fitting, restored, scheme_of
from parlay.models.state_table import STATES
from parlay.models.tokenizers.folder import load_template as folder_template
from parlay.models.tokenizers.folder import load_tokenizer as load_folder_tokenizer
from parlay.models.tokenizers.folder import tokenizer_digest as folder_digest
from parlay.models.tokenizers.plain import PlainTokenizer
from parlay.models.weights.dequantize import dense
from parlay.models.weights.regrouped import in_halves, unfused
from parlay.models.weights.shapes import BadCheckpoint, Weight, check_weights, some, unread, weight_shapes
from parlay.models.weights.stored import StoredTensor
from parlay.types import Tokenizer

_log = logging.getLogger(__name__)
_NUMBERS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
"""Types of weights that are supported."""
_HARMLESS = re.compile(r"rotary_emb\.inv_freq$|attention\.(masked_)?bias$")
"""Tensors that old exporters stored and that are recomputed from the config."""


def read_config(model: Path, longest: int = 0) -> DecoderConfig:
    """Read the decoder's config from a folder or GGUF file, for texts of up to ``longest`` tokens; 0: the usual length.

    For texts beyond the original context of a model with longrope, ``longest`` is needed, as their position factors
    differ. Raises UnsupportedModel for a model that the native decoder does not run, and ParlayError for invalid files.
    """
    return gguf_file.read_config(model, longest) if model.is_file() else reading.read_config(model, longest)


def load_tokenizer(model: Path) -> Tokenizer:
    """Load the tokenizer of a folder or GGUF file, without remote code and without the network."""
    found = load_gguf_tokenizer(model) if model.is_file() else load_folder_tokenizer(model)
    if isinstance(found, PlainTokenizer):
        found.digest = tokenizer_digest(model)
    return found


def tokenizer_digest(model: Path) -> str:
    """A hash of the tokenizer of a folder or GGUF file, without building it; empty if that is not possible."""
    return gguf_digest(model) if model.is_file() else folder_digest(model)


def load_template(model: Path) -> str:
    """The chat templates of a folder or GGUF file joined, without building the tokenizer; empty if there are none.

    Raises ParlayError for an invalid file.
    """
    return gguf_template(model) if model.is_file() else folder_template(model)


def load_weights(model: Path, config: DecoderConfig) -> dict[str, Weight]:
    """All weights of the decoder by Hugging Face name, as stored, memory-mapped.

    Quantized matrices (of GGUF files, AWQ, GPTQ and the like) stay in blocks; all other weights are tensors. With tied
    embeddings ``lm_head.weight`` is left out. Raises BadCheckpoint that names the first missing, extra and mis-shaped
    tensors, or a truncated file.
    """
    return gguf_file.load_weights(model, config) if model.is_file() else _load_folder(model, config)


def load_tensors(directory: Path, config: DecoderConfig) -> dict[str, Tensor]:
    """All weights of a folder, dequantized to tensors; see `load_weights`."""
    return {name: as_tensor(weight) for name, weight in _load_folder(directory, config).items()}


def as_tensor(weight: Weight) -> Tensor:
    """A weight as a tensor; a quantized one becomes float32."""
    return weight if isinstance(weight, Tensor) else dense(weight, torch.float32)


def _load_folder(directory: Path, config: DecoderConfig) -> dict[str, Weight]:
    expected = weight_shapes(config)
    stored: dict[str, Tensor] = {}
    for path in weight_files(directory):
        stored.update(_read(path))
    stored = _with_head(directory, stored, config)
    family = FAMILIES.get(config.architecture, LLAMA)
    scheme = scheme_of(directory, read_json(directory / "config.json"), family.quantized)
    if family.regroup is not None and scheme is not None:
        raise BadCheckpoint(f"{directory}: {config.architecture} can't be read from {scheme.method}")
    with fitting(str(directory)):
        grouped = stored if family.regroup is None else family.regroup(stored)
    plain = grouped if scheme is None else restored(scheme, stored, config.dtype)
    left_out = tuple(each.format(layers=config.num_layers) for each in family.left_out)
    renamed = {family.renamed(name): each for name, each in plain.items() if not name.startswith(left_out)}
    weights = unfused(renamed, config)
    if family.interleaved:
        weights = in_halves(weights, config)
    spare = unread(config)
    weights = {
        name: weights[name] for name in weights if name in expected or not (name in spare or _harmless(name, weights))
    }
    check_weights(directory, expected, weights)
    _check_types(directory, {name: weights[name] for name in expected})
    return {name: _offset(name, weights[name], family.norm_offset) for name in expected}


def _with_head(directory: Path, stored: dict[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """The tensors under the names of a model with an LM head; embedding models may lack that part of the names.

    If there is no LM head, the embedding takes its place, as nobody reads such models' logits.
    """
    embedding = stored.get("embed_tokens.weight")
    if embedding is None:
        return stored
    found = {name if name.startswith("lm_head.") else f"model.{name}": tensor for name, tensor in stored.items()}
    if not config.tie_embeddings and "lm_head.weight" not in found:
        _log.warning(
            "%s has no LM head: use it for embeddings only, as texts that it writes have no meaning", directory
        )
        found["lm_head.weight"] = embedding
    return found


def _check_types(directory: Path, weights: Mapping[str, Weight]) -> None:
    """Raises BadCheckpoint for weights that are not floating-point."""
    types = {name: weight.dtype for name, weight in weights.items() if isinstance(weight, Tensor)}
    if odd := [name for name, dtype in types.items() if dtype not in _NUMBERS]:
        stored = f"{some(odd)} stored as {str(types[odd[0]]).removeprefix('torch.')}"
        raise BadCheckpoint(f"{directory}: {stored}, which can't be read: convert the checkpoint")


def _offset(name: str, weight: Weight, offset: float) -> Weight:
    """Add a family's ``offset`` to ``weight``, of any shape, if it is a norm's: all vectors except biases are."""
    if not offset or isinstance(weight, StoredTensor) or weight.dim() != 1 or name.endswith(".bias"):
        return weight
    return weight.float() + offset


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint: model.safetensors, those in its index, or its only one.

    As in transformers, other files do not belong to it (consolidated.safetensors, adapter_model.safetensors), and an
    index beside a whole file is from an earlier save.
    """
    whole, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if index.exists():
        named = read_json(index).get("weight_map")
        if not isinstance(named, Mapping) or not all(_is_name(name) for name in named.values()):
            raise BadCheckpoint(f"{index} names no files of its own folder: download or copy the checkpoint again")
        paths = [directory / name for name in sorted(set(named.values()))]
        absent = [path.name for path in paths if not path.is_file()]
        if absent:
            raise BadCheckpoint(f"{directory}: {index.name} names files that are not there: {some(absent)}")
        return paths
    paths = sorted(
        path for path in directory.glob("*.safetensors") if path.is_file() and path.name not in (TABLE, STATES)
    )
    if len(paths) != 1:
        raise BadCheckpoint(f"{directory}: {len(paths)} *.safetensors files and no {index.name} to say what is where")
    return paths


def _is_name(name: object) -> bool:
    """Whether this is the name of a file in the same folder."""
    return isinstance(name, str) and Path(name).name == name and name not in ("", "..")


def _read(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (the file is no mapping)
    except (SafetensorError, OSError) as error:
        raise BadCheckpoint(f"{path} is damaged or cut short ({error}): download or copy it again") from error


def _harmless(name: str, weights: Mapping[str, Weight]) -> bool:
    """Whether a tensor may be ignored: recomputed buffers, the second LM head of a tied checkpoint, and zero biases."""
    weight, embedding = weights[name], weights.get("model.embed_tokens.weight")
    if not isinstance(weight, Tensor):
        return False
    if name == "lm_head.weight" and isinstance(embedding, Tensor):
        return weight.dtype == embedding.dtype and weight.equal(embedding)
    return _HARMLESS.search(name) is not None or (
        name.endswith(".bias") and weight.dtype in _NUMBERS and not weight.float().any()
    )
