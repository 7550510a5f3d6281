"""From a model's name to a folder, from a folder to weights and a tokenizer. Strict: nothing is skipped or made up."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from parlay.models.config import DecoderConfig, read_json
from parlay.types import ParlayError

_PLAIN_TOKENIZERS = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
BUILT_IN = ("parlay-mini", "parlay-mini-draft")
_CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"
_WANTED_FILES = ("*.safetensors", "*.json", "*.txt", "*.jinja", "tokenizer.model")
_CONFIG_FILES = ("config.json", "generation_config.json")
_MERGE = "merge it into its base model (peft: merge_and_unload, then save_pretrained), and name that folder"
_HARMLESS = re.compile(r"rotary_emb\.inv_freq$|attention\.(masked_)?bias$")
"""Tensors that old exporters stored and that are recomputed from the config anyway."""


class BadCheckpoint(ParlayError):
    """The files of a checkpoint don't hold the weights that its config.json calls for."""


def resolve(model: str) -> Path:
    """The folder of a built-in model, of a local path, or of a Hugging Face Hub id (downloaded if need be).

    Only safetensors, JSON and tokenizer files are ever fetched. Raises ParlayError with one line otherwise.
    """
    return _check_weights(_find(model, _WANTED_FILES))


def resolve_config(model: str) -> Path:
    """The same for who needs config.json alone: no weights are looked for, or fetched."""
    return _find(model, _CONFIG_FILES)


def _find(model: str, wanted: tuple[str, ...]) -> Path:
    if model in BUILT_IN:
        return _check_config(_CHECKPOINTS / model)
    path = Path(model).expanduser()
    if path.is_dir():
        return _check_config(path)
    if path.exists():
        raise ParlayError(f"{model} is a file: name the folder that holds config.json and *.safetensors")
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ParlayError(f"no folder {model}: name a local folder, a Hub id, or one of {', '.join(BUILT_IN)}")
    return _check_config(_download(model, wanted))


def _download(model: str, wanted: tuple[str, ...]) -> Path:
    import huggingface_hub  # here, because a local folder needs no network code

    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=list(wanted)))
    except (OSError, ValueError, huggingface_hub.errors.RevisionResolutionError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ParlayError(
            f"can't get {model!r} from the Hugging Face Hub ({reason}): "
            f"name a local folder instead, or one of {', '.join(BUILT_IN)}"
        ) from error


def _check_config(directory: Path) -> Path:
    """Refuses a folder that holds no model."""
    if (directory / "config.json").is_file():
        return directory
    if (directory / "adapter_config.json").is_file():
        raise ParlayError(f"{directory} holds an adapter and no model: {_MERGE}")
    raise ParlayError(f"no config.json in {directory}: is this a model's folder?")


def _check_weights(directory: Path) -> Path:
    """Refuses a folder without weights, or whose weights are pickles, which may run code when they load."""
    names = {path.name for path in directory.glob("*.safetensors")}
    if names == {"adapter_model.safetensors"}:
        raise ParlayError(f"{directory} holds the weights of an adapter alone: {_MERGE}")
    if names:
        return directory
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt")):
        raise ParlayError(f"{directory} holds pickled weights only, which are never loaded: save them as *.safetensors")
    raise ParlayError(f"no *.safetensors in {directory}")


def load_tokenizer(directory: Path) -> Any:
    """The tokenizer in ``directory``, through transformers; no remote code, no network."""
    try:
        if _is_plain(directory):
            return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
        from transformers import AutoTokenizer  # here, because it takes two seconds to import

        return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ParlayError(f"can't load a tokenizer from {directory}: {reason}") from error


def _is_plain(directory: Path) -> bool:
    """Whether tokenizer.json says it all, so that no model's own tokenizer class is needed."""
    described = directory / "tokenizer_config.json"
    if not described.is_file() or not (directory / "tokenizer.json").is_file():
        return False
    return read_json(described).get("tokenizer_class") in _PLAIN_TOKENIZERS


def load_weights(directory: Path, config: DecoderConfig) -> dict[str, Tensor]:
    """Every weight of the decoder under its Hugging Face name, in the dtype stored, mapped from disk.

    With tied embeddings ``lm_head.weight`` is left out. Raises BadCheckpoint naming the first missing, extra and
    mis-shaped tensors, or the file that is cut short.
    """
    expected = weight_shapes(config)
    weights: dict[str, Tensor] = {}
    for path in weight_files(directory):
        weights.update(_read(path))
    _check_names(directory, expected, weights)
    return {name: weights[name] for name in expected}


def weight_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight that a decoder of this config has."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        shapes.update({f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(config).items()})
    return shapes


def _layer_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key, hidden),
        "self_attn.v_proj.weight": (key, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.qkv_bias:
        shapes |= {"self_attn.q_proj.bias": (query,), "self_attn.k_proj.bias": (key,), "self_attn.v_proj.bias": (key,)}
    if config.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    return shapes


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint: those its index names, or its only one."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        named: Mapping[str, str] = read_json(index).get("weight_map", {})
        paths = [directory / name for name in sorted(set(named.values()))]
        absent = [path.name for path in paths if not path.is_file()]
        if absent:
            raise BadCheckpoint(f"{directory}: {index.name} names files that are not there: {_some(absent)}")
        return paths
    paths = sorted(directory.glob("*.safetensors"))
    if len(paths) != 1:
        raise BadCheckpoint(f"{directory}: {len(paths)} *.safetensors files and no {index.name} to say what is where")
    return paths


def _read(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (the file is no mapping)
    except (SafetensorError, OSError) as error:
        raise BadCheckpoint(f"{path} is damaged or cut short ({error}): download or copy it again") from error


def _check_names(directory: Path, expected: Mapping[str, tuple[int, ...]], weights: Mapping[str, Tensor]) -> None:
    missing = [name for name in expected if name not in weights]
    extra = [name for name in weights if name not in expected and not _harmless(name, weights)]
    shapes = [
        f"{name} {list(weights[name].shape)} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in weights and tuple(weights[name].shape) != shape
    ]
    faults = {"missing": missing, "extra": extra, "of another shape": shapes}
    lines = [f"{len(names)} {kind}: {_some(names)}" for kind, names in faults.items() if names]
    if lines:
        raise BadCheckpoint(f"{directory}: the tensors don't match config.json; {'; '.join(lines)}")


def _harmless(name: str, weights: Mapping[str, Tensor]) -> bool:
    """Recomputed buffers, and the LM head that a tied checkpoint stores a second time."""
    if name == "lm_head.weight" and "model.embed_tokens.weight" in weights:
        return weights[name].equal(weights["model.embed_tokens.weight"])
    return _HARMLESS.search(name) is not None


def _some(names: Iterable[str], most: int = 3) -> str:
    listed = list(names)
    return ", ".join(listed[:most]) + (", ..." if len(listed) > most else "")
