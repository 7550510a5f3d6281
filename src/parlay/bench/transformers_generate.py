"""Runs `generate` of `transformers`, greedy, and reports each emission: all measurements of it use this.

Peers are measured in environments without Parlay, so this module imports nothing of Parlay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, CompileConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

Emit = Callable[[list[int]], None]
"""Called with the tokens of each emission."""

PROMPT_LOOKUP: dict[str, Any] = {"prompt_lookup_num_tokens": 10}
"""Options for its own prompt lookup, at the setting that its documentation shows."""


def compiled(longest: int) -> dict[str, Any]:
    """Options for a static cache of so many tokens, and a decoding forward compiled for it."""
    config = CompileConfig()
    config._compile_all_devices = True  # by default `generate` compiles on GPUs only
    return {"cache_implementation": "static", "max_cache_len": longest, "compile_config": config}


def load(folder: Path, **options: Any) -> PreTrainedModel:
    """The checkpoint, ready for inference; ``options`` are those of `from_pretrained`."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, use_safetensors=True, **options
    )
    return model.eval()


def generate(model: PreTrainedModel, ids: Sequence[int], most: int, options: dict[str, Any], emit: Emit) -> None:
    """At most ``most`` tokens after ``ids``; ``options`` are those of `generate`."""
    ids_NT = torch.tensor([ids], device=model.device)
    model.generate(
        input_ids=ids_NT,
        attention_mask=torch.ones_like(ids_NT),
        do_sample=False,
        max_new_tokens=most,
        streamer=_Streamer(emit),
        **options,
    )


class _Streamer(BaseStreamer):  # type: ignore[misc]
    """Passes on what `generate` emits, without the prompt, which comes first."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        """``value`` is ``[1, L]``, the prompt, or ``[1]``, one more token."""
        if self._prompt_seen:
            self._emit(value.flatten().tolist())
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing waits for the end."""
