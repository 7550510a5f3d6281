"""Language models trained from scratch: their sizes, their loss, and writing their checkpoints."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from parlay.system.user_cache import saved_whole
from parlay.types import ParlayError

CONTEXT = 4096
"""The most tokens that a trained model can read."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder with Qwen3's architecture."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int

    def config(self, vocab_size: int, end: int, start: int | None = None) -> Qwen3Config:
        """Return the ``transformers`` configuration; ``end`` and ``start`` are token ids."""
        return Qwen3Config(
            vocab_size=vocab_size,
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=CONTEXT,
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
            tie_word_embeddings=True,
            eos_token_id=end,
            bos_token_id=start,
            use_cache=False,
        )


SHAPES = {
    "mini": Shape(hidden=256, layers=6, heads=8, kv_heads=4, head_dim=64, ffn=768),
    "mini-draft": Shape(hidden=128, layers=2, heads=4, kv_heads=2, head_dim=32, ffn=384),
    "mini-deep": Shape(hidden=128, layers=3, heads=4, kv_heads=2, head_dim=32, ffn=384),
    "tiny": Shape(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=64),
}


TEACHER_SHARE = 0.7
"""The weight of the teacher's distribution in the loss; the text's own tokens have the rest."""
Loss = Callable[[Tensor, Tensor], Tensor]
"""Called with token ids ``[B, T]`` and labels ``[B, T]``, returns the mean loss ``[]``."""


def logits_of(model: Qwen3ForCausalLM, ids_BT: Tensor) -> Tensor:
    """Return the model's logits ``[B, T, V]`` in the autocast dtype."""
    hidden = model.model(input_ids=ids_BT).last_hidden_state
    logits: Tensor = model.lm_head(hidden)
    return logits


def make_loss(model: Qwen3ForCausalLM, teacher: Qwen3ForCausalLM | None) -> Loss:
    """Return the loss for training: cross-entropy, and with a teacher also the divergence from it (see
    `TEACHER_SHARE`)."""

    def plain(ids_BT: Tensor, labels_BT: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = logits_of(model, ids_BT).flatten(0, 1).float()
            return F.cross_entropy(logits, labels_BT.flatten())

    def distilled(ids_BT: Tensor, labels_BT: Tensor) -> Tensor:
        assert teacher is not None
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                target = logits_of(teacher, ids_BT).flatten(0, 1).float().softmax(-1)
            log_probs = logits_of(model, ids_BT).flatten(0, 1).float().log_softmax(-1)
        # KL(teacher || student) plus the teacher's entropy, which has no gradient.
        divergence = -(target * log_probs).sum(-1).mean()
        text = F.nll_loss(log_probs, labels_BT.flatten())
        return TEACHER_SHARE * divergence + (1 - TEACHER_SHARE) * text

    return plain if teacher is None else distilled


@torch.inference_mode()
def text_loss(model: Qwen3ForCausalLM, ids_BT: Tensor, labels_BT: Tensor) -> float:
    """Return the mean cross-entropy in nats per token, computed without gradients."""
    return float(make_loss(model, None)(ids_BT, labels_BT))


def export(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path, record: dict[str, Any]) -> None:
    """Save model (bfloat16), tokenizer, generation defaults and ``provenance.json`` under ``out``.

    The weights are those of a plain Qwen3: weights that a replaced module adds, such as `NgramEmbedding`'s, are left
    out. Each file is replaced atomically. Raises ParlayError if the files can't be written; earlier files then stay
    whole.
    """
    copy = Qwen3ForCausalLM(Qwen3Config.from_dict({**model.config.to_dict(), "use_cache": True}))
    weights = model.state_dict()
    copy.load_state_dict({name: weights[name] for name in copy.state_dict()})
    copy.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unfinished", dir=out) as unfinished:
            part = Path(unfinished)
            copy.to(torch.bfloat16).save_pretrained(part)
            tokenizer.save_pretrained(part)
            (part / "provenance.json").write_text(json.dumps(record, indent=1, default=str) + "\n")
            for file in part.iterdir():
                file.replace(out / file.name)
    except (OSError, SafetensorError) as error:
        raise ParlayError(f"can't write the model to {out} ({error}); earlier files there are unchanged") from error


def machine_record() -> dict[str, Any]:
    """Return the command line, versions, commit and processor, for provenance."""
    command = ["git", "rev-parse", "HEAD"]
    git = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return {
        "argv": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "commit": git.stdout.strip() or None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "processor": torch.cpu.get_capabilities().get("cpu_name", platform.machine()),
        "threads": torch.get_num_threads(),
    }


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Replace ``path`` atomically, so that a killed run leaves either the old or the new file, whole.

    Raises ParlayError if it can't be written.
    """
    with saved_whole(path) as part:
        try:
            torch.save(state, part)
        except RuntimeError as error:  # torch raises this for a full disk
            raise OSError(str(error).partition("\n")[0]) from error
