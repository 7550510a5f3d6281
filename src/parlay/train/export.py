"""Writes checkpoints: the Hugging Face directory of a model, its provenance, and the state a run resumes from."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


def export(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path, record: dict[str, Any]) -> None:
    """Saves model (bfloat16), tokenizer, generation defaults and ``provenance.json`` under ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    copy = Qwen3ForCausalLM(Qwen3Config.from_dict({**model.config.to_dict(), "use_cache": True}))
    copy.load_state_dict(model.state_dict())
    copy.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    copy.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "provenance.json").write_text(json.dumps(record, indent=1, default=str) + "\n")


def machine_record() -> dict[str, Any]:
    """Versions, commit and processor, for provenance."""
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
    """Replaces ``path`` in one move, so that a kill at any moment leaves a whole file."""
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)
