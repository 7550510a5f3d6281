"""Runs `generate` of `transformers` greedily and reports each emission. All measurements of transformers use this.

Some measurements run in environments without Parlay's dependencies, so this module imports nothing of Parlay.
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
"""Options for the prompt lookup of `transformers`, with the setting that its documentation shows."""


def compiled(longest: int) -> dict[str, Any]:
    """Return options for a static cache of ``longest`` tokens and a decoding forward that is compiled for it."""
    config = CompileConfig()
    config._compile_all_devices = True  # by default `generate` compiles on GPUs only
    return {"cache_implementation": "static", "max_cache_len": longest, "compile_config": config}


def load(folder: Path, **options: Any) -> PreTrainedModel:
    """Load the checkpoint for inference; `from_pretrained` gets the ``options``."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, use_safetensors=True, **options
    )
    return model.eval()


def generate(model: PreTrainedModel, ids: Sequence[int], most: int, options: dict[str, Any], emit: Emit) -> None:
    """Generate at most ``most`` tokens after ``ids``; `generate` gets the ``options``."""
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
    """Passes on the tokens that `generate` emits, except the prompt, which comes first."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        """Take the prompt, if ``value`` is ``[1, L]``, or one more token, if it is ``[1]``."""
        if self._prompt_seen:
            self._emit(value.flatten().tolist())
        self._prompt_seen = True

    def end(self) -> None:
        """Do nothing: nothing waits for the end."""
