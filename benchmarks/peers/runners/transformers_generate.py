"""Runs `generate` of `transformers`: plain, with a compiled static cache, with prompt lookup, and with a draft
model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.peers.protocol import Decode, Task, serve
from parlay.bench.stopwatch import Reading, Stopwatch
from parlay.bench.transformers_generate import PROMPT_LOOKUP, compiled, generate, load

COMPILED = "plain-compiled"
"""The compiled mode, with eager attention: once it is compiled, the fastest combination."""


class TransformersRunner:
    """Runs the modes, and shares a loaded model between those that run it alike."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._models: dict[tuple[str, str], PreTrainedModel] = {}

    def load(self, mode: str) -> Decode:
        attention = "eager" if mode == COMPILED else "sdpa"
        model = self._model(self._task.folder, attention)
        options = self._options(mode)

        def decode(ids: Sequence[int], most: int) -> Reading:
            watch = Stopwatch()
            generate(model, ids, most, options, watch.emit)
            return watch.read(steps=watch.emissions, note=f"bf16 {attention}")

        return decode

    def _options(self, mode: str) -> dict[str, Any]:
        match mode:
            case "plain":
                return {}
            case "plain-compiled":
                return compiled(self._task.longest)
            case "prompt-lookup":
                return PROMPT_LOOKUP
            case "assisted":
                return {"assistant_model": self._model(self._task.dense_draft, "sdpa")}
        raise ValueError(f"no mode {mode}")

    def _model(self, directory: str, attention: str) -> PreTrainedModel:
        """Load a model that never ends a text itself, so that all answers have the requested length."""
        key = (directory, attention)
        if key not in self._models:
            model = load(Path(directory), dtype=torch.bfloat16, attn_implementation=attention)
            model.generation_config.eos_token_id = None
            self._models[key] = model
        return self._models[key]


if __name__ == "__main__":
    serve(TransformersRunner, "transformers")
