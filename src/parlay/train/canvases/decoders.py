"""The decoders that canvas recipes train: transformers' modules with our attention masks. Also opens and saves them.

Shapes: B rows, T tokens of each, H hidden, M chosen places, V tokens; S places of both streams, 2 T.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from parlay.models.config import read_json
from parlay.models.families.diffusion import SET_BLOCK_SIZE
from parlay.models.families.reading import architecture_of
from parlay.models.fetch.resolving import resolve
from parlay.models.loading import as_tensor, load_weights, read_config
from parlay.models.pruning.saving import described
from parlay.system.user_cache import saved_whole
from parlay.types import ParlayError

CANVASES = "A2DQwen3LMHeadModel"
"""The architecture name of saved Qwen3-shaped models that only fill canvases."""
NO_MASK = -1
_NEVER = -1e4
"""A logit so low that its token is never drawn. It is finite, since -inf - -inf in a divergence would be NaN."""
_PLAIN = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


class Decoder(nn.Module):
    """A decoder whose attention follows a given mask.

    ``mask_id`` is the token of an open place, which is never predicted; `NO_MASK` if the model has none.
    """

    def __init__(self, model: Any, mask_id: int = NO_MASK) -> None:
        super().__init__()
        self.inner: nn.Module = model
        self.mask_id = mask_id

    def hidden(self, ids_BT: Tensor, seen_TT: Tensor, positions_T: Tensor | None = None) -> Tensor:
        """Return the states ``[B, T, H]`` that the LM head reads.

        Row t of ``seen_TT`` is true at the places that place t attends to; ``[B, T, T]`` if the rows of the batch
        differ.
        """
        positions = torch.arange(ids_BT.shape[1]) if positions_T is None else positions_T
        mask = (seen_TT if seen_TT.ndim == 3 else seen_TT[None])[:, None].expand(len(ids_BT), 1, -1, -1)
        model: Any = self.inner
        out: Tensor = model.model(
            input_ids=ids_BT, attention_mask=mask, position_ids=positions[None].expand(len(ids_BT), -1)
        ).last_hidden_state
        return out

    def read(self, ids_BT: Tensor) -> tuple[Tensor, DynamicCache]:
        """Return the states of a causal text, like `hidden`, and its keys and values, for `further`."""
        cache, model = DynamicCache(), cast(Any, self.inner)
        seen = torch.ones(ids_BT.shape[1], ids_BT.shape[1], dtype=torch.bool).tril()
        out: Tensor = model.model(
            input_ids=ids_BT, attention_mask=seen[None, None].expand(len(ids_BT), 1, -1, -1), past_key_values=cache
        ).last_hidden_state
        return out, cache

    def further(self, ids_BM: Tensor, positions_BM: Tensor, seen_BMS: Tensor, text: DynamicCache) -> Tensor:
        """Return the states ``[B, M, H]`` of M additional places that attend to a text of T tokens.

        ``seen_BMS`` is true at those of all S = T + M places that each of them attends to. The text's own states do not
        change. The cache ``text`` gets the places' keys and values, too.
        """
        model: Any = self.inner
        out: Tensor = model.model(
            input_ids=ids_BM, attention_mask=seen_BMS[:, None], position_ids=positions_BM, past_key_values=text
        ).last_hidden_state
        return out

    def head(self, hidden_MH: Tensor) -> Tensor:
        """Return the logits ``[M, V]``, with the mask token ruled out."""
        logits = self.raw_head(hidden_MH)
        return logits if self.mask_id == NO_MASK else logits.index_fill(-1, torch.tensor([self.mask_id]), _NEVER)

    def raw_head(self, hidden_MH: Tensor) -> Tensor:
        """Return the logits ``[M, V]`` unchanged, as programs compute them that do not know the mask token."""
        model: Any = self.inner
        logits: Tensor = model.lm_head(hidden_MH).float()
        return logits

    def streams(self, noisy_BT: Tensor, ids_BT: Tensor, seen_SS: Tensor, first: int = 0) -> Tensor:
        """Return the states ``[B, 2 T, H]`` of the noisy places, then of the clean places; see `masks.two_streams`.

        Noisy places before ``first`` are not computed: their states are zeros, and no other place attends to them.
        """
        both_BS, positions_S = torch.cat([noisy_BT, ids_BT], 1), torch.arange(ids_BT.shape[1]).repeat(2)
        out_BSH = self.hidden(both_BS[:, first:], seen_SS[..., first:, first:], positions_S[first:])
        return F.pad(out_BSH, (0, 0, first, 0))


def load_decoder(name: str) -> Any:
    """Load the model of a folder or GGUF file in float32. Weights stored in blocks are expanded.

    Raises ParlayError for a GGUF file that can't be described by the config.json of a Llama, Qwen2 or Qwen3.
    """
    folder = resolve(name)
    if not folder.is_dir():
        return _of_file(folder)
    raw = read_json(folder / "config.json")
    if architecture_of(raw) != CANVASES:
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True, trust_remote_code=False
        )
    model = new_decoder(Qwen3Config.from_dict({**raw, **_PLAIN}))
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    return model


def _of_file(path: Path) -> Any:
    config = read_config(path)
    fields = described(config, path)
    rope = {"rope_type": "default", "rope_theta": fields.pop("rope_theta")}
    shape = AutoConfig.for_model(fields.pop("model_type"), **fields, rope_parameters=rope)
    shape._name_or_path = path.stem
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32, attn_implementation="sdpa")
    tensors = {name: as_tensor(weight).float() for name, weight in load_weights(path, config).items()}
    model.load_state_dict(tensors, strict=not config.tie_embeddings)
    return model


def new_decoder(config: Any) -> Any:
    """Make a Qwen3-shaped decoder with random weights."""
    config._attn_implementation = "sdpa"
    return Qwen3ForCausalLM(config).float()


def mask_of(name: str) -> int:
    """Return the mask token of a model that fills canvases. Raises ParlayError for a file, and if config.json names
    no mask."""
    folder = resolve(name)
    if not folder.is_dir():
        raise ParlayError(f"{name} is a file: name the folder of a model that fills masked places")
    raw = read_json(folder / "config.json")
    if raw.get("mask_token_id") is None:
        raise ParlayError(f"{name} fills no masked places: its config.json has no mask_token_id")
    return int(raw["mask_token_id"])


def save_decoder(
    folder: Path, decoder: Decoder, tokenizer: PreTrainedTokenizerFast, card: str, changes: Mapping[str, Any]
) -> None:
    """Write the weights in bfloat16, the tokenizer, the card, and the model's config.json with ``changes``."""
    folder.mkdir(parents=True, exist_ok=True)
    inner: Any = decoder.inner
    own = {"architectures": [type(inner).__name__], "dtype": "bfloat16", "use_cache": True}
    config = {**inner.config.to_dict(), **own, **changes}
    tied = config.get("tie_word_embeddings")
    tensors = {
        name: weight.detach().to(torch.bfloat16).contiguous()
        for name, weight in inner.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(card, encoding="utf-8")
    tokenizer.save_pretrained(folder)
    with saved_whole(folder / "model.safetensors") as part:
        save_file(tensors, part, {"format": "pt"})


def canvas_config(mask_id: int, block: int = 0) -> dict[str, Any]:
    """Return the config.json keys of a model that only fills canvases; ``block`` 0: all places attend to each other."""
    fields = {"architectures": [CANVASES], "model_type": "a2d-qwen3", "mask_token_id": mask_id}
    return {**fields, "block_size": block} if block else fields


def set_block_config(mask_id: int, block: int) -> dict[str, Any]:
    """Return the config.json keys of a causal model that also fills canvases."""
    return {"mask_token_id": mask_id, SET_BLOCK_SIZE: block}
